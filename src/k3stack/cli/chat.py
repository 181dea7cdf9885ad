"""`k3 chat`: a conversation in the terminal, streamed, the model's thinking dimmed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from k3stack.cli.arguments import Parser, say
from k3stack.errors import K3Error, NotNow, Unavailable, UserError

DEFAULT_URL = "http://127.0.0.1:30000"
HELP = "/new starts over, /think on|off, /quit or Ctrl-D leaves"


def run(argv: list[str]) -> int:
    """Talk until the user leaves; with a prompt on the command line, answer it and leave."""
    parser = Parser("chat", f"Talk to a server from the terminal. In the conversation: {HELP}.")
    parser.add_argument("prompt", nargs="*", help="a question to answer at once; without one a conversation begins")
    parser.add_argument("--base-url", default=DEFAULT_URL, help=f"address of the server [{DEFAULT_URL}]")
    parser.add_argument("--api-key", help="key that the server asks for")
    parser.add_argument("--model", help="name of the model, where the server has several")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, help="longest answer [what the context leaves]")
    parser.add_argument("--temperature", type=float, help="how freely tokens are chosen; 0 takes the likeliest")
    parser.add_argument("--no-think", action="store_true", help="answer without thinking")
    found = parser.read(argv)
    chat = Chat(found.base_url, found.api_key, found.system)
    chat.thinking = not found.no_think
    for name in ("model", "max_tokens", "temperature"):
        if (value := getattr(found, name)) is not None:
            chat.fields[name] = value
    if found.prompt:
        chat.ask(" ".join(found.prompt), _printer())
        return 0
    return converse(chat)


def converse(chat: Chat) -> int:
    """The loop of a conversation."""
    say(f"k3 chat: {chat.url} ({HELP})")
    printer = _printer()
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/new":
            chat.start_over()
            say("(a new conversation)")
        elif line in ("/think on", "/think off"):
            chat.thinking = line.endswith("on")
        elif line.startswith("/"):
            say(HELP)
        elif line:
            _one_turn(chat, line, printer)


def _one_turn(chat: Chat, line: str, printer: Printer) -> None:
    try:
        chat.ask(line, printer)
    except KeyboardInterrupt:
        say("\n(stopped)")
    except (UserError, NotNow) as e:
        say(f"k3 chat: {e}")


class Chat:
    """One conversation with a server: what was said, kept whole so that the server can reuse its work."""

    def __init__(self, url: str, api_key: str | None, system: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.fields: dict[str, Any] = {}
        self.thinking = True
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self._system)

    def start_over(self) -> None:
        """Forget what was said."""
        self.messages = list(self._system)

    def ask(self, text: str, printer: Printer) -> None:
        """Send one message and show the answer as it comes. A turn that fails or is stopped is forgotten."""
        self.messages.append({"role": "user", "content": text})
        answer = {"role": "assistant", "content": "", "reasoning_content": ""}
        try:
            for kind, piece in self._stream():
                answer[kind] += piece
                printer.show(kind, piece)
        except BaseException:
            self.messages.pop()
            raise
        finally:
            printer.end()
        self.messages.append(answer)

    def _stream(self) -> Iterator[tuple[str, str]]:
        import httpx

        body = {**self.fields, "messages": self.messages, "stream": True}
        if not self.thinking:
            body["thinking"] = {"type": "disabled"}
        try:
            with (
                httpx.Client(timeout=httpx.Timeout(10.0, read=None)) as client,
                client.stream("POST", f"{self.url}/v1/chat/completions", json=body, headers=self._headers) as response,
            ):
                if response.status_code != 200:
                    raise _refusal(response.status_code, response.read())
                yield from _pieces(response.iter_lines())
        except httpx.ConnectError:
            raise Unavailable(
                f"nothing answers at {self.url}; start a server with: k3 serve --model-path nano"
            ) from None
        except httpx.HTTPError as e:
            raise Unavailable(f"{self.url}: {e}") from None


def _pieces(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """The texts of a stream, each with the member of the message it belongs to."""
    for line in lines:
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        frame = json.loads(line[5:])
        if "error" in frame:
            raise Unavailable(f"the answer broke off: {frame['error']['message']}")
        for choice in frame["choices"]:
            for kind in ("reasoning_content", "content"):
                if piece := choice["delta"].get(kind):
                    yield kind, piece


def _refusal(status: int, body: bytes) -> K3Error:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace")[:200]
    return UserError(f"{status}: {message}") if status < 500 and status != 429 else Unavailable(f"{status}: {message}")


class Printer:
    """Shows pieces as they come: thinking dimmed, a line between it and the answer."""

    def __init__(self, colour: bool) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, no_color=not colour)
        self._last: str | None = None

    def show(self, kind: str, piece: str) -> None:
        """Print one piece."""
        if self._last == "reasoning_content" and kind == "content":
            self._console.print("\n")
        self._console.print(
            piece, end="", style="dim" if kind == "reasoning_content" else None, markup=False, soft_wrap=True
        )
        self._last = kind

    def end(self) -> None:
        """The answer is over."""
        if self._last is not None:
            self._console.print()
        self._last = None


def _printer() -> Printer:
    return Printer(sys.stdout.isatty())
