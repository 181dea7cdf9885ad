"""Reads an operator's command line: which server, which model, which flags, which environment. Decides nothing."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3stack.config.layout import SizingEngine
from k3stack.errors import UserError
from k3stack.planner.flags import K3, SGLANG, VLLM, FlagSpec

TABLES: Mapping[SizingEngine, Mapping[str, FlagSpec]] = {"sglang": SGLANG, "vllm": VLLM, "k3": K3}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MODULES: Mapping[str, SizingEngine] = {
    "sglang.launch_server": "sglang",
    "vllm.entrypoints.openai.api_server": "vllm",
    "k3stack": "k3",
    "k3stack.cli": "k3",
}
_NOT_NVIDIA = {"SGLANG_USE_AITER": "AMD", "SGLANG_AITER_K3_OPT": "AMD", "AITER_FLYDSL_FORCE": "AMD"}


@dataclass(frozen=True, slots=True)
class UnknownFlag:
    """A flag in no table: nothing of it is used in the plan, and the plan says so."""

    flag: str
    meant: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command as read. ``flags`` holds values by the name they have here (see planner.flags)."""

    engine: SizingEngine
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """The command without its environment, as given."""
    unknown: tuple[UnknownFlag, ...] = ()
    serve_words: tuple[str, ...] = ()
    """The flags alone, as given: what our own server would read."""

    def text(self) -> str:
        """The command as one line, environment first."""
        return shlex.join([*(f"{k}={v}" for k, v in self.env.items()), *self.words])


def read_command(words: Sequence[str]) -> Command:
    """Read ``[NAME=value ...] sglang serve|python -m sglang.launch_server|vllm serve|k3 serve flags``.

    One word that holds a whole command (quoted) is split first. Raises UserError for other programs.
    """
    if len(words) == 1 and " " in words[0]:
        words = shlex.split(words[0].replace("\\\n", " "))
    env, rest = _environment([w for w in words if w.strip() and w != "\\"])
    engine, skip = _program(rest)
    flags, unknown = read_flags(rest[skip:], engine)
    for name, vendor in _NOT_NVIDIA.items():
        if env.get(name, "0") not in ("0", "", "false"):
            raise UserError(f"{name}={env[name]} makes this an {vendor} recipe, which is not planned for here")
    _refuse_other_devices(flags)
    return Command(engine, flags, env, tuple(rest), tuple(unknown), tuple(rest[skip:]))


def _environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    env: dict[str, str] = {}
    rest = list(words)
    if rest and rest[0] in ("env", "export"):
        rest.pop(0)
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env[name] = value
    return env, rest


def _program(words: Sequence[str]) -> tuple[SizingEngine, int]:
    """(engine, words to skip) of the program at the front."""
    head = [w.rsplit("/", 1)[-1] for w in words[:4]]
    if not head:
        raise UserError("there is no command after --; write it out, such as: -- sglang serve --tp-size 8")
    if head[0] in ("sglang", "vllm", "k3") and len(head) > 1 and head[1] == "serve":
        return {"sglang": "sglang", "vllm": "vllm", "k3": "k3"}[head[0]], 2  # type: ignore[return-value]
    if re.fullmatch(r"python[\d.]*", head[0]) and len(head) > 2 and head[1] == "-m":
        engine = _MODULES.get(head[2])
        if engine == "k3" and (len(head) < 4 or head[3] != "serve"):
            engine = None
        if engine is not None:
            return engine, 4 if engine == "k3" else 3
    raise UserError(
        f"{' '.join(words[:3])!r} is no command that can be planned; known: sglang serve, "
        "python -m sglang.launch_server, vllm serve, k3 serve (environment assignments may stand before them)"
    )


def read_flags(words: Sequence[str], engine: SizingEngine) -> tuple[dict[str, Any], list[UnknownFlag]]:
    """Values of known flags by their name here, and the unknown ones. Raises UserError for a malformed value."""
    table = TABLES[engine]
    flags: dict[str, Any] = {}
    unknown: list[UnknownFlag] = []
    rest = list(words)
    if engine == "vllm" and rest and not rest[0].startswith("-"):
        flags["model"] = rest.pop(0)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--?[A-Za-z]", word):
            raise UserError(f"{word!r} stands alone in the command; a value follows its flag", param=word)
        name, equals, inline = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        spec = table.get(name)
        if spec is None and engine == "vllm" and name.startswith("--") and "." in name:
            # vLLM takes fields of a JSON option as --option.field value.
            spec = FlagSpec("", "str")
        if spec is None:
            close = difflib.get_close_matches(name, table, n=1, cutoff=0.75)
            unknown.append(UnknownFlag(name, close[0] if close else ""))
            while not equals and rest and not re.match(r"--?[A-Za-z]", rest[0]):
                rest.pop(0)
            continue
        value = _value(name, spec, inline if equals else None, rest)
        if spec.dest:
            flags[spec.dest] = value
    return flags, unknown


def _value(name: str, spec: FlagSpec, inline: str | None, rest: list[str]) -> Any:
    if spec.kind == "bool":
        if inline is not None:
            return inline.lower() in ("1", "true", "yes")
        return True
    if spec.kind == "list":
        values = [] if inline is None else [inline]
        while rest and re.fullmatch(r"\d+", rest[0]):
            values.append(rest.pop(0))
        return [int(v) for v in values]
    if inline is None:
        if not rest:
            raise UserError(f"{name} needs a value", param=name)
        inline = rest.pop(0)
    try:
        if spec.kind == "int":
            return _whole(inline)
        if spec.kind == "float":
            return float(inline)
        if spec.kind == "json":
            return json.loads(inline)
    except ValueError:
        kind = {"int": "a whole number", "float": "a number", "json": "a JSON object"}[spec.kind]
        raise UserError(f"{name} is {inline!r}; it must be {kind}", param=name) from None
    return inline


def _whole(text: str) -> int:
    """A whole number; vLLM also takes 256k (decimal) and 1M (binary capital letters)."""
    match = re.fullmatch(r"(-?\d+)([kKmM]?)", text)
    if match is None:
        raise ValueError(text)
    return int(match.group(1)) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}[match.group(2)]


def _refuse_other_devices(flags: Mapping[str, Any]) -> None:
    device = str(flags.get("device", "cuda"))
    if device.startswith(("npu", "hip", "rocm", "xpu", "tpu")):
        raise UserError(f"--device {device} is not planned for here: NVIDIA GPUs only", param="--device")
    for key in ("attention", "prefill_attention", "decode_attention"):
        if str(flags.get(key, "")) in ("aiter", "ascend", "wave"):
            raise UserError(
                f"the attention back end {flags[key]!r} belongs to AMD or NPU hardware, which is not planned for here",
                param="--attention-backend",
            )
