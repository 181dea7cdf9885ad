"""Flags of SGLang, vLLM and k3 that a command may carry: spelling, kind, and the name they have here.

Only flags that change a layout, a size, a limit or a warning are given a name; the others are listed so that a typo
is told apart from a flag without effect on a plan. The lists were read from public recipes and documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int", "float", "str", "bool", "list", "json"]


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag. ``dest`` is its name here; '' where nothing in a plan depends on it."""

    dest: str
    kind: Kind


def _table(*groups: tuple[Kind, str]) -> dict[str, FlagSpec]:
    """``kind, 'dest=--flag,--alias --other'``: words are flags; 'dest=' names them here."""
    table: dict[str, FlagSpec] = {}
    for kind, text in groups:
        for word in text.split():
            dest, _, names = word.rpartition("=")
            for name in names.split(","):
                table[name] = FlagSpec(dest, kind)
    return table


SGLANG = _table(
    (
        "int",
        """
        tp=--tp-size,--tensor-parallel-size,--tp pp=--pp-size,--pipeline-parallel-size,--pp
        ep=--ep-size,--expert-parallel-size,--ep dp=--dp-size,--data-parallel-size,--dp attn_dp=--attn-dp-size
        dcp=--dcp-size,--decode-context-parallel-size nnodes=--nnodes node_rank=--node-rank
        attn_cp=--attn-cp-size,--attention-context-parallel-size moe_dp=--moe-dp-size
        shared_tp=--shared-experts-tp-size moe_dense_tp=--moe-dense-tp-size
        max_mamba_cache_size=--max-mamba-cache-size track_interval=--mamba-track-interval
        max_states_per_path=--mamba-max-states-per-path page_size=--page-size context_length=--context-length
        max_total_tokens=--max-total-tokens max_running=--max-running-requests chunk=--chunked-prefill-size
        max_prefill_tokens=--max-prefill-tokens graph_max_bs=--cuda-graph-max-bs-decode,--cuda-graph-max-bs
        block_dspark=--speculative-dspark-block-size block_dflash=--speculative-dflash-block-size
        draft_tokens=--speculative-num-draft-tokens draft_steps=--speculative-num-steps
        ring_length=--linear-replayssm-cache-len extra_slots=--disaggregation-decode-extra-slots
        reserved_decode=--num-reserved-decode-tokens bootstrap_port=--disaggregation-bootstrap-port port=--port
        --prefill-max-requests --min-free-slots-delay --watchdog-timeout --dist-timeout --max-queued-requests
        --speculative-eagle-topk --num-continuous-decode-steps --stream-interval --random-seed --base-gpu-id
        --gpu-id-step --tokenizer-worker-num --decode-log-interval --hicache-size --nccl-port
        --eplb-rebalance-num-iterations --ep-num-redundant-experts --max-lora-rank --soft-watchdog-timeout
        --attn-dp-rank --init-expert-location-steps
        --mm-max-concurrent-calls --detokenizer-worker-num
        """,
    ),
    (
        "float",
        """
        fraction=--mem-fraction-static ratio=--mamba-full-memory-ratio
        conservativeness=--schedule-conservativeness hicache_ratio=--hicache-ratio
        --tbo-token-distribution-threshold --swa-full-tokens-ratio arena_gib=--arena-gib --hicache-mamba-size-gb
        --prefill-delayer-max-delay
        """,
    ),
    (
        "bool",
        """
        dp_attention=--enable-dp-attention dp_lm_head=--enable-dp-lm-head replicate_q=--dcp-replicate-q-proj
        dense_attn_tp=--enable-dense-mlp-attn-tp shared_attn_tp=--enable-shared-experts-attn-tp
        unified_memory=--enable-unified-memory no_radix=--disable-radix-cache
        hicache=--enable-hierarchical-cache symm_mem=--enable-symm-mem no_custom_ar=--disable-custom-all-reduce
        no_overlap=--disable-overlap-schedule replay=--enable-linear-replayssm-spec
        decode_radix=--disaggregation-decode-enable-radix-cache eplb=--enable-eplb
        w4a4=--enable-w4a4-mxfp4-megamoe int8_checkpoint=--enable-int8-mamba-checkpoint
        replay_plain=--enable-linear-replayssm --trust-remote-code
        --schedule-low-priority-values-first --disable-flashinfer-autotune
        --enable-mamba-cache-stochastic-rounding --weight-loader-prefetch-checkpoints --enable-metrics
        --enable-mixed-chunk --enable-two-batch-overlap --enable-cache-report --disable-cuda-graph
        --skip-server-warmup --enable-torch-compile --enable-mfu-metrics --enable-request-time-stats-logging
        --enable-priority-scheduling --log-requests --enable-nccl-nvls --enable-flashinfer-allreduce-fusion
        --disable-cuda-graph-padding --disable-piecewise-cuda-graph --enable-multimodal
        --enable-metrics-for-all-schedulers --enable-mscclpp --disable-shared-experts-fusion
        --enable-nsa-prefill-context-parallel --enable-tokenizer-batch-encode --enable-trace
        --disable-fast-image-processor --mm-enable-dp-encoder --enable-nan-detection
        --enable-deterministic-inference --enable-p2p-check --weight-loader-disable-mmap
        --enable-return-hidden-states --disable-hicache-numa-detect --enable-draft-weights-cpu-backup
        --enable-memory-saver --keep-mm-feature-on-device --enable-broadcast-mm-inputs-process --language-only
        --disable-outlines-disk-cache --allow-auto-truncate --enable-custom-logit-processor
        --enable-single-batch-overlap --enable-breakable-cuda-graph --show-time-cost --disable-request-logging
        --enable-prefill-delayer
        """,
    ),
    (
        "str",
        """
        model=--model-path,--model engine_behaviour=--engine a2a=--moe-a2a-backend
        moe_runner=--moe-runner-backend attention=--attention-backend
        prefill_attention=--prefill-attention-backend decode_attention=--decode-attention-backend
        draft_attention=--speculative-draft-attention-backend dcp_comm=--dcp-comm-backend
        deepep_mode=--deepep-mode ssm_dtype=--mamba-ssm-dtype
        strategy=--mamba-radix-cache-strategy,--mamba-scheduler-strategy kv_dtype=--kv-cache-dtype
        hicache_storage=--hicache-storage-backend mm_transport=--mm-feature-transport
        schedule_policy=--schedule-policy algorithm=--speculative-algorithm
        draft_model=--speculative-draft-model-path,--speculative-draft-model
        draft_kv_dtype=--speculative-draft-kv-cache-dtype spec_attention_mode=--speculative-attention-mode
        role=--disaggregation-mode transfer=--disaggregation-transfer-backend device=--device dtype=--dtype
        graph_prefill=--cuda-graph-backend-prefill quantization=--quantization load_format=--load-format
        policy=--policy dist_init=--dist-init-addr,--nccl-init-addr host=--host served_name=--served-model-name
        --reasoning-parser --tool-call-parser --tokenizer-path --tokenizer-mode --chat-template --api-key
        --log-level --linear-attn-backend --linear-attn-prefill-backend --linear-attn-decode-backend
        --linear-attn-verify-backend --mm-attention-backend --sampling-backend --grammar-backend
        --disaggregation-ib-device --download-dir --revision --speculative-dspark-sps-table-path
        --hicache-io-backend --hicache-mem-layout --hicache-write-policy --hicache-storage-prefetch-policy
        --load-balance-method --init-expert-location --expert-distribution-recorder-mode --eplb-algorithm
        --ep-dispatch-algorithm --speculative-token-map --speculative-draft-model-revision --fp8-gemm-backend
        --fp4-gemm-backend --radix-eviction-policy --collect-tokens-histogram --log-level-http --numa-node
        --crash-dump-folder --file-storage-path --weight-version --speculative-moe-runner-backend
        --speculative-moe-a2a-backend --kt-method --preferred-sampling-params --trace-level
        --prefill-round-robin-balance --speculative-draft-load-format --mamba-backend
        --linear-attn-kernel-backend --dllm-algorithm --kv-events-config --disaggregation-decode-tp
        --disaggregation-decode-dp --disaggregation-prefill-pp --cuda-graph-mode --otlp-traces-endpoint
        """,
    ),
    ("list", "graph_bs=--cuda-graph-bs-decode,--cuda-graph-bs"),
    (
        "json",
        """
        --model-loader-extra-config --json-model-override-args --hicache-storage-backend-extra-config
        --deepep-config --limit-mm-data-per-request --mm-process-config
        """,
    ),
)

VLLM = _table(
    (
        "int",
        """
        tp=--tensor-parallel-size,-tp pp=--pipeline-parallel-size,-pp dp=--data-parallel-size,-dp
        dcp=--decode-context-parallel-size,-dcp max_running=--max-num-seqs chunk=--max-num-batched-tokens
        context_length=--max-model-len page_size=--block-size nnodes=--nnodes,-n node_rank=--node-rank,-r
        dp_local=--data-parallel-size-local,-dpl port=--port dp_start=--data-parallel-start-rank
        max_capture=--max-cudagraph-capture-size mamba_block=--mamba-block-size
        kv_cache_bytes=--kv-cache-memory-bytes --data-parallel-rpc-port --data-parallel-rank --master-port
        --seed --max-log-len --swap-space --prefill-context-parallel-size --api-server-count
        --max-parallel-loading-workers --long-prefill-token-threshold --max-num-partial-prefills
        --prefix-match-unit
        """,
    ),
    ("float", "fraction=--gpu-memory-utilization --cpu-offload-gb kv_offload_gb=--kv-offloading-size"),
    (
        "bool",
        """
        expert_parallel=--enable-expert-parallel,-ep prefix_cache=--enable-prefix-caching
        no_prefix_cache=--no-enable-prefix-caching eplb=--enable-eplb --trust-remote-code
        --enable-auto-tool-choice --enforce-eager --async-scheduling --no-async-scheduling
        --enable-chunked-prefill --headless --data-parallel-hybrid-lb --data-parallel-external-lb
        --language-model-only --disable-log-requests --enable-log-requests --disable-custom-all-reduce
        --enable-sleep-mode --skip-mm-profiling --enable-dbo --disable-hybrid-kv-cache-manager
        --no-disable-hybrid-kv-cache-manager --use-replayssm --disable-log-stats --enable-prompt-tokens-details
        --disable-uvicorn-access-log --enable-flashinfer-autotune --no-enable-flashinfer-autotune
        """,
    ),
    (
        "str",
        """
        model=--model kv_dtype=--kv-cache-dtype ssm_dtype=--mamba-ssm-cache-dtype conv_dtype=--mamba-cache-dtype
        mamba_mode=--mamba-cache-mode moe_runner=--moe-backend a2a=--all2all-backend load_format=--load-format
        dcp_comm=--dcp-comm-backend dtype=--dtype quantization=--quantization,-q device=--device
        mm_encoder_tp=--mm-encoder-tp-mode attention=--attention-backend host=--host
        served_name=--served-model-name --tokenizer --tokenizer-mode --reasoning-parser --tool-call-parser
        --revision --api-key --download-dir --distributed-executor-backend --data-parallel-address
        --data-parallel-backend --master-addr --chat-template --generation-config --uvicorn-log-level
        --scheduling-policy --kv-offloading-backend --prefix-caching-hash-algo --guided-decoding-backend
        """,
    ),
    ("list", "capture_sizes=--cudagraph-capture-sizes"),
    (
        "json",
        """
        speculative=--speculative-config,-sc kv_transfer=--kv-transfer-config
        compilation=--compilation-config,-cc,-O --hf-overrides --limit-mm-per-prompt --model-loader-extra-config
        --kv-events-config --attention-config --structured-outputs-config --eplb-config --additional-config
        --override-generation-config --profiler-config --kernel-config
        """,
    ),
)

K3 = dict(SGLANG)
"""Our own flags keep SGLang's names; those that exist only here are in the same table (--arena-gib, --policy)."""
