"""vLLM's OpenAI server over an engine with a script, on a CPU: what `http_layer.py --peer` measures beside ours.

    PYTHON benchmarks/peer_vllm.py --model FOLDER --tokens 400 --step-ms 6        PYTHON: of vLLM 0.33.0's environment

The server is vLLM's own (application, middlewares, OpenAIServingChat, uvicorn); its engine client is replaced by one
that yields ready-made outputs with their text, so that neither detokenization nor the way from an engine process is in
the figure. FOLDER: a tokenizer written by clients/tokenizer.py; a config.json is put beside it. Prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import uvicorn
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog "


class Scripted:
    """The engine: every running request gets its next output each step."""

    is_running, is_stopped, errored = True, False, False
    dead_error = RuntimeError("never dies")

    def __init__(self, config: Any, tokens: int, step_s: float) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self._tokens, self._step = tokens, step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._ticker: asyncio.Task[None] | None = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._step)
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
        loop = asyncio.get_running_loop()
        for number in range(self._tokens):
            if self._step:
                step = loop.create_future()
                self._waiting.append(step)
                await step
            else:
                await asyncio.sleep(0)
            last = number + 1 == self._tokens
            text = TEXT[number % len(TEXT)]
            output = CompletionOutput(0, text, [97], None, None, finish_reason="stop" if last else None)
            yield RequestOutput(request_id, None, [1, 2, 3], None, [output], finished=last)

    def __getattr__(self, name: str) -> Any:
        """Whatever else of an engine client is asked for, at start: answered with nothing."""
        if name not in dir(EngineClient):
            raise AttributeError(name)

        async def nothing(*args: Any, **kwargs: Any) -> None:
            return None

        return nothing

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        return None


async def serve(args: argparse.Namespace) -> None:
    """Until killed."""
    (args.model / "config.json").write_text(json.dumps(CONFIG))
    options = ["--model", str(args.model), "--served-model-name", "scripted", "--enforce-eager", *args.options]
    server_args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    server_args.model = str(args.model)
    config = AsyncEngineArgs.from_cli_args(server_args).create_engine_config()
    engine: Any = Scripted(config, args.tokens, args.step_ms / 1000)
    app = build_app(server_args, ("generate",), config.model_config)
    await init_app_state(engine, app.state, server_args, ("generate",))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)  # who comes early waits
    print(f"port {listener.getsockname()[1]}", flush=True)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).serve(sockets=[listener])


async def alone(args: argparse.Namespace) -> None:
    """What the script itself costs: its outputs made and dropped."""
    engine = Scripted.__new__(Scripted)
    engine._tokens, engine._step, engine._waiting, engine._ticker = args.tokens, args.step_ms / 1000, [], None

    async def drop() -> None:
        async for _ in engine.generate(None, None, "x"):
            pass

    began = time.process_time()
    await asyncio.gather(*(drop() for _ in range(64)))
    print(f"{1e6 * (time.process_time() - began) / 64 / args.tokens:.1f} µs a token is the script's own")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--alone", action="store_true", help="measure the script without a server")
    args, args.options = parser.parse_known_args()
    if args.alone:
        asyncio.run(alone(args))
        return
    import uvloop

    uvloop.run(serve(args))


if __name__ == "__main__":
    main()
