"""Flags of SGLang and vLLM that are not rows of the option table: other spellings, settings that this server always
has, and flags refused by name with what to do instead. Nothing is accepted and ignored."""

from __future__ import annotations

from dataclasses import dataclass

from k3stack.config.options import ONE_GPU

OTHER_SPELLING: dict[str, str] = {
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--tokenizer": "--tokenizer-path",
    "--seed": "--random-seed",
    "--mamba-ssm-cache-dtype": "--mamba-ssm-dtype",
    "--uvicorn-log-level": "--log-level",
    "--no-async-scheduling": "--disable-overlap-schedule",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "-tp": "--tp-size",
    "--ep": "--ep-size",
    "--expert-parallel-size": "--ep-size",
}
"""Spelling elsewhere -> the flag here that means the same."""


@dataclass(frozen=True, slots=True)
class Always:
    """A setting that this server has anyway: accepted where it asks for just that, and said at boot."""

    note: str
    values: tuple[str, ...] = ()
    """Values it may have; empty: the flag takes none."""
    otherwise: str = ""
    """What to do where another value is wanted."""


_KERNELS = "kernels are chosen by k3stack for the device it finds; leave the flag out"

ALWAYS: dict[str, Always] = {
    "--trust-remote-code": Always("no code of a checkpoint is ever run; the model and its tokenizer are built in"),
    "--reasoning-parser": Always(
        "one parser for Kimi-K3's output is always on", ("kimi_k3",), "output is always parsed as Kimi-K3's"
    ),
    "--tool-call-parser": Always(
        "one parser for Kimi-K3's output is always on", ("kimi_k3",), "output is always parsed as Kimi-K3's"
    ),
    "--enable-auto-tool-choice": Always("tool calls are always parsed where a request declares tools"),
    "--enable-metrics": Always("/metrics is always there"),
    "--enable-cache-report": Always("usage always reports cached tokens"),
    "--enable-prompt-tokens-details": Always("usage always reports cached tokens"),
    "--enable-prefix-caching": Always("prefix reuse is on unless --disable-radix-cache"),
    "--enable-chunked-prefill": Always("prompts are computed in chunks of --chunked-prefill-size"),
    "--async-scheduling": Always("planning overlaps the step that runs unless --disable-overlap-schedule"),
    "--enable-unified-memory": Always("states and cache share one arena (engine k3)"),
    "--language-model-only": Always("images are not read; the vision tower's weights are skipped"),
    "--skip-server-warmup": Always("the server warms up nothing that it must skip"),
    "--dp-size": Always("one rank is what is served", ("1",), ONE_GPU),
    "--pp-size": Always("one rank is what is served", ("1",), ONE_GPU),
    "--dcp-size": Always("one rank is what is served", ("1",), ONE_GPU),
    "--attn-dp-size": Always("one rank is what is served", ("1",), ONE_GPU),
    "--nnodes": Always("one node is what is served", ("1",), ONE_GPU),
    "--node-rank": Always("one node is what is served", ("0",), ONE_GPU),
    "--page-size": Always("a page has 64 rows", ("64",), "a page has 64 rows; leave the flag out"),
    "--schedule-policy": Always(
        "prompts are taken in order of priority, then of arrival",
        ("fcfs", "priority"),
        "leave it out, or choose --policy",
    ),
    "--disaggregation-mode": Always(
        "prompts and decoding share one server", ("null",), "separate prefill and decode servers are not here yet"
    ),
    "--moe-a2a-backend": Always("no experts on other ranks", ("none",), _KERNELS),
    "--grammar-backend": Always("grammars are compiled by llguidance", ("llguidance",), "leave the flag out"),
    "--quantization": Always(
        "the checkpoint's own config says how its weights are stored",
        ("compressed-tensors", "mxfp4"),
        "weights are read as the checkpoint stores them; leave the flag out",
    ),
}

SAME_AS: dict[str, str] = {
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "-dp": "--dp-size",
    "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    "-pp": "--pp-size",
    "--decode-context-parallel-size": "--dcp-size",
    "--block-size": "--page-size",
}
"""Other spellings of flags in ALWAYS."""

_SPECULATION = "drafting is not in this version: leave the flag out"
_NODES = "one node only: leave the flag out"
_GRAPHS = "which batch sizes are captured is decided by k3stack: leave the flag out"
_TIERS = "cache tiers outside the GPU are not in this version: leave the flag out"
_DISAGG = "separate prefill and decode servers are not in this version: leave the flag out"
_LORA = "adapters are not served: merge them into the checkpoint"
_VISION = "images are not read in this version: leave the flag out"

REFUSED: dict[str, str] = {
    "--enable-dp-attention": ONE_GPU,
    "--enable-dp-lm-head": ONE_GPU,
    "--enable-expert-parallel": ONE_GPU,
    "--dcp-comm-backend": ONE_GPU,
    "--dcp-replicate-q-proj": ONE_GPU,
    "--load-balance-method": ONE_GPU,
    "--shared-experts-tp-size": ONE_GPU,
    "--enable-eplb": ONE_GPU,
    "--deepep-mode": ONE_GPU,
    "--enable-symm-mem": ONE_GPU,
    "--disable-custom-all-reduce": ONE_GPU,
    "--distributed-executor-backend": ONE_GPU,
    "--dist-init-addr": _NODES,
    "--dist-timeout": _NODES,
    "--nccl-init-addr": _NODES,
    "--attention-backend": _KERNELS,
    "--prefill-attention-backend": _KERNELS,
    "--decode-attention-backend": _KERNELS,
    "--linear-attn-backend": _KERNELS,
    "--linear-attn-prefill-backend": _KERNELS,
    "--linear-attn-decode-backend": _KERNELS,
    "--linear-attn-verify-backend": _KERNELS,
    "--moe-runner-backend": _KERNELS,
    "--sampling-backend": _KERNELS,
    "--mm-attention-backend": _VISION,
    "--disable-flashinfer-autotune": _KERNELS,
    "--enable-torch-compile": _KERNELS,
    "--compilation-config": _KERNELS,
    "--enable-w4a4-mxfp4-megamoe": _KERNELS,
    "--cuda-graph-max-bs-decode": _GRAPHS,
    "--cuda-graph-bs": _GRAPHS,
    "--cuda-graph-bs-decode": _GRAPHS,
    "--cuda-graph-backend-prefill": _GRAPHS,
    "--enforce-eager": _GRAPHS,
    "--mamba-radix-cache-strategy": "a running request holds one state; snapshots are taken where they are worth it "
    "(--mamba-track-interval, --mamba-max-states-per-path), or choose --engine sglang",
    "--mamba-scheduler-strategy": "a running request holds one state; choose --engine sglang for reserved slots",
    "--enable-int8-mamba-checkpoint": "snapshots are kept in the state's own precision (--mamba-ssm-dtype)",
    "--enable-mamba-cache-stochastic-rounding": "choose --mamba-ssm-dtype float32 where rounding matters",
    "--linear-replayssm-cache-len": _SPECULATION,
    "--enable-linear-replayssm-spec": _SPECULATION,
    "--swa-full-tokens-ratio": "no layer here has a sliding window: leave the flag out",
    "--max-prefill-tokens": "a step's prompt tokens are bounded by --chunked-prefill-size",
    "--prefill-max-requests": "a step's prompt tokens are bounded by --chunked-prefill-size",
    "--schedule-conservativeness": "admission looks at real room and preempts if it runs out: leave the flag out",
    "--min-free-slots-delay": "a request needs one state, which is free as soon as another ends: leave the flag out",
    "--enable-priority-scheduling": "a request's `priority` always counts: leave the flag out",
    "--stream-interval": "every token is streamed as it comes: leave the flag out",
    "--num-continuous-decode-steps": "every token is streamed as it comes: leave the flag out",
    "--disable-hybrid-kv-cache-manager": "states and cache share one arena: leave the flag out",
    "--enable-hierarchical-cache": _TIERS,
    "--hicache-ratio": _TIERS,
    "--hicache-size": _TIERS,
    "--hicache-storage-backend": _TIERS,
    "--hicache-write-policy": _TIERS,
    "--cpu-offload-gb": _TIERS,
    "--swap-space": _TIERS,
    "--kv-transfer-config": _DISAGG,
    "--disaggregation-transfer-backend": _DISAGG,
    "--disaggregation-bootstrap-port": _DISAGG,
    "--disaggregation-ib-device": _DISAGG,
    "--disaggregation-decode-extra-slots": _DISAGG,
    "--disaggregation-decode-enable-radix-cache": _DISAGG,
    "--num-reserved-decode-tokens": _DISAGG,
    "--speculative-algorithm": _SPECULATION,
    "--speculative-draft-model-path": _SPECULATION,
    "--speculative-num-steps": _SPECULATION,
    "--speculative-eagle-topk": _SPECULATION,
    "--speculative-num-draft-tokens": _SPECULATION,
    "--speculative-dspark-block-size": _SPECULATION,
    "--speculative-dspark-sps-table-path": _SPECULATION,
    "--speculative-dflash-block-size": _SPECULATION,
    "--speculative-draft-attention-backend": _SPECULATION,
    "--speculative-draft-kv-cache-dtype": _SPECULATION,
    "--speculative-attention-mode": _SPECULATION,
    "--speculative-config": _SPECULATION,
    "--enable-lora": _LORA,
    "--lora-paths": _LORA,
    "--lora-modules": _LORA,
    "--max-loras-per-batch": _LORA,
    "--enable-multimodal": _VISION,
    "--limit-mm-per-prompt": _VISION,
    "--mm-feature-transport": _VISION,
    "--mm-encoder-tp-mode": _VISION,
    "--chat-template": "Kimi-K3's prompt format is built in; no template is read",
    "--completion-template": "Kimi-K3's prompt format is built in; no template is read",
    "--skip-tokenizer-init": "send token ids to /generate where no tokenizer is wanted",
    "--tokenizer-mode": "the checkpoint's tiktoken.model is read by a built-in tokenizer: leave the flag out",
    "--json-model-override-args": "edit the checkpoint's config.json",
    "--hf-overrides": "edit the checkpoint's config.json",
    "--revision": "give the folder of the revision as --model-path",
    "--download-dir": "nothing is downloaded: give the checkpoint's folder as --model-path",
    "--model-loader-extra-config": "shards are read several at a time always: leave the flag out",
    "--weight-loader-prefetch-checkpoints": "shards are read several at a time always: leave the flag out",
    "--is-embedding": "only generation is served",
    "--task": "only generation is served",
    "--admin-api-key": "use --api-key",
    "--ssl-keyfile": "put a proxy that speaks TLS in front",
    "--ssl-certfile": "put a proxy that speaks TLS in front",
    "--root-path": "put a proxy that rewrites paths in front",
    "--allowed-origins": "use --cors-origin",
    "--file-storage-path": "nothing is stored: leave the flag out",
    "--enable-torch-profiler": "profile with an outside tool",
    "--enable-memory-saver": "weights and arena stay in place while the server runs",
    "--enable-deterministic-inference": "give each request a `seed`, and --dtype float32 where bits matter",
    "--enable-log-requests": "finished requests are always logged: see --disable-request-log",
    "--log-requests": "finished requests are always logged, without their text: see --disable-request-log",
    "--log-requests-level": "finished requests are always logged, without their text",
    "--log-level-http": "use --log-level",
    "--crash-dump-folder": "use the log; nothing is dumped",
    "--kv-events-config": "cache events are not published in this version: leave the flag out",
    "--config": "write the options on the command line",
}
"""Flag -> what to do instead."""
