"""Launch commands: one a node, for SGLang, vLLM and k3; for a planned command the command itself, node by node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

from k3stack.config.layout import SizingEngine
from k3stack.estimate.budget import K3_FRACTION, VLLM_UTILIZATION
from k3stack.planner.plan import Plan, make_plan

HEAD_PORT = 20000
ENGINES: tuple[SizingEngine, ...] = ("k3", "sglang", "vllm")


def commands(plan: Plan) -> dict[str, list[str]]:
    """Engine -> commands, one a node (and one a copy where several copies share a node)."""
    command = plan.setup.command
    if plan.setup.own is not None:
        found = {"k3": [shlex.join(["k3", "serve", *_words(_k3(plan))])]}
    else:
        found = {engine: _for_engine(as_engine(plan, engine), engine) for engine in ENGINES}
    if command is not None and command.words and plan.setup.engine == command.engine:
        found[command.engine] = _as_given(plan)
    return found


def as_engine(plan: Plan, engine: SizingEngine) -> Plan:
    """The same layout planned by another engine's rules, at that engine's usual memory fraction."""
    setup = plan.setup
    if engine == setup.engine:
        return plan
    fraction = VLLM_UTILIZATION if engine == "vllm" else K3_FRACTION
    settings = replace(setup.settings, draft_tokens=0) if engine != "sglang" else setup.settings
    other = replace(
        setup, engine=engine, fraction=fraction, settings=settings, max_running=None, command=None, flags={},
        drafter=setup.drafter if engine == "sglang" else None,
    )  # fmt: skip
    return make_plan(other, plan.tokens, balance=engine == "sglang")


def _as_given(plan: Plan) -> list[str]:
    """The operator's own command, completed with what each node needs."""
    command = plan.setup.command
    if command is None:
        return []
    nodes = _nodes_per_copy(plan)
    text = command.text()
    if nodes == 1:
        return [text]
    stripped = re.sub(r"\s--node[-_]rank(?:\s+|=)\d+", "", text)
    extra = "" if re.search(r"--nnodes", stripped) else f" --nnodes {nodes}"
    address = "" if re.search(r"--(dist-init|nccl-init|master)-addr", stripped) else _address(command.engine, 0)
    return [f"{stripped}{extra}{address} --node-rank {i}" for i in range(nodes)]


def _address(engine: SizingEngine, copy: int) -> str:
    if engine == "vllm":
        return f" --master-addr $HEAD{copy or ''} --master-port {HEAD_PORT}"
    return f" --dist-init-addr $HEAD{copy or ''}:{HEAD_PORT}"


def _nodes_per_copy(plan: Plan) -> int:
    return -(-plan.setup.layout.gpus // plan.setup.hardware.gpus_per_node)


def _for_engine(plan: Plan, engine: SizingEngine) -> list[str]:
    flags = {"sglang": _sglang, "vllm": _vllm, "k3": _k3}[engine](plan)
    program = ["vllm", "serve", plan.setup.model] if engine == "vllm" else [engine, "serve"]
    base = shlex.join(program + _words(flags))
    nodes, layout = _nodes_per_copy(plan), plan.setup.layout
    here = plan.setup.hardware.gpus_per_node
    lines = []
    for copy in range(layout.replicas):
        if nodes > 1:
            where = f" --nnodes {nodes}{_address(engine, copy)}"
            lines += [f"{base}{where} --node-rank {i}" for i in range(nodes)]
            continue
        slot = copy % max(1, here // layout.gpus)
        first = slot * layout.gpus
        visible = "" if layout.gpus == here else f"CUDA_VISIBLE_DEVICES={_span(first, layout.gpus)} "
        port = "" if layout.gpus == here else f" --port {30000 + 100 * slot}"
        lines.append(f"{visible}{base}{port}")
    return lines


def _span(first: int, count: int) -> str:
    return ",".join(str(i) for i in range(first, first + count))


def _words(flags: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif value not in (None, False):
            words += [name, str(value)]
    return words


def _sglang(plan: Plan) -> dict[str, object]:
    setup, layout = plan.setup, plan.setup.layout
    hopper = not setup.hardware.gpu.blackwell
    return {
        "--model-path": setup.model,
        "--trust-remote-code": True,
        "--reasoning-parser": "kimi_k3",
        "--tool-call-parser": "kimi_k3",
        "--tp-size": layout.tp,
        "--pp-size": layout.pp if layout.pp > 1 else None,
        "--ep-size": layout.ep if layout.ep > 1 else None,
        "--dcp-size": layout.dcp if layout.dcp > 1 else None,
        "--dp-size": layout.dp if layout.dp > 1 else None,
        "--enable-dp-attention": layout.dp > 1,
        "--enable-dp-lm-head": layout.dp > 1 and layout.dp_lm_head,
        "--moe-a2a-backend": layout.a2a if layout.a2a != "none" else None,
        "--moe-runner-backend": "marlin" if hopper else None,
        "--attention-backend": "flashmla" if hopper else None,
        "--kv-cache-dtype": "fp8_e4m3" if setup.row_itemsize == 1 else None,
        "--mamba-ssm-dtype": "bfloat16" if setup.state_itemsize == 2 else None,
        "--mem-fraction-static": f"{setup.fraction:.3g}",
        "--mamba-full-memory-ratio": f"{setup.settings.ratio:.3g}",
        "--speculative-algorithm": setup.drafter.algorithm if setup.drafter else None,
        "--speculative-draft-model-path": setup.drafter.name if setup.drafter else None,
        "--enable-linear-replayssm-spec": bool(setup.drafter) and setup.role != "prefill",
        "--max-running-requests": max(1, plan.max_running * layout.dp) if setup.drafter else None,
        "--host": "0.0.0.0",
    }


def _vllm(plan: Plan) -> dict[str, object]:
    setup, layout = plan.setup, plan.setup.layout
    running = plan.admission.requests if plan.admission else None
    return {
        "--tensor-parallel-size": layout.attn_tp,
        "--pipeline-parallel-size": layout.pp if layout.pp > 1 else None,
        "--data-parallel-size": layout.dp if layout.dp > 1 else None,
        "--enable-expert-parallel": layout.ep > 1 or (layout.tp >= 16),
        "--decode-context-parallel-size": layout.dcp if layout.dcp > 1 else None,
        "--gpu-memory-utilization": f"{setup.fraction:.3g}",
        "--kv-cache-dtype": "fp8" if setup.row_itemsize == 1 and setup.hardware.gpu.blackwell else None,
        "--max-num-seqs": max(1, running) if running else None,
        "--max-model-len": min(setup.context, max(8192, plan.cache_tokens)) if plan.pool_plan else None,
        "--reasoning-parser": "kimi_k3",
        "--tool-call-parser": "kimi_k3",
        "--enable-auto-tool-choice": True,
        "--host": "0.0.0.0",
    }


def _k3(plan: Plan) -> dict[str, object]:
    setup, layout = plan.setup, plan.setup.layout
    return {
        "--model-path": setup.model,
        "--tp-size": layout.tp if layout.tp > 1 else None,
        "--pp-size": layout.pp if layout.pp > 1 else None,
        "--ep-size": layout.ep if layout.ep > 1 else None,
        "--dcp-size": layout.dcp if layout.dcp > 1 else None,
        "--attn-dp-size": layout.dp if layout.dp > 1 else None,
        "--mamba-ssm-dtype": "bfloat16" if setup.state_itemsize == 2 else None,
        "--mem-fraction-static": f"{setup.fraction:.3g}",
        "--max-running-requests": max(1, plan.admission.requests) if plan.admission else None,
        "--host": "0.0.0.0",
    }
