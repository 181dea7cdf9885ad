"""K3-nano: its files, its training network against the engine's, and what it answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import batches, mxfp4
from training.export import export, read
from training.format import Formatter
from training.model import Batch, Moe, Nano, NanoConfig, Ops

from k3stack.chat import encode, load_tokenizer, parse_ids, render
from k3stack.chat.deltas import Parsed
from k3stack.config.geometry import load_geometry
from k3stack.config.sampling import SamplingParams
from k3stack.engine.llm import LLM
from k3stack.models.builtin import resolve
from k3stack.models.load import load_model
from k3stack.verify.language.talk import Talker
from tests.cpu.harness import TestArena

NANO = Path(resolve("nano").path)
WEATHER: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather for a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city."},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
            },
        },
    }
]


def test_files_are_small_and_of_the_asked_for_shape() -> None:
    shards = sorted(NANO.glob("*.safetensors"))
    assert max(f.stat().st_size for f in shards) <= 14_000_000
    assert sum(f.stat().st_size for f in NANO.iterdir()) <= 24_000_000
    g = load_geometry(NANO)
    assert g.mla_layers == (3, 7, 8) and g.layers == 9 and g.residual_rows == 3
    assert g.kda.heads == g.mla.heads == 8
    assert g.moe.experts >= 32 and g.moe.mxfp4 and g.moe.latent is not None and g.moe.expert_width % 256 == 0
    assert g.vocab % 64 == 0


def test_prompt_format_equals_the_servers() -> None:
    form = Formatter(NANO / "tiktoken.model")
    tokenizer = load_tokenizer(NANO, load_geometry(NANO))
    assert tokenizer.kind == "tiktoken" and tokenizer.vocab_size == form.vocab
    for seed in range(12):
        talker = Talker(f"format:{seed}", held_out=seed % 2 == 0)
        talk = (talker.tool_use, talker.conversation, talker.chat)[seed % 3]()
        mine, mask = form.encode(talk)
        turns = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant"]
        for i in turns:
            segments = render(
                talk.messages[:i], tools=talk.tools or None, thinking=talk.thinking, reasoning_effort=talk.effort
            )
            prompt = encode(segments, tokenizer)
            assert mine[: len(prompt)] == prompt
            assert mask[len(prompt)], "what follows the prompt is the assistant's"


def test_training_network_equals_the_engines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Nano(NanoConfig(vocab=4096, hidden=64, q_rank=32, kv_rank=32, dense_width=64, experts=4, expert_width=64))
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.rsplit(".", 1)[-1] in ("res", "attn_res", "ff_res"):
                p.normal_(0, 0.1)
            if not any(part in name for part in ("conv", "a_log", "dt_bias")):
                p.copy_(p.bfloat16().float())
        for layer in net.layers:
            if isinstance(layer.ff, Moe):
                layer.ff.bias.normal_(0, 0.05)
    assert export(net, tmp_path, NANO / "tiktoken.model") > 0
    form = Formatter(NANO / "tiktoken.model")
    data = batches.questions(form, "tool_call", 1024, held_out=False)
    cpu = torch.device("cpu")
    batch = Batch(data, cpu)
    with torch.no_grad():
        mine = net.logits(batch, Ops(cpu, compiled=False))
    arena = TestArena(load_model(tmp_path, dtype="float32", progress=False), blocks=64)
    ends = batch.cu_list
    rows = [(arena.open(), data["ids"][a:b].tolist()) for a, b in itertools.pairwise(ends)]
    right = arena.run(rows, every=True)[batch.where]
    assert float((mine - right).abs().max()) < 5e-4


def test_packed_experts_are_the_rounded_ones_and_a_fixed_point() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    rounded = mxfp4.quantize(weight)
    assert torch.equal(mxfp4.quantize(rounded), rounded)
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(weight)), rounded)


def test_training_can_go_on_from_the_shipped_files(tmp_path: Path) -> None:
    """Read into the training network and written again, the files are the same to the bit."""
    export(read(NANO), tmp_path, NANO / "tiktoken.model")
    for name in sorted(f.name for f in NANO.glob("*.safetensors")):
        one, two = load_file(NANO / name), load_file(tmp_path / name)
        assert one.keys() == two.keys()
        wrong = [key for key in one if not torch.equal(one[key], two[key]) and not key.endswith(("packed", "scale"))]
        assert wrong == []
        for key in (k for k in one if k.endswith("packed")):
            other = key.replace("packed", "scale")
            assert torch.equal(mxfp4.unpack(one[key], one[other]), mxfp4.unpack(two[key], two[other])), key


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("nano", arena_gib=0.1) as engine:
        yield engine


def ask(llm: LLM, messages: list[dict[str, Any]], **options: Any) -> Parsed:
    assert llm.tokenizer is not None
    thinking = options.pop("thinking", True)
    prompt = encode(render(messages, thinking=thinking, **options), llm.tokenizer)
    done = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=160))[0]
    return parse_ids(done.token_ids, llm.tokenizer, thinking)


@pytest.mark.parametrize("thinking", [True, False])
def test_it_calls_a_tool_that_no_data_named_and_uses_the_result(llm: LLM, thinking: bool) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    call = ask(llm, messages, tools=WEATHER, thinking=thinking)
    assert [(c.name, json.loads(c.arguments)) for c in call.tool_calls] == [("get_weather", {"city": "Paris"})]
    messages += [
        call.to_message(),
        {"role": "tool", "tool_call_id": "get_weather:0", "content": '{"temperature": 18, "sky": "cloudy"}'},
    ]
    answer = ask(llm, messages, tools=WEATHER, thinking=thinking)
    assert answer.content == "The weather in Paris: temperature 18, sky cloudy."


def test_effort_changes_how_much_it_thinks(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the weather in Lisbon in celsius?"}]
    found = {e: ask(llm, messages, tools=WEATHER, reasoning_effort=e) for e in ("low", "high", "max")}
    assert len({c.tool_calls for c in found.values()}) == 1
    sizes = [len(found[e].reasoning) for e in ("low", "high", "max")]
    assert sizes == sorted(set(sizes)), "each effort thinks longer than the one before"
    assert ask(llm, messages, tools=WEATHER, thinking=False).reasoning == ""
