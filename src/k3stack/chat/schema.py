"""JSON schemas as constraints: which parts they have, what llguidance can hold an output to, and where it cannot.

A schema that cannot be enforced in full is refused with the path of the part at fault. Nothing is loosened silently,
with one exception: an unknown ``format`` says nothing about validity (it is an annotation) and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from k3stack.chat.formats import REGEXES
from k3stack.chat.guidance import problem_of
from k3stack.errors import UserError

Schema = Mapping[str, Any] | bool

MAX_DEPTH = 64
"""Nesting of a schema that is accepted."""

MAX_OPTIONAL = 400
"""Optional properties of one object. Each is a way for the grammar to go on after any one before it, and llguidance
ends an output that has 2,000 such items (four for a property)."""

FORMATS = frozenset(REGEXES)
"""Formats that are enforced (inside JSON by llguidance's own expressions)."""

SPACES = r"[ \n\r\t]{1,40}"
"""Blanks between the parts of a JSON answer: enough to indent, too few to run away."""

_ONE = (
    "items additionalProperties not if then else contains propertyNames unevaluatedProperties unevaluatedItems".split()
)
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    "$schema $id $comment title description default examples deprecated readOnly writeOnly nullable format".split()
) | frozenset(DEFINITIONS)
"""Keywords that do not decide validity."""


def children(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The direct parts of a schema that are schemas themselves, with their paths below it."""
    if isinstance(schema, bool):
        return
    for key in _ONE:
        part = schema.get(key)
        if isinstance(part, (Mapping, bool)):
            yield f".{key}", part
        elif isinstance(part, list):
            yield from ((f".{key}[{i}]", p) for i, p in enumerate(part))
    for key in _MANY:
        part = schema.get(key)
        if isinstance(part, list):
            yield from ((f".{key}[{i}]", p) for i, p in enumerate(part))
    for key in _NAMED:
        part = schema.get(key)
        if isinstance(part, Mapping):
            yield from ((f".{key}.{name}", p) for name, p in part.items())


def check(schema: Any, path: str) -> None:
    """UserError with the path of the smallest part of ``schema`` that cannot be enforced."""
    _check_shape(schema, path, MAX_DEPTH)
    problem = compile_error(schema)
    if problem is None:
        return
    where, problem = _locate(schema, schema, path, problem)
    raise UserError(f"{where} cannot be enforced: {problem}", param=where)


def _check_shape(schema: Any, path: str, room: int) -> None:
    if not isinstance(schema, (Mapping, bool)):
        raise UserError(f"{path} must be a JSON schema: an object or a boolean", param=path)
    if room == 0:
        raise UserError(f"{path}: schemas may be nested {MAX_DEPTH} deep at most", param=path)
    if isinstance(schema, Mapping) and isinstance(named := schema.get("properties"), Mapping):
        required = schema.get("required")
        optional = len(named) - (len(set(map(str, required)) & set(named)) if isinstance(required, list) else 0)
        if optional > MAX_OPTIONAL:
            raise UserError(
                f"{path} has {optional:,} optional properties; {MAX_OPTIONAL} at most can be enforced in one object: "
                "name the others in required, or put them into objects of their own",
                param=path,
            )
    for below, part in children(schema):
        _check_shape(part, path + below, room - 1)


def _locate(schema: Schema, root: Schema, path: str, problem: str) -> tuple[str, str]:
    for below, part in children(schema):
        found = compile_error(with_definitions(part, root))
        if found is not None:
            return _locate(part, root, path + below, found)
    return path, problem


def compile_error(schema: Schema) -> str | None:
    """What llguidance says against ``schema``; None if it can be enforced."""
    said = problem_of(f"start: {json_rule(schema)}")
    return said.split("failed to compile JSON schema:")[-1].split("\n")[0].strip() if said else None


def json_rule(schema: Schema, *, spaced: bool = True) -> str:
    """``schema`` as a part of a Lark grammar.

    ``spaced``: the blanks of a free JSON text; otherwise exactly ``", "`` and ``": "``, as in a call's arguments.
    """
    style: dict[str, Any]
    if spaced:
        style = {"whitespace_pattern": SPACES}
    else:
        style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return "%json " + json.dumps({**without_unknown_formats(schema), "x-guidance": style}, ensure_ascii=False)


def without_unknown_formats(schema: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, part in schema.items():
        if key == "format" and part not in FORMATS:
            continue
        if key in _NAMED and isinstance(part, Mapping):
            out[key] = {name: _clean(p) for name, p in part.items()}
        elif key in _MANY or key in _ONE:
            out[key] = [_clean(p) for p in part] if isinstance(part, list) else _clean(part)
        else:
            out[key] = part
    return out


def _clean(part: Any) -> Any:
    return without_unknown_formats(part) if isinstance(part, Mapping) else part


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """``schema`` with the definitions of the document that it is a part of, so that its references resolve."""
    if isinstance(schema, bool) or isinstance(root, bool):
        return schema
    return {**{key: root[key] for key in DEFINITIONS if key in root}, **schema}


def resolve(schema: Schema, root: Schema, path: str) -> Schema:
    """Follow local references of ``schema`` itself (not of its parts)."""
    for _ in range(MAX_DEPTH):
        if isinstance(schema, bool) or "$ref" not in schema:
            return schema
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UserError(f"{path}.$ref {reference!r} does not point into this schema", param=f"{path}.$ref")
        schema = _merged(_follow(reference, root, path), {k: v for k, v in schema.items() if k != "$ref"}, path)
    raise UserError(f"{path}.$ref leads in a circle", param=f"{path}.$ref")


def _merged(target: Schema, beside: Mapping[str, Any], path: str) -> Schema:
    """Both at once: a reference's target and the keywords beside the reference."""
    if isinstance(target, bool):
        return {**beside, "not": {}} if not target else beside
    for key, part in beside.items():
        if key in target and target[key] != part and key not in ANNOTATIONS:
            raise UserError(f"{path}.{key} and the {key} that its $ref leads to cannot be combined", param=path)
    return {**target, **beside}


def _follow(reference: str, root: Schema, path: str) -> Schema:
    target: Any = root
    for step in reference.lstrip("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and key in target:
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and len(key) < 10 and int(key) < len(target):
            target = target[int(key)]
        else:
            raise UserError(f"{path}.$ref {reference!r} points to nothing", param=f"{path}.$ref")
    if not isinstance(target, (Mapping, bool)):
        raise UserError(f"{path}.$ref {reference!r} points to no schema", param=f"{path}.$ref")
    return target
