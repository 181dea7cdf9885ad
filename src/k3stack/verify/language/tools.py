"""Declared tools, the requests that call them, and what the assistant says: all answers follow from the prompt."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from k3stack.verify.language import words
from k3stack.verify.language.names import Namer
from k3stack.verify.language.variety import Coiner, label

Value = str | int | float | bool

# Requests about one noun. Held-out questions use only the second group. In training the same wordings ask for calls,
# noted facts and what no tool fits, so that the wording never tells which of them is right.
ASKS = (
    "What is the {noun} {prep} {name}?",
    "Tell me the {noun} {prep} {name}.",
    "I need the {noun} {prep} {name}.",
    "Please find the {noun} {prep} {name}.",
    "Can you check the {noun} {prep} {name}?",
    "Do you know the {noun} {prep} {name}?",
    "The {noun} {prep} {name}, please.",
    "Hello, what is the {noun} {prep} {name}?",
    "What's the {noun} {prep} {name}?",
    "How is the {noun} {prep} {name}?",
    "What is the {noun} {prep} {name} today?",
    "Give me the {noun} {prep} {name} now.",
    "Quick question: what is the {noun} {prep} {name}?",
    "Look up the {noun} {prep} {name} for me.",
    "What is the {noun} like {prep} {name}?",
    "What is the {noun} {prep} {name} right now?",
    "Which {noun} is there {prep} {name}?",
    "I want the {noun} {prep} {name}.",
    "I want to hear the {noun} {prep} {name}.",
    "I would like to see the {noun} {prep} {name}.",
    "I wonder what the {noun} {prep} {name} is.",
    "Could somebody find the {noun} {prep} {name}?",
    "Would you check the {noun} {prep} {name}, please?",
    "Let me know the {noun} {prep} {name}.",
    "Show me the {noun} {prep} {name}.",
    "Please read me the {noun} {prep} {name}.",
    "Next: the {noun} {prep} {name}.",
    "Now the {noun} {prep} {name}.",
    "And the {noun} {prep} {name}?",
    "Find out the {noun} {prep} {name}, please.",
    "Any news of the {noun} {prep} {name}?",
    "May I have the {noun} {prep} {name}?",
    "We need the {noun} {prep} {name} today.",
    "It is about the {noun} {prep} {name}.",
    "Hi, can you get the {noun} {prep} {name}?",
    "Before we go on, what is the {noun} {prep} {name}?",
    "My question: how is the {noun} {prep} {name} now?",
    "Look up the {noun} {prep} {name}.",
    "Look up the {noun} {prep} {name}, please.",
    "Please get the {noun} {prep} {name}.",
    "Please give the {noun} {prep} {name}.",
    "Now tell me the {noun} {prep} {name}.",
    "I must have the {noun} {prep} {name}.",
    "What was the {noun} {prep} {name}?",
    "Which {noun} does {name} have?",
    "{name}: which {noun}?",
    "May I have the {noun} that {name} has?",
)
HELD_OUT_ASKS = (
    "Could you tell me the {noun} {prep} {name}?",
    "I want to know the {noun} {prep} {name}.",
    "Please check the {noun} {prep} {name} for me.",
    "Hello, I need the {noun} {prep} {name}, please.",
    "Quick question: do you know the {noun} {prep} {name}?",
)
PREPOSITIONS = ("of", "in", "for", "at", "near")

ORDERS = (
    "{act} the {noun} with {list}.",
    "Please {act} a {noun}: {list}.",
    "Can you {act} the {noun} with {list}?",
    "I want to {act} a {noun}, {list}.",
    "{act} one {noun}. Use {list}.",
    "Hello, {act} the {noun} now: {list}.",
    "We must {act} the {noun}. {list}.",
    "Could we {act} the {noun}? {list}.",
    "Would you {act} a {noun} with {list}?",
    "I need to {act} the {noun}: {list}.",
    "I would like to {act} one {noun} with {list}.",
    "Let us {act} a {noun}. {list}.",
    "Next, {act} a {noun} using {list}.",
    "Now {act} the {noun} again, {list}.",
    "{act} a {noun}: {list}.",
    "{act} the {noun}, please. Take {list}.",
    "Hi, please {act} a {noun} with {list}.",
    "Is it possible to {act} the {noun} with {list}?",
    "You should {act} one {noun}. {list}.",
    "Time to {act} the {noun}: {list}.",
)
HELD_OUT_ORDERS = (
    "Could you {act} a {noun} with {list}?",
    "Please {act} one {noun}. Use {list}.",
    "Hello, can you {act} the {noun}: {list}.",
)


@dataclass
class Param:
    name: str
    kind: str
    """'string', 'integer', 'number', 'boolean' or 'enum'."""
    choices: tuple[str, ...] = ()
    required: bool = True


@dataclass
class Tool:
    """One declared function. ``act`` tells orders (several listed arguments) from look-ups (one noun, one name)."""

    name: str
    verb: str
    noun: str
    act: bool
    params: list[Param]
    description: str | None
    nouns_shown: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    def declaration(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        for param in self.params:
            entry: dict[str, Any] = {"type": "string" if param.kind == "enum" else param.kind}
            if param.choices:
                entry["enum"] = list(param.choices)
            if param.name in self.extra:
                entry["description"] = self.extra[param.name]
            properties[param.name] = entry
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        required = [p.name for p in self.params if p.required]
        if required:
            schema["required"] = required
        function: dict[str, Any] = {"name": self.name, "parameters": schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass
class Call:
    tool: Tool
    arguments: dict[str, Value]
    subject: str
    """How an answer begins: 'The depth of Lomira', or 'Done'."""

    def message_form(self, number: int) -> dict[str, Any]:
        return {
            "id": f"{self.tool.name}:{number}",
            "type": "function",
            "function": {"name": self.tool.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)},
        }


@dataclass
class Ask:
    """A user's request, the calls it needs, and the thinking at each effort."""

    text: str
    calls: list[Call]
    wish: str


class ToolMaker:
    """Tools and requests. Those of training are built from coined words, those of held-out questions from lists."""

    def __init__(self, rng: random.Random, namer: Namer) -> None:
        self.rng = rng
        self.namer = namer
        self.coiner = None if namer.held_out else Coiner(namer)

    def toolbox(self, count: int) -> list[Tool]:
        """``count`` tools with different names; some share a verb. In held-out questions none shares a noun."""
        if self.coiner is not None:
            return self._alike(self.coiner, count)
        tools: list[Tool] = []
        nouns: set[str] = set()
        while len(tools) < count:
            noun = self.namer.noun()
            if noun in nouns:
                continue
            nouns.add(noun)
            tools.append(self._order(noun) if self.rng.random() < 0.4 else self._lookup(noun))
        return tools

    def _alike(self, coiner: Coiner, count: int) -> list[Tool]:
        """Tools of which some are easily taken for one another: a noun or a verb is shared, or nearly so."""
        rng = self.rng
        tools: list[Tool] = []
        near = rng.choice((0.0, 0.3, 0.7))
        while len(tools) < count:
            noun, verb, act = coiner.noun(), "", rng.random() < 0.4
            if tools and rng.random() < near:
                other = rng.choice(tools)
                roll = rng.random()
                if roll < 0.4:
                    noun, act = other.noun, act or not other.act  # two orders differ by the verb that is asked for
                elif roll < 0.7:
                    noun = coiner.noun_like(other.noun)
                if roll > 0.6:
                    verb, act = other.verb, other.act
            made = self._order(noun, verb) if act else self._lookup(noun, verb)
            if not any(
                t.name == made.name
                or (t.noun, t.act, t.verb if act else "") == (made.noun, act, made.verb if act else "")
                for t in tools
            ):
                tools.append(made)
        return tools

    def other_noun(self, tools: list[Tool]) -> str:
        """A noun that no tool is about; in training sometimes one that resembles a tool's."""
        used = {t.noun for t in tools}
        while True:
            if self.coiner is None:
                noun = self.namer.noun()
            elif self.rng.random() < 0.4:
                noun = self.coiner.noun_like(self.rng.choice(tools).noun)
            else:
                noun = self.coiner.noun()
            if noun not in used:
                return noun

    def _verb(self, listed: tuple[str, ...], *, several: bool) -> str:
        return self.rng.choice(listed) if self.coiner is None else self.coiner.verb(listed, several=several)

    def _key(self) -> str:
        return self.namer.param() if self.coiner is None else self.coiner.key()

    def _text(self) -> str:
        return self.namer.text_value() if self.coiner is None else self.coiner.text()

    def subject(self) -> str:
        """What a look-up is about."""
        return self.namer.name() if self.coiner is None else self.coiner.subject()

    def _name(self, verb: str, noun: str) -> str:
        if self.coiner is not None:
            return self.coiner.tool(verb, noun)
        roll = self.rng.random()
        if roll < 0.75:
            return f"{verb}_{noun}"
        if roll < 0.85:
            return verb.replace("_", "") + noun.capitalize()
        if roll < 0.93:
            return noun
        return f"{noun}_{verb}"

    def _lookup(self, noun: str, verb: str = "") -> Tool:
        rng = self.rng
        verb = verb or self._verb(words.VERBS, several=True)
        params = [Param(self._key(), "string")]
        if rng.random() < 0.4:
            other = self._key()
            if other != params[0].name:
                choices = self._choices(rng.randint(2, 3))
                params.append(Param(other, "enum", choices, required=False))
        return self._finish(Tool(self._name(verb, noun), verb, noun, False, params, None))

    def _choices(self, count: int) -> tuple[str, ...]:
        if self.coiner is None or self.rng.random() < 0.5:
            return tuple(self.rng.sample(words.ENUMS, count))
        return tuple(dict.fromkeys(self.coiner.word(words.ENUMS) for _ in range(count)))

    def _order(self, noun: str, verb: str = "") -> Tool:
        rng = self.rng
        verb = verb or self._verb(words.ACTS, several=False)
        params: list[Param] = []
        for _ in range(rng.choice((1, 2, 2, 3, 3, 4) if self.coiner is None else (1, 2, 2, 3, 3, 4, 5))):
            if self.coiner is not None and params and rng.random() < 0.25:
                name = self.coiner.key_like(params[-1].name)
            else:
                name = self._key()
            if any(label(p.name) == label(name) for p in params):
                continue
            kind = rng.choice(("string", "string", "string", "integer", "integer", "number", "boolean", "enum"))
            choices = self._choices(rng.randint(2, 4)) if kind == "enum" else ()
            params.append(Param(name, kind, choices, required=not params or rng.random() < 0.7))
        return self._finish(Tool(self._name(verb, noun), verb, noun, True, params, None))

    def _finish(self, tool: Tool) -> Tool:
        rng = self.rng
        verb = tool.verb.replace("_", " ")
        if rng.random() < 0.85:
            tool.description = rng.choice(
                (
                    f"{verb.capitalize()} the {tool.noun}.",
                    f"{verb.capitalize()} the {tool.noun} of a {tool.params[0].name}.",
                    f"{verb.capitalize()} a {tool.noun}",
                    f"Use this to {verb} the {tool.noun}.",
                    f"{verb.capitalize()} the current {tool.noun} for a {tool.params[0].name}.",
                )
            )
            if rng.random() < 0.12:
                tool.description += ("" if tool.description.endswith(".") else ".") + " " + self.namer.sentence()
        for param in tool.params:
            if rng.random() < 0.3:
                tool.extra[param.name] = rng.choice(
                    (
                        f"The {param.name}.",
                        f"{param.name.capitalize()} of the {tool.noun}",
                        f"Which {param.name} to use.",
                    )
                )
        return tool

    def value(self, param: Param) -> Value:
        rng = self.rng
        if param.kind == "integer":
            return self.namer.number()
        if param.kind == "number":
            return self.namer.decimal()
        if param.kind == "boolean":
            return rng.random() < 0.5
        if param.kind == "enum":
            return rng.choice(param.choices)
        return self._text()

    def lookup_ask(self, tools: list[Tool]) -> Ask:
        """One to four names asked of one tool, or two tools in one request: several calls are made at once."""
        rng = self.rng
        ask = rng.choice(HELD_OUT_ASKS if self.namer.held_out else ASKS)
        prep = rng.choice(PREPOSITIONS) if "{prep}" in ask else "of"
        roll = rng.random()
        if roll < (0.3 if self.coiner is None else 0.4) and len(tools) > 1 and "{prep}" in ask:
            first, second = rng.sample(tools, 2)
            one, two = self.subject(), self.subject()
            other = rng.choice(PREPOSITIONS)
            text = ask.format(noun=first.noun, prep=prep, name=f"{one} and the {second.noun} {other} {two}")
            calls = [self._simple(first, prep, one), self._simple(second, other, two)]
            return Ask(text, calls, f"the {first.noun} {prep} {one} and the {second.noun} {other} {two}")
        tool = rng.choice(tools)
        names = [self.subject() for _ in range(rng.choice((1, 1, 1, 1, 2, 3)))]
        joined = _join(names)
        calls = [self._simple(tool, prep, name) for name in names]
        wish = f"the {tool.noun} {prep} {joined}"
        enum = next((p for p in tool.params if p.kind == "enum"), None)
        if enum is not None and len(names) == 1 and rng.random() < 0.6:
            choice = rng.choice(enum.choices)
            calls[0].arguments[enum.name] = choice
            joined = f"{joined} in {choice}"
        return Ask(ask.format(noun=tool.noun, prep=prep, name=joined), calls, wish)

    def _simple(self, tool: Tool, prep: str, name: str) -> Call:
        return Call(tool, {tool.params[0].name: name}, f"The {tool.noun} {prep} {name}")

    def order_ask(self, tool: Tool) -> Ask:
        rng = self.rng
        order = rng.choice(HELD_OUT_ORDERS if self.namer.held_out else ORDERS)
        chosen = [p for p in tool.params if p.required or rng.random() < 0.5]
        rng.shuffle(chosen)
        arguments = {p.name: self.value(p) for p in chosen}
        style = rng.randrange(4)
        shown = []
        for key, value in arguments.items():
            text = json.dumps(value) if not isinstance(value, str) else value
            said = label(key) if style != 1 else key
            shown.append((f"{said} {text}", f"{said} = {text}", f"{said}: {text}", f"{text} as the {said}")[style])
        glue = "; " if style in (1, 2) else ", "
        listed = glue.join(shown) if style in (1, 2) else _join(shown)
        act = tool.verb
        text = order.format(act=act, noun=tool.noun, list=listed)
        text = text[0].upper() + text[1:]
        return Ask(text, [Call(tool, arguments, "Done")], f"to {act} the {tool.noun}")

    def ask(self, tools: list[Tool]) -> Ask:
        lookups = [t for t in tools if not t.act]
        orders = [t for t in tools if t.act]
        if orders and (not lookups or self.rng.random() < 0.45):
            return self.order_ask(self.rng.choice(orders))
        return self.lookup_ask(lookups)

    def result(self, *, act: bool) -> tuple[str, str]:
        """What a tool returns, and how an answer words it after the subject."""
        rng, namer = self.rng, self.namer
        roll = rng.random()
        if roll < 0.3:
            scalar = str(namer.number()) if rng.random() < 0.5 else self._text()
            return scalar, f": {scalar}." if act else f" is {scalar}."
        if roll < 0.36:
            return json.dumps({"error": (reason := namer.phrase())}), f": error {reason}."
        data: dict[str, Value] = {}
        for _ in range(rng.choice((1, 2, 2, 3))):
            kind = rng.choice(("string", "string", "integer", "number", "boolean"))
            data[self._key()] = self.value(Param("", kind))
        said = ", ".join(f"{k} {v if isinstance(v, str) else json.dumps(v)}" for k, v in data.items())
        return json.dumps(data, ensure_ascii=False), f": {said}."


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def call_thinking(ask: Ask, effort: str) -> str:
    """The assistant's thinking before calls, by effort: longer efforts say more, never something else.

    Each line names the noun before the tool: what is looked up stands right before the place where it is needed.
    """
    if effort == "low":
        return " ".join(dict.fromkeys(f"The {c.tool.noun}: call {c.tool.name}." for c in ask.calls))
    plan = []
    for call in ask.calls:
        listed = ", ".join(f"{k} = {v if isinstance(v, str) else json.dumps(v)}" for k, v in call.arguments.items())
        plan.append(f"The {call.tool.noun}: call {call.tool.name} with {listed}.")
    if effort == "high":
        return "\n".join((f"The user wants {ask.wish}.", *plan))
    count = len(ask.calls)
    last = f"That is {count} call{'s' if count > 1 else ''}; no other argument is given."
    return "\n".join((f"The user wants {ask.wish}.", "A declared tool fits.", *plan, last))


def answer_thinking(count: int, effort: str) -> str:
    if effort == "low":
        return "Answer from the result."
    text = "The result is here." if count == 1 else f"The {count} results are here."
    if effort == "high":
        return f"{text} Answer from it."
    return f"{text} Nothing is left to call.\nAnswer from it in the same order."
