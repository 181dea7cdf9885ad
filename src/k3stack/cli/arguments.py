"""Argument parsing that verbs share: errors as UserError, no guessing of abbreviations, ``--json``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from k3stack.config.options import did_you_mean
from k3stack.errors import UserError


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
