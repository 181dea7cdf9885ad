"""The vectorised sampler against a plain twin, one row and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from k3stack.config.sampling import SamplingParams
from k3stack.executor.torch import draw as draw_module
from k3stack.executor.torch.noise import uniform
from k3stack.executor.torch.sampler import Sampler
from k3stack.scheduler.plan import RowAdd

CPU = torch.device("cpu")
VOCAB = 211


def add(row: int, params: SamplingParams, **more: Any) -> RowAdd:
    return RowAdd(row=row, state_block=0, pages=(), length=0, sampling=params, **more)


def shaped_twin(
    logits: list[float], p: SamplingParams, prompt: list[int], output: list[int], eos: list[int]
) -> list[float]:
    """Penalties, bias, min_tokens; the straightforward way."""
    found = list(logits)
    for token in range(len(found)):
        count = output.count(token)
        if count or token in prompt:
            found[token] = (
                found[token] / p.repetition_penalty if found[token] > 0 else found[token] * p.repetition_penalty
            )
        found[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
        found[token] += p.logit_bias.get(token, 0.0)
        if len(output) < p.min_tokens and token in (*eos, *p.stop_token_ids):
            found[token] = -math.inf
    return found


def distribution_twin(logits: list[float], p: SamplingParams) -> list[float]:
    """Probabilities after temperature, top-k, top-p, min-p."""
    scaled = [x / p.temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    if p.top_k > 0:
        limit = sorted(weights, reverse=True)[min(p.top_k, len(weights)) - 1]
        weights = [w if w >= limit else 0.0 for w in weights]
    if p.top_p < 1.0:
        total, mass, limit = math.fsum(weights), 0.0, 0.0
        for w in sorted(weights, reverse=True):
            mass, limit = mass + w, w
            if mass >= p.top_p * total:
                break
        weights = [w if w >= limit else 0.0 for w in weights]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def draw_twin(probabilities: list[float], u: float) -> int:
    mass = 0.0
    for token, share in enumerate(probabilities):
        mass += share
        if mass > u:
            return token
    return max(i for i, share in enumerate(probabilities) if share)


def choose_twin(logits: list[float], p: SamplingParams, prompt: list[int], output: list[int], eos: list[int]) -> int:
    shaped = shaped_twin(logits, p, prompt, output, eos)
    if p.temperature == 0.0 or p.top_k == 1:
        return shaped.index(max(shaped))
    u = float(uniform(np.array([p.seed], np.uint64), np.array([len(output)]))[0])
    return draw_twin(distribution_twin(shaped, p), u)


def random_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        top_k=maybe(int(rng.integers(1, 300)), 0),
        min_p=maybe(float(rng.uniform(0.0, 0.5)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        logit_bias=maybe({int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, VOCAB, 5)}, {}),
        min_tokens=maybe(int(rng.integers(1, 8)), 0),
        stop_token_ids=maybe((int(rng.integers(0, VOCAB)),), ()),
        seed=int(rng.integers(0, 2**63)),
    )


@pytest.mark.parametrize(("prefixes", "chunk"), [((4, 20), 4), ((1, 2, 3), 32), ((64, 512), 64)])
def test_every_parameter_against_the_twin(
    prefixes: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows of random parameters, 12 tokens each, rows coming and going; fp64, so that no rounding decides."""
    monkeypatch.setattr(draw_module, "PREFIXES", prefixes)
    monkeypatch.setattr(draw_module, "CHUNK", chunk)
    rng = np.random.default_rng(7)
    sampler = Sampler(VOCAB, CPU, rows=4)
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(30):
        for row in rng.choice(40, 12, replace=False).tolist():
            if row in live:
                sampler.end(row)
                del live[row]
            else:
                params = random_params(rng)
                prompt, output = rng.integers(0, VOCAB, 20).tolist(), rng.integers(0, VOCAB, 3).tolist()
                sampler.add(
                    add(row, params, prompt_ids=tuple(prompt), output_ids=tuple(output), output_count=3, eos_ids=(3,))
                )
                live[row] = params, prompt, output
        rows = list(live)
        rng.shuffle(rows)
        logits = torch.from_numpy(rng.normal(0, 3, (len(rows), VOCAB)))
        kept = logits.clone()
        sampled = sampler.sample(logits, np.array(rows, np.int64))
        assert torch.equal(logits, kept), "log-probabilities need the network's own logits"
        assert sampled.best.isfinite().all()
        for i, row in enumerate(rows):
            params, prompt, output = live[row]
            token = choose_twin(logits[i].tolist(), params, prompt, output, [3])
            assert sampled.tokens[i] == token, (row, params)
            output.append(token)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=1.5, min_p=0.1, top_k=20, top_p=0.95),
    ],
    ids=["plain", "top_p", "top_k", "all"],
)
def test_the_distribution_is_the_wanted_one(params: SamplingParams) -> None:
    """20,032 draws, 64 seeds at 313 positions, by chi-square (a right sampler fails once in a million)."""
    logits = np.random.default_rng(1).normal(0, 2, 50)
    sampler, draws = Sampler(50, CPU), 64 * 313
    for row in range(64):
        sampler.add(add(row, msgspec.structs.replace(params, seed=row)))
    counts = np.zeros(50)
    batch = torch.from_numpy(logits).float().repeat(64, 1)
    for _ in range(313):
        np.add.at(counts, sampler.sample(batch, np.arange(64)).tokens.numpy(), 1)
    expected = np.array(distribution_twin(logits.tolist(), params)) * draws
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    statistic = float(((counts[big] - expected[big]) ** 2 / expected[big]).sum())
    freedom = int(big.sum()) - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 4.9


def test_seeds_do_not_depend_on_the_batch() -> None:
    """A row's tokens alone, among greedy rows, and among random ones; and continued after it was interrupted."""
    rng = np.random.default_rng(3)
    steps = [torch.from_numpy(rng.normal(0, 1, (1, VOCAB))).float() for _ in range(16)]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=99)

    def tokens(others: list[SamplingParams], at: int) -> list[int]:
        sampler = Sampler(VOCAB, CPU)
        sampler.add(add(at, params))
        for i, other in enumerate(others):
            sampler.add(add(i + at + 1, other))
        found = []
        for logits in steps:
            batch = torch.cat([torch.randn(len(others), VOCAB), logits])
            rows = np.array([*range(at + 1, at + 1 + len(others)), at])
            found.append(int(sampler.sample(batch, rows).tokens[-1]))
        return found

    alone = tokens([], 0)
    assert tokens([SamplingParams(temperature=0.0)] * 5, 7) == alone
    assert tokens([SamplingParams(seed=5), SamplingParams(top_k=3, seed=6), SamplingParams()], 2) == alone
    resumed = Sampler(VOCAB, CPU)
    resumed.add(add(0, params, output_count=10))
    assert [int(resumed.sample(x, np.array([0])).tokens[0]) for x in steps[10:]] == alone[10:]


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 70}, {"min_p": 0.9}])
def test_equal_logits_are_kept_together(params: dict[str, Any]) -> None:
    """200 tokens share the best value: no cut may tell them apart, so all of them come."""
    sampler, seen = Sampler(VOCAB, CPU), set()
    for row in range(64):
        sampler.add(add(row, SamplingParams(temperature=1.0, seed=row, **params)))
    logits = torch.zeros(64, VOCAB)
    logits[:, 200:] = -3.0
    for _ in range(60):
        seen |= set(sampler.sample(logits, np.arange(64)).tokens.tolist())
    assert seen == set(range(200))


def test_rows_without_a_seed_differ() -> None:
    sampler = Sampler(VOCAB, CPU)
    for row in range(64):
        sampler.add(add(row, SamplingParams(temperature=1.0)))
    tokens = sampler.sample(torch.zeros(64, VOCAB), np.arange(64)).tokens
    assert len(set(tokens.tolist())) > 30


def test_greedy_takes_the_lowest_of_equals() -> None:
    sampler = Sampler(VOCAB, CPU)
    sampler.add(add(0, SamplingParams(temperature=0.0)))
    sampler.add(add(1, SamplingParams(temperature=1.0, top_k=1)))
    sampler.add(add(2, SamplingParams(temperature=0.0, presence_penalty=0.5)))
    logits = torch.zeros(3, VOCAB)
    logits[:, [40, 41, 90]] = 5.0
    assert sampler.sample(logits, np.arange(3)).tokens.tolist() == [40, 40, 40]


def test_uniform_numbers_are_uniform_and_independent() -> None:
    u = uniform(np.arange(200, dtype=np.uint64).repeat(500), np.tile(np.arange(500), 200)).reshape(200, 500)
    assert 0.0 <= u.min() < u.max() < 1.0
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.size)
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):  # along positions, along seeds
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(a.size)
