"""Clients that leave things undone: half a request, an answer that nobody reads, the next request sent too early.

A whole server process with a scripted engine, and bare sockets.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 1.0


@dataclass
class Running:
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def connect(self, *, narrow: bool = False) -> socket.socket:
        """``narrow``: takes a few kilobytes, then nothing more until they are read."""
        client = socket.socket()
        if narrow:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(20)
        client.connect(self.address)
        return client

    def idle(self) -> bool:
        return httpx.get(f"{self.url}/dashboard/data").json()["open"] == 0

    def record(self, rid: str) -> dict[str, Any]:
        """The line of the request log, once there is one; there must be only one."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
            found = [line for line in lines if line["rid"] == rid]
            if found:
                assert len(found) == 1
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"{rid} never ended")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, str(ROOT / "benchmarks" / "scripted_worker.py"), "--tokens", "60000", "--step-ms", "0.1"]
    with log.open("w") as err, subprocess.Popen(
        [*command, "--port", "0", "--client-timeout", str(TIMEOUT_S)], stdout=subprocess.PIPE, stderr=err, text=True
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield Running(process.stdout.readline().strip(), log)
        finally:
            process.terminate()
            assert process.wait(30) == 0


def post(rid: str, *, max_tokens: int = 5, stream: bool = True, more: str = "") -> bytes:
    """A whole request."""
    fields = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, "max_tokens": max_tokens}
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: {rid}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def rest(client: socket.socket) -> bytes:
    """Everything until the server hangs up."""
    data = b""
    while part := client.recv(65536):
        data += part
    return data


def test_an_answer_that_nobody_reads_is_given_up(server: Running) -> None:
    with server.connect(narrow=True) as client:
        client.sendall(post("unread", max_tokens=50_000))
        record = server.record("unread")
    assert record["end"] == "disconnect"
    assert "took nothing of its answer for 1 s (--client-timeout)" in record["message"]
    assert server.idle()


def test_a_slow_reader_gets_all(server: Running) -> None:
    """It takes much longer than the timeout in all, but never stops reading for as long."""
    with server.connect(narrow=True) as client:
        client.sendall(post("slow", max_tokens=5_000, more="Connection: close\r\n"))
        data = b""
        began = time.monotonic()
        while part := client.recv(16_384):
            data += part
            if time.monotonic() - began < 3 * TIMEOUT_S:
                time.sleep(0.3)
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert server.record("slow")["end"] == "length"


def test_half_a_head_is_answered_408(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-")
        assert rest(client).startswith(b"HTTP/1.1 408 ")


def test_nothing_at_all_is_answered_408(server: Running) -> None:
    with server.connect() as client:
        assert rest(client).startswith(b"HTTP/1.1 408 ")


def test_a_trickling_head_is_no_way_around(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        began = time.monotonic()
        data = b""
        client.settimeout(0.2)
        while not data and time.monotonic() - began < 10 * TIMEOUT_S:
            client.sendall(b"X-Slow: 1\r\n")
            try:
                data = client.recv(100)
            except TimeoutError:
                continue
    assert data.startswith(b"HTTP/1.1 408 ")


def test_half_a_body_is_answered_408(server: Running) -> None:
    with server.connect() as client:
        client.sendall(post("half", more="Connection: close\r\n")[:-5])
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert "--client-timeout" in error["message"]


def test_huge_headers_are_answered_431(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 100_000)
        assert rest(client).startswith(b"HTTP/1.1 431 ")
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"X-Many: y\r\n" * 10_000)
        assert rest(client).startswith(b"HTTP/1.1 431 ")


def test_requests_sent_early_are_answered_in_order(server: Running) -> None:
    with server.connect() as client:
        client.sendall(post("one", stream=False) + post("two", stream=False, more="Connection: close\r\n"))
        answer = rest(client)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b'"id":"one"') < answer.index(b'"id":"two"')


def test_leaving_after_a_request_sent_early_is_noticed(server: Running) -> None:
    client = server.connect()
    client.sendall(post("first", max_tokens=50_000) + post("never"))
    assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    client.close()
    assert server.record("first")["end"] == "disconnect"
    assert server.idle()


def test_http_1_0(server: Running) -> None:
    """No chunks, and the connection's end is the answer's."""
    body = post("old")
    with server.connect() as client:
        client.sendall(body.replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = rest(client)
    head, _, data = answer.partition(b"\r\n\r\n")
    assert b" 200 OK" in head and b"connection: close" in head.lower()
    assert data.rstrip(b"\r\n0").rstrip().endswith(b"data: [DONE]")


def test_what_is_no_http(server: Running) -> None:
    for junk in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\xff" * 5000,
        b"GET\r\n",
    ):
        with server.connect() as client:
            client.sendall(junk)
            assert rest(client).startswith(b"HTTP/1.1 400 ")


def test_unusual_requests(server: Running) -> None:
    """Bytes that are no UTF-8 in path and headers, an absolute path, unknown methods, bodies where none belong."""
    for first, status in (
        (b"GET /\xff\xfe HTTP/1.1", (400,)),
        (b"GET /%ff%fe HTTP/1.1", (404,)),
        (b"GET http://127.0.0.1/health HTTP/1.1", (200,)),
        (b"OPTIONS * HTTP/1.1", (404, 405)),
        (b"DELETE /v1/models HTTP/1.1", (405,)),
        (b"GET /health?%00=%ff HTTP/1.1\r\nX-Request-ID: \xff\xfe\r\nAuthorization: \xe9", (200,)),
        (b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nhello\r\n0", (200,)),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1", (400,)),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked", (400,)),
        (b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz", (400,)),
        (b"HEAD /health HTTP/1.1", (405,)),
    ):
        with server.connect() as client:
            client.sendall(first + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert int(rest(client).split(b" ", 2)[1]) in status, first
    assert server.idle()
