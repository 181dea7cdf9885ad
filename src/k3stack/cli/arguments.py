"""Argument parsing that verbs share: errors as UserError, no guessing of abbreviations, ``--json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from k3stack.config.options import did_you_mean
from k3stack.errors import UserError


def whole(low: int, high: int) -> Callable[[str], int]:
    """A converter for argparse: a whole number from ``low`` to ``high``."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}; it must be from {low:,} to {high:,}")
        return value

    return convert


def above(low: float, high: float, *, below: bool = False) -> Callable[[str], float]:
    """A converter for argparse: a number above ``low`` and at most ``high`` (``below``: less than it)."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not low < value <= high or (below and value == high):
            raise argparse.ArgumentTypeError(
                f"{text}; it must be above {low:g} and {'below' if below else 'at most'} {high:g}"
            )
        return value

    return convert


def from_zero(text: str) -> float:
    """A converter for argparse: a finite number, 0 or more."""
    return 0.0 if text.strip() in ("0", "0.0") else above(0, 1e9)(text)


def flag_of(name: str) -> str:
    """How argparse's attribute ``name`` is spelled on the command line."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse for the verb ``verb``; what is wrong raises UserError (exit status 2) instead of leaving the process."""

    def __init__(self, verb: str, description: str, *, json_output: bool = False) -> None:
        super().__init__(
            prog=f"k3 {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if json_output:
            self.add_argument("--json", action="store_true", help="print the result alone, as JSON, on stdout")

    def read(self, argv: list[str]) -> argparse.Namespace:
        """Parse ``argv``; an unknown option raises UserError with a suggestion."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            first = unknown[0].partition("=")[0]
            known = [name for action in self._actions for name in action.option_strings]
            raise UserError(f"there is no option {first}{did_you_mean(first, known)}", param=first)
        return found

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def print_json(result: Any) -> None:
    """Print ``result`` on stdout as one JSON document."""
    json.dump(result, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def say(text: str) -> None:
    """Everything that is not the result goes to stderr."""
    print(text, file=sys.stderr, flush=True)
