"""Tool calls and tool results of earlier turns: which result belongs to which call, and in which order they appear.

A result is bound to its call by ``tool_call_id`` within the assistant turn before it, never across turns: clients
reuse ids. The id itself is not part of the prompt, only the call's name and the result's place are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3stack.chat.jsontext import Json, loads
from k3stack.errors import UserError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an assistant turn: ``arguments`` by key, or ``raw`` text where what was sent is not JSON."""

    name: str
    id: str | None
    arguments: Mapping[str, Json]
    raw: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A tool message with the name of its tool and its 1-based place after the assistant turn."""

    message: Message
    where: str
    tool: str
    index: int


def read_calls(message: Message, where: str) -> list[Call]:
    """The calls of an assistant message. UserError names the field that is wrong."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise UserError(f"{where}.tool_calls must be an array", param=f"{where}.tool_calls")
    return [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _read_call(call: object, where: str) -> Call:
    if not isinstance(call, Mapping):
        raise UserError(f"{where} must be an object", param=where)
    if call.get("type", "function") != "function":
        raise UserError(f"{where}.type is {call['type']!r}; only function calls are supported", param=f"{where}.type")
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise UserError(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise UserError(f"{where}.id must be a string", param=f"{where}.id")
    arguments, raw = _read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return Call(name, call_id, arguments, raw)


def _read_arguments(value: object, where: str) -> tuple[Mapping[str, Json], str | None]:
    if isinstance(value, Mapping):
        return value, None
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}, None
    if not isinstance(value, str):
        raise UserError(f"{where} must be a JSON object in text form", param=where)
    try:
        parsed = loads(value)
    except ValueError:
        return {}, value
    if not isinstance(parsed, dict):
        raise UserError(f"{where} is JSON but not an object", param=where)
    return parsed, None


class TurnResults:
    """Names and numbers the tool messages that follow one assistant turn."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self._calls = calls
        self._seen = 0

    def read(self, run: Sequence[tuple[Message, str]]) -> list[Result]:
        """Order one run of consecutive tool messages (with their paths) and number them on from the last run.

        When every id of the run is known the results follow the order of the calls, else the client's order.
        """
        places = self._places([message for message, _ in run])
        order = list(range(len(run)))
        known = [place for place in places if place is not None]
        if len(known) == len(run):
            order.sort(key=lambda i: known[i])
        results = []
        for i in order:
            self._seen += 1
            message, where = run[i]
            results.append(Result(message, where, self._name(message, where, places[i]), self._seen))
        return results

    def _places(self, run: Sequence[Message]) -> list[int | None]:
        """0-based call of each result by id; a repeated id takes the repeated calls in turn."""
        by_id: dict[str, list[int]] = {}
        for place, call in enumerate(self._calls):
            if call.id:
                by_id.setdefault(call.id, []).append(place)
        places: list[int | None] = []
        for message in run:
            wanted = message.get("tool_call_id")
            queue = by_id.get(wanted) if isinstance(wanted, str) else None
            if queue:
                places.append(queue.pop(0) if len(queue) > 1 else queue[0])
            else:
                places.append(self._by_position(wanted))
        return places

    def _by_position(self, wanted: object) -> int | None:
        """``name:i`` where call i (from 0) has that name."""
        if not isinstance(wanted, str):
            return None
        name, colon, digits = wanted.rpartition(":")
        if not colon or not digits.isdecimal() or len(digits) > 6 or int(digits) >= len(self._calls):
            return None
        place = int(digits)
        return place if self._calls[place].name == name else None

    def _name(self, message: Message, where: str, place: int | None) -> str:
        if place is not None:
            return self._calls[place].name
        for key in ("tool", "name"):
            given = message.get(key)
            if isinstance(given, str) and given:
                return given
        if self._seen <= len(self._calls):
            return self._calls[self._seen - 1].name
        raise UserError(
            f"{where}.tool_call_id is {message.get('tool_call_id')!r}, which belongs to no call of the assistant turn "
            f"before it ({len(self._calls)} calls); send the call as well, or the tool's name in {where}.name",
            param=f"{where}.tool_call_id",
        )
