from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from k3stack.chat import Tokenizer, load_tokenizer
from k3stack.config.geometry import load_geometry
from k3stack.models.builtin import resolve
from k3stack.verify import questions as q
from k3stack.verify.language.names import reserved_pair, syllables
from k3stack.verify.language.talk import Talker


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    nano = Path(resolve("nano").path)
    return load_tokenizer(nano, load_geometry(nano))


def test_the_same_questions_every_time(tokenizer: Tokenizer) -> None:
    assert q.build((20, 1, 3), tokenizer) == q.build((20, 1, 3), tokenizer)
    assert q.tool_calls(30)[:20] == q.tool_calls(20), "a quick run asks the first of a full one"


def test_what_training_shows_does_not_move_the_questions() -> None:
    """Scores are comparable only while the questions stay as they are."""
    asked = json.dumps([asdict(x) for x in (*q.tool_calls(40), *q.conversations(6))], sort_keys=True)
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "a800f63158aa24c6"


def test_long_lookups_share_a_document_of_the_asked_for_length(tokenizer: Tokenizer) -> None:
    found = q.long_lookups(2, tokenizer, asked=16)
    assert [question.group for question in found] == [0] * 16 + [1] * 16
    for group in (found[:16], found[16:]):
        (text,) = {question.messages[0]["content"] for question in group}
        assert 8192 <= len(tokenizer.encode_text(text)) < 8192 + 40
        assert len({question.messages[1]["content"] for question in group}) == 16
        for question in group:
            assert question.expected.content.split(" is ")[-1].rstrip(".") in text
    assert {question.thinking for question in found} == {True, False}


def test_conversations_ask_every_turn_with_the_right_history() -> None:
    found = q.conversations(4)
    for group in range(4):
        turns = [question for question in found if question.group == group]
        assert [question.turn for question in turns] == list(range(len(turns)))
        assert all(len(a.messages) < len(b.messages) for a, b in itertools.pairwise(turns))


def test_exact_match_compares_values_not_spelling() -> None:
    expected = q.Expected("", (("get_depth", q.canonical('{"a": 1, "b": "x"}')),))
    assert q.is_right(expected, "", [("get_depth", '{"b":"x","a":1}')])
    assert not q.is_right(expected, "", [("get_depth", '{"a": "1", "b": "x"}')])
    assert not q.is_right(expected, "", [("get_depth", '{"a": 1, "b": "x')])
    assert not q.is_right(expected, "Hello", [("get_depth", '{"a": 1, "b": "x"}')])
    assert not q.is_right(expected, "", [])


def test_held_out_names_have_a_reserved_pair_and_training_has_none() -> None:
    index = {s: i for i, s in enumerate(syllables())}

    def pairs(word: str) -> list[tuple[int, int]]:
        parts: list[int] = []
        while word:  # a third letter belongs to the syllable unless a vowel follows it
            closed = len(word) == 3 or (len(word) > 3 and word[:3] in index and word[3] not in "aeiou")
            size = 3 if closed else 2
            parts.append(index[word[:size]])
            word = word[size:]
        return list(itertools.pairwise(parts))

    for held_out in (False, True):
        namer = Talker("pairs", held_out=held_out).namer
        for _ in range(500):
            assert any(reserved_pair(a, b) for a, b in pairs(namer.syllabic(3))) is held_out
