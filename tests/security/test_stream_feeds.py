"""Streams of one job share one poller, which ends with the last of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Evaluated, Event, Prepared, Progress, Started, read_events
from llama_stack_provider_trl_remote.service.views.events import Cursor, Feeds, read_page
from llama_stack_provider_trl_remote.service.views.series import read_series
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


def test_a_stream_of_several_jobs_shares_their_pollers_and_reports_a_job_that_is_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")
    for name in ("one", "two"):
        store.add_job(job_spec(name), "digest")

    async def run() -> tuple[int, list[bytes]]:
        feeds, stopping = Feeds(store), asyncio.Event()
        stream = feeds.streams(["one", "two"], [Cursor(), Cursor()], stopping)
        single = feeds.stream("one", Cursor(), stopping)
        waiting = asyncio.ensure_future(_next(single))
        parts = [await _next(stream)]
        pollers = sum("_Feed._poll" in repr(task.get_coro()) for task in asyncio.all_tasks())
        store.request_cancel("two")
        store.delete("two")
        parts.append(await asyncio.wait_for(_next(stream), 60))
        store.request_cancel("one")
        parts += [part async for part in stream]
        await asyncio.wait_for(waiting, 60)  # the end of the other stream
        await single.aclose()
        async with asyncio.timeout(60):
            while any("_Feed" in repr(task.get_coro()) for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)
        return pollers, parts

    pollers, parts = asyncio.run(run())
    store.close()
    assert pollers == 2
    assert b"".join(parts).decode().split("\n\n")[:-1] == [
        'event: state\ndata: {"job": "one", "state": "scheduled"}',
        'event: state\ndata: {"job": "two", "state": "scheduled"}',
        'event: state\ndata: {"job": "two", "state": "deleted"}',
        'event: state\ndata: {"job": "one", "state": "cancelled"}',
        "event: end\ndata: {}",
    ]


def test_a_message_of_several_jobs_has_what_follows_from_its_event(tmp_path: Path) -> None:
    """Names of curves, steps that are done again and the time left are those of `series` and of the status."""
    store = Store(tmp_path / "jobs.db")
    store.add_job(job_spec("a"), "digest")
    store.launch("a", 1, "cpu", tmp_path)
    events: list[Event] = [
        Started(pid=1, device="cpu", versions={}),
        Prepared(time=100.0, total_steps=9, start_step=3, num_rows=1, trainable_parameters=1, total_parameters=1),
        Progress(
            time=102.0,
            step=4,
            epoch=0.1,
            metrics={"loss": 2.0},
            peak_memory_bytes=7,
            rank_memory_bytes=(5, 6),
            rank_peak_memory_bytes=(7, 8),
        ),
        Evaluated(time=103.0, step=4, epoch=0.1, metrics={"eval_loss": 1.5}),
    ]
    text = "".join(f"{event.model_dump_json()}\n" for event in events)
    (tmp_path / "events.jsonl").write_text(text)
    assert store.apply_events("a", 1, events, len(text))

    async def first() -> str:
        stream = Feeds(store).streams(["a"], [Cursor()], asyncio.Event())
        part = await _next(stream)
        await stream.aclose()
        return part.decode()

    parts = [part.partition("data: ")[2] for part in asyncio.run(first()).split("\n\n")[:-2]]
    found = [json.loads(part) for part in parts]
    status, series = store.get("a").progress, read_series(store, "a", (), 100)
    store.close()
    assert [message.pop("job") for message in found] == ["a"] * 4
    assert [message.pop("event")["type"] for message in found] == ["started", "prepared", "progress", "evaluated"]
    memory = {"memory_bytes": 5, "memory_bytes_rank_1": 6, "peak_memory_bytes": 7, "peak_memory_bytes_rank_1": 8}
    point = {"kind": "train", "metrics": {"loss": 2.0, **memory}}
    assert found == [
        {},
        {"superseded_after": 3},
        {"point": point, "eta_seconds": status.eta_seconds},
        {"point": {"kind": "validation", "metrics": {"eval_loss": 1.5}}},
    ]
    assert status.eta_seconds == 10.0
    assert set(point["metrics"]) == set(series.train)


def test_a_stream_reads_again_what_could_not_be_read_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "jobs.db")
    store.add_job(job_spec("streamed"), "digest")

    def fails(*arguments: Any) -> Any:
        raise StoreError("the disk is full")

    async def run() -> list[list[bytes]]:
        feeds, stopping = Feeds(store), asyncio.Event()
        other = feeds._enter("streamed", stopping)  # a stream elsewhere in the job's events
        await asyncio.sleep(0)  # its poller has seen the job, which changes no more
        with monkeypatch.context() as patch:
            patch.setattr("llama_stack_provider_trl_remote.service.views.events.read_page", fails)
            found = [[part async for part in feeds.stream("streamed", Cursor(), stopping)]]
        found.append([part async for part in feeds.stream("streamed", Cursor(), stopping)])
        feeds._leave("streamed", other)
        return found

    store.request_cancel("streamed")
    assert asyncio.run(run()) == [[], [b'event: end\ndata: {"state": "cancelled"}\n\n']]
    store.close()


def test_an_event_with_line_ends_between_its_values_imitates_no_other_event(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")
    store.add_job(job_spec("hostile"), "digest")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store.launch("hostile", 1, "cpu", run_dir)
    (run_dir / "events.jsonl").write_bytes(b'{"type": "finished",\r "step": 1,\r\r "time": 1}\n')
    store.apply_events("hostile", 1, *read_events(run_dir / "events.jsonl"))
    page = read_page(store, "hostile", Cursor(), 10)
    store.close()
    assert len(page.lines) == 1
    assert "\r" not in page.lines[0].text
