"""`k3 serve` as a process, for tests: started as a user starts it, stopped by SIGTERM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

ROOT = Path(__file__).parents[2]


class Served:
    """A running server."""

    def __init__(self, *options: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k3stack", "serve", "--port", "0", *options],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = self._wait_for_address()
        # Somebody must go on reading, or the server would block on a full pipe.
        threading.Thread(target=self._read_log, daemon=True).start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def _wait_for_address(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"answers at (http://\S+)", line):
                return found.group(1)
        raise AssertionError("the server did not start:\n" + "".join(self.log))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if re.match(rf"{name}(\{{| )", line) and all(w in line for w in wanted)]
        assert found, f"there is no metric {name} {labels}"
        return sum(float(line.rpartition(" ")[2]) for line in found)


@contextmanager
def served(*options: str) -> Iterator[Served]:
    """A server that is stopped at the end, and must stop well."""
    running = Served(*options)
    try:
        yield running
        running.process.terminate()
        assert running.process.wait(30) == 0, "".join(running.log)
    finally:
        running.process.kill()
        running.process.wait()
