"""The page at /: its data, and the page itself in a real browser."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from k3stack.server.history import History
from tests.unit.server.browser import PROGRAM, browser
from tests.unit.server.harness import FakeEngine, Live, turn

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)")
P = 4  # pages a block


def stats(second: int) -> dict[str, Any]:
    """Statistics of an engine with 100 blocks of 4 pages of 1 MiB; each second 3 prompts start: a hit, a miss, and one
    with pages but no snapshot. 100 prompt tokens each, 60 of the hit reused."""
    memory = {
        "blocks": 100, "pages_per_block": P, "page_tokens": 64, "block_bytes": P * 2**20, "blocks_free": 40,
        "blocks_running": 10, "blocks_snapshot": 20, "blocks_slab": 30, "blocks_reserved": 0, "blocks_pinned": 0,
        "pages_running": 50, "pages_cached": 60, "pages_free_in_slabs": 10, "pages_pinned": 0, "moves": 0,
        "opens": 3 * second, "hits": second, "misses": second, "pages_without_snapshot": second,
        "prompt_tokens": 300 * second, "cached_tokens": 60 * second, "tokens_without_snapshot": 30 * second,
    }  # fmt: skip
    scheduler = {
        "waiting": 7, "prefilling": 1, "decoding": 8, "finishing": 1, "prefill_tokens": 240 * second,
        "decode_tokens": 500 * second, "preempted": 0,
    }  # fmt: skip
    steps = {
        "failed": 0,
        "prefill": {"steps": second, "seconds": 0.08 * second, "p99_s": 0.08},
        "decode": {"steps": 50 * second, "seconds": 50 * 0.013 * second, "p99_s": 0.02},
    }
    return {"memory": memory, "scheduler": scheduler, "steps": steps}


class WatchedEngine(FakeEngine):
    """A scripted engine whose statistics move on by one second with each look, and which sleeps before every token."""

    def __init__(self, **kind: Any) -> None:
        ids = turn("a[TC][RO]" + "x" * 4000 + "[RC][MC]")
        super().__init__(lambda submit, choice: ids, **kind)
        self.second = 0

    async def stats(self) -> dict[str, Any]:
        self.second += 1
        return stats(self.second)


def test_data_has_samples_and_streams() -> None:
    with Live(WatchedEngine(delay=0.01)) as live:
        first = httpx.get(f"{live.url}/dashboard/data").json()
        assert first["server"]["model"] == "tiny" and first["server"]["phase"] == "ready"
        assert first["target"] == {"first_s": 2.0, "token_s": 0.025}
        assert first["streams"] == [] and first["open"] == 0
        row = dict(zip(first["samples"]["columns"], first["samples"]["rows"][0], strict=True))
        assert row["blocks_running"] == 10 and row["pages_cached"] == 60 and row["waiting"] == 7
        assert row["decode_steps"] == 50 and row["decode_p99_s"] == 0.02 and row["mixed_steps"] is None
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "rid": "mine"}
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            time.sleep(0.2)
            later = httpx.get(f"{live.url}/dashboard/data?since={first['samples']['next']}").json()
            assert len(later["samples"]["rows"]) == 1
            [stream] = later["streams"]
            assert stream["rid"] == "mine" and stream["endpoint"] == "chat" and stream["stream"] is True
            assert stream["tokens"] >= 3 and 0 < stream["first_token_s"] < stream["age_s"]


@pytest.mark.parametrize("since", ["-1", "x", "1e3", "9" * 400])
def test_since_is_checked(since: str) -> None:
    with Live(WatchedEngine()) as live:
        answer = httpx.get(f"{live.url}/dashboard/data", params={"since": since})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "since"


def test_page_needs_no_key_but_its_data_does() -> None:
    with Live(WatchedEngine(), api_key=("secret",)) as live:
        page = httpx.get(f"{live.url}/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert httpx.get(f"{live.url}/dashboard/data").status_code == 401
        found = httpx.get(f"{live.url}/dashboard/data", headers={"authorization": "Bearer secret"})
        assert found.status_code == 200


def test_page_has_no_outside_assets() -> None:
    with Live(WatchedEngine()) as live:
        text = httpx.get(f"{live.url}/").text
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in outside and "https://" not in outside and "src=" not in outside and "@import" not in outside


def test_history_of_a_silent_engine_and_of_another_run() -> None:
    async def take() -> list[dict[str, Any]]:
        async def source() -> Mapping[str, Any]:
            return {}

        history = History(source)
        return [await history.since(0), await history.since(1), await history.since(99)]

    first, second, third = asyncio.run(take())
    assert set(first["rows"][0][1:]) == {None}
    assert (second["next"], len(second["rows"])) == (2, 1)
    assert (third["next"], len(third["rows"])) == (3, 3)


@needs_browser
def test_page_in_a_browser(tmp_path: Path) -> None:
    async def look(live: Live) -> None:
        async with browser() as page:
            # A target that even a busy machine meets.
            await page.open(f"{live.url}/?first=3600&token=60000")
            await page.until("document.querySelectorAll('#streams tbody tr').length == 1")
            await page.until("document.querySelectorAll('#steps path').length >= 2")
            assert await page.text("#model") == "tiny"
            kinds = await page.text("#kinds")
            assert "states of running requests\t40.0 MiB\t10 %" in kinds
            assert "snapshots for reuse\t80.0 MiB\t20 %" in kinds
            assert "cached pages\t60.0 MiB\t15 %" in kinds and "free blocks\t160.0 MiB\t40 %" in kinds
            await page.until("$('tiles').innerText.includes('13 ms')")
            tiles = await page.text("#tiles")
            assert "20 %" in tiles  # 60 of 300 prompt tokens
            assert "prefill step 80 ms" in tiles
            assert "pages without a snapshot" in await page.text("#reuse")
            row = await page.text("#streams tbody tr")
            assert row.startswith("<img src=x onerror=") and "+" in row  # text, not markup; ahead of its schedule
            # With a target that nothing can meet the stream is behind.
            await page.evaluate("$('token').value = 1; $('token').dispatchEvent(new Event('change'))")
            await page.until("document.querySelector('#tiles').innerText.includes('1 behind the target')")
            assert "−" in await page.text("#streams tbody tr")
            assert "token=1" in (await page.evaluate("location.search"))[1:].split("&")
            for dark in (False, True):
                await page.dark(dark)
                colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (colour == "rgb(16, 19, 22)") is dark
                await page.picture(tmp_path / f"dark-{dark}.png")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            await page.size(420, 900)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=300, y=600)
            assert page.problems == []

    with Live(WatchedEngine(delay=0.01)) as live:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "rid": "<img src=x onerror=alert(1)>"}
        done = threading.Event()

        def stream() -> None:
            with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body, timeout=60) as answer:
                for _ in answer.iter_lines():
                    if done.is_set():
                        return

        client = threading.Thread(target=stream)
        client.start()
        try:
            asyncio.run(look(live))
        finally:
            done.set()
            client.join()


@needs_browser
def test_page_asks_for_a_key() -> None:
    async def look(live: Live) -> None:
        async with browser() as page:
            await page.open(f"{live.url}/")
            await page.until("!document.getElementById('ask').hidden")
            assert "asks for a key" in await page.text("#banner")
            await page.evaluate("$('key').value = 'secret'; $('ask').requestSubmit()")
            await page.until("document.getElementById('phase').innerText == 'ready'")
            assert await page.evaluate("$('banner').hidden")

    with Live(WatchedEngine(), api_key=("secret",)) as live:
        asyncio.run(look(live))


@needs_browser
def test_page_says_when_the_server_is_gone() -> None:
    async def look() -> None:
        async with browser() as page:
            with Live(WatchedEngine()) as live:
                await page.open(f"{live.url}/")
                await page.until("document.getElementById('phase').innerText == 'ready'")
            await page.until("!$('banner').hidden")
            assert "No answer from the server" in await page.text("#banner")

    asyncio.run(look())
