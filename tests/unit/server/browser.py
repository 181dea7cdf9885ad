"""A headless Chromium, spoken to over its DevTools protocol: open a page, evaluate, take a picture.

Needs a chromium on the PATH (Debian: ``apt-get install chromium``); no driver and no package besides aiohttp.
"""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0"
).split()


class Page:
    """The one tab. ``problems``: what the page wrote to the console as errors, and exceptions nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """One DevTools command and its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), 20)
            self._note(message)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details.get("text"))))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    async def open(self, url: str) -> None:
        """Load ``url``."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState == 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 15.0) -> None:
        """Wait until the expression is true."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.evaluate(expression):
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"never true: {expression}; problems: {self.problems}")
            await asyncio.sleep(0.05)

    async def text(self, selector: str) -> str:
        """What a person reads in an element."""
        return str(await self.evaluate(f"document.querySelector({selector!r}).innerText"))

    async def dark(self, on: bool) -> None:
        """Prefer a dark colour scheme, or a light one."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """Size of the window in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(width: int = 1280, height: int = 1000) -> AsyncIterator[Page]:
    """A fresh browser with one empty tab; it ends with the block."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="k3-browser-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            PROGRAM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            address = await asyncio.wait_for(_address(process), 30)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{address}/json/list") as tabs,
                session.ws_connect((await tabs.json())[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket,
            ):
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.size(width, height)
                yield page
        finally:
            process.kill()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = b""
    while line := await process.stderr.readline():
        seen += line
        if found := re.search(rb"DevTools listening on ws://([^/]+)/", line):
            return found.group(1).decode()
    raise RuntimeError(f"chromium ended before it listened: {seen.decode()}")
