"""Several engine requests behind one request of the API: their outputs as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from k3stack.engine.messages import Output, Submit
from k3stack.errors import K3Error
from k3stack.server.records import Record
from k3stack.server.service import Service


async def run_many(service: Service, submits: Sequence[Submit], record: Record) -> AsyncIterator[tuple[int, Output]]:
    """Outputs with the number of their submit. The first failure of one ends all, and is raised."""
    if len(submits) == 1:
        async for output in service.run(submits[0], record):
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output] | K3Error | None] = asyncio.Queue()

    async def one(number: int, submit: Submit) -> None:
        try:
            async for output in service.run(submit, record):
                queue.put_nowait((number, output))
        except K3Error as e:
            queue.put_nowait(e)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(one(number, submit)) for number, submit in enumerate(submits)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, K3Error):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
