"""`k3 verify` against a running server: the same answers and probabilities as in process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from k3stack.cli.verify import run as verify_command
from k3stack.errors import UserError
from k3stack.verify import agreement as agree
from k3stack.verify import questions as q
from k3stack.verify.local import LocalTarget
from k3stack.verify.remote import RemoteTarget
from k3stack.verify.run import AGREEMENT
from k3stack.verify.target import CannotScoreError
from tests.cpu.served import Served, served
from tests.cpu.test_nano_faults import part


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--model-path", "nano", "--dtype", "float32", "--arena-gib", "0.2") as running:
        yield running


def test_answers_equal_those_in_process(server: Served) -> None:
    questions = [*q.tool_calls(3), *q.conversations(1)[:2]]
    remote = RemoteTarget(server.url, None, None)
    assert remote.model == "nano"
    with LocalTarget("nano", "float32", "cpu", arena_gib=0.2) as local:
        mine, theirs = (target.ask(questions, lambda n: None) for target in (local, remote))
    for a, b in zip(mine, theirs, strict=True):
        assert (a.content, a.failure, b.failure) == (b.content, None, None)
        assert [(n, q.canonical(x)) for n, x in a.calls] == [(n, q.canonical(x)) for n, x in b.calls]
    right = [q.is_right(x.expected, a.content, a.calls) for x, a in zip(questions, mine, strict=True)]
    assert sum(right) >= len(right) - 2


def test_agreement_through_generate(server: Served) -> None:
    found = agree.compare(part([0, 1]), RemoteTarget(server.url + "/v1", "nano", None))
    assert found.n > 100 and found.top1 == 1.0
    assert found.mean_kl <= AGREEMENT["float32"]["mean_kl"]


class Bare(BaseHTTPRequestHandler):
    """A server with a model list and nothing else."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "other"}]})

    def do_POST(self) -> None:
        self._send(404, {"error": {"message": "no such path"}})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_without_probabilities_says_so() -> None:
    bare = ThreadingHTTPServer(("127.0.0.1", 0), Bare)
    threading.Thread(target=bare.serve_forever, daemon=True).start()
    try:
        target = RemoteTarget(f"http://127.0.0.1:{bare.server_port}", None, None)
        with pytest.raises(CannotScoreError, match="404"):
            agree.compare(part([0]), target)
        (answer,) = target.ask(q.tool_calls(1), lambda n: None)
        assert answer.failure is not None and "404" in answer.failure
    finally:
        bare.shutdown()


def test_the_command_refuses_what_makes_no_sense() -> None:
    with pytest.raises(UserError, match="one of --model-path and --base-url"):
        verify_command([])
    with pytest.raises(UserError, match="NAME=NUMBER"):
        verify_command(["--model-path", "nano", "--threshold", "nonsense=1"])
    with pytest.raises(UserError, match="did not answer"):
        verify_command(["--base-url", "http://127.0.0.1:9"])
