"""/generate: SGLang's request and answer, whole, streamed and in batches."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest

from k3stack.engine.messages import Output, Submit
from k3stack.scheduler.plan import TokenLogprobs
from tests.unit.server.harness import TOKENIZER, FakeEngine, Live

ids = TOKENIZER.encode_text


class Scoring(FakeEngine):
    """Answers with its prompt backwards, and scores the prompt where asked to."""

    def __init__(self) -> None:
        super().__init__(lambda submit, choice: submit.prompt_ids[::-1])

    async def _choice(self, submit: Submit, choice: int) -> AsyncGenerator[Output, None]:
        start = submit.sampling.prompt_logprobs_from
        if start is not None:
            prompt = submit.prompt_ids
            entries = [TokenLogprobs(prompt[i], -float(i), (9,), (-0.25,)) if i else None for i in range(len(prompt))]
            yield Output(rid=submit.rid, choice=choice, scored=tuple(entries[start:]))
        async for output in super()._choice(submit, choice):
            yield msgspec.structs.replace(output, matched_stop=7 if output.finish_reason == "stop" else None)


def post(live: Live, **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/generate", json=body)


def test_text_and_ids() -> None:
    with Live(Scoring()) as live:
        for body in ({"text": "abc"}, {"input_ids": ids("abc")}):
            got = post(live, **body, sampling_params={"max_new_tokens": 8, "temperature": 0}).json()
            assert (got["text"], got["output_ids"]) == ("cba", ids("cba"))
            meta = got["meta_info"]
            assert meta["finish_reason"] == {"type": "stop", "matched": 7}
            assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 3)
        cut = post(live, text="abc", sampling_params={"max_new_tokens": 2}).json()
        assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert live.engine.submits[0].sampling.temperature == 0
    assert live.engine.submits[0].stop_scope == "text"


def test_log_probabilities_of_prompt_and_output() -> None:
    with Live(Scoring()) as live:
        meta = post(
            live, input_ids=[97, 98, 99], sampling_params={"max_new_tokens": 1}, return_logprob=True,
            logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True,
        ).json()["meta_info"]  # fmt: skip
        assert meta["input_token_logprobs"] == [[None, 97, "a"], [-1.0, 98, "b"], [-2.0, 99, "c"]]
        assert meta["input_top_logprobs"] == [None, [[-0.25, 9, "\t"]], [[-0.25, 9, "\t"]]]
        assert meta["output_token_logprobs"] == [[-0.5, 99, "c"]]
        assert meta["output_top_logprobs"][0][1][0] == -9999.0
        later = post(live, input_ids=[97, 98, 99], return_logprob=True, logprob_start_len=2).json()["meta_info"]
        assert later["input_token_logprobs"] == [[-2.0, 99, None]]
        none = post(live, input_ids=[97, 98, 99], return_logprob=True).json()["meta_info"]
        assert none["input_token_logprobs"] == [] and "input_top_logprobs" not in none


def test_scoring_alone_gives_no_output() -> None:
    with Live(Scoring()) as live:
        got = post(
            live, input_ids=[97, 98], sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        ).json()
    assert (got["text"], got["output_ids"], got["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert [entry[1] for entry in got["meta_info"]["input_token_logprobs"]] == [97, 98]
    assert got["meta_info"]["output_token_logprobs"] == []


def test_batches_and_choices() -> None:
    with Live(Scoring()) as live:
        batch = post(
            live,
            input_ids=[[97], [98, 99]],
            sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            rid=["x", "y"],
        ).json()
        assert [(b["text"], b["meta_info"]["id"]) for b in batch] == [("a", "x"), ("cb", "y")]
        assert [b["text"] for b in post(live, text="ab", sampling_params={"n": 2}).json()] == ["ba", "ba"]
        assert len(post(live, text=["ab"]).json()) == 1


def test_frames_are_cumulative() -> None:
    with Live(Scoring()) as live:
        frames = post(live, text="abc", stream=True).text.split("\n\n")
        assert frames[-2] == "data: [DONE]"
        decoded = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
        assert [d["text"] for d in decoded] == ["c", "cb", "cba", "cba"]
        assert decoded[-1]["meta_info"]["finish_reason"]["type"] == "stop"
        assert decoded[0]["meta_info"]["finish_reason"] is None
        many = [json.loads(f[6:]) for f in post(live, text=["a", "bc"], stream=True).text.split("\n\n")[:-2]]
        assert {d["index"]: d["text"] for d in many} == {0: "a", 1: "cb"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [999_999]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 99_999}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "logprob_start_len": 9, "return_logprob": True}, "logprob_start_len"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with Live(Scoring()) as live:
        answer = post(live, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
