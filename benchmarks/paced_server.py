"""A chat server of known times: first tokens after ``--first-ms`` and up to ``--spread-ms`` more, then a steady pace.

    python benchmarks/paced_server.py --first-ms 500 --spread-ms 1000 --gap-ms 25 --port 0

Prints its address. It does as little as a server can, so that a load client can be measured beside it: one timer
writes what is due to all streams, and notes when. ``GET /times`` gives, for each answer so far, seconds from the
request's last byte to the first token's write, and milliseconds a token after it, as they really were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from bisect import insort
from dataclasses import dataclass, field
from typing import cast

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
OPEN = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"paced","choices":'
)

GOLDEN = 0.6180339887
"""Its multiples, modulo 1, spread evenly in any stretch of them: runs of the same length see the same delays."""


def frame(body: bytes) -> bytes:
    """One event in a chunk of its own."""
    event = body + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


TOKEN = frame(OPEN + b'[{"index":0,"delta":{"reasoning_content":" word"},"finish_reason":null}]}')
END = frame(OPEN + b'[{"index":0,"delta":{},"finish_reason":"length"}]}')
DONE = frame(b"data: [DONE]") + b"0\r\n\r\n"


@dataclass(eq=False)
class Answer:
    """One stream: what is left to say, and when it was said."""

    transport: asyncio.Transport
    tokens: int
    prompt: int
    asked: float
    due: float
    sent: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass
class Pacer:
    """Writes what is due, at ticks of a millisecond."""

    first_s: float
    gap_s: float
    spread_s: float = 0.0
    answers: int = 0
    queue: list[tuple[float, int, Answer]] = field(default_factory=list)
    number: int = 0
    done: list[tuple[float, float]] = field(default_factory=list)

    def start(self, transport: asyncio.Transport, tokens: int, prompt: int) -> None:
        now = asyncio.get_running_loop().time()
        transport.write(HEAD)
        self.answers += 1
        spread = self.spread_s * (self.answers * GOLDEN % 1.0)
        self._put(Answer(transport, tokens, prompt, now, now + self.first_s + spread))

    def _put(self, answer: Answer) -> None:
        self.number += 1
        insort(self.queue, (answer.due, self.number, answer))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self.queue and self.queue[0][0] <= loop.time():
                self._say(self.queue.pop(0)[2], loop.time())
            await asyncio.sleep(0.001)

    def _say(self, answer: Answer, now: float) -> None:
        answer.sent += 1
        answer.first = answer.first or now
        answer.last = now
        if answer.transport.is_closing():
            return
        if answer.sent < answer.tokens:
            answer.transport.write(TOKEN)
            answer.due += self.gap_s
            self._put(answer)
            return
        usage = {"prompt_tokens": answer.prompt, "completion_tokens": answer.tokens}
        last = frame(OPEN + b'[],"usage":' + json.dumps(usage).encode() + b"}")
        answer.transport.write(TOKEN + END + last + DONE)
        if answer.tokens > 1:
            spent = answer.last - answer.first
            self.done.append((answer.first - answer.asked, 1000 * spent / (answer.tokens - 1)))


class Connection(asyncio.Protocol):
    """Just enough of HTTP/1.1: requests with a length, one at a time, kept alive."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer, self._data = pacer, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            lengths = [x.split(b":")[1] for x in head.lower().split(b"\r\n") if x.startswith(b"content-length")]
            length = int(lengths[0]) if lengths else 0
            if len(rest) < length:
                return
            self._data = rest[length:]
            self._answer(head.split(b" ", 2)[1], rest[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        if path.endswith(b"/chat/completions"):
            asked = json.loads(body)
            words = sum(len(str(m["content"]).split()) for m in asked["messages"])
            self._pacer.start(self._transport, asked.get("max_tokens") or asked["max_completion_tokens"], words)
            return
        found = self._pacer.done if path == b"/times" else {"object": "list", "data": [{"id": "paced"}]}
        text = json.dumps(found).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
        )


async def serve(pacer: Pacer, port: int) -> None:
    """Until interrupted."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(pacer), "127.0.0.1", port, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await pacer.run()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-ms", type=float, default=500.0)
    parser.add_argument("--spread-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=25.0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    pacer = Pacer(args.first_ms / 1000, args.gap_ms / 1000, args.spread_ms / 1000)
    asyncio.run(serve(pacer, args.port))


if __name__ == "__main__":
    main()
