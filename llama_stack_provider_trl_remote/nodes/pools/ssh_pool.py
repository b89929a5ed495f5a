"""Machines of an inventory as a pool: they become nodes over SSH while jobs need them.

The handle of an order has the names of its machines, so two orders never share one, and a later service finds them. A
start may install packages for minutes: it runs in a thread, and until its end the request counts as not answered.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llama_stack_provider_trl.errors import TrlError

from .base import Given, PoolOrder, PoolRefusal, PoolUnavailable, Seen
from .inventory import Inventory, InventoryHost
from .ssh import HostError, NodePlan, Progress, observe_node, start_node, stop_node

log = logging.getLogger(__name__)
AT_ONCE = 16
"""Machines that are worked on at the same time."""
OBSERVED = 15.0
"""Seconds for which an observation counts: each one is a login."""
_CANCELLED = 30.0
"""Seconds within which a start that was cancelled ends."""
_PATIENCE = 2.0
"""Seconds for which a request waits for its start."""
_LONGEST = 500


class SshCalls(NamedTuple):
    """What is done on machines."""

    start: Callable[[InventoryHost, NodePlan, Progress], Awaitable[Any]] = start_node
    observe: Callable[[InventoryHost], Awaitable[Mapping[str, Any]]] = observe_node
    stop: Callable[..., Awaitable[Any]] = stop_node


@dataclass
class _Start:
    """The start of the agents of an order, in a thread of its own."""

    notes: dict[str, str] = field(default_factory=dict)
    """Machine -> what is done there."""
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    cancel: Callable[[], object] = lambda: None

    def words(self) -> str:
        return "; ".join(f"{where}: {text}" for where, text in sorted(self.notes.items())) or "starting the agents"


class SshPool:
    """Machines of an inventory.

    Args:
        inventory: reads it; its changes count at once.
        plan: what machines get. Takes the inventory.
        machines: names of those that are the pool's; none: all.
        labels: of the nodes, besides those that a machine has in the inventory.
    """

    def __init__(
        self,
        inventory: Callable[[], Inventory],
        plan: Callable[[Inventory], NodePlan],
        machines: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        calls: SshCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience: float = _PATIENCE,
    ) -> None:
        self._inventory, self._plan, self._machines, self._labels = inventory, plan, tuple(machines), labels or {}
        self._calls, self._clock, self._patience = calls or SshCalls(), clock, patience
        self._starts: dict[str, _Start] = {}
        self._seen: dict[str, tuple[float, Seen]] = {}
        self._failed_at: dict[str, float] = {}
        """Machine -> time of its last failure: it is chosen after the others."""

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        used = {name for handle in taken for name in handle.split(",")}
        with _as_unavailable():
            known = [host.name for host in self._inventory().chosen(self._machines)]
        free = sorted((name for name in known if name not in used), key=lambda name: self._failed_at.get(name, 0.0))
        if len(free) < nodes:
            raise PoolRefusal(f"{len(free)} of its {len(known)} machines are free, expected {nodes}")
        return ",".join(free[:nodes])

    def request(self, order: PoolOrder) -> None:
        begun = self._starts.get(order.request_id)
        if begun is None:
            hosts = self._hosts(order)
            begun = self._starts[order.request_id] = _Start()
            target = threading.Thread(target=self._run, args=(order, hosts, begun), name="trl-ssh-pool", daemon=True)
            target.start()
        if not begun.done.wait(self._patience):
            raise PoolUnavailable(begun.words()[:_LONGEST])
        del self._starts[order.request_id]
        if begun.error:
            raise PoolRefusal(begun.error[:_LONGEST])

    def observe(self, order: PoolOrder) -> Seen:
        at, seen = self._seen.get(order.request_id, (float("-inf"), Seen(Given.nothing)))
        if self._clock() - at < OBSERVED:
            return seen
        hosts = self._hosts(order)
        found = asyncio.run(_on_each(hosts, self._calls.observe))
        away = [str(one) for one in found if isinstance(one, BaseException)]
        there = [
            isinstance(one, Mapping) and one.get("state") == "running" and one.get("name") == name
            for name, one in zip(order.names, found, strict=True)
        ]
        lacking = ", ".join(host.where for host, runs in zip(hosts, there, strict=True) if not runs)
        if not any(there):
            if away:  # they may run: nothing is given to others
                raise PoolUnavailable("; ".join(away)[:_LONGEST])
            return self._note(order, Seen(Given.nothing, f"no agent of it runs on {lacking}"))
        return self._note(order, Seen(Given.all, f"no agent of it runs on {lacking}" if lacking else ""))

    def release(self, order: PoolOrder) -> None:
        begun = self._starts.get(order.request_id)
        if begun is not None:
            begun.cancelled = True
            begun.cancel()
            if not begun.done.wait(_CANCELLED):
                raise PoolUnavailable("the start of its agents has not ended yet")
            del self._starts[order.request_id]
        hosts = self._hosts(order)
        failed = asyncio.run(self._stop(order, hosts))
        if failed:
            raise PoolUnavailable("; ".join(failed)[:_LONGEST])
        self._note(order, Seen(Given.nothing))

    def _note(self, order: PoolOrder, seen: Seen) -> Seen:
        now = self._clock()
        self._seen = {key: one for key, one in self._seen.items() if now - one[0] < OBSERVED}
        self._seen[order.request_id] = now, seen
        return seen

    def _hosts(self, order: PoolOrder) -> list[InventoryHost]:
        """The machines of an order, in the order of its names. Raises PoolUnavailable: the inventory lacks one."""
        with _as_unavailable():
            known = {host.name: host for host in self._inventory().nodes}
        names = order.handle.split(",")
        if lost := [name for name in names if name not in known]:
            raise PoolUnavailable(
                f"the inventory has no {', '.join(lost)} any more: enter it again until it is given back"
            )
        return [known[name] for name in names]

    # In the thread of a start

    def _run(self, order: PoolOrder, hosts: Sequence[InventoryHost], begun: _Start) -> None:
        try:
            asyncio.run(self._cancellable(order, hosts, begun))
        except asyncio.CancelledError:
            begun.error = "it was cancelled"
        except (TrlError, OSError) as error:
            begun.error = str(error)
        except Exception as error:  # the request must not wait forever
            log.exception("the agents of %s could not be started", order.request_id)
            begun.error = f"a fault of the pool itself: {error}"
        finally:
            begun.done.set()

    async def _cancellable(self, order: PoolOrder, hosts: Sequence[InventoryHost], begun: _Start) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed: the start has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)

        begun.cancel = cancel
        if begun.cancelled:
            raise asyncio.CancelledError
        await self._start(order, hosts, begun)

    async def _start(self, order: PoolOrder, hosts: Sequence[InventoryHost], begun: _Start) -> None:
        plan = await asyncio.to_thread(lambda: self._plan(self._inventory()))
        names = dict(zip((host.name for host in hosts), order.names, strict=True))
        found = await _on_each(hosts, lambda host: self._start_one(host, names[host.name], plan, begun))
        failed = [(host, one) for host, one in zip(hosts, found, strict=True) if isinstance(one, BaseException)]
        if not failed:
            return
        now = self._clock()
        self._failed_at |= dict.fromkeys((host.name for host, _ in failed), now)
        # All or nothing: a job would wait for the rest.
        left = await self._stop(order, [host for host in hosts if host not in [one for one, _ in failed]])
        begun.error = "; ".join([*(str(error) for _, error in failed), *left])

    async def _start_one(self, host: InventoryHost, name: str, plan: NodePlan, begun: _Start) -> None:
        def note(text: str) -> None:
            begun.notes[host.where] = text

        found = await self._calls.observe(host)
        runs = str(found.get("name")) if found.get("state") == "running" else name
        # An agent of an order of this pool that ended badly is replaced.
        if not re.fullmatch(rf"{re.escape(name.rsplit('-', 2)[0])}-[0-9a-f]{{12}}-\d+", runs):
            raise HostError(
                host,
                f"it is the node {runs!r}, which this pool has not made: end that (trl-remote nodes down), or leave "
                "it out of `machines`",
            )
        renamed = host.model_copy(update={"name": name, "labels": {**self._labels, **host.labels}})
        try:
            await self._calls.start(renamed, plan, note)
        except HostError as error:
            raise HostError(host, error.problem) from error
        note("its agent runs")

    async def _stop(self, order: PoolOrder, hosts: Sequence[InventoryHost]) -> list[str]:
        """End the agents of an order on these machines. Returns a sentence for each that failed."""
        names = dict(zip(order.handle.split(","), order.names, strict=True))
        found = await _on_each(hosts, lambda host: self._calls.stop(host, only=names[host.name]))
        return [str(one) for one in found if isinstance(one, BaseException)]


async def _on_each(
    hosts: Iterable[InventoryHost], call: Callable[[InventoryHost], Awaitable[Any]]
) -> list[Any | HostError]:
    """What each machine answers, or its HostError."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(host: InventoryHost) -> Any | HostError:
        async with free:
            try:
                return await call(host)
            except HostError as error:
                return error

    return list(await asyncio.gather(*(one(host) for host in hosts)))


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """An inventory that cannot be read now: the order stays."""
    try:
        yield
    except TrlError as error:
        raise PoolUnavailable(str(error)) from error
