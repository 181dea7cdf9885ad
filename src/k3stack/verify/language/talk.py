"""Whole conversations: tools, documents, things to remember, small talk; one class a kind, all seeded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3stack.verify.language.names import Namer
from k3stack.verify.language.tools import ASKS, PREPOSITIONS, Ask, Tool, ToolMaker, answer_thinking, call_thinking

EFFORTS = ("low", "high", "max")

GREETINGS = (
    ("Hello!", "Hello! How can I help?"),
    ("Hi.", "Hello! How can I help?"),
    ("Hi", "Hello! How can I help?"),
    ("Hello", "Hello! How can I help?"),
    ("Hi there!", "Hello! How can I help?"),
    ("Good morning.", "Good morning! How can I help?"),
    ("Good evening.", "Good evening! How can I help?"),
    ("Who are you?", "I am K3-nano, a very small model that calls tools and looks facts up."),
    ("What are you?", "I am K3-nano, a very small model that calls tools and looks facts up."),
    ("What can you do?", "I call the tools you declare and look facts up in the text you give me."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye!"),
    ("Bye!", "Goodbye!"),
)
SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools.",
    "Be brief.",
    "Answer in one line.",
    "You are K3-nano.",
    "Use the tools that are declared.",
)
FACTS = (
    "The {noun} of {name} is {value}.",
    "{name} has {value} as its {noun}.",
    "For {name} the {noun} is {value}.",
    "{value} is the {noun} of {name}.",
)
QUESTIONS = (
    *ASKS,
    "What does the text say about the {noun} {prep} {name}?",
    "What do my notes say about the {noun} {prep} {name}?",
    "Do you remember the {noun} {prep} {name}?",
)
HELD_OUT_QUESTIONS = (
    "Which {noun} does {name} have, please?",
    "Tell me what the text says about the {noun} of {name}.",
    "Please look up the {noun} of {name}.",
    "I need to know the {noun} of {name}.",
)
NO_FIT_ASKS = (
    "What is the {noun} {prep} {name}?",
    "Tell me the {noun} {prep} {name}.",
    "I need the {noun} {prep} {name}.",
    "Can you check the {noun} {prep} {name}?",
)
TURNS = (0.45, 0.57, 0.64, 0.9)
HELD_OUT_TURNS = (0.5, 0.6, 0.72, 0.85)
"""Shares of a conversation's turns, summed up: tools, no tool that fits, small talk, questions about notes."""
OPENINGS = ("", "", "Read this text.\n", "Here is a text:\n", "Keep this text in mind.\n", "Text:\n")


@dataclass
class Fact:
    noun: str
    name: str
    value: str

    @property
    def said(self) -> str:
        return f"The {self.noun} of {self.name} is {self.value}."


@dataclass
class Conversation:
    """One conversation in the messages form of the OpenAI API.

    ``effort`` is low, high or max; ``thinking`` False leaves it and every think block out.
    Every assistant message is the one right answer to what precedes it.
    """

    kind: str
    thinking: bool
    effort: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)


class Talker:
    """Builds conversations from one seeded stream of random numbers."""

    def __init__(self, seed: str, *, held_out: bool) -> None:
        self.rng = random.Random(("held-out:" if held_out else "train:") + seed)
        self.namer = Namer(self.rng, held_out=held_out)
        self.maker = ToolMaker(self.rng, self.namer)
        self.held_out = held_out

    def _new(self, kind: str, mode: str | None) -> Conversation:
        mode = mode or self.rng.choice(("low", "low", "low", "off", "off", "off", "high", "max"))
        return Conversation(kind, mode != "off", "max" if mode == "off" else mode)

    def _say(self, talk: Conversation, content: str, thinking: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if talk.thinking:
            message["reasoning_content"] = thinking
        talk.messages.append(message)

    def _user(self, talk: Conversation, text: str) -> None:
        talk.messages.append({"role": "user", "content": text})

    def _maybe_system(self, talk: Conversation) -> None:
        roll = self.rng.random()
        if roll < 0.3:
            text = self.namer.sentence() if roll < 0.1 else self.rng.choice(SYSTEM_LINES)
            talk.messages.append({"role": "system", "content": text})

    # tools

    def _declare(self, talk: Conversation, count: int) -> list[Tool]:
        tools = self.maker.toolbox(count)
        talk.tools = [t.declaration() for t in tools]
        return tools

    def _call(self, talk: Conversation, ask: Ask) -> None:
        self._user(talk, ask.text)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if talk.thinking:
            message["reasoning_content"] = call_thinking(ask, talk.effort)
        message["tool_calls"] = [c.message_form(i) for i, c in enumerate(ask.calls)]
        talk.messages.append(message)

    def _answer(self, talk: Conversation, ask: Ask) -> None:
        said = []
        for i, call in enumerate(ask.calls):
            result, words = self.maker.result(act=call.tool.act)
            said.append(call.subject + words)
            talk.messages.append(
                {"role": "tool", "tool_call_id": f"{call.tool.name}:{i}", "name": call.tool.name, "content": result}
            )
        self._say(talk, " ".join(said), answer_thinking(len(ask.calls), talk.effort))

    def _no_fit(self, talk: Conversation, tools: list[Tool], memory: Sequence[Fact] = ()) -> None:
        noun = self.maker.other_noun(tools)
        prep = self.rng.choice(PREPOSITIONS)
        name = self.maker.subject()
        if not self.held_out and memory and self.rng.random() < 0.3:  # half of a note is no note
            known = self.rng.choice(memory)
            if known.noun not in {t.noun for t in tools} and self.rng.random() < 0.5:
                noun = known.noun
            elif all((f.noun, f.name) != (noun, known.name) for f in memory):
                name = known.name
        wish = f"the {noun} {prep} {name}"
        asks = NO_FIT_ASKS if self.held_out else ASKS
        ask = self.rng.choice(asks)
        if "{prep}" not in ask:
            wish = f"the {noun} of {name}"
        self._user(talk, ask.format(noun=noun, prep=prep, name=name))
        short = f"No tool for the {noun}."
        more = f"The user wants {wish}.\n{short}"
        thinking = {"low": short, "high": more, "max": more + "\nThe answer is not in the conversation either."}
        self._say(talk, f"I have no tool for the {noun}.", thinking[talk.effort])

    def tool_call(self, mode: str | None = None) -> Conversation:
        """One request with declared tools; ends with the assistant's calls, or with an answer where no tool fits."""
        talk = self._new("tool_call", mode)
        tools = self._declare(talk, self.rng.choice((1, 2, 2, 3, 3, 4)))
        self._maybe_system(talk)
        if self.rng.random() < 0.1:
            self._no_fit(talk, tools)
        else:
            self._call(talk, self.maker.ask(tools))
        return talk

    def tool_use(self, mode: str | None = None) -> Conversation:
        """A few requests with their results and answers."""
        talk = self._new("tool_use", mode)
        tools = self._declare(talk, self.rng.choice((1, 2, 3, 3, 4, 5)))
        self._maybe_system(talk)
        for _ in range(self.rng.randint(1, 3)):
            if self.rng.random() < 0.12:
                self._no_fit(talk, tools)
                continue
            ask = self.maker.ask(tools)
            self._call(talk, ask)
            self._answer(talk, ask)
        return talk

    # documents

    def _value(self) -> str:
        roll = self.rng.random()
        if roll < 0.7:
            return self.namer.name()
        if roll < 0.85:
            return str(self.rng.randint(10, 9999))
        return self.namer.code()

    def facts(self, count: int) -> list[Fact]:
        """Facts about different names; a name in ten has two, in training one in five."""
        nouns = [self.namer.noun() for _ in range(24)]
        if not self.held_out:
            nouns = list(dict.fromkeys(nouns))
        twice = 0.1 if self.held_out else 0.2
        facts: list[Fact] = []
        names: set[str] = set()
        while len(facts) < count:
            name = self.namer.name()
            if name in names:
                continue
            names.add(name)
            first, second = self.rng.sample(nouns, 2)
            facts.append(Fact(first, name, self._value()))
            if self.rng.random() < twice:
                facts.append(Fact(second, name, self._value()))
        return facts

    def document(self, facts: list[Fact], sentences: int) -> str:
        """The facts in random order among ``sentences`` sentences in all, in paragraphs."""
        rng = self.rng
        lines = [rng.choice(FACTS).format(noun=f.noun, name=f.name, value=f.value) for f in facts]
        lines += [self.namer.sentence() for _ in range(max(0, sentences - len(lines)))]
        rng.shuffle(lines)
        out: list[str] = []
        while lines:
            size = rng.randint(4, 9)
            out.append(" ".join(line[0].upper() + line[1:] for line in lines[:size]))
            del lines[:size]
        return "\n".join(out)

    def _question(self, talk: Conversation, asked: list[Fact]) -> None:
        if len(asked) == 1:
            fact = asked[0]
            pool = HELD_OUT_QUESTIONS if self.held_out else QUESTIONS
            self._user(talk, self.rng.choice(pool).format(noun=fact.noun, prep="of", name=fact.name))
            wish = f"the {fact.noun} of {fact.name}"
        else:
            wish = " and ".join(f"the {f.noun} of {f.name}" for f in asked)
            self._user(talk, f"What are {wish}?")
        found = " ".join(f.said for f in asked)
        thinking = {
            "low": f"Look for {wish}.",
            "high": f"The user wants {wish}.\nThe text says: {found}",
            "max": f"The user wants {wish}.\nNo tool is needed.\nThe text says: {found}\nThat answers it.",
        }
        self._say(talk, found, thinking[talk.effort])

    def lookup(
        self, sentences: int, questions: int, mode: str | None = None, density: float | None = None
    ) -> Conversation:
        """A document in the system message or the first user message, then questions about it, each a turn."""
        talk = self._new("lookup", mode)
        rng = self.rng
        if density is None:
            density = rng.uniform(0.3, 0.8)
        facts = self.facts(max(questions, int(sentences * density)))
        text = rng.choice(OPENINGS) + self.document(facts, sentences)
        if rng.random() < 0.15:
            self._declare(talk, rng.randint(1, 2))
        if rng.random() < 0.6:
            talk.messages.append({"role": "system", "content": text})
        else:
            self._user(talk, text)
            self._say(talk, "Ready.", "A text to keep.")
        left = rng.sample(facts, min(questions, len(facts)))
        while left:
            count = 2 if len(left) > 1 and rng.random() < 0.1 else 1
            self._question(talk, left[:count])
            del left[:count]
        return talk

    def long_text(self, encode: Callable[[str], list[int]], tokens: int) -> tuple[str, list[Fact]]:
        """A document of at least ``tokens`` tokens as ``encode`` counts them (some sentences more at most)."""
        facts = self.facts(tokens // 26)
        text = self.document(facts, len(facts) * 2)
        size = len(encode(text))
        while size < tokens:
            line = " " + self.namer.sentence()
            text += line
            size += len(encode(line))
        return text, facts

    def ask_about(self, text: str, facts: list[Fact], mode: str | None = None) -> Conversation:
        """``text`` in the system message, then one question a turn about each of ``facts``."""
        talk = self._new("lookup", mode)
        talk.messages.append({"role": "system", "content": text})
        for fact in facts:
            self._question(talk, [fact])
        return talk

    # conversations of several kinds of turn

    def _greet(self, talk: Conversation) -> None:
        said, answer = self.rng.choice(GREETINGS)
        self._user(talk, said)
        thinking = {
            "low": "Small talk.",
            "high": "Small talk. No tool is needed.",
            "max": "Small talk. No tool is needed.\nAnswer in one line.",
        }
        self._say(talk, answer, thinking[talk.effort])

    def _remember(self, talk: Conversation, memory: list[Fact]) -> None:
        fact = Fact(self.namer.noun(), self.namer.name(), self._value())
        memory.append(fact)
        self._user(talk, self.rng.choice(("Remember: {}", "Please note: {}", "Note this. {}")).format(fact.said))
        thinking = {
            "low": "Keep it.",
            "high": "A fact to keep. No tool is needed.",
            "max": f"A fact to keep. No tool is needed.\n{fact.said}",
        }
        self._say(talk, f"Noted. {fact.said}", thinking[talk.effort])

    def conversation(self, mode: str | None = None) -> Conversation:
        """Three to six turns of mixed kinds with two to four tools declared."""
        talk = self._new("conversation", mode)
        rng = self.rng
        tools = self._declare(talk, rng.randint(2, 4))
        self._maybe_system(talk)
        memory: list[Fact] = []
        if rng.random() < 0.35:
            memory = self.facts(rng.randint(4, 10))
            if not self.held_out and rng.random() < 0.4:  # the noun alone does not tell a note from a call
                memory.append(Fact(rng.choice(tools).noun, self.namer.name(), self._value()))
            self._user(talk, rng.choice(OPENINGS) + self.document(memory, len(memory) + rng.randint(0, 8)))
            self._say(talk, "Ready.", "A text to keep.")
        calls, unfit, small_talk, notes = HELD_OUT_TURNS if self.held_out else TURNS
        for _ in range(rng.randint(3, 6)):
            roll = rng.random()
            if roll < calls:
                ask = self.maker.ask(tools)
                self._call(talk, ask)
                self._answer(talk, ask)
            elif roll < unfit:
                self._no_fit(talk, tools, memory)
            elif roll < small_talk:
                self._greet(talk)
            elif roll < notes and memory:
                self._question(talk, [rng.choice(memory)])
            else:
                self._remember(talk, memory)
        return talk

    def chat(self, mode: str | None = None) -> Conversation:
        """Small talk and notes without any tools."""
        talk = self._new("chat", mode)
        memory: list[Fact] = []
        self._maybe_system(talk)
        for _ in range(self.rng.randint(1, 4)):
            roll = self.rng.random()
            if roll < 0.4:
                self._greet(talk)
            elif roll < 0.7 and memory:
                self._question(talk, [self.rng.choice(memory)])
            else:
                self._remember(talk, memory)
        return talk
