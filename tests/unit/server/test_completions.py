"""/v1/completions: text and ids, lists of prompts, echo, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.server.harness import TOKENIZER, FakeEngine, Live

ids = TOKENIZER.encode_text


def echoing() -> FakeEngine:
    """Answers with its prompt, backwards."""
    return FakeEngine(lambda submit, choice: submit.prompt_ids[::-1])


def test_text_in_text_out() -> None:
    with Live(echoing()) as live:
        got = live.client.completions.create(model="tiny", prompt="abc")
    assert (got.choices[0].text, got.choices[0].finish_reason) == ("cba", "stop")
    assert got.usage is not None and (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 3)
    assert live.engine.submits[0].sampling.max_tokens == 16
    assert live.engine.submits[0].stop_scope == "text"


@pytest.mark.parametrize("prompt", ["héllo → you", ids("héllo → you")])
def test_characters_of_several_tokens_are_never_cut(prompt: Any) -> None:
    engine = FakeEngine(lambda submit, choice: submit.prompt_ids)
    with Live(engine) as live:
        pieces = [
            chunk.choices[0].text
            for chunk in live.client.completions.create(model="tiny", prompt=prompt, max_tokens=99, stream=True)
        ]
    assert "".join(pieces) == "héllo → you"
    assert "�" not in "".join(pieces)


def test_a_list_of_prompts_with_several_choices() -> None:
    with Live(echoing()) as live:
        got = live.client.completions.create(model="tiny", prompt=["ab", "cd", "ef"], n=2)
        streamed = [""] * 6
        ends = []
        for chunk in live.client.completions.create(model="tiny", prompt=["ab", "cd", "ef"], n=2, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
            ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert [c.text for c in got.choices] == ["ba", "ba", "dc", "dc", "fe", "fe"] == streamed
    assert ends == ["stop"] * 6
    assert got.usage is not None and (got.usage.prompt_tokens, got.usage.completion_tokens) == (6, 12)


def test_echo_and_logprobs() -> None:
    with Live(echoing()) as live:
        got = live.client.completions.create(model="tiny", prompt="abc", echo=True, logprobs=1)
    choice = got.choices[0]
    assert choice.text == "abccba"
    assert choice.logprobs is not None and choice.logprobs.tokens == ["c", "b", "a"]
    assert live.engine.submits[0].sampling.prompt_logprobs_from == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, 99999]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 50}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": ["a"] * 300}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], param: str) -> None:
    with Live(echoing()) as live:
        answer = httpx.post(f"{live.url}/v1/completions", json=change)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
