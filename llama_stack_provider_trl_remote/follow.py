"""Follows a job over the network, where the service or the connection may be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable

from .client import MOST_EVENT, ServiceClient, job_path

ENDED = ("completed", "failed", "cancelled")
"""Statuses after which a job does not change any more."""
Note = Callable[[str], None]
"""Receives a message once for each time without the service."""
_PAGE = 1000


class JobEvent(NamedTuple):
    """An event of a job: progress, an evaluation, a checkpoint, a warning, an end."""

    id: str
    """Cursor behind this event: events continue there."""
    event: dict[str, Any]
    """Its `type`, `time` in seconds since the epoch, and the fields of that type."""


async def statuses(
    client: ServiceClient, job_uuid: str, interval: float = 1.0, note: Note | None = None, config: bool = True
) -> AsyncIterator[dict[str, Any]]:
    """A job's status every `interval` seconds, until it has ended: the last one reports how.

    Args:
        config: with the effective configuration.

    Raises:
        ServiceRefusal: 404, there is no such job, or no longer.
        ServiceUnreachable: at the first request. Later ones are repeated until the service answers.
    """
    status = await client.status(job_uuid, config)
    while True:
        yield status
        if status["status"] in ENDED:
            return
        await asyncio.sleep(interval)
        status = await status_again(client, job_uuid, interval, note, config)


async def status_again(
    client: ServiceClient, job_uuid: str, interval: float, note: Note | None = None, config: bool = False
) -> Any:
    """A job's status, requested until the service answers."""
    noted = False
    while True:
        try:
            return await client.status(job_uuid, config)
        except (ServiceUnreachable, ServiceRefusal) as error:
            _require_temporary(error)
            if note is not None and not noted:
                note(f"{error} (retrying every {interval:g} s)")
                noted = True
            await asyncio.sleep(interval)


async def events(
    client: ServiceClient, job_uuid: str, after: str = "", *, follow: bool = True, interval: float = 1.0
) -> AsyncGenerator[JobEvent, None]:
    """Events of a job behind the cursor `after`, each exactly once: until the job has ended, over restarts of the
    service; without `follow` those that there are.

    Raises:
        ServiceRefusal: 400, no event of this job ends at `after`; 404, there is no such job, or no longer.
        ServiceUnreachable: at the first request. Later ones are repeated every `interval` seconds.
    """
    if not follow:
        async for event in _pages(client, job_uuid, after):
            yield event
        return
    path = job_path(job_uuid, "/events")
    # What is wrong with the request is refused here, where a stream that breaks off is opened again.
    await client.get(path, after=after or None, limit=1)
    while True:
        try:
            async with aclosing(client.stream(path, after)) as stream:
                async for sent in stream:
                    if sent.kind == "end":
                        return
                    after = sent.id
                    yield JobEvent(sent.id, client.parsed(sent.data.encode(), MOST_EVENT))
        except (ServiceUnreachable, ServiceRefusal) as error:
            _require_temporary(error)
        await asyncio.sleep(interval)


async def changes(
    client: ServiceClient, job_uuid: str, after: str = "", interval: float = 1.0, note: Note | None = None
) -> AsyncGenerator[JobEvent, None]:
    """What changes in a job behind the cursor `after`, until it has ended, over restarts of the service.

    Its events, each exactly once, and two further types. `state`: `state`, `status`, `detail`, `device` and `attempt`
    of the status, at first and whenever one of these is another. `end`, the last one: the status without the
    configuration. The id of both is that of the event before.

    Raises:
        ServiceRefusal: 400, no event of this job ends at `after`; 404, there is no such job, or no longer.
        ServiceUnreachable: at the first request. Later ones are repeated every `interval` seconds.
    """
    shown: dict[str, Any] = {}
    async for status in statuses(client, job_uuid, interval, note, config=False):
        resources = status.get("resources_allocated") or {}
        state = {"state": resources.get("state"), "status": status["status"]}
        state |= {name: resources.get(name) for name in ("detail", "device", "attempt")}
        # A state is read before the events: when it says that the job has ended, all of them are there.
        while True:
            if not shown:
                shown = state
                yield JobEvent(after, {"type": "state", **state})
            try:
                async for event in _pages(client, job_uuid, after):
                    after = event.id
                    yield event
                break
            except (ServiceUnreachable, ServiceRefusal) as error:
                _require_temporary(error)
                if status["status"] not in ENDED:
                    break
                await asyncio.sleep(interval)
        if state != shown:
            shown = state
            yield JobEvent(after, {"type": "state", **state})
    yield JobEvent(after, {"type": "end", **status})


async def _pages(client: ServiceClient, job_uuid: str, after: str) -> AsyncIterator[JobEvent]:
    while True:
        page = await client.get(job_path(job_uuid, "/events"), after=after or None, limit=_PAGE)
        for line in page["data"]:
            yield JobEvent(line["id"], line["event"])
        if not page["data"]:
            return
        after = page["next"]


def _require_temporary(error: ServiceUnreachable | ServiceRefusal) -> None:
    """Raise an error that a later request would get again."""
    if isinstance(error, ServiceRefusal) and error.status < 500 and error.status != 429:
        raise error
