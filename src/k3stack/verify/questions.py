"""The held-out questions: chat requests whose one right answer is known, seeded, the same for every target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from k3stack.chat import Tokenizer
from k3stack.verify.language.talk import Conversation, Fact, Talker

MODES = ("low", "off", "low", "off", "high", "low", "off", "max")
"""Efforts in turn: mostly short thinking, so that the whole gate takes minutes on a CPU; every effort is asked."""
DOCUMENT_TOKENS = 8192
QUESTIONS_A_DOCUMENT = 32


@dataclass(frozen=True)
class Expected:
    """A right answer: text and calls. Thinking is not compared."""

    content: str
    calls: tuple[tuple[str, str], ...]
    """(name, canonical JSON of the arguments)."""


@dataclass(frozen=True)
class Question:
    """One chat request. Questions of a ``group`` share a document or belong to one conversation."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool
    effort: str
    expected: Expected
    group: int
    turn: int = 0
    """Asked when all questions of the group with a smaller turn have been answered."""


@dataclass
class QuestionSet:
    tool_calls: list[Question] = field(default_factory=list)
    long_lookups: list[Question] = field(default_factory=list)
    conversations: list[Question] = field(default_factory=list)


def canonical(arguments: str) -> str:
    """Arguments as sorted JSON; text that is no JSON object stays as it is and equals nothing expected."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return arguments


def expected_of(message: dict[str, Any]) -> Expected:
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    return Expected(message["content"], tuple((c["name"], canonical(c["arguments"])) for c in calls))


def questions_of(talk: Conversation, group: int) -> Iterable[Question]:
    """One question for each assistant message, with the right history before it."""
    turn = 0
    for i, message in enumerate(talk.messages):
        if message["role"] == "assistant":
            before = tuple(talk.messages[:i])
            yield Question(before, tuple(talk.tools), talk.thinking, talk.effort, expected_of(message), group, turn)
            turn += 1


def tool_calls(count: int) -> list[Question]:
    """One request each with one to four declared tools, held-out words, names and wordings."""
    talker = Talker("verify:tool_calls", held_out=True)
    return [next(iter(questions_of(talker.tool_call(MODES[i % len(MODES)]), i))) for i in range(count)]


def conversations(count: int) -> list[Question]:
    """All turns of ``count`` conversations; a conversation is right when every turn of it is."""
    talker = Talker("verify:conversations", held_out=True)
    found: list[Question] = []
    for i in range(count):
        found += questions_of(talker.conversation(MODES[i % len(MODES)]), i)
    return found


def long_lookups(
    documents: int, tokenizer: Tokenizer, asked: int = QUESTIONS_A_DOCUMENT, tokens: int = DOCUMENT_TOKENS
) -> list[Question]:
    """``asked`` questions about each of ``documents`` documents, each question a request of its own."""
    talker = Talker("verify:long_lookups", held_out=True)
    found: list[Question] = []
    for group in range(documents):
        text, facts = talker.long_text(tokenizer.encode_text, tokens)
        for i, fact in enumerate(talker.rng.sample(facts, asked)):
            # Efforts change the head of the prompt, so one document is asked in one mode.
            found.append(_lookup(talker, text, fact, MODES[group % 2], group, i))
    return found


def _lookup(talker: Talker, text: str, fact: Fact, mode: str, group: int, number: int) -> Question:
    (question,) = questions_of(talker.ask_about(text, [fact], mode), group)
    # The first computes the document. The second meets it in the cache, which shows where the prompts part: a snapshot
    # is kept there, and the others, all at once, compute little but their question.
    return replace(question, turn=min(number, 2))


def build(sizes: tuple[int, int, int], tokenizer: Tokenizer) -> QuestionSet:
    """``sizes``: tool calls, documents, conversations."""
    calls, documents, talks = sizes
    return QuestionSet(tool_calls(calls), long_lookups(documents, tokenizer), conversations(talks))


def is_right(expected: Expected, content: str, calls: Sequence[tuple[str, str]]) -> bool:
    """Exact match of text and calls (arguments as JSON values)."""
    return expected.content == content and expected.calls == tuple((n, canonical(a)) for n, a in calls)
