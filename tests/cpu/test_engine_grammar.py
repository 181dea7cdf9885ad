"""Grammars through the whole engine: a random model that can only say what it is allowed to."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from k3stack import LLM, SamplingParams
from k3stack.chat import parse_ids
from k3stack.chat.grammar import build_grammar
from k3stack.chat.settings import OutputGrammar, ResponseFormat
from k3stack.engine import messages as msg
from tests.cpu.test_llm import K3

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 20, 300]}, "good": {"type": "boolean"}},
    "required": ["size", "good"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with K3.llm("float32") as llm:
        yield llm


def grammar(llm: LLM, **wanted: object) -> OutputGrammar:
    assert llm.tokenizer is not None
    found = build_grammar(llm.tokenizer, in_think=False, **wanted)  # type: ignore[arg-type]
    assert found is not None
    return found


def run(llm: LLM, *submits: msg.Submit) -> dict[tuple[str, int], tuple[list[int], msg.Output]]:
    core = llm._core
    for submit in submits:
        core.submit(submit)
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], tuple[list[int], msg.Output]] = {}
    busy = True
    while busy:
        busy = core.turn()
        for output in core.take_outputs():
            key = output.rid, output.choice
            tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[key] = tokens[key], output
    return ends


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_under_a_schema_validate_beside_free_ones(llm: LLM, temperature: float) -> None:
    assert llm.tokenizer is not None
    wanted = grammar(llm, form=ResponseFormat("json_schema", SCHEMA))
    free = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=400, n=3)
    ends = run(
        llm,
        msg.Submit(rid="free", prompt_ids=tuple(K3.prompts[1]), sampling=free),
        msg.Submit(rid="bound", prompt_ids=(1, 2, 3), sampling=params, grammar=wanted),
    )
    assert ends["free", 0][0] == K3.tokens[1]
    for choice in range(3):
        ids, last = ends["bound", choice]
        assert last.finish_reason == "stop", last
        answer = json.loads(parse_ids(ids, llm.tokenizer, thinking=False).content)
        assert answer["size"] in (1, 20, 300) and isinstance(answer["good"], bool) and len(answer) == 2


def test_a_bad_grammar_is_refused_and_an_abort_while_compiling_ends_it(llm: LLM) -> None:
    bad = OutputGrammar(lark="start: nonsense(", thinking=False)
    good = grammar(llm, regex="[a-f]{3}")
    params = SamplingParams(temperature=1.0, max_tokens=50, n=2)
    core = llm._core
    core.submit(msg.Submit(rid="gone", prompt_ids=(1,), sampling=params, grammar=good))
    core.abort("gone")
    ends = run(
        llm,
        msg.Submit(rid="bad", prompt_ids=(1,), sampling=params, grammar=bad),
        msg.Submit(rid="good", prompt_ids=(1,), sampling=params, grammar=good),
    )
    assert {ends["gone", i][1].finish_reason for i in (0, 1)} == {"abort"}
    assert {ends["bad", i][1].finish_reason for i in (0, 1)} == {"rejected"}
    assert "cannot be compiled" in (ends["bad", 0][1].message or "")
    assert {ends["good", i][1].finish_reason for i in (0, 1)} == {"stop"}
