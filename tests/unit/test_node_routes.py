"""What operators and agents request about nodes: who may be removed, who has a name, whose calls count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.schema import schema_digest
from llama_stack_provider_trl_remote.service.cluster import joins
from llama_stack_provider_trl_remote.service.cluster.credentials import NodeCredentials
from llama_stack_provider_trl_remote.service.cluster.joined_nodes import JoinedNodes
from llama_stack_provider_trl_remote.service.cluster.joins import Joins
from llama_stack_provider_trl_remote.service.cluster.loads import Loads
from llama_stack_provider_trl_remote.service.cluster.membership import Cluster
from llama_stack_provider_trl_remote.service.cluster.node_rows import NodeRows
from llama_stack_provider_trl_remote.service.cluster.poll_order import PollOrder
from llama_stack_provider_trl_remote.service.cluster.polls import Polls
from llama_stack_provider_trl_remote.service.cluster.presence import Presence
from llama_stack_provider_trl_remote.service.http.errors import Conflict, Gone, NotFound
from llama_stack_provider_trl_remote.service.pool_settings import gpus_elsewhere
from llama_stack_provider_trl_remote.service.routes import agents as routes_agents
from llama_stack_provider_trl_remote.service.routes import nodes as routes_nodes
from llama_stack_provider_trl_remote.service.security.access import Caller, Refused
from llama_stack_provider_trl_remote.service.views.service_logs import ServiceLogs
from llama_stack_provider_trl_remote.wire import (
    SILENCE,
    SPECS,
    VERSIONS,
    CheckpointReport,
    DeviceLoad,
    DeviceReport,
    Load,
    LogEntries,
    NodeReport,
    OwnerUse,
    Poll,
    Stage,
    StageProgress,
    TaskReport,
)
from tests.fakes import FakeClock, job_spec
from tests.orders import order

JOINS = Caller("node", "joins")
OWN = Caller.of_node("head")
VERSION = {**dict.fromkeys(VERSIONS, "1"), SPECS: schema_digest()}


class World:
    """What the routes use of a service, on a stopped clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, FakeClock()
        self.store = Store(root / "jobs.db", self.clock)
        self.start()

    def start(self) -> None:
        """A new process takes over."""
        self.presence = Presence(self.clock, "head")
        self.received: list[str] = []
        self.owners: dict[str, OwnerUse | None] = {}
        self.woken: list[OwnerUse | None] = []
        self.stopping: Any = SimpleNamespace(is_set=lambda: True)  # a poll is answered at once
        self.uploads: Any = SimpleNamespace(receive=self.receive, current=self.current, first=self.current)
        self.loads, self.logs = Loads(self.store, self.clock), ServiceLogs(self.root)
        cluster: Any = SimpleNamespace(
            head="head",
            allow_again=lambda node: None,
            note_owner=self.note_owner,
            forget=lambda node: self.owners.pop(node, None),
        )
        about, order = (self.store, "head", self.presence), PollOrder()
        self.nodes = JoinedNodes(*about, self.loads, order, cluster, self.logs, self.wake)
        known = (self.store, self.nodes, self.presence, cluster)
        self.joins = Joins(*known, "head", False, lambda: VERSION, self.wake, self.clock)
        self.polls = Polls(*known, self.loads, order, self.logs, self.clock)
        machines = Cluster(self.store, self.presence, "head", "machine of head", ["cpu"], 1)
        self.listed = NodeRows(self.store, self.nodes, machines, self.loads, ("cpu",), self.root)

    def wake(self) -> None:
        self.woken.append(self.owners.get("a"))

    def note_owner(self, node: str, use: OwnerUse | None) -> bool:
        before, self.owners[node] = self.owners.get(node), use
        return use is not before

    def current(self, task_id: str, node: str) -> None:
        if self.store.tasks.current(task_id, node) is None:
            raise Gone("it is not current")

    async def receive(self, *about: Any) -> int:
        *_, coming = about
        async for _ in coming:
            self.received.append("lost" if self.presence.is_absent("a") else "there")
        return len(self.received)

    def join(
        self,
        name: str = "a",
        agent_id: str = "one",
        machine: str = "",
        caller: Caller = JOINS,
        versions: dict[str, str] = VERSION,
    ) -> tuple[Caller, str]:
        """Returns the caller that its credential makes the node, and the credential."""
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
            versions=versions,
        )
        answer = asyncio.run(routes_agents.join(self.joins, caller, report))
        credential = json.loads(bytes(answer.body))["credential"]
        return self.authenticated(credential) or caller, credential

    def authenticated(self, credential: str) -> Caller | None:
        return NodeCredentials(self.store)(credential)

    def poll(self, name: str = "a", caller: Caller = JOINS, *, kept: Sequence[str] = (), **given: Any) -> Any:
        """Returns the answer."""
        body = Poll(**{"boot_id": "1", "agent_id": "one", "seen": -1, **given})
        answer = asyncio.run(routes_agents.poll(self.polls, self.stopping, self.wake, caller, name, body, list(kept)))
        return json.loads(bytes(answer.body))

    def report_load(self, cpu_percent: float) -> None:
        gpu = DeviceLoad(name="cuda:0")
        self.poll(load=Load(cpu_percent=cpu_percent, memory_used_bytes=1, disk_free_bytes=1, devices=(gpu,)))

    def load(self, name: str) -> dict[str, Any]:
        return dict(json.loads(bytes(asyncio.run(routes_nodes.node_load(self.listed, name)).body)))

    def remove(self, name: str = "a") -> None:
        asyncio.run(routes_nodes.remove(self.nodes, name))

    def give_task(self, order: str = "{}") -> None:
        self.store.add_job(job_spec("job", checkpoint_dir=self.root / "checkpoints" / "out"), "digest")
        self.store.launch("job", 1, "a/cpu", self.root / "run")
        self.store.tasks.add([NodeTaskRecord("job-1", "a", "job", 1, 0, ("a/cpu",), "run", order, None, None, False)])

    def pass_time(self, seconds: float) -> None:
        """The supervisor looks all the while."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(min(4.0, end - self.clock.now))
            self.presence.silence("a")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


def test_a_poll_that_names_jobs_learns_which_of_them_are_over(world: World) -> None:
    world.join()
    for name in ("waits", "cancelled"):
        world.store.add_job(job_spec(name, checkpoint_dir=world.root / "checkpoints" / name), "digest")
    assert world.poll(kept=["waits", "cancelled"])["over"] == []
    world.store.request_cancel("cancelled")
    assert world.poll(kept=["waits", "cancelled", "unknown"])["over"] == ["cancelled"]
    assert world.poll()["over"] == []


def test_the_owners_use_of_a_loaned_node_is_known_and_wakes_the_supervisor(world: World) -> None:
    world.join()
    world.woken.clear()
    for use in (OwnerUse.low, OwnerUse.low, OwnerUse.high, None):
        world.poll(owner=use)
    assert world.woken == [OwnerUse.low, OwnerUse.high, None]


def test_a_task_that_its_agent_has_ended_by_itself_is_gone_and_its_devices_are_free(world: World) -> None:
    world.join()
    world.give_task(order(Stage.run).model_dump_json())
    for stage, progress, left in (
        (Stage.run, StageProgress.working, 1),
        (Stage.stop, StageProgress.working, 1),
        (Stage.stop, StageProgress.done, 0),
    ):
        report = TaskReport(task_id="job-1", stage=stage, progress=progress, error="the owner is back")
        world.poll(tasks=(report,))
        assert len(world.store.tasks.of_node("a")) == left


def test_an_earlier_poll_that_arrives_late_replaces_nothing(world: World) -> None:
    """It is of before the task began, which would be gone, and its devices given to another job."""
    world.join()
    world.give_task(order(Stage.run).model_dump_json())

    def poll(number: int, *tasks: TaskReport, run: str = "r", leaving: bool = False) -> None:
        world.poll(run=run, number=number, tasks=tasks, leaving=leaving)

    def left() -> list[str | None]:
        return [task.report for task in world.store.tasks.of_node("a")]

    runs, done = (
        TaskReport(task_id="job-1", stage=Stage.run, progress=progress)
        for progress in (StageProgress.working, StageProgress.done)
    )
    poll(3, done)
    world.store.tasks.stop("job-1", "{}")
    poll(2, runs, leaving=True)
    poll(2)
    assert left() == [done.model_dump_json()]
    assert world.store.nodes.all()[0].mode == "open"
    poll(1, runs, run="of an agent that was started again")
    assert left() == [runs.model_dump_json()]
    poll(2, run="of an agent that was started again")
    assert left() == []


def test_a_node_that_reports_that_its_machine_is_taken_away_is_drained(world: World) -> None:
    world.join("a")
    world.join("b")
    world.poll("a", leaving=True)
    assert {record.name: record.mode for record in world.store.nodes.all()} == {"a": "draining", "b": "open"}
    world.store.nodes.set_mode("a", "cordoned")
    world.poll("a", leaving=True)  # an operator's order stays
    assert {record.name: record.mode for record in world.store.nodes.all()} == {"a": "cordoned", "b": "open"}


def test_a_node_whose_stored_report_cannot_be_read_is_listed_with_what_to_do_and_the_others_beside_it(
    world: World,
) -> None:
    world.join("a")
    world.join("b")
    world.store.nodes.join("a", "machine of a", "1", '{"of": "another release"}')
    head, a, b = world.listed.all()
    assert (head.node, b.node, b.state) == ("head", "b", "open")
    assert (a.node, a.devices) == ("a", [])
    assert "start its agent again" in a.state


def test_nodes_of_one_machine_are_listed_with_one_hash_that_is_not_its_id(world: World) -> None:
    world.join("a", machine="shared")
    world.join("b", machine="shared")
    world.join("c", machine="machine of head")
    head, a, b, c = (row.machine for row in world.listed.all())
    assert a == b != head == c
    assert "shared" not in str(a)


def test_a_node_is_shown_as_the_list_has_it_and_an_unknown_one_is_refused_by_name(world: World) -> None:
    world.join("a")
    shown = [json.loads(asyncio.run(routes_nodes.node(world.listed, name)).body) for name in ("head", "a")]
    assert [(row["node"], row["head"], row["address"]) for row in shown] == [
        ("head", True, None),
        ("a", False, "10.0.0.1"),
    ]
    listed = json.loads(asyncio.run(routes_nodes.nodes(world.listed)).body)["data"]
    assert [row.keys() for row in shown] == [row.keys() for row in listed]
    assert shown[1] == listed[1]
    with pytest.raises(NotFound, match="there is no node 'b' here"):
        asyncio.run(routes_nodes.node(world.listed, "b"))


@pytest.mark.parametrize("digest", [None, "0123"])
def test_an_agent_of_another_build_cannot_join_and_one_that_has_joined_before_stays(
    world: World, digest: str | None
) -> None:
    other = {**dict.fromkeys(VERSIONS, "1"), **({SPECS: digest} if digest else {})}
    found = rf"have the digest {digest or 'none'}, the service's {schema_digest()}\. Install the same build on both"
    with pytest.raises(Conflict, match=found):
        world.join(versions=other)
    own, _ = world.join()
    world.join(caller=own, versions=other)  # the service has been upgraded, and its disk has changed
    world.pass_time(SILENCE + 1)
    with pytest.raises(Conflict, match=found):
        world.join(agent_id="two", caller=own, versions=other)


def test_the_services_own_machine_cannot_be_removed(world: World) -> None:
    assert world.join("head", machine="machine of head", caller=OWN)[1] == ""
    world.pass_time(SILENCE + 1)
    with pytest.raises(Conflict, match="the service's own machine: cordon or drain it"):
        world.remove("head")
    assert world.store.nodes.get("head")


def test_no_other_node_takes_the_name_of_the_services_own_machine(world: World) -> None:
    with pytest.raises(Conflict, match="it is the service's own machine; choose another name"):
        world.join("head", machine="machine of head")
    assert world.store.nodes.get("head") is None


def test_a_node_with_a_job_can_be_removed_once_it_is_silent(world: World) -> None:
    world.join()
    world.give_task()
    world.pass_time(SILENCE)
    with pytest.raises(Conflict, match="node 'a' still has job: drain it first"):
        world.remove()
    assert world.store.nodes.get("a")
    world.pass_time(1)
    world.remove()
    assert world.store.nodes.get("a") is None
    (task,) = world.store.tasks.of_attempt("job-1")
    assert task.gone


def test_a_node_with_a_job_has_time_to_call_after_the_service_was_away(world: World) -> None:
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
    assert not world.presence.has_called("a")
    with pytest.raises(Gone, match="was removed"):
        world.poll()
    world.join()
    world.poll()


def test_a_poll_is_refused_as_removed_while_another_thread_removes_its_node(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join()
    read = world.store.nodes.get

    def read_after_the_removal(name: str) -> Any:
        monkeypatch.setattr(world.store.nodes, "get", read)
        world.remove(name)
        return read(name)

    monkeypatch.setattr(world.store.nodes, "get", read_after_the_removal)
    with pytest.raises(Gone, match="was removed"):
        world.poll()


def test_nothing_stays_of_a_poll_whose_node_another_thread_removes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join()
    note_call = world.presence.note_call

    def note_after_the_removal(name: str) -> None:
        world.remove(name)
        note_call(name)

    monkeypatch.setattr(world.presence, "note_call", note_after_the_removal)
    load = Load(cpu_percent=1.0, memory_used_bytes=1, disk_free_bytes=1)
    entries = LogEntries(run="a", number=1, lines=("joined",))
    with pytest.raises(Gone, match="was removed"):
        world.poll(load=load, log=entries, owner=OwnerUse.low)
    assert not world.presence.has_called("a")
    assert world.loads.last("a") is None
    assert "a" not in world.owners
    with pytest.raises(NotFound):
        world.logs.read("a", 10, 1000)


def test_a_name_is_free_once_its_agent_is_silent(world: World) -> None:
    world.join()
    world.pass_time(SILENCE)
    for other in ({"agent_id": "two"}, {"machine": "another"}):
        with pytest.raises(Conflict, match="is there already"):
            world.join(**other)
    world.join()  # itself, started again
    world.pass_time(SILENCE + 1)
    with pytest.raises(
        Conflict, match=r"joined from another machine before: .* remove it \(trl-remote nodes remove a\)"
    ):
        world.join(machine="another")
    world.join(agent_id="two")
    world.remove()
    world.join(machine="another")


def test_a_lost_answer_to_a_join_keeps_no_node_out(world: World) -> None:
    world.join()
    own, _ = world.join()
    world.poll(caller=own)
    with pytest.raises(Conflict, match="is there already"):
        world.join()
    for _ in range(20):
        world.join(caller=own)
    world.poll(caller=own)


def test_a_node_that_has_called_with_its_credential_joins_with_nothing_else_while_it_is_there(world: World) -> None:
    own, credential = world.join()
    assert own.unused_credential
    world.poll(caller=own)
    used = world.authenticated(credential)
    assert used == Caller.of_node("a")
    world.join(caller=used)
    world.join(agent_id="two", caller=used)  # for example started again with another boot
    with pytest.raises(Conflict, match="is there already"):
        world.join(agent_id="two")
    with pytest.raises(Conflict, match="is there already"):
        world.join(machine="another", caller=used)
    with pytest.raises(Refused, match="is another node's"):
        world.join("b", caller=used)
    world.pass_time(SILENCE + 1)
    world.join(machine="another", caller=used)  # its data directory was moved


def test_a_credential_is_replaced_once_its_successor_is_used(world: World) -> None:
    own, first = world.join()
    world.poll(caller=own)
    own, second = world.join(caller=own)
    world.clock.advance(3600)
    assert world.authenticated(first)
    world.poll(caller=own)
    assert world.authenticated(first), "calls with it may be under way"
    world.clock.advance(31)
    assert world.authenticated(first) is None
    assert world.authenticated(second)


def test_of_many_joins_without_an_answer_few_credentials_are_kept(world: World) -> None:
    issued = [world.join()[1] for _ in range(20)]
    assert [credential for credential in issued if world.authenticated(credential)] == issued[-4:]


def test_the_nodes_that_a_token_may_add_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "_MOST_NODES", 2)
    world.join("a")
    own, _ = world.join("b")
    with pytest.raises(Conflict, match="there are 2 nodes already: remove those that are gone"):
        world.join("c")
    world.join("b", caller=own)
    world.remove("a")
    world.join("c")


def test_a_removed_node_s_credentials_are_refused_for_as_long_as_its_agent_may_still_come(world: World) -> None:
    own, first = world.join()
    world.poll(caller=own)
    _, second = world.join(caller=own)
    world.remove()
    world.start()
    for credential in (first, second):
        with pytest.raises(Refused, match="was removed") as caught:
            world.authenticated(credential)
        assert caught.value.status_code == 410
    third = world.join(machine="another")[1]
    with pytest.raises(Refused, match="was removed"):
        world.authenticated(first)
    world.clock.advance(31 * 24 * 3600)
    assert world.authenticated(first) is None
    assert world.authenticated(third)


def test_a_poll_that_waits_ends_when_another_agent_has_the_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = world.join()
    world.poll(caller=own)
    used = Caller.of_node("a")
    world.stopping = SimpleNamespace(is_set=lambda: False)

    async def meanwhile(seconds: float) -> None:
        report = json.loads(world.store.nodes.all()[0].report) | {"agent_id": "two"}
        await routes_agents.join(world.joins, used, NodeReport.model_validate(report))

    monkeypatch.setattr(routes_agents.asyncio, "sleep", meanwhile)
    revision = world.store.nodes.all()[0].revision
    with pytest.raises(Conflict, match="has joined as another agent"):
        world.poll(caller=used, seen=revision)


def test_a_database_that_cannot_be_read_is_no_wrong_credential(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(sha256: str) -> None:
        raise StoreError("disk I/O error")

    monkeypatch.setattr(world.store.nodes, "credential", broken)
    with pytest.raises(Refused, match="storage cannot be used: a credential cannot be checked") as caught:
        world.authenticated("any")
    assert caught.value.status_code == 503


def test_the_first_use_of_a_credential_may_be_recorded_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = world.join()

    def full(node: str, sha256: str) -> None:
        raise StoreError("database or disk is full")

    monkeypatch.setattr(world.store.nodes, "record_credential_use", full)
    world.poll(caller=own)
    assert not world.store.nodes.has_used_credential("a")


@pytest.mark.parametrize("call", ["events", "log", "ask", "file"])
def test_a_refused_call_is_no_heartbeat(world: World, call: str) -> None:
    """Before, every call in the name of a node kept it alive, whatever came of the call."""
    world.join()
    world.give_task()
    world.store.tasks.stop("job-1", "{}")
    world.pass_time(SILENCE + 1)

    class Sent:
        async def stream(self) -> AsyncIterator[bytes]:
            yield b"x"

    request: Any = Sent()
    uploads, presence = world.uploads, world.presence
    digests: Any = SimpleNamespace()
    for task in ("job-1", "another"):
        calls = {
            "events": lambda task=task: routes_agents.add_events(uploads, presence, world.wake, "a", task, 0, request),
            "log": lambda task=task: routes_agents.add_log(uploads, presence, "a", task, "rank-0.log", 0, request),
            "ask": lambda task=task: routes_agents.ask_for_checkpoint(
                uploads, presence, digests, "a", task, "final", CheckpointReport(kind="final", files=())
            ),
            "file": lambda task=task: routes_agents.add_checkpoint_file(
                uploads, presence, "a", task, "final", "f", "0" * 64, request
            ),
        }
        with pytest.raises(Gone):
            asyncio.run(calls[call]())
    assert world.presence.is_absent("a")


def test_an_upload_ends_when_its_task_is_not_current_any_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.join()
    world.give_task()
    monkeypatch.setattr(routes_agents, "RECHECK", 0.0)

    class Endless:
        async def stream(self) -> AsyncIterator[bytes]:
            for number in range(1000):
                if number == 3:
                    world.store.tasks.stop("job-1", "{}")
                yield b"x"

    request: Any = Endless()
    with pytest.raises(Gone):
        asyncio.run(
            routes_agents.add_checkpoint_file(
                world.uploads, world.presence, "a", "job-1", "final", "f", "0" * 64, request
            )
        )
    assert world.received == ["there"] * 3


def test_a_node_that_called_before_the_service_was_started_is_there(world: World) -> None:
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
    world.give_task()

    class Slow:
        async def stream(self) -> AsyncIterator[bytes]:
            for _ in range(6):
                world.pass_time(SILENCE - 1)
                yield b"a piece"
            world.pass_time(SILENCE - 1)

    request: Any = Slow()
    about = ("a", "job-1", "checkpoint-2", "model.safetensors", "0" * 64, request)
    asyncio.run(routes_agents.add_checkpoint_file(world.uploads, world.presence, *about))
    assert world.received == ["there"] * 6
    assert not world.presence.is_absent("a")


def test_the_load_that_polls_report_is_read_per_minute(world: World) -> None:
    world.join()
    begin = int(world.clock.now) // 60 * 60
    for percent in (10.0, 30.0):
        world.report_load(percent)
    world.clock.advance(60)
    world.report_load(90.0)
    found = world.load("a")
    assert (found["time"], found["cpu_percent"]) == ([begin, begin + 60], [20.0, 90.0])
    assert found["devices"]["cuda:0"]["power_watts"] == [None, None]
    assert world.load("head")["time"] == []  # it is there without an agent
    with pytest.raises(NotFound):
        world.load("b")
    world.remove()
    world.join()
    assert world.load("a")["time"] == []


def test_gpus_elsewhere_are_those_of_pools_and_of_nodes_that_have_joined() -> None:
    pools: Any = [
        SimpleNamespace(name=name, max_nodes=most, node=SimpleNamespace(gpus=gpus))
        for name, most, gpus in (("gpu", 2, 8), ("cpu", 2, 0), ("closed", 0, 8))
    ]
    nodes = [Node("head", ("cuda:0",), head=True), Node("b", ("cpu",)), Node("c", ("cuda:0", "cuda:1"))]
    assert gpus_elsewhere(pools, nodes) == ["pool gpu", "node c"]


def test_a_node_is_listed_with_its_last_load(world: World) -> None:
    world.join()
    world.loads.note("a", Load(cpu_percent=1.0, memory_used_bytes=1, disk_free_bytes=1))
    world.clock.advance(40)
    found = world.listed._last_load("a")
    assert found is not None
    assert (found.cpu_percent, found.age_seconds) == (1.0, 40.0)
    assert world.listed._last_load("b") is None
