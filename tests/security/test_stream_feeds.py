"""Streams of one job share one poller, which ends with the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl_remote.service.views.events import Cursor, Feeds
from tests.fakes import job_spec


async def _next(stream: AsyncIterator[bytes]) -> bytes:
    return await anext(stream)


def test_streams_of_a_job_have_one_poller_and_none_is_left_when_all_are_closed(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")
    store.add_job(job_spec("streamed"), "digest")

    def pollers() -> int:
        return sum("_Feed._poll" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async def run() -> tuple[int, int]:
        feeds, stopping = Feeds(store), asyncio.Event()
        streams = [feeds.stream("streamed", Cursor(), stopping) for _ in range(20)]
        first = [asyncio.ensure_future(_next(stream)) for stream in streams]
        await asyncio.sleep(0.1)  # until each waits for the first event
        open_pollers = pollers()
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        await asyncio.sleep(0)
        return open_pollers, pollers()

    assert asyncio.run(run()) == (1, 0)
    store.close()
