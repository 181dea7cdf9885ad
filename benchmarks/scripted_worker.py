"""A whole server over an engine that answers from a script: for what is measured or broken outside of the engine.

    python benchmarks/scripted_worker.py --tokens 100 --step-ms 10 --port 0

Every answer is ``expected(tokens)``, one character a step. Prints its address when it is up; other options are those
of ``k3 serve``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import k3stack
from k3stack.chat.tokenizer import load_tokenizer
from k3stack.config.flags import parse_serve
from k3stack.config.geometry import load_geometry
from k3stack.engine.client import EngineClient
from k3stack.engine.scripted import Script
from k3stack.errors import K3Error
from k3stack.server.run import Runner, build_service, listen, setup_logging

MODEL = Path(k3stack.__file__).parent / "models" / "data" / "random"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def expected(tokens: int) -> str:
    """The content of every answer."""
    return "".join(ALPHABET[i % len(ALPHABET)] for i in range(tokens))


def serve(options: list[str], script: Script) -> int:
    """Serve the script under these options of ``k3 serve`` until told to stop; prints the address."""
    setup_logging("info")
    command = parse_serve(["--model-path", str(MODEL), *options])
    engine = EngineClient(command.engine, script=script, max_restarts=command.serve.max_restarts)
    listener = listen(command.serve.host, command.serve.port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    runner = Runner(build_service(command, engine), announce=lambda: print(url, flush=True))
    try:
        return runner.run_until_stopped(listener)
    except K3Error as e:
        print(e, file=sys.stderr)
        return e.exit_code


def main() -> int:
    """Answer with ``expected``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args, options = parser.parse_known_args()
    text = "<|close|>think<|sep|><|open|>response<|sep|>" + expected(args.tokens)
    text += "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    reply = load_tokenizer(MODEL, load_geometry(MODEL)).encode_marked(text)
    script = Script(reply=tuple(reply), step_seconds=args.step_ms / 1000)
    return serve(["--served-model-name", "scripted", *options], script)


if __name__ == "__main__":
    sys.exit(main())
