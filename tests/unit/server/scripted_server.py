"""A whole server process whose engine process answers from a script: ``python -m`` this with options of `k3 serve`.

Prints the address on stdout. The answer is 200 characters, one every 10 ms.
"""

from __future__ import annotations

import sys

from k3stack.config.flags import parse_serve
from k3stack.engine.client import EngineClient
from k3stack.engine.scripted import Script
from k3stack.errors import K3Error
from k3stack.server.run import Runner, build_service, listen, setup_logging
from tests.unit.server.harness import MODEL, turn

STEPS = 200


def main() -> int:
    """Serve until told to stop."""
    setup_logging("info")
    command = parse_serve(["--model-path", str(MODEL), "--served-model-name", "tiny", "--port", "0", *sys.argv[1:]])
    script = Script(reply=tuple(turn("a[TC][RO]" + "x" * STEPS + "[RC][MC]")), step_seconds=0.01)
    engine = EngineClient(command.engine, script=script, max_restarts=command.serve.max_restarts)
    listener = listen(command.serve.host, command.serve.port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    runner = Runner(build_service(command, engine), announce=lambda: print(url, flush=True))
    try:
        return runner.run_until_stopped(listener)
    except K3Error as e:
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
