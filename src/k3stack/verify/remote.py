"""A running server as the target: the OpenAI chat API for answers, SGLang's ``/generate`` for log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from k3stack.errors import UserError
from k3stack.scheduler.plan import TokenLogprobs
from k3stack.verify.order import Order, places
from k3stack.verify.questions import Question
from k3stack.verify.target import AT_ONCE, MAX_TOKENS, Answer, CannotScoreError, Progress, Scoring

TIMEOUT_S = 600.0


class RemoteTarget:
    """``base_url`` with or without ``/v1``. ``model``: the name to send; None: the server's first."""

    def __init__(self, base_url: str, model: str | None, api_key: str | None, max_tokens: int = MAX_TOKENS) -> None:
        self.base = base_url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.max_tokens = max_tokens
        try:
            listed = httpx.get(f"{self.base}/v1/models", headers=self.headers, timeout=30).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as e:
            raise UserError(f"{self.base}/v1/models did not answer: {e}", param="--base-url") from None
        self.model = model or str(listed["data"][0]["id"])
        self.name = f"{self.model} at {self.base}"

    def ask(self, questions: Sequence[Question], tell: Progress) -> list[Answer]:
        bodies = [_body(q, self.model, self.max_tokens) for q in questions]
        return asyncio.run(self._gather(bodies, Order(places(questions), AT_ONCE), tell))

    def ask_plain(self, texts: Sequence[str], tell: Progress) -> list[Answer]:
        """One user message each, everything else as the server has it by default, greedy."""
        head: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens}
        bodies = [{**head, "messages": [{"role": "user", "content": t}]} for t in texts]
        return asyncio.run(self._gather(bodies, Order([(i, 0) for i in range(len(bodies))], AT_ONCE), tell))

    async def _gather(self, bodies: list[dict[str, Any]], order: Order, tell: Progress) -> list[Answer]:
        answers: dict[int, Answer] = {}
        open_: dict[asyncio.Task[Answer], int] = {}
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(headers=self.headers, timeout=TIMEOUT_S, limits=limits) as client:
            while order.left:
                while len(open_) < AT_ONCE and (i := order.take()) is not None:
                    open_[asyncio.create_task(self._chat(client, bodies[i]))] = i
                ended, _ = await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    i = open_.pop(task)
                    answers[i] = task.result()
                    order.done(i)
                tell(len(ended))
        return [answers[i] for i in range(len(bodies))]

    async def _chat(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        try:
            response = await client.post(f"{self.base}/v1/chat/completions", json=body)
        except httpx.HTTPError as e:
            return Answer("", (), failure=f"{type(e).__name__}: {e}")
        return _answer(response)

    def score(self, work: Sequence[Scoring], top: int) -> list[list[TokenLogprobs]]:
        found = []
        with httpx.Client(headers=self.headers, timeout=TIMEOUT_S) as client:
            for w in work:
                if w.first:
                    self._generate(client, {"input_ids": list(w.ids[: w.first])})
                more = {"return_logprob": True, "logprob_start_len": w.start, "top_logprobs_num": top}
                answer = self._generate(client, {"input_ids": list(w.ids), **more})
                found.append(_entries(answer, len(w.ids) - w.start))
        return found

    def _generate(self, client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        try:
            response = client.post(f"{self.base}/generate", json={**body, "sampling_params": sampling})
        except httpx.HTTPError as e:
            raise CannotScoreError(f"/generate failed: {e}") from None
        if response.status_code != 200:
            raise CannotScoreError(f"/generate answered {response.status_code}: {response.text[:200]}")
        answer: dict[str, Any] = response.json()
        return answer


def _body(question: Question, model: str, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(question.messages),
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    if question.tools:
        body["tools"] = list(question.tools)
    if question.thinking:
        body["reasoning_effort"] = question.effort
    else:
        body["chat_template_kwargs"] = {"thinking": False}
    return body


def _answer(response: httpx.Response) -> Answer:
    if response.status_code != 200:
        return Answer("", (), failure=f"status {response.status_code}: {response.text[:200]}")
    body = response.json()
    choice = body["choices"][0]
    message = choice["message"]
    calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ())
    details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = int(details.get("cached_tokens") or 0)
    return Answer(message.get("content") or "", calls, choice.get("finish_reason") == "length", None, cached)


def _entries(answer: dict[str, Any], count: int) -> list[TokenLogprobs]:
    meta = answer.get("meta_info", {})
    tokens, tops = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if not tokens or not tops:
        raise CannotScoreError("/generate returns no log-probabilities of the prompt")
    found = []
    for own, best in zip(tokens[-count:], tops[-count:], strict=True):
        if own[0] is None or best is None:
            continue
        ids, values = tuple(b[1] for b in best), tuple(b[0] for b in best)
        found.append(TokenLogprobs(own[1], own[0], ids, values))
    return found
