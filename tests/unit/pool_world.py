"""A pool whose workers are played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llama_stack_provider_trl.errors import JobConflict
from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.job import ResourcesSpec
from llama_stack_provider_trl_remote.nodes.pools.base import Given, PoolOrder, Seen
from llama_stack_provider_trl_remote.service.cluster.pools import ManagedPool, Pools
from tests.fakes import FakeClock, job_spec

HEAD = Node("head", ("cpu",), "m", head=True, cpus=2)


SHAPE = Node("", ("cuda:0", "cuda:1"), cpus=8)


class FakePool:
    """Machines that are given as soon as they are requested."""

    def __init__(self) -> None:
        self.given: dict[str, PoolOrder] = {}
        self.requests: list[str] = []
        self.error: Exception | None = None
        self.unreachable: Exception | None = None
        self.pending = ""
        self.partly = False

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        return f"handle-{len(taken)}"

    def request(self, order: PoolOrder) -> None:
        if self.error:
            raise self.error
        self.requests.append(order.request_id)
        self.given[order.request_id] = order

    def observe(self, order: PoolOrder) -> Seen:
        if self.unreachable:
            raise self.unreachable
        if order.request_id not in self.given:
            return Seen(Given.nothing, "it was cancelled")
        if self.partly:
            return Seen(Given.some, "1 of 2 pods start")
        return Seen(Given.pending, self.pending) if self.pending else Seen(Given.all)

    def release(self, order: PoolOrder) -> None:
        self.given.pop(order.request_id, None)


class World:
    """A service's pools. The agents of machines that a pool gives join at once."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store, self.clock, self.pool = store, clock, FakePool()
        self.limits = ManagedPool("ray", self.pool, SHAPE, "2 GPUs", max_nodes=3, idle_seconds=60, join_seconds=100)
        self.joins = True
        self.wakes = 0
        self.restart()

    def restart(self) -> None:
        self.pools = Pools(self.store, [self.limits], self.remove, self.wake, self.clock)

    def wake(self) -> None:
        self.wakes += 1

    def remove(self, name: str) -> None:
        if any(place.startswith(f"{name}/") for place in self.store.holders()):
            raise JobConflict(name)
        self.store.nodes.remove(name)

    def nodes(self) -> list[Node]:
        modes = {record.name: record.mode for record in self.store.nodes.all()}
        whys = {name: self.pools.why_closed(name) or mode.removeprefix("open") for name, mode in modes.items()}
        return [HEAD, *(replace(SHAPE, name=name, machine=name, why_closed=why) for name, why in whys.items())]

    def round(self, seconds: float = 5.0) -> None:
        """A decision, and what the pool's thread does after it."""
        self.clock.advance(seconds)
        self.pools.tend(self.nodes)
        self.pools.work("ray")
        if self.joins:
            known = {record.name for record in self.store.nodes.all()}
            for order in self.pool.given.values():
                for name in set(order.names) - known:
                    self.store.nodes.join(name, name, "boot", "{}")

    def submit(self, name: str = "job", nodes: int = 2) -> None:
        resources = ResourcesSpec(nodes=nodes, min_nodes=nodes)
        self.store.add_job(job_spec(name, device="cuda", ranks=2 * nodes, resources=resources), "digest")

    def states(self) -> list[str]:
        return [one.state for one in self.store.allocations.all(since=0.0)]

    def note(self) -> str:
        (note,) = self.pools.pooled.notes.values()
        return note
