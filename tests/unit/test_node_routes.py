"""What operators and agents ask of the service about nodes: who may be removed, who has a name, who was heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl_remote.service import routes_nodes
from llama_stack_provider_trl_remote.service.cluster import Presence
from llama_stack_provider_trl_remote.service.errors import Conflict, Gone
from llama_stack_provider_trl_remote.wire import SILENCE, VERSIONS, DeviceReport, NodeReport, Poll
from tests.fakes import FakeClock, job_spec

VERSION = dict.fromkeys(VERSIONS, "1")


class World:
    """What the routes use of a service, on a clock that stands still."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.clock = root, FakeClock()
        self.store = Store(root / "jobs.db", self.clock)
        monkeypatch.setattr(routes_nodes.time, "time", self.clock)
        self.start()

    def start(self) -> None:
        """A new process takes over."""
        self.presence = Presence(self.clock, "head")
        self.received: list[str] = []
        self.service: Any = SimpleNamespace(
            node_name="head",
            machine_id="machine of head",
            settings=SimpleNamespace(on_loopback=False),
            versions=lambda: VERSION,
            store=self.store,
            presence=self.presence,
            removed={},
            supervisor=SimpleNamespace(wake=lambda: None),
            stopping=SimpleNamespace(is_set=lambda: True),  # a poll is answered at once
            shipping=SimpleNamespace(receive=self.receive),
        )

    async def receive(self, *about: Any) -> int:
        *_, coming = about
        async for _ in coming:
            self.received.append("lost" if self.presence.is_lost("a") else "there")
        return len(self.received)

    def join(self, name: str = "a", agent_id: str = "one", machine: str = "") -> None:
        report = NodeReport(
            name=name,
            machine_id=machine or f"machine of {name}",
            boot_id="1",
            agent_id=agent_id,
            address="10.0.0.1",
            cpus=1,
            memory_bytes=1,
            disk_free_bytes=0,
            devices=(DeviceReport(name="cpu"),),
            versions=VERSION,
        )
        asyncio.run(routes_nodes.join(self.service, report))

    def poll(self, name: str = "a", agent_id: str = "one") -> None:
        asyncio.run(routes_nodes.poll(self.service, name, Poll(boot_id="1", agent_id=agent_id, tasks=(), seen=-1)))

    def remove(self, name: str = "a") -> None:
        asyncio.run(routes_nodes.remove(self.service, name))

    def give_task(self) -> None:
        self.store.add_job(job_spec("job", checkpoint_dir=self.root / "out"), "digest")
        self.store.launch("job", 1, "a/cpu", self.root / "run")
        self.store.add_tasks([NodeTaskRecord("job-1", "a", "job", 1, 0, ("a/cpu",), "run", "{}", None, None, False)])

    def pass_time(self, seconds: float) -> None:
        """The supervisor looks all the while."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(min(4.0, end - self.clock.now))
            self.presence.silence("a")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    world.store.close()


def test_the_services_own_machine_cannot_be_removed(world: World) -> None:
    world.join("head", machine="machine of head")
    world.pass_time(SILENCE + 1)
    with pytest.raises(Conflict, match="the service's own machine: cordon or drain it"):
        world.remove("head")
    assert world.store.node("head")


def test_nobody_else_takes_the_name_of_the_services_own_machine(world: World) -> None:
    with pytest.raises(Conflict, match="it is the service's own machine; choose another name"):
        world.join("head", machine="another")
    assert world.store.node("head") is None


def test_a_node_with_a_job_can_be_removed_once_it_is_silent(world: World) -> None:
    world.join()
    world.give_task()
    world.pass_time(SILENCE)
    with pytest.raises(Conflict, match="node 'a' still has job: drain it first"):
        world.remove()
    assert world.store.node("a")
    world.pass_time(1)
    world.remove()
    assert world.store.node("a") is None
    (task,) = world.store.tasks("job-1")
    assert task.gone


def test_a_node_with_a_job_has_time_to_be_heard_of_after_the_service_was_away(world: World) -> None:
    world.join()
    world.give_task()
    world.clock.advance(3600)
    world.start()
    with pytest.raises(Conflict, match="drain it first"):
        world.remove()
    world.pass_time(SILENCE + 1)
    world.remove()


def test_a_node_without_a_job_can_be_removed_and_its_agent_ends_until_it_joins_again(world: World) -> None:
    world.join()
    world.remove()
    assert not world.presence.was_heard("a")
    with pytest.raises(Gone, match="was removed"):
        world.poll()
    world.join()
    world.poll()


def test_a_name_is_free_once_its_agent_is_silent(world: World) -> None:
    world.join()
    world.pass_time(SILENCE)
    for other in ({"agent_id": "two"}, {"machine": "another"}):
        with pytest.raises(Conflict, match="is there already"):
            world.join(**other)
    world.join()  # itself, started again
    world.pass_time(SILENCE + 1)
    world.join(machine="another")


def test_who_was_heard_before_the_service_was_started_is_there(world: World) -> None:
    world.join()
    world.pass_time(8)
    world.poll()
    world.start()
    world.pass_time(14)
    with pytest.raises(Conflict, match="is there already"):
        world.join(agent_id="two")
    world.pass_time(1)
    world.join(agent_id="two")


def test_a_node_that_uploads_for_longer_than_its_silence_is_not_lost(world: World) -> None:
    """Its polls may not get through beside a checkpoint that takes all of the line."""
    world.join()

    class Slow:
        async def stream(self) -> AsyncIterator[bytes]:
            for _ in range(6):
                world.pass_time(SILENCE - 1)
                yield b"a piece"
            world.pass_time(SILENCE - 1)

    request: Any = Slow()
    about = ("a", "job-1", "checkpoint-2", "model.safetensors", "0" * 64, request)
    asyncio.run(routes_nodes.add_checkpoint_file(world.service, *about))
    assert world.received == ["there"] * 6
    assert not world.presence.is_lost("a")
