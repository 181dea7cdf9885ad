"""Stop strings against a plain search of the whole text, over every cut into tokens."""

from __future__ import annotations

import itertools
import random

import pytest

from k3stack.engine.stops import RawText, StopMatcher
from k3stack.scheduler.plan import TokenLogprobs


class Pieces:
    """A tokenizer whose tokens are given byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode_bytes(self, ids: tuple[int, ...]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)


def run(pieces: list[bytes], stops: tuple[str, ...], min_tokens: int = 0) -> tuple[list[list[int]], StopMatcher]:
    """Feed the pieces as tokens 0, 1, ...; what left after each, and the matcher at the end."""
    matcher = StopMatcher(stops, RawText(Pieces(pieces)), min_tokens)  # type: ignore[arg-type]
    left = []
    for token in range(len(pieces)):
        hit = matcher.feed(token)
        left.append(list(matcher.release().tokens))
        if hit:
            return left, matcher
    left.append(list(matcher.release_all().tokens))
    return left, matcher


def visible(pieces: list[bytes], left: list[list[int]], matcher: StopMatcher) -> str:
    tokens = [t for part in left for t in part]
    assert tokens == list(range(len(tokens))), "tokens leave in order, none is lost"
    return b"".join(pieces[t] for t in tokens).decode("utf-8", "replace") + matcher.tail


def cuts(data: bytes, count: int) -> list[list[bytes]]:
    """All ways to cut ``data`` into ``count`` pieces."""
    found = []
    for places in itertools.combinations(range(1, len(data)), count - 1):
        bounds = [0, *places, len(data)]
        found.append([data[a:b] for a, b in itertools.pairwise(bounds)])
    return found


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("hello\n\nworld", ("\n\n",)),
        ("abcabcabd", ("abcabd",)),
        ("aaaab", ("aab",)),
        ("née – fin", ("– f",)),
        ("日本語です", ("語",)),
        ("one STOP two END", ("END", "STOP")),
        ("nothing here", ("xyz",)),
        ("ends in half ST", ("STOP",)),
        ("abcd", ("cd", "bc")),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_cut(text: str, stops: tuple[str, ...], count: int) -> None:
    for pieces in cuts(text.encode(), count):
        left, matcher = run(pieces, stops)
        shown = visible(pieces, left, matcher)
        ends = [text.index(s) + len(s) for s in stops if s in text]
        if not ends:
            assert shown == text and matcher.matched is None
            continue
        assert matcher.matched in stops
        assert shown + matcher.matched == text[: len(shown) + len(matcher.matched)]
        assert not any(s in shown for s in stops)


def test_random_texts_never_show_a_stop_or_its_beginning_early() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice("abé") for _ in range(rng.randint(1, 14)))
        data = text.encode()
        stops = tuple("".join(rng.choice("abé") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        bounds = sorted({0, len(data), *(rng.randint(0, len(data)) for _ in range(5))})
        pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
        left, matcher = run(pieces, stops)
        shown = visible(pieces, left, matcher)
        assert not any(s in shown for s in stops)
        if matcher.matched is None:
            assert shown == text
        else:
            assert text.startswith(shown + matcher.matched)


def test_text_that_cannot_match_leaves_at_once() -> None:
    left, _ = run([b"a", b"b", b"c", b"x", b"bc"], ("xyz",))
    assert left == [[0], [1], [2], [], [3, 4], []]


def test_a_visible_beginning_of_a_token_is_the_tail() -> None:
    left, matcher = run([b"ab", b"c\nSTOP it"], ("STOP",))
    assert (left, matcher.tail, matcher.matched) == ([[0], []], "c\n", "STOP")


def test_half_a_character_before_the_stop_is_whole_in_the_tail() -> None:
    you = "你".encode()
    left, matcher = run([b"a", you[:2], you[2:] + b"STOP"], ("STOP",))
    assert (left, matcher.tail) == ([[0], [], []], "你")


def test_matches_within_min_tokens_do_not_count() -> None:
    left, matcher = run([b"x", b"x", b"a", b"x"], ("x",), min_tokens=3)
    assert matcher.matched == "x" and [t for part in left for t in part] == [0, 1, 2]


def test_logprobs_stay_with_their_tokens() -> None:
    matcher = StopMatcher(("bc",), RawText(Pieces([b"a", b"b", b"x", b"b", b"c"])))  # type: ignore[arg-type]
    found = []
    for token in range(5):
        hit = matcher.feed(token)
        if not hit:
            matcher.add_logprobs((TokenLogprobs(token, -float(token)),))
        released = matcher.release()
        assert [entry.token for entry in released.logprobs] == list(released.tokens)
        found += released.tokens
    assert found == [0, 1, 2]
