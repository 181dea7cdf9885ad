"""What can I type? The `k3` command: one thin file a verb, imported when it is asked for.

A verb is a module of this package with ``run(argv: list[str]) -> int`` and a line in ``VERBS``. Results go to
stdout, everything else to stderr; errors become exit statuses here and nowhere else: 0 good, 1 the answer is no,
2 the request is wrong, 3 not now, 70 a bug.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from k3stack import __version__
from k3stack.config.options import did_you_mean
from k3stack.errors import BugError, K3Error

VERBS: dict[str, str] = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a server from the terminal",
    "plan": "say before the boot what fits, and what to run",
    "simulate": "say what a deployment would do under load, in virtual time",
    "bench": "load-test a server against a latency target",
    "verify": "say whether a model or a server is still right",
}
"""Verb -> what it does. The verb's module is ``k3stack.cli.<verb>``."""

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(words)
    except K3Error as e:
        print(f"k3 {words[0]}: {e}", file=sys.stderr)
        if isinstance(e, BugError):
            traceback.print_exc()
        return e.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`k3 plan ... | head`); keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - the last resort: Python's own status 1 would read as 'the answer is no'
        traceback.print_exc()
        print(f"k3 {words[0]}: this is a bug of k3stack; please report it with the lines above", file=sys.stderr)
        return BugError.exit_code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version", "version"):
        print(f"k3stack {__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        print(f"k3: there is no verb {verb!r}{did_you_mean(verb, VERBS)}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"k3stack.cli.{verb}")
    status: int = module.run(words[1:])
    return status


def usage() -> str:
    """The list of verbs."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {does}" for name, does in VERBS.items())
    return f"usage: k3 VERB [options]     (k3 VERB --help lists a verb's options)\n\n{verbs}"
