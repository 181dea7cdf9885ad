"""`k3 serve`: a model behind HTTP."""

from __future__ import annotations

import dataclasses
import os

from k3stack.cli.arguments import say
from k3stack.config.flags import help_text, parse_serve
from k3stack.estimate.saved_plan import default_path


def run(argv: list[str]) -> int:
    """Serve until told to stop."""
    if "-h" in argv or "--help" in argv:
        print(f"usage: k3 serve --model-path FOLDER [options]\n\n{help_text()}")
        return 0
    command = parse_serve(argv, os.environ)
    from k3stack.models.builtin import resolve

    found = resolve(command.engine.model_path)
    served = command.serve.served_model_name or command.engine.model_path
    command = dataclasses.replace(
        command,
        engine=dataclasses.replace(
            command.engine,
            model_path=found.path,
            load_format=found.load_format or command.engine.load_format,
            pool_plan_file=command.engine.pool_plan_file or str(default_path()),
        ),
        serve=dataclasses.replace(command.serve, served_model_name=served),
        notes=(*command.notes, *((found.note,) if found.note else ())),
    )
    from k3stack.server.run import serve

    return serve(command, lambda url: say(welcome(url, served)))


def welcome(url: str, model: str) -> str:
    """What is printed when requests are taken."""
    return f"""
k3: {model} answers at {url}

  k3 chat --base-url {url}

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 100}}'
"""
