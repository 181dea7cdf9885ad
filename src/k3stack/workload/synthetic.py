"""The three workloads of the published study, synthetic and seeded.

* ``fresh``: coding-agent calls of about 8,400 prompt tokens that share nothing, answers up to 512 tokens.
* ``long``: a history of about 118,000 tokens, then returning turns that each add about 2,000.
* ``interference``: 16 streams decode; after a quiet time one prompt a second for 24 s, each asking for one token.

A third of the answers of the first two are tool calls. The study gives means and caps, not distributions: prompts
are log-normal (sigma 0.7), answers spread between 16 and 512 tokens, evenly unless another mean is asked for.
"""

from __future__ import annotations

import numpy as np

from k3stack.errors import UserError
from k3stack.workload.lengths import Arrivals, arrival_times, lognormal, truncated_exponential
from k3stack.workload.sessions import Session, Turn, Workload

NAMES = ("fresh", "long", "interference")
TOOL_SHARE = 1 / 3
PROMPT_MEAN, PROMPT_SIGMA, PROMPT_LOW, PROMPT_HIGH = 8_400, 0.7, 256, 65_536
ANSWER_MEAN, ANSWER_LOW, ANSWER_HIGH = 264, 16, 512
HISTORY_MEAN, RETURN_MEAN = 118_000, 2_000
STREAMS, QUIET_S, PROMPTS, STREAM_PROMPT = 16, 20.0, 24, 1_024


def fresh(
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 240.0,
    seed: int = 0,
    input_len: int | None = None,
    output_len: int | None = None,
    answer_mean: float = ANSWER_MEAN,
    requests: int | None = None,
    arrivals: Arrivals = "poisson",
) -> Workload:
    """Unrelated calls. ``input_len`` / ``output_len`` fix the lengths (as benchmark runs do) instead of drawing."""
    rng = np.random.default_rng([seed, 1])
    times = _times(rng, rate, concurrency, duration_s, requests, arrivals)
    n = len(times)
    prompts = (
        np.full(n, input_len) if input_len else lognormal(rng, n, PROMPT_MEAN, PROMPT_SIGMA, PROMPT_LOW, PROMPT_HIGH)
    )
    answers = (
        np.full(n, output_len) if output_len else truncated_exponential(rng, n, answer_mean, ANSWER_LOW, ANSWER_HIGH)
    )
    tools = rng.random(n) < TOOL_SHARE if not output_len else np.zeros(n, dtype=bool)
    sessions = tuple(
        Session(
            sid=i,
            arrival_s=float(times[i]),
            turns=(Turn(new_tokens=int(prompts[i]), output_tokens=int(answers[i]), tool_call=bool(tools[i])),),
        )
        for i in range(n)
    )
    return Workload(
        name="fresh", sessions=sessions, concurrency=concurrency, duration_s=duration_s if rate else None
    ).validate()


def long(
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 240.0,
    seed: int = 0,
    history: int = HISTORY_MEAN,
    turns: int = 4,
    requests: int | None = None,
    arrivals: Arrivals = "poisson",
) -> Workload:
    """Sessions: a long first prompt, then ``turns`` - 1 returning ones. ``rate`` counts requests, not sessions.

    With ``rate`` a session pauses 5 s on average before it returns; with ``concurrency`` it returns at once, so that so
    many requests are always under way.
    """
    if turns < 1:
        raise UserError(f"turns is {turns}; a session needs at least one", param="turns")
    rng = np.random.default_rng([seed, 2])
    session_rate = rate / turns if rate else None
    n_sessions = -(-requests // turns) if requests else None
    times = _times(rng, session_rate, concurrency, duration_s, n_sessions, arrivals)
    sessions = []
    for i, at in enumerate(times):
        first = int(lognormal(rng, 1, history, 0.1, 1_024, 1_000_000)[0])
        later = lognormal(rng, turns, RETURN_MEAN, 0.5, 64, 32_768)
        answers = truncated_exponential(rng, turns, ANSWER_MEAN, ANSWER_LOW, ANSWER_HIGH)
        tools = rng.random(turns) < TOOL_SHARE
        think = rng.exponential(5.0, turns)
        sessions.append(
            Session(
                sid=i,
                arrival_s=float(at),
                turns=tuple(
                    Turn(
                        new_tokens=first if k == 0 else int(later[k]),
                        output_tokens=int(answers[k]),
                        tool_call=bool(tools[k]),
                        think_s=0.0 if k == 0 or rate is None else float(think[k]),
                    )
                    for k in range(turns)
                ),
            )
        )
    return Workload(
        name="long", sessions=tuple(sessions), concurrency=concurrency, duration_s=duration_s if rate else None
    ).validate()


def interference(
    *,
    rate: float = 1.0,
    streams: int = STREAMS,
    prompts: int = PROMPTS,
    input_len: int = PROMPT_MEAN,
    quiet_s: float = QUIET_S,
    stream_tokens: int = 4_096,
    stream_prompt: int = STREAM_PROMPT,
) -> Workload:
    """Streams that decode all the time; from ``quiet_s`` on, ``prompts`` prompts at ``rate``, one token each."""
    if rate <= 0:
        raise UserError(f"--rate is {rate:g}; it must be above 0 prompts a second", param="rate")
    background = [
        Session(
            sid=i,
            arrival_s=0.0,
            turns=(Turn(new_tokens=stream_prompt, output_tokens=stream_tokens),),
            stream=True,
        )
        for i in range(streams)
    ]
    burst = [
        Session(
            sid=streams + i,
            arrival_s=quiet_s + i / rate,
            turns=(Turn(new_tokens=input_len, output_tokens=1),),
        )
        for i in range(prompts)
    ]
    return Workload(
        name="interference",
        sessions=tuple(background + burst),
        window_s=(quiet_s, quiet_s + prompts / rate),
    ).validate()


def _times(
    rng: np.random.Generator,
    rate: float | None,
    concurrency: int | None,
    duration_s: float,
    requests: int | None,
    arrivals: Arrivals,
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if (rate is None) == (concurrency is None):
        raise UserError("give either --rate (open loop) or --concurrency (closed loop), not both", param="rate")
    if rate is not None:
        if requests is not None:
            duration_s = 4 * requests / rate + 60.0
        times = arrival_times(rng, rate, duration_s, arrivals)
        return times if requests is None else times[:requests]
    assert concurrency is not None
    return np.zeros(requests if requests is not None else max(4 * concurrency, 16))
