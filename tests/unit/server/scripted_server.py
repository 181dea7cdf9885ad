"""A whole server process whose engine process answers from a script: ``python -m`` this with options of `k3 serve`.

Prints the address on stdout. The answer is 200 characters, one every 10 ms.
"""

from __future__ import annotations

import sys

from benchmarks.scripted_worker import serve

from k3stack.engine.scripted import Script
from tests.unit.server.harness import turn

STEPS = 200


def main() -> int:
    """Serve until told to stop."""
    script = Script(reply=tuple(turn("a[TC][RO]" + "x" * STEPS + "[RC][MC]")), step_seconds=0.01)
    return serve(["--served-model-name", "tiny", "--port", "0", *sys.argv[1:]], script)


if __name__ == "__main__":
    sys.exit(main())
