"""Reads the option table from a command line, and prints it as help and as documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3stack.config.files import read_text
from k3stack.config.flag_names import ALWAYS, OTHER_SPELLING, REFUSED, SAME_AS
from k3stack.config.options import EngineOptions, Option, ServeOptions, did_you_mean, rows
from k3stack.errors import UserError


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What a `k3 serve` command line asks for."""

    engine: EngineOptions
    serve: ServeOptions
    notes: tuple[str, ...]
    """One line for each flag that stands for something else, to be said at boot."""


def parse_serve(argv: Sequence[str], env: Mapping[str, str] | None = None) -> ServeCommand:
    """Flags (without the program and the verb) and the environment -> options. Raises UserError with the flag."""
    engine_rows, serve_rows = rows(EngineOptions), rows(ServeOptions)
    known = {flag: opt for opt in (*engine_rows, *serve_rows) for flag in (opt.flag, *opt.row.short)}
    values, notes = _read(argv, known)
    for opt in (*engine_rows, *serve_rows):
        if opt.row.env and opt.name not in values and env and env.get(opt.row.env):
            values[opt.name] = tuple(part for part in env[opt.row.env].replace(",", " ").split() if part)
    if "model_path" not in values:
        raise UserError("--model-path is missing: a checkpoint's folder, or nano", param="--model-path")
    if "api_key_file" in values:
        values["api_key"] = (*values.get("api_key", ()), *_keys(values["api_key_file"]))
    engine = EngineOptions(**{o.name: values[o.name] for o in engine_rows if o.name in values})
    serve = ServeOptions(**{o.name: values[o.name] for o in serve_rows if o.name in values})
    return ServeCommand(engine, serve, tuple(notes))


def _read(argv: Sequence[str], known: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    notes: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise UserError(f"{word!r} stands alone; options are written --name value", param=word)
        spelled, inline = _split(word)
        flag = OTHER_SPELLING.get(spelled, spelled)
        if flag in known:
            opt = known[flag]
            if flag != spelled:
                notes.append(f"{spelled} stands for {flag}")
            _store(values, opt, spelled, _value_text(opt, spelled, inline, words))
        else:
            notes.append(_always(spelled, inline, words, known))
    return values, notes


def _split(word: str) -> tuple[str, str | None]:
    """`--flag=value` -> its parts; underscores in the name are read as dashes."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), value if equals else None


def _value_text(opt: Option, flag: str, inline: str | None, words: list[str]) -> str | None:
    if opt.kind is bool:
        if inline not in (None, "true", "false"):
            raise UserError(f"{flag} takes no value (found {inline!r})", param=flag)
        return inline or "true"
    if inline is not None:
        return inline
    if not words or words[0].startswith("--"):
        raise UserError(f"{flag} needs a value{': ' + opt.allowed if opt.allowed else ''}", param=flag)
    return words.pop(0)


def _store(values: dict[str, Any], opt: Option, flag: str, text: str | None) -> None:
    value = convert(opt, flag, text or "")
    if opt.repeated:
        values[opt.name] = (*values.get(opt.name, ()), value)
    elif opt.name in values and values[opt.name] != value:
        raise UserError(f"{flag} is given twice, as {values[opt.name]!r} and {value!r}", param=flag)
    else:
        values[opt.name] = value


def convert(opt: Option, flag: str, text: str) -> Any:
    """The text of a flag's value as the option's type (bounds are checked when the options are made)."""
    try:
        if opt.kind is int:
            return int(text)
        if opt.kind is float:
            return float(text)
    except ValueError:
        kind = "a whole number" if opt.kind is int else "a number"
        raise UserError(f"{flag} is {text!r}; it must be {kind}", param=flag) from None
    return text == "true" if opt.kind is bool else text


def _always(spelled: str, inline: str | None, words: list[str], known: Mapping[str, Option]) -> str:
    """A flag outside the table: the note for boot, or UserError."""
    flag = SAME_AS.get(spelled, spelled)
    if flag in REFUSED:
        raise UserError(f"{spelled} is not taken: {REFUSED[flag]}", param=spelled)
    entry = ALWAYS.get(flag)
    if entry is None:
        every = [*known, *OTHER_SPELLING, *ALWAYS, *SAME_AS, *REFUSED]
        raise UserError(
            f"there is no option {spelled}{did_you_mean(spelled, every)} (k3 serve --help lists them)", param=spelled
        )
    if not entry.values:
        if inline not in (None, "true"):
            raise UserError(f"{spelled} takes no value (found {inline!r})", param=spelled)
        return f"{spelled}: {entry.note}"
    value = inline if inline is not None else (words.pop(0) if words else "")
    if value not in entry.values:
        raise UserError(f"{spelled} {value} is not taken: {entry.otherwise}", param=spelled)
    return f"{spelled} {value}: {entry.note}"


def _keys(path: str) -> tuple[str, ...]:
    lines = read_text(path, param="--api-key-file", flag="--api-key-file ").split()
    if not lines:
        raise UserError(f"--api-key-file {path} holds no key", param="--api-key-file")
    return tuple(lines)


def help_text() -> str:
    """The table as terminal help."""
    lines: list[str] = []
    group = ""
    for opt in (*rows(EngineOptions), *rows(ServeOptions)):
        if opt.row.group != group:
            group = opt.row.group
            lines += ["", f"{group}:"]
        value = "" if opt.kind is bool else " " + ("|".join(opt.row.choices) or opt.kind.__name__.upper())
        doc = opt.row.doc.replace("`", "")
        shown = default_text(opt)
        lines += [f"  {opt.flag}{value}", f"      {doc}{f' [{shown}]' if shown else ''}"]
    return "\n".join(lines[1:])


def default_text(opt: Option) -> str:
    """The default as help and documentation show it; empty where there is none or the description tells it."""
    if opt.required:
        return "required"
    return "" if opt.default is None or opt.default is False or opt.default == () else str(opt.default)


def markdown_table() -> str:
    """The table as docs/serve.md shows it."""
    lines = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    for opt in (*rows(EngineOptions), *rows(ServeOptions)):
        values = opt.allowed or {bool: "–", int: "whole number", float: "number", str: "text"}[opt.kind]
        lines.append(f"| `{opt.flag}` | {values} | {default_text(opt)} | {opt.row.doc} |")
    return "\n".join(lines)


def markdown_aliases() -> str:
    """Other spellings and settings that are always on, as docs/serve.md shows them."""
    lines = ["| flag elsewhere | here |", "|---|---|"]
    lines += [f"| `{a}` | `{b}` |" for a, b in OTHER_SPELLING.items()]
    for flag, entry in ALWAYS.items():
        also = [a for a, b in SAME_AS.items() if b == flag]
        names = ", ".join(f"`{n}`" for n in (flag, *also))
        lines.append(f"| {names} {' or '.join(entry.values)} | {entry.note} |")
    return "\n".join(lines)
