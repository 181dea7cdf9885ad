"""Arguments of a strict tool as grammar: its parameters' schema, one argument tag per property, in the schema's order.

A string argument is raw text, so a schema's string keywords (enum, const, pattern, length) become regular expressions
over the text itself; every other type is JSON and is left to llguidance. Parameters not named in ``properties`` come
only where ``additionalProperties`` is given and not false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llguidance

from k3stack.chat.formats import REGEXES
from k3stack.chat.jsontext import dumps
from k3stack.chat.schema import ANNOTATIONS, Schema, check, json_rule, resolve, with_definitions
from k3stack.chat.segments import Segment, close_tag, open_tag
from k3stack.errors import UserError

ARGUMENT_TYPES = ("string", "number", "boolean", "null", "object", "array")
_ROOT_KEYS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "anyOf", "oneOf", "$ref"}
_STRING_KEYS = ANNOTATIONS | {"type", "minLength", "maxLength", "pattern", "enum", "const"}
_TYPES = frozenset((*ARGUMENT_TYPES, "integer"))

Fixed = Callable[[Sequence[Segment]], str]
Rule = Callable[[str, str], str]


def free_typed(kind: str, fixed: Fixed) -> str:
    """The type attribute of an argument, the end of its head, and any value of that type."""
    value = "TEXT?" if kind == "string" else json_rule({"type": kind}, spaced=False)
    return f"{_typed(kind, fixed)} {value}"


def _typed(kind: str, fixed: Fixed) -> str:
    return fixed(open_tag("", (("type", kind),))[2:])


class StrictArguments:
    """Writes one tool's arguments. ``rule`` adds a named rule to the grammar; ``name`` is the prefix of ours."""

    def __init__(self, rule: Rule, fixed: Fixed, name: str) -> None:
        self._rule = rule
        self._fixed = fixed
        self._name = name
        self._count = 0
        self._root: Schema = {}

    def write(self, schema: Schema | None, path: str) -> str:
        """The expression of all arguments. UserError names the part of the schema that cannot be enforced."""
        if schema is None or schema is True:
            schema = {"type": "object", "additionalProperties": True}
        self._root = schema
        check(schema, path)
        return self._object(schema, path)

    # -- the object ----------------------------------------------------------------------------------------------

    def _object(self, schema: Schema, path: str) -> str:
        schema = resolve(schema, self._root, path)
        if isinstance(schema, bool):
            raise UserError(f"{path} of a strict tool must describe an object", param=path)
        for key in schema:
            if key not in _ROOT_KEYS:
                raise UserError(f"{path}.{key} cannot be enforced on a strict tool's parameters", param=f"{path}.{key}")
        for key in ("anyOf", "oneOf"):
            if key in schema:
                beside = {k: v for k, v in schema.items() if k != key}
                branches = [{**beside, **p} if isinstance(p, Mapping) else p for p in schema[key]]
                return "(" + " | ".join(self._object(p, f"{path}.{key}[{i}]") for i, p in enumerate(branches)) + ")"
        if schema.get("type", "object") != "object":
            raise UserError(f"{path}.type of a strict tool must be 'object'", param=f"{path}.type")
        properties: dict[str, Schema] = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        more = schema.get("additionalProperties", False)
        for key in required:
            properties.setdefault(key, True if more is False else more)
        parts: list[str] = []
        for key, part in properties.items():
            argument = self._argument(key, part, f"{path}.properties.{key}")
            parts.append(argument if key in required else f"{argument}?")
        if more is not False:
            parts.append(self._others(more, list(properties), f"{path}.additionalProperties") + "*")
        return " ".join(parts)

    def _argument(self, key: str, schema: Schema, path: str) -> str:
        head = open_tag("argument", (("key", key),))[:-1]
        return self._new(f"{self._fixed(head)} ({self._alternatives(schema, path)}) {self._close()}")

    def _others(self, schema: Schema, known: Sequence[str], path: str) -> str:
        head = open_tag("argument", (("key", "?"),))
        key = self._terminal("KEY & ~(" + " | ".join(map(_literal, known)) + ")") if known else "KEY"
        before, quote = self._fixed(head[:-3]), self._fixed(head[-2:-1])
        return self._new(f"{before} {key} {quote} ({self._alternatives(schema, path)}) {self._close()}")

    def _close(self) -> str:
        return self._fixed(close_tag("argument"))

    # -- one value -----------------------------------------------------------------------------------------------

    def _alternatives(self, schema: Schema, path: str) -> str:
        """Every type that the value may have, with what it may then be."""
        schema = resolve(schema, self._root, path)
        if schema is False:
            raise UserError(f"{path} allows no value", param=path)
        if schema is True or not set(schema) - ANNOTATIONS:
            return " | ".join(free_typed(kind, self._fixed) for kind in ARGUMENT_TYPES)
        for key in ("anyOf", "oneOf"):
            if key in schema and not set(schema) - ANNOTATIONS - {key}:
                return " | ".join(self._alternatives(p, f"{path}.{key}[{i}]") for i, p in enumerate(schema[key]))
        kinds = _kinds(schema, path)
        found = [self._value(schema, kind, path) for kind in kinds]
        return " | ".join(part for part in found if part)

    def _value(self, schema: Mapping[str, Any], kind: str, path: str) -> str:
        shown = "number" if kind == "integer" else kind
        if kind == "string":
            return f"{_typed(shown, self._fixed)} {self._string(schema, path)}"
        narrowed = {key: part for key, part in schema.items() if key not in ("enum", "const")} | {"type": kind}
        if "enum" in schema or "const" in schema:
            fitting = [v for v in _values(schema) if _fits(v, kind)]
            if not fitting:
                return ""
            narrowed = {"enum": fitting} if set(narrowed) - ANNOTATIONS == {"type"} else narrowed | {"enum": fitting}
        narrowed = dict(with_definitions(narrowed, self._root))  # type: ignore[arg-type]
        return f"{_typed(shown, self._fixed)} {json_rule(narrowed, spaced=False)}"

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        for key in schema:
            if key not in _STRING_KEYS and key in _STRING_BLOCKERS:
                raise UserError(f"{path}.{key} cannot be enforced on a string argument", param=f"{path}.{key}")
        if "enum" in schema or "const" in schema:
            texts = [v for v in _values(schema) if isinstance(v, str)]
            return self._texts(texts)
        terms = []
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least or most is not None:
            terms.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
        if (regex := REGEXES.get(str(schema.get("format")))) is not None:
            terms.append("/" + regex.replace("/", r"\/") + "/")
        if "pattern" in schema:
            terms.append(f"/{whole_pattern(schema['pattern'], f'{path}.pattern')}/")
        if not terms:
            return "TEXT?"
        return self._terminal(" & ".join(self._terminal(term) for term in terms) if len(terms) > 1 else terms[0])

    def _texts(self, texts: Sequence[str]) -> str:
        written = " | ".join(_literal(text) for text in texts if text)
        optional = "?" if "" in texts else ""
        return f"({written}){optional}" if written else ""

    def _new(self, body: str) -> str:
        self._count += 1
        return self._rule(f"{self._name}_{self._count}", body)

    def _terminal(self, body: str) -> str:
        self._count += 1
        return self._rule(f"{self._name.upper()}_{self._count}", body)


_STRING_BLOCKERS = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref"))


def _values(schema: Mapping[str, Any]) -> list[Any]:
    values = [schema["const"]] if "const" in schema else list(schema["enum"])
    return [v for v in values if "enum" not in schema or v in schema["enum"]]


def _fits(value: Any, kind: str) -> bool:
    return _kind_of(value) == kind or (kind == "number" and _kind_of(value) == "integer")


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _kinds(schema: Mapping[str, Any], path: str) -> list[str]:
    """The JSON types that a schema allows, in the order it names them."""
    given = schema.get("type")
    named = [given] if isinstance(given, str) else given
    if named is None:
        if "enum" in schema or "const" in schema:
            named = list(dict.fromkeys(map(_kind_of, _values(schema))))
        else:
            named = list(ARGUMENT_TYPES)
    for kind in named:
        if kind not in _TYPES:
            raise UserError(f"{path}.type is {kind!r}; known: {', '.join(sorted(_TYPES))}", param=f"{path}.type")
    return ["number" if k == "integer" and "number" in named else k for k in dict.fromkeys(named)]


def _literal(text: str) -> str:
    return dumps(text)


def whole_pattern(pattern: str, path: str) -> str:
    """A schema's ``pattern`` (found anywhere in the text) as a regular expression over the whole text."""
    branches = []
    for branch in _branches(pattern):
        start = branch.startswith("^")
        end = branch.endswith("$") and not _escaped(branch, len(branch) - 1)
        inner = branch[start : len(branch) - end]
        if _has_anchor(inner):
            raise UserError(f"{path}: ^ and $ can only stand at its ends", param=path)
        branches.append(f"{'' if start else '(?s:.)*'}({inner}){'' if end else '(?s:.)*'}")
    return llguidance.regex_to_lark("|".join(branches), "dw")


def _escaped(text: str, at: int) -> bool:
    before = text[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern at its top level."""
    found, begin = [], 0
    for i, depth in _outside_classes(pattern):
        if pattern[i] == "|" and depth == 0:
            found.append(pattern[begin:i])
            begin = i + 1
    return [*found, pattern[begin:]]


def _has_anchor(pattern: str) -> bool:
    return any(pattern[i] in "^$" for i, _ in _outside_classes(pattern))


def _outside_classes(pattern: str) -> list[tuple[int, int]]:
    """(position, depth of parentheses) of every character that is not escaped and not in a [class]."""
    places, depth, in_class, i = [], 0, False, 0
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            i += 2
            continue
        if in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
            if pattern[i + 1 : i + 2] == "^":
                i += 1
        else:
            places.append((i, depth))
            depth += (c == "(") - (c == ")")
        i += 1
    return places
