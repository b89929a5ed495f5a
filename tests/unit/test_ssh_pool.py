"""What a pool of an inventory does on machines; their SSH servers are played."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.pools.base import Given, PoolOrder, PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.inventory import Inventory, InventoryHost
from llama_stack_provider_trl_remote.nodes.pools.ssh import HostError, NodePlan, Progress
from llama_stack_provider_trl_remote.nodes.pools.ssh_pool import OBSERVED, SshCalls, SshPool
from llama_stack_provider_trl_remote.nodes.pools.wheel import Wheel
from tests.fakes import FakeClock

ID = "0123456789ab"
ORDER = PoolOrder(ID, (f"rack-{ID}-0", f"rack-{ID}-1"), "a,b")
PLAN = NodePlan("http://10.0.0.1:8322", "token", Wheel("w.whl", b""))
NAMES = ("a", "b", "c")


class Machines:
    """Machines with SSH servers: name of the inventory -> name of the node that its agent is."""

    def __init__(self) -> None:
        self.agents: dict[str, str] = {}
        self.fails: dict[str, str] = {}
        self.labels: dict[str, Mapping[str, str]] = {}
        self.logins = 0
        self.holds = False
        self.held: list[str] = []
        self.installs = threading.Event()
        """Set once the starts of an order that are held have begun, on all of its machines."""

    def check(self, host: InventoryHost) -> str:
        self.logins += 1
        name = host.host.removeprefix("machine-")
        if name in self.fails:
            raise HostError(host, self.fails[name])
        return name

    async def start(self, host: InventoryHost, plan: NodePlan, progress: Progress) -> dict[str, Any]:
        name = self.check(host)
        assert plan is PLAN
        progress("installing")
        if self.holds:
            self.held.append(name)
            if len(self.held) == len(ORDER.names):
                self.installs.set()
            await asyncio.Event().wait()
        self.agents[name], self.labels[name] = host.name, host.labels
        return {"state": "started"}

    async def observe(self, host: InventoryHost) -> dict[str, Any]:
        name = self.check(host)
        return {"state": "running", "name": self.agents[name]} if name in self.agents else {"state": "absent"}

    async def stop(self, host: InventoryHost, *, only: str | None = None) -> dict[str, Any]:
        name = self.check(host)
        if self.agents.get(name) == only:
            del self.agents[name]
        return {"state": "ended"}


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pool(machines: Machines, clock: FakeClock) -> SshPool:
    return made(machines, clock)


def made(machines: Machines, clock: FakeClock, *names: str, patience: float = 20.0) -> SshPool:
    hosts = [InventoryHost(host=f"machine-{name}", name=name, labels={"rack": name}) for name in NAMES]
    inventory = Inventory(nodes=hosts)
    calls = SshCalls(machines.start, machines.observe, machines.stop)
    return SshPool(lambda: inventory, lambda found: PLAN, names, {"rack": "7", "pool": "x"}, calls, clock, patience)


@pytest.fixture
def held(machines: Machines, clock: FakeClock) -> Iterator[SshPool]:
    """A pool in the middle of a start."""
    machines.holds = True
    pool = made(machines, clock, patience=0.0)
    with pytest.raises(PoolUnavailable):
        pool.request(ORDER)
    assert machines.installs.wait(60)
    yield pool
    pool.release(ORDER)


def test_an_order_has_machines_that_no_other_has(machines: Machines, clock: FakeClock) -> None:
    pool = made(machines, clock)
    assert pool.choose(ID, 2, []) == "a,b"
    assert pool.choose(ID, 1, ["a,b"]) == "c"
    with pytest.raises(PoolRefusal, match="1 of its 3 machines are free, expected 2"):
        pool.choose(ID, 2, ["a,b"])
    assert made(machines, clock, "c", "b").choose(ID, 2, ["a"]) == "b,c"
    with pytest.raises(PoolUnavailable, match="there is no node 'z' in the inventory: it has a, b, c"):
        made(machines, clock, "z").choose(ID, 1, [])


def test_machines_become_nodes_under_the_names_of_the_order_and_are_given_back(
    pool: SshPool, machines: Machines, clock: FakeClock
) -> None:
    assert pool.observe(ORDER).given is Given.nothing
    for _ in range(2):
        pool.request(ORDER)
        assert machines.agents == {"a": ORDER.names[0], "b": ORDER.names[1]}
    assert machines.labels["a"] == {"rack": "a", "pool": "x"}
    clock.advance(OBSERVED)
    assert pool.observe(ORDER) == (Given.all, "")
    pool.release(ORDER)
    pool.release(ORDER)
    assert machines.agents == {}
    assert pool.observe(ORDER).given is Given.nothing


def test_a_later_service_finds_the_agents_of_an_order(pool: SshPool, machines: Machines, clock: FakeClock) -> None:
    pool.request(ORDER)
    later = made(machines, clock)
    assert later.observe(ORDER).given is Given.all
    later.release(ORDER)
    assert machines.agents == {}


def test_a_start_reports_what_it_does_and_can_be_given_back(held: SshPool, machines: Machines) -> None:
    with pytest.raises(PoolUnavailable, match=r"^a \(machine-a\): installing; b \(machine-b\): installing$"):
        held.request(ORDER)
    held.release(ORDER)
    assert machines.agents == {}
    assert held.observe(ORDER).given is Given.nothing


def test_an_order_is_given_back_whose_start_has_ended_since_it_was_requested(
    machines: Machines, clock: FakeClock
) -> None:
    may_end = threading.Event()
    start = machines.start

    async def start_late(*arguments: Any) -> dict[str, Any]:
        await asyncio.to_thread(may_end.wait)
        return await start(*arguments)

    machines.start = start_late  # type: ignore[method-assign]
    pool = made(machines, clock, patience=0.0)
    with pytest.raises(PoolUnavailable, match="starting the agents"):
        pool.request(ORDER)
    may_end.set()
    assert pool._starts[ID].done.wait(60)
    assert machines.agents.keys() == {"a", "b"}
    pool.release(ORDER)
    assert machines.agents == {}
    assert pool.observe(ORDER).given is Given.nothing


def test_a_machine_that_fails_gives_the_others_back_and_is_chosen_last(
    pool: SshPool, machines: Machines, clock: FakeClock
) -> None:
    clock.advance(1)
    machines.fails["a"] = "its host key SHA256:x is not the one in known_hosts"
    with pytest.raises(PoolRefusal, match=r"^a \(machine-a\): its host key SHA256:x is not the one in known_hosts$"):
        pool.request(ORDER)
    assert machines.agents == {}
    assert pool.choose(ID, 2, []) == "b,c"


def test_a_machine_that_is_a_node_already_is_left_alone(pool: SshPool, machines: Machines) -> None:
    machines.agents = {"a": "rack-unit-7"}  # by `trl-remote nodes up`
    with pytest.raises(PoolRefusal, match="it is the node 'rack-unit-7', which this pool has not made: end that"):
        pool.request(ORDER)
    assert machines.agents == {"a": "rack-unit-7"}
    machines.agents = {"a": "rack-ba9876543210-4"}  # of an order that ended badly
    pool.request(ORDER)
    assert machines.agents == {"a": ORDER.names[0], "b": ORDER.names[1]}


def test_what_a_login_has_shown_counts_for_a_while(pool: SshPool, machines: Machines, clock: FakeClock) -> None:
    pool.request(ORDER)
    pool.observe(ORDER)
    logins = machines.logins
    pool.observe(ORDER)
    assert machines.logins == logins
    clock.advance(OBSERVED)
    pool.observe(ORDER)
    assert machines.logins == logins + 2


def test_agents_that_are_gone_end_the_order_and_machines_that_are_away_do_not(
    pool: SshPool, machines: Machines, clock: FakeClock
) -> None:
    pool.request(ORDER)
    del machines.agents["a"]
    assert pool.observe(ORDER) == (Given.all, "no agent of it runs on a (machine-a)")
    machines.fails["b"] = "port 22 of machine-b cannot be reached"
    clock.advance(OBSERVED)
    with pytest.raises(PoolUnavailable, match=r"^b \(machine-b\): port 22 of machine-b cannot be reached$"):
        pool.observe(ORDER)
    with pytest.raises(PoolUnavailable, match="cannot be reached"):
        pool.release(ORDER)
    machines.fails.clear()
    machines.agents.clear()
    assert pool.observe(ORDER) == (Given.nothing, "no agent of it runs on a (machine-a), b (machine-b)")


def test_an_order_of_a_machine_that_left_the_inventory_stays(pool: SshPool) -> None:
    lost = ORDER._replace(handle="a,z")
    for call in (pool.request, pool.observe, pool.release):
        with pytest.raises(PoolUnavailable, match="the inventory has no z any more: enter it again"):
            call(lost)


def test_a_plan_that_cannot_be_made_is_a_refusal(machines: Machines, clock: FakeClock) -> None:
    def plan(found: Inventory) -> NodePlan:
        raise NodeError("llama_stack_provider_trl is not installed here")

    inventory = Inventory(nodes=[InventoryHost(host="machine-a", name="a", key_file=Path("id"))])
    pool = SshPool(
        lambda: inventory, plan, (), {}, SshCalls(machines.start, machines.observe, machines.stop), clock, 20
    )
    with pytest.raises(PoolRefusal, match=r"^llama_stack_provider_trl is not installed here$"):
        pool.request(PoolOrder(ID, (f"rack-{ID}-0",), "a"))
