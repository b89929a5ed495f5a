"""Jobs over several machines, from the supervisor to what each node is ordered; the nodes are played by the test."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from llama_stack_provider_trl.errors import JobConflict, StoreError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.retries import LOSSES_IN_A_ROW
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import Ended, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.ports import PortRange
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    EventWriter,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Reason,
    Started,
)
from llama_stack_provider_trl.specs.job import AttemptSpec, ResourcesSpec
from llama_stack_provider_trl.specs.schema import schema_digest
from llama_stack_provider_trl.stack.responses import resources
from llama_stack_provider_trl.system.files import RunDir, write_manifest
from llama_stack_provider_trl_remote.service.cluster.launcher import ClusterLauncher
from llama_stack_provider_trl_remote.service.cluster.membership import FORMING, Cluster
from llama_stack_provider_trl_remote.service.cluster.presence import Presence
from llama_stack_provider_trl_remote.service.cluster.states import CALL_DUE, GRACE_DONE, GRACE_FAILED
from llama_stack_provider_trl_remote.service.cluster.uploads import UploadReceiver
from llama_stack_provider_trl_remote.service.http.errors import Gone
from llama_stack_provider_trl_remote.service.views.checkpoints import Digests
from llama_stack_provider_trl_remote.wire import (
    POLL_SECONDS,
    SILENCE,
    SPECS,
    CheckpointFileReport,
    CheckpointReport,
    DeviceReport,
    NodeReport,
    OwnerUse,
    Stage,
    StageProgress,
    TaskOrder,
    TaskReport,
)
from tests.fakes import FakeClock, FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})
PREPARED = Prepared(total_steps=4, num_rows=8, trainable_parameters=1, total_parameters=1)
STEP = Progress(step=1, epoch=0.5, metrics={"loss": 2.0}, peak_memory_bytes=1)


@dataclass
class World:
    """A supervisor whose passes are made by hand, on a stopped clock."""

    root: Path
    clock: FakeClock
    store: Store
    local: FakeLauncher = field(default_factory=FakeLauncher)

    def __post_init__(self) -> None:
        self.start()

    def start(self, hang_timeout: float | None = None) -> None:
        """A new process takes over."""
        self.presence = Presence(self.clock, "head")
        self.cluster = Cluster(
            self.store, self.presence, "head", "machine of head", ["cpu"], 4, clock=lambda: self.clock.now
        )
        digests = Digests()
        digests.close()
        self.uploads = UploadReceiver(self.store, digests)
        self.launcher = ClusterLauncher(self.local, self.store, self.cluster, self.uploads, (29500, 100), self.clock)
        self.supervisor = Supervisor(
            self.store,
            self.launcher,
            ["cpu"],
            self.root,
            nodes=self.cluster.nodes,
            hang_timeout=hang_timeout,
            ports=PortRange(),
        )

    def join(self, *names: str, **changes: Any) -> None:
        for number, name in enumerate(names):
            report = NodeReport(
                **{
                    **{"name": name, "machine_id": f"machine of {name}", "boot_id": "1", "address": f"10.0.0.{number}"},
                    **{"cpus": 4, "memory_bytes": 8 << 30, "disk_free_bytes": 0, "versions": {SPECS: schema_digest()}},
                    **{"devices": (DeviceReport(name="cpu"),)},
                    **changes,
                }
            )
            self.store.nodes.join(name, report.machine_id, report.boot_id, report.model_dump_json())
            self.presence.note_call(name)
            self.cluster.allow_again(name)

    def add(self, name: str = "a", nodes: int = 2, min_nodes: int | None = None, **changes: Any) -> None:
        resources = ResourcesSpec(nodes=nodes, min_nodes=min_nodes or nodes, **changes.pop("resources", {}))
        values = {
            "checkpoint_dir": self.root / "checkpoints" / "out" / name,
            "ranks": nodes,
            "resources": resources,
            **changes,
        }
        self.store.add_job(job_spec(name, **values), "digest")

    def pass_time(self, seconds: float, *reporting: str) -> None:
        """In steps of the supervisor's poll; only the nodes in `reporting` call the service."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(min(4.0, end - self.clock.now))
            for name in reporting:
                self.presence.note_call(name)
            self.supervisor.tick()

    def tick(self) -> None:
        self.supervisor.tick()

    def job(self, name: str = "a") -> JobRecord:
        return self.store.get(name)

    def orders(self, node: str) -> dict[str, TaskOrder]:
        found = {}
        for task in self.store.tasks.of_node(node):
            order = TaskOrder.model_validate_json(task.order)
            found[task.task_id] = order.model_copy(update={"stage": Stage(task.stage)})
        return found

    def task(self, name: str = "a") -> TaskSpec:
        """The current attempt, as the supervisor names it."""
        job = self.job(name)
        return TaskSpec(f"{name}-{job.attempt}", job.run_dir or Path(), job.devices)

    def stages(self, nodes: str = "bc", task_id: str = "a-1") -> set[Stage]:
        return {self.orders(node)[task_id].stage for node in nodes}

    def report(self, node: str, stage: str, progress: str = "done", task_id: str = "a-1", **more: Any) -> None:
        text = TaskReport(task_id=task_id, stage=Stage(stage), progress=progress, **more)  # type: ignore[arg-type]
        self.store.tasks.record_reports(node, {task_id: text.model_dump_json()}, ())

    def gone(self, *nodes: str, task_id: str = "a-1") -> None:
        for node in nodes:
            self.store.tasks.record_reports(node, {}, [task_id])

    def emit(self, *events: BaseModel) -> None:
        """As rank 0's node ships them."""
        run_dir = self.job().run_dir
        assert run_dir is not None
        writer = EventWriter(RunDir(run_dir).events)
        for event in events:
            writer.write(event)
        writer.close()

    def run(self, *nodes: str, task_id: str = "a-1") -> None:
        """Bring a placed job in progress."""
        for port, node in enumerate(nodes):
            self.report(node, "prepare", task_id=task_id, port=29500 + port)
        self.tick()
        for node in nodes if len(nodes) > 1 else ():
            self.report(node, "probe", task_id=task_id)
        self.tick()
        for node in nodes:
            assert self.orders(node)[task_id].stage is Stage.run
            self.report(node, "run", "working", task_id=task_id, observation=seen())
        self.emit(STARTED, PREPARED)
        self.tick()
        assert self.job().state is JobState.in_progress

    def exit(self, node: str, exit_code: int | None = 0, **more: Any) -> None:
        shipped = more.pop("shipped", True)
        failed = more.pop("failed", None)
        observation = seen(TaskState.exited, exit_code, **more)
        self.report(node, "run", observation=observation, shipped=shipped, failed=failed)

    def save_and_leave(self) -> None:
        """Both nodes of `pair` end after a pause, and report that nothing is left."""
        self.emit(STEP, Paused(step=1))
        for node in "bc":
            self.exit(node, 0)
        self.tick()
        self.gone("b", "c")
        self.tick()


def seen(state: TaskState = TaskState.running, exit_code: int | None = None, **more: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(asdict(Observation(state, exit_code, **more)))))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = FakeClock()
    world = World(tmp_path, clock, Store(tmp_path / "jobs.db", clock))
    yield world
    world.store.close()


@pytest.fixture
def pair(world: World) -> World:
    """A job in progress on b and c."""
    world.join("b", "c")
    world.add()
    world.tick()
    world.run("b", "c")
    return world


def test_the_nodes_of_an_attempt_are_recorded_rank_0_first(world: World) -> None:
    world.join("b", "c")
    world.add(ranks=4)
    world.tick()
    assert world.job().device == "b/cpu,c/cpu"
    first, second = world.orders("b")["a-1"], world.orders("c")["a-1"]
    assert [(one.node_rank, one.nodes, one.ranks, one.devices) for one in (first, second)] == [
        (0, 2, 2, ("cpu",)),
        (1, 2, 2, ("cpu",)),
    ]
    spec = AttemptSpec.model_validate(first.spec)
    assert (spec.world_size, spec.job.device, spec.attempt) == (4, "cpu", 1)
    assert Path(first.shared_mark).read_text() == "a-1"
    assert world.local.started == []


def test_the_service_s_own_machine_takes_part_once_it_has_an_agent(world: World) -> None:
    world.join("b")
    world.add()
    world.tick()
    assert world.job().state is JobState.scheduled
    assert "1 of 2 can serve it; head has no agent" in world.job().detail
    world.join("head")
    world.tick()
    assert world.job().device == "cpu,b/cpu"
    assert world.orders("head")["a-1"].devices == ("cpu",)
    assert world.local.started == []


def test_a_job_takes_no_fewer_machines_while_agents_join(world: World) -> None:
    """Of the three nodes that are there first two are on one machine."""
    world.join("b", "c", machine_id="m")
    world.clock.advance(60)
    world.join("d")
    world.add(nodes=3)
    world.tick()
    assert world.job().detail == (
        "waiting for 3 nodes: 2 of 4 can serve it on machines of their own, and others may follow d"
    )
    world.pass_time(FORMING - 5, "b", "c", "d")
    world.join("e")
    world.tick()
    assert world.job().devices == ("b/cpu", "d/cpu", "e/cpu")


def test_two_agents_on_one_machine_train_as_one_process_and_the_job_reports_it(world: World) -> None:
    world.join("b", "c", machine_id="m")
    world.add(resources={"labels": {}})
    world.pass_time(FORMING, "b", "c")
    job = world.job()
    assert job.devices == ("b/cpu",)
    assert "2 nodes were requested, and fewer machines can serve the job" in job.warnings[0]
    assert "it trains on one node" in job.warnings[0]
    assert job.run_dir is not None
    attempt = AttemptSpec.model_validate_json(RunDir(job.run_dir).spec.read_text())
    assert (attempt.world_size, attempt.rows_per_step) == (1, job.spec.rows_per_step)


def test_two_pods_on_one_machine_are_one_machine_whatever_their_own_ids_are(world: World) -> None:
    world.join("b", "c", host_id="gpu-7")  # machine ids of their own, as pods have
    world.join("d", host_id="gpu-8")
    assert [node.where for node in world.cluster.nodes()] == ["machine of head", "gpu-7", "gpu-7", "gpu-8"]
    world.join("e", "f")
    assert [node.where for node in world.cluster.nodes()[4:]] == ["machine of e", "machine of f"]
    world.join("g", host_id="machine of head")  # beside the service
    assert world.cluster.nodes()[-1].where == world.cluster.nodes()[0].where


@pytest.mark.parametrize(
    ("b", "c", "threads"),
    [({"cpus": 8}, {"cpus": 2}, 2), ({"cpus": 8}, {"cpus": 8, "threads": 3}, 3), ({"cpus": 1}, {"cpus": 16}, 1)],
)
def test_equal_bits_need_equal_threads_on_all_nodes_of_a_job(
    world: World, b: dict[str, int], c: dict[str, int], threads: int
) -> None:
    world.join("b", **b)
    world.join("c", **c)
    world.add()
    world.tick()
    assert {world.orders(node)["a-1"].threads for node in "bc"} == {threads}


def test_a_task_of_one_node_has_threads_by_its_own_cores(world: World) -> None:
    world.join("b", cpus=8, labels={"rack": "7"})
    world.add(nodes=1, resources={"labels": {"rack": "7"}})
    world.tick()
    assert world.orders("b")["a-1"].threads is None


def test_all_nodes_of_an_attempt_move_on_together(world: World) -> None:
    world.join("b", "c")
    world.add()
    world.tick()
    world.report("b", "prepare", port=29511)
    world.report("c", "prepare", "working", detail="fetches rows")
    world.tick()
    assert world.orders("b")["a-1"].stage is Stage.prepare
    assert world.job().detail == "c: fetches rows"
    world.report("c", "prepare", port=29512)
    world.tick()
    for node, peers in (("b", ["c"]), ("c", ["b"])):
        order = world.orders(node)["a-1"]
        assert order.stage is Stage.probe
        assert order.master is not None
        assert (order.master.node, order.master.address, order.master.port) == ("b", "10.0.0.0", 29511)
        assert [peer.node for peer in order.peers] == peers
    world.report("b", "probe")
    world.tick()
    assert world.orders("b")["a-1"].stage is Stage.probe
    world.report("c", "probe")
    world.tick()
    assert world.stages() == {Stage.run}


def test_ranks_that_no_node_has_the_cores_for_are_not_started(world: World) -> None:
    world.join("b")
    world.join("head", cpus=2)
    world.add(ranks=6)
    world.tick()
    assert world.job().state is JobState.scheduled
    there = "1 of 2 can serve it"
    assert world.job().detail == f"waiting for 2 nodes: {there}; head has 2 CPU cores for 3 ranks"
    world.join("c")
    world.tick()
    assert world.job().device == "b/cpu,c/cpu"


def test_a_service_without_an_agent_knows_its_own_cores(world: World) -> None:
    world.add("many", nodes=1, ranks=5)
    world.add("few", nodes=1, ranks=4)
    world.tick()
    there = "0 of 1 can serve it"
    assert world.job("many").detail == f"waiting for a node: {there}; head has 4 CPU cores for 5 ranks"
    assert world.job("few").device == "cpu"


def test_one_node_needs_no_probe(world: World) -> None:
    world.join("b")
    world.local.refuse = OSError("not here")
    world.add(nodes=1, resources={"cpus": 2})
    world.store.add_job(job_spec("other", checkpoint_dir=world.root / "checkpoints" / "other", priority=9), "digest")
    world.tick()
    world.report("b", "prepare", port=29500)
    world.tick()
    assert world.orders("b")["a-1"].stage is Stage.run


def test_a_pair_that_cannot_talk_ends_the_attempt_with_its_sentence(world: World) -> None:
    world.join("b", "c")
    world.add()
    world.tick()
    for port, node in enumerate("bc"):
        world.report(node, "prepare", port=29500 + port)
    world.tick()
    world.report("c", "probe", "failed", error="node c cannot reach node b at 10.0.0.0 port 29500: open TCP ports")
    world.tick()
    assert world.stages() == {Stage.stop}
    assert world.job().detail == "it ends on b, c"
    world.gone("b", "c")
    world.tick()
    assert (world.job().state, world.job().reason) == (JobState.failed, Reason.launch_failed)
    assert "cannot reach node b at 10.0.0.0 port 29500" in world.job().message


def test_a_node_on_which_it_could_not_be_launched_comes_last(world: World) -> None:
    world.join("b", "c", labels={"kind": "worker"})
    world.add(nodes=1, retries=2, resources={"labels": {"kind": "worker"}})
    world.tick()
    for attempt, (node, other) in enumerate((("b", "c"), ("c", "b")), 1):
        assert world.job().device == f"{node}/cpu"
        world.report(node, "prepare", "failed", task_id=f"a-{attempt}", error=f"the model is not on node {node}")
        world.tick()
        world.gone(node, task_id=f"a-{attempt}")
        world.pass_time(40, node, other)
    assert (world.job().attempt, world.job().device) == (3, "b/cpu")  # better than none


def test_a_node_that_cannot_start_a_job_is_left_out_for_it_until_its_agent_joins_again(world: World) -> None:
    world.join("b", "c", labels={"kind": "worker"})
    world.add(nodes=1, retries=1, resources={"labels": {"kind": "worker"}})
    world.tick()
    for attempt, node in enumerate("bc", 1):
        assert world.job().device == f"{node}/cpu"
        error = f"the model /m is not on node {node}"
        world.report(node, "prepare", "failed", task_id=f"a-{attempt}", error=error, lasting=True)
        world.tick()
        world.gone(node, task_id=f"a-{attempt}")
        world.pass_time(60, "b", "c")
    job = world.job()
    assert (job.state, job.attempt, job.retries_used) == (JobState.scheduled, 2, 0)
    assert "b cannot start it until its agent joins again: the model /m is not on node b" in job.detail
    world.add("other", nodes=1, resources={"labels": {"kind": "worker"}})
    world.pass_time(1, "b", "c")
    assert world.job("other").device == "b/cpu"  # it is that job alone which cannot start there
    world.join("c", labels={"kind": "worker"})
    world.pass_time(1, "b", "c")
    assert (world.job().attempt, world.job().device) == (3, "c/cpu")


def test_a_node_whose_agent_has_joined_again_before_its_failure_was_read_is_not_left_out(world: World) -> None:
    labels = {"kind": "worker"}
    world.join("b", labels=labels)
    world.add(nodes=1, retries=1, resources={"labels": labels})
    world.tick()
    failed: dict[str, Any] = {"error": "the model /m is not on node b", "lasting": True}
    world.report("b", "prepare", "failed", **failed)
    world.join("b", labels=labels)  # with the model
    world.tick()
    world.gone("b")
    world.pass_time(60, "b")
    assert (world.job().attempt, world.job().device) == (2, "b/cpu")
    world.report("b", "prepare", "failed", task_id="a-2", **failed)
    world.tick()
    world.gone("b", task_id="a-2")
    world.pass_time(60, "b")
    assert "b cannot start it until its agent joins again" in world.job().detail


def test_nothing_is_kept_of_a_node_that_was_removed(world: World) -> None:
    """Machines of a pool have other names each time."""
    world.join("b")
    world.cluster.leave_out("b", "a-1", "a", "the model /m is not on node b")
    world.cluster.note_owner("b", OwnerUse.low)
    world.cluster.forget("b")
    assert not [name for name, kept in vars(world.cluster).items() if isinstance(kept, dict) and "b" in kept]


def test_what_a_node_was_left_out_for_does_not_return_with_the_next_failure(world: World) -> None:
    """Its agent joins in one thread while the supervisor leaves the node out in another."""

    class JoinsMeanwhile(dict[str, dict[str, str]]):
        def get(self, node: str, default: Any = None) -> Any:
            found = super().get(node, default)
            joins = threading.Thread(target=world.cluster.allow_again, args=("b",), daemon=True)
            joins.start()
            joins.join(0.2)  # it waits for the lock
            joining.append(joins)
            return found

    joining: list[threading.Thread] = []
    world.join("b")
    world.cluster._refused = JoinsMeanwhile()
    world.cluster._refused["b"] = {"old": "the disk is full"}
    world.cluster.leave_out("b", "a-1", "a", "the model /m is not on node b")
    joining[0].join()
    assert "b" not in world.cluster._refused


def test_a_job_is_over_when_all_nodes_are_and_rank_0_has_shipped_everything(pair: World) -> None:
    pair.exit("b", 0, shipped=False)
    pair.exit("c", 0)
    pair.pass_time(GRACE_DONE * 2, "b", "c")
    assert pair.job().state is JobState.in_progress  # its last checkpoint is still on its way
    pair.emit(Finished(step=4))
    pair.exit("b", 0)
    pair.tick()
    assert pair.job().state is JobState.completed
    assert pair.store.holders() == {"b/cpu": "a", "c/cpu": "a"}  # until they report that nothing is left
    assert pair.stages() == {Stage.stop}
    pair.gone("b", "c")
    pair.tick()
    assert pair.store.holders() == {}


def test_an_order_is_deleted_once_its_task_is_over(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.supervision.supervisor.INTERVAL", 0.0)
    pair.emit(Finished(step=4))
    pair.exit("b", 0)
    pair.exit("c", 0)
    pair.tick()
    pair.gone("b")
    pair.tick()
    assert pair.job().state is JobState.completed
    assert [task.node for task in pair.store.tasks.of_attempt("a-1")] == ["c"]  # it may still have it
    pair.gone("c")
    pair.tick()
    assert pair.store.tasks.of_attempt("a-1") == []


def test_the_node_that_ended_first_reports_why(pair: World) -> None:
    pair.exit("c", -9, rank=1)
    pair.tick()
    pair.clock.advance(1)
    pair.exit("b", 1, rank=0)
    pair.tick()
    assert (pair.job().state, pair.job().reason) == (JobState.failed, Reason.rank_failed)
    assert pair.job().message.startswith("rank 1 was killed by SIGKILL")


def test_a_node_that_went_down_is_to_blame_for_the_end_of_the_others(pair: World) -> None:
    pair.clock.advance(1)
    pair.exit("b", 1, rank=0)
    pair.tick()
    pair.pass_time(GRACE_FAILED + 2, "b")
    assert pair.stages() == {Stage.run}  # the last call of c is even older
    pair.pass_time(SILENCE - GRACE_FAILED, "b")
    pair.gone("b")
    pair.tick()
    assert pair.store.attempts("a")[0].reason is Reason.node_lost
    assert "node c is silent since" in pair.store.attempts("a")[0].message


def test_the_failure_of_another_node_counts_where_rank_0_reported_none(pair: World) -> None:
    failed = Failed(reason=Reason.out_of_memory, message="3 GiB short", traceback="", rank=1)
    pair.exit("c", 1, failed=failed.model_dump(mode="json"))
    pair.tick()
    assert pair.job().state is JobState.in_progress  # rank 0 has time to report its own failure
    pair.pass_time(GRACE_FAILED + 2, "b", "c")
    pair.gone("b", "c")
    pair.pass_time(2, "b", "c")
    assert (pair.job().state, pair.job().reason) == (JobState.failed, Reason.out_of_memory)
    assert "rank 1 on node c: 3 GiB short" in pair.job().message


def test_rank_0_s_own_final_event_comes_first(pair: World) -> None:
    failed = Failed(reason=Reason.rank_failed, message="lost contact", traceback="", rank=1)
    pair.exit("c", 1, failed=failed.model_dump(mode="json"))
    pair.emit(Failed(reason=Reason.diverged, message="the loss is NaN", traceback=""))
    pair.exit("b", 1)
    pair.tick()
    assert pair.job().reason is Reason.diverged
    assert RunDir(pair.job().run_dir or Path()).events.read_text().count('"failed"') == 1


def test_cancelling_ends_every_node_and_waits_until_they_have(pair: World) -> None:
    pair.store.request_cancel("a")
    pair.tick()
    assert pair.stages() == {Stage.stop}
    pair.gone("b")
    pair.tick()
    assert pair.job().state is JobState.cancelling
    pair.gone("c")
    pair.tick()
    assert pair.job().state is JobState.cancelled


def test_nodes_get_the_order_to_end_where_it_cannot_be_recorded(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._BUSY_SECONDS", 0.0)
    pair.store.cancels.prepare()
    pair.store.close()
    with closing(sqlite3.connect(pair.store.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        pair.store.request_cancel("a")
        with pytest.raises(StoreError, match="locked"):
            pair.tick()
        assert pair.stages() == {Stage.stop}
        assert pair.store.tasks.current("a-1", "b") is None
    pair.tick()
    assert pair.job().state is JobState.cancelling
    pair.gone("b")
    pair.gone("c")
    pair.tick()
    assert pair.job().state is JobState.cancelled


def test_a_node_that_returns_before_its_loss_is_recorded_trains_on(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._BUSY_SECONDS", 0.0)
    pair.store.close()
    pair.pass_time(SILENCE - 1, "b")
    with closing(sqlite3.connect(pair.store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            pair.pass_time(4, "b")
        pair.presence.note_call("c")
    pair.tick()
    assert pair.stages() == {Stage.run}
    assert pair.store.tasks.current("a-1", "c") is not None
    assert pair.job().state is JobState.in_progress


def test_a_job_that_no_node_has_reported_is_cancelled_too(world: World) -> None:
    world.join("b", "c")
    world.add()
    world.store.launch("a", 1, "b/cpu,c/cpu", world.root / "jobs" / "a" / "attempts" / "1")
    world.store.request_cancel("a")  # the service was killed before it could order anything
    world.tick()
    assert world.stages() == {Stage.stop}
    world.gone("b", "c")
    world.tick()
    assert world.job().state is JobState.cancelled


def test_pausing_is_rank_0_s_matter_and_ends_all(pair: World) -> None:
    pair.store.request_pause("a")
    pair.tick()
    assert pair.stages() == {Stage.pause}
    pair.emit(Paused(step=2))
    for node in "bc":
        pair.exit(node, 0)
    pair.tick()
    assert pair.job().state is JobState.paused


# Losing nodes


def test_a_silent_node_ends_the_attempt_and_a_spare_one_takes_its_place(pair: World) -> None:
    pair.join("d")
    pair.emit(STEP)
    pair.pass_time(SILENCE - 2, "b", "d")
    assert pair.job().attempt == 1
    pair.pass_time(4, "b", "d")
    assert pair.orders("b")["a-1"].stage is Stage.stop
    pair.gone("b")
    pair.pass_time(8, "b", "d")
    job = pair.job()
    assert (job.attempt, job.device, job.retries_used) == (2, "b/cpu,d/cpu", 0)
    (lost, _) = pair.store.attempts("a")
    assert lost.reason is Reason.node_lost
    assert lost.message.startswith("node c is silent since")


def test_without_a_spare_the_job_waits_names_the_node_and_continues_when_it_is_back(pair: World) -> None:
    pair.emit(STEP)
    mark = Path(pair.orders("b")["a-1"].shared_mark)
    pair.pass_time(SILENCE + 2, "b")
    assert mark.exists()  # b's may still save what it is at
    pair.gone("b")
    pair.pass_time(8, "b")
    assert pair.job().state is JobState.scheduled
    assert not mark.exists()  # where c sees the disk, it writes no more
    assert "waiting for 2 nodes; c is silent since" in pair.job().detail
    pair.pass_time(1, "b", "c")
    # Its old task may still run there.
    assert "c/cpu (held by a)" in pair.job().detail
    pair.gone("c")
    pair.pass_time(1, "b", "c")
    assert (pair.job().attempt, pair.job().device) == (2, "b/cpu,c/cpu")
    assert mark.read_text() == "a-2"


def test_with_min_nodes_it_continues_with_fewer_and_the_same_rows_per_step(world: World) -> None:
    world.join("b", "c")
    world.add(min_nodes=1, batch_size=2)
    world.tick()
    world.run("b", "c")
    world.emit(STEP)
    world.pass_time(SILENCE + 2, "b")
    world.gone("b")
    world.pass_time(8, "b")
    assert (world.job().attempt, world.job().device) == (2, "b/cpu")
    spec = AttemptSpec.model_validate(world.orders("b")["a-2"].spec)
    assert (spec.world_size, spec.rows_per_step, world.orders("b")["a-2"].nodes) == (1, 4, 1)
    (warning,) = world.job().warnings
    assert warning.startswith("2 nodes were requested, and fewer are free now (resources.min_nodes is 1): attempt 2 ")
    assert warning.endswith("trains on one node, with the same rows per step, so that a step takes longer")


@pytest.mark.parametrize(("left", "where"), [("bc", "2 nodes"), ("b", "one node"), ("bcd", "")])
def test_every_attempt_on_fewer_nodes_than_requested_has_a_warning(world: World, left: str, where: str) -> None:
    world.join("b", "c", "d")
    world.add(nodes=3, min_nodes=1, batch_size=2)
    world.tick()
    world.run("b", "c", "d")
    world.emit(STEP)
    world.pass_time(SILENCE + 2, *(left if len(left) < 3 else "bc"))
    world.gone(*left)
    world.gone("d")
    world.pass_time(8, *left)
    assert world.job().attempt == 2
    assert [f"trains on {where}" in one for one in world.job().warnings] == ([True] if where else [])


def test_a_job_begins_with_all_its_nodes_whatever_min_nodes_is(world: World) -> None:
    world.join("b")
    world.add(min_nodes=1)
    world.tick()
    assert world.job().state is JobState.scheduled


def test_losses_without_a_step_come_to_an_end(world: World) -> None:
    world.add()
    for attempt in range(1, LOSSES_IN_A_ROW + 1):
        world.join("b", "c", boot_id=str(attempt))
        world.pass_time(60, "b", "c")
        assert world.job().attempt == attempt
        world.join("b", boot_id=f"{attempt} again")
        world.gone("c", task_id=f"a-{attempt}")
        world.tick()
        world.gone("c", task_id=f"a-{attempt}")
        world.tick()
    assert (world.job().state, world.job().reason) == (JobState.failed, Reason.node_lost)


def test_without_failover_a_lost_node_ends_the_job_and_another_failure_does_not(world: World) -> None:
    world.add("a", failover=False, retries=3)
    world.join("b", "c")
    world.pass_time(60, "b", "c")
    world.exit("b", 1, rank=0)
    world.exit("c", 1, rank=1)
    world.tick()
    assert (world.job().state, world.job().retries_used) == (JobState.scheduled, 1)
    world.join("b", "c", boot_id="2")
    world.pass_time(60, "b", "c")
    assert world.job().attempt == 2
    world.pass_time(SILENCE + 1, "b")
    world.gone("b", task_id="a-2")
    world.tick()
    assert (world.job().state, world.job().reason) == (JobState.failed, Reason.node_lost)
    assert "node c is silent since" in world.job().message


def test_a_node_that_was_restarted_has_lost_its_task(pair: World) -> None:
    pair.join("c", boot_id="2")
    pair.tick()
    pair.gone("b")
    pair.tick()
    assert pair.store.attempts("a")[0].reason is Reason.node_lost
    assert "node c no longer has the task" in pair.store.attempts("a")[0].message


def test_an_agent_that_was_started_again_on_a_running_machine_changes_nothing(pair: World) -> None:
    pair.join("c")
    pair.tick()
    assert pair.stages() == {Stage.run}


def test_no_node_is_lost_because_the_service_was_away(pair: World) -> None:
    pair.clock.advance(3600)
    pair.start()
    pair.pass_time(SILENCE - 1, "c")
    assert pair.job().attempt == 1
    assert pair.orders("b")["a-1"].stage is Stage.run
    pair.pass_time(3, "c")
    assert pair.orders("b")["a-1"].stage is Stage.stop


def test_no_node_is_lost_because_the_service_was_cut_off(pair: World) -> None:
    pair.pass_time(4, "b")  # whatever the order of their calls before
    pair.pass_time(60, "head")  # its own agent needs no network
    assert pair.orders("b")["a-1"].stage is Stage.run
    assert "all other machines are silent since" in pair.job().detail
    pair.pass_time(4, "b", "head")
    pair.pass_time(POLL_SECONDS, "b")  # c sits on a connection that is dead
    pair.pass_time(30, "b", "c")
    assert pair.stages() == {Stage.run}
    assert pair.job().detail == ""


def test_a_node_that_is_not_back_when_the_others_are_is_lost(pair: World) -> None:
    pair.pass_time(60)
    pair.pass_time(SILENCE + 4, "b")
    assert pair.orders("b")["a-1"].stage is Stage.stop
    pair.gone("b")
    pair.tick()
    assert "node c is silent since" in pair.store.attempts("a")[0].message


def test_a_job_is_left_alone_for_as_long_as_all_other_machines_are_silent(pair: World) -> None:
    pair.pass_time(1800)
    assert pair.orders("b")["a-1"].stage is Stage.run
    assert "all other machines are silent since" in pair.job().detail
    pair.pass_time(60, "b", "c")
    assert (pair.job().attempt, pair.job().detail) == (1, "")


def test_no_node_is_lost_while_the_service_receives_no_calls(pair: World) -> None:
    pair.presence.require_proofs()
    pair.pass_time(700, "b")  # the calls of c find no free connection
    assert pair.stages() == {Stage.run}
    pair.presence.note_proof()
    pair.pass_time(60, "b")  # one proof is none of the time after it
    assert pair.stages() == {Stage.run}
    pair.presence.note_proof()
    pass_proven_time(pair, SILENCE - 1, "b")
    assert pair.stages() == {Stage.run}
    pass_proven_time(pair, 12, "b")
    assert pair.stages() == {Stage.stop}


def test_a_job_of_the_service_s_machine_outlasts_an_overloaded_service(world: World) -> None:
    world.join("head", "b", machine_id="")
    world.add()
    world.tick()
    world.run("head", "b")
    world.presence.require_proofs()
    world.pass_time(700)
    assert world.stages("b") == {Stage.run}
    world.presence.note_proof()
    pass_proven_time(world, SILENCE + 2, "head")
    assert world.stages("b") == {Stage.stop}


def test_silence_counts_without_proofs_where_none_can_be_had(pair: World) -> None:
    pair.presence.require_proofs()
    pair.presence.require_no_proofs()
    pair.pass_time(SILENCE + CALL_DUE, "b")
    assert pair.stages() == {Stage.stop}


def pass_proven_time(world: World, seconds: float, *reporting: str) -> None:
    """`pass_time` of a service that answers its own calls."""
    end = world.clock.now + seconds
    while world.clock.now < end:
        world.presence.note_proof()
        world.pass_time(min(2.0, end - world.clock.now), *reporting)
        world.presence.note_proof()


def test_a_training_on_a_lost_node_is_not_replaced_before_another_node_can_take_it(world: World) -> None:
    world.join("b")
    world.join("c", labels={"fast": "no"})
    world.add(nodes=1, resources={"labels": {"fast": "yes"}})
    world.join("b", labels={"fast": "yes"})
    world.tick()
    world.run("b")
    world.pass_time(700, "c")
    assert world.stages("b") == {Stage.run}
    assert "left alone: node b is silent since" in world.job().detail
    world.pass_time(8, "b", "c")
    assert (world.job().attempt, world.job().detail) == (1, "")
    world.emit(STEP)
    world.pass_time(60, "c")
    world.join("d", labels={"fast": "yes"})
    world.pass_time(8, "c", "d")
    assert (world.stages("b"), world.job().attempt, world.job().device) == ({Stage.stop}, 2, "d/cpu")


@pytest.mark.parametrize("stage", ["prepare", "probe"])
@pytest.mark.parametrize("nodes", ["b", "bc", "bcd"])
def test_an_attempt_that_does_not_train_yet_ends_though_all_other_machines_are_silent(
    world: World, nodes: str, stage: str
) -> None:
    if stage == "probe" and nodes == "b":
        return  # one node has no other to connect to
    world.join(*nodes)
    world.add(nodes=len(nodes), resources={"labels": {"rack": "7"}})
    world.join(*nodes, labels={"rack": "7"})
    world.tick()
    if stage == "probe":
        for node in nodes:
            world.report(node, "prepare", port=29500)
        world.tick()
    assert {world.orders(node)["a-1"].stage for node in nodes} == {Stage(stage)}
    world.pass_time(SILENCE - 4)
    assert world.job().state is JobState.launching
    world.pass_time(8)
    assert (world.job().state, world.store.attempts("a")[0].reason) == (JobState.scheduled, Reason.node_lost)
    world.pass_time(8, *nodes)
    world.gone(*nodes)
    world.pass_time(8, *nodes)
    assert (world.job().state, world.job().attempt) == (JobState.launching, 2)


def test_a_job_whose_only_other_machine_is_lost_before_it_trains_moves_to_the_service_s_machine(world: World) -> None:
    world.join("b")
    world.add("first", nodes=1)
    world.add("second", nodes=1)
    world.tick()
    assert (world.job("first").device, world.job("second").device) == ("cpu", "b/cpu")
    world.local.emit("first-1", Finished(step=4))
    world.local.exit("first-1", 0)
    world.pass_time(SILENCE + 8)
    assert (world.job("second").device, world.job("second").attempt) == ("cpu", 2)


@pytest.mark.parametrize(
    "other",
    [
        {"priority": 1},
        {"priority": 2, "resources": {"labels": {"fast": "yes", "rack": "7"}}},
        {"nodes": 1, "priority": 1, "resources": {"cpus": 2, "labels": {"fast": "yes"}}},
    ],
)
def test_a_training_on_a_lost_node_is_not_replaced_where_a_job_before_it_gets_the_free_node(
    world: World, other: dict[str, Any]
) -> None:
    wanted = {"labels": {"fast": "yes"}}
    world.join("b", "c")
    world.join("b", labels={"fast": "yes"})
    world.add(nodes=1, resources=wanted)
    world.tick()
    world.run("b")
    world.pass_time(60, "c")
    world.join("d", labels={"fast": "yes", "rack": "7"})
    world.add("other", **{"nodes": 1, "resources": wanted, **other})
    world.presence.note_call("d")
    assert world.launcher.poll(world.supervisor._attempts.task(world.job())).detail.startswith("left alone: node b")
    world.pass_time(8, "c", "d")
    assert (world.job("other").device, world.job().attempt, world.stages("b")) == ("d/cpu", 1, {Stage.run})


def test_with_a_pool_a_training_on_a_lost_node_is_replaced(world: World) -> None:
    world.launcher._has_pools = True  # which gives nodes to jobs that wait
    world.join("c")
    world.join("b", labels={"fast": "yes"})
    world.add(nodes=1, resources={"labels": {"fast": "yes"}})
    world.tick()
    world.run("b")
    world.pass_time(SILENCE + CALL_DUE, "c")
    assert world.stages("b") == {Stage.stop}
    assert world.job().state is JobState.scheduled


def test_the_result_of_a_training_that_ended_on_a_lost_node_is_awaited(world: World) -> None:
    world.join("b", "c")
    world.join("b", labels={"fast": "yes"})
    world.add(nodes=1, resources={"labels": {"fast": "yes"}})
    world.tick()
    world.run("b")
    world.exit("b", 0, shipped=False)
    world.pass_time(700, "c")
    assert world.stages("b") == {Stage.run}
    world.emit(Finished(step=4))
    world.exit("b", 0)
    world.pass_time(4, "b", "c")
    assert world.job().attempt == 1
    assert world.stages("b") == {Stage.stop}


def test_a_job_that_needs_the_service_s_machine_is_not_left_to_the_others(world: World) -> None:
    world.join("head", "b", machine_id="")
    world.add()
    world.tick()
    assert world.job().device == "cpu,b/cpu"
    world.run("head", "b")
    world.pass_time(SILENCE + 2, "head")
    assert world.orders("head")["a-1"].stage is Stage.stop


def test_no_node_is_lost_because_the_service_was_stopped_for_a_while(pair: World) -> None:
    pair.clock.advance(3600)  # SIGSTOP, or a virtual machine that was suspended
    pair.tick()
    pair.pass_time(2)
    assert pair.orders("b")["a-1"].stage is Stage.run


def test_no_node_is_given_a_job_before_its_first_call(world: World) -> None:
    world.join("b", "c")
    world.start()
    world.add()
    world.tick()
    assert "b is not seen since the service was started" in world.job().detail
    world.pass_time(1, "b", "c")
    assert world.job().state is JobState.launching


def test_a_node_that_is_opened_again_is_seen_by_the_job_that_waits_for_it(world: World) -> None:
    world.join("b", "c")
    world.store.nodes.set_mode("c", "cordoned")
    world.add(nodes=2, resources={"cpus": 1})
    world.tick()
    world.tick()
    assert world.job().detail.endswith("c is cordoned")
    world.store.nodes.set_mode("c", "open")
    world.tick()
    assert world.job().device == "b/cpu,c/cpu"


def test_a_drained_node_s_job_saves_and_continues_elsewhere(pair: World) -> None:
    pair.join("d")
    pair.store.nodes.set_mode("c", "draining")
    pair.tick()
    assert pair.stages() == {Stage.pause}
    pair.save_and_leave()
    assert (pair.job().attempt, pair.job().device, pair.job().retries_used) == (2, "b/cpu,d/cpu", 0)


def test_a_loaned_node_gets_jobs_only_while_its_owner_uses_little_of_it(world: World) -> None:
    world.join("b", loaned=True)
    node = world.cluster.nodes()[-1]
    assert (node.why_closed, node.draining) == ("loaned, and its owner's load is not known yet", False)
    assert world.cluster.conditions()["b"] == "in_use"
    assert world.cluster.note_owner("b", OwnerUse.low)
    assert not world.cluster.note_owner("b", OwnerUse.low)
    assert (world.cluster.nodes()[-1].why_closed, world.cluster.conditions()["b"]) == ("", "open")
    world.cluster.note_owner("b", OwnerUse.high)
    node = world.cluster.nodes()[-1]
    assert (node.why_closed, node.draining) == ("in use by its owner", True)
    world.store.nodes.set_mode("b", "cordoned")
    assert world.cluster.nodes()[-1].why_closed == "cordoned"


def test_a_training_on_a_node_whose_owner_is_back_saves_and_waits_for_another(pair: World) -> None:
    pair.join("c", loaned=True)
    pair.cluster.note_owner("c", OwnerUse.high)
    pair.tick()
    assert pair.stages() == {Stage.pause}
    pair.save_and_leave()
    assert (pair.job().state, pair.job().retries_used) == (JobState.scheduled, 0)
    assert "c is in use by its owner" in pair.job().detail
    pair.cluster.note_owner("c", OwnerUse.low)
    pair.tick()
    assert pair.job().device == "b/cpu,c/cpu"


@pytest.mark.parametrize("leaves", ["owner", "owner who is gone again", "drain", "drain of a used machine"])
def test_the_record_distinguishes_an_eviction_from_a_drain(pair: World, leaves: str) -> None:
    pair.join("c", loaned=True)
    if leaves.startswith("owner"):
        pair.cluster.note_owner("c", OwnerUse.high)
    else:
        pair.cluster.note_owner("c", OwnerUse.high if leaves != "drain" else OwnerUse.low)
        pair.store.nodes.set_mode("c", "draining")
    pair.tick()
    pair.emit(STEP, Paused(step=1))
    if leaves == "owner who is gone again":  # before the training has saved
        pair.cluster.note_owner("c", OwnerUse.low)
        pair.tick()
    for node in "bc":
        pair.exit(node, 0)
    pair.tick()
    pair.gone("b", "c")
    pair.tick()
    why = "it was evicted from c, which its owner uses" if leaves.startswith("owner") else "its node is being drained"
    assert pair.store.attempts("a")[0].message == f"saved at step 1: {why}"


def test_a_task_that_its_agent_has_ended_is_a_lost_node_and_no_retry(pair: World) -> None:
    pair.join("c", loaned=True)
    report = TaskReport(task_id="a-1", stage=Stage.stop, progress=StageProgress.done, error="the owner is back")
    pair.store.tasks.record_reports("c", {"a-1": report.model_dump_json()}, ["a-1"])
    pair.tick()
    pair.gone("b")
    pair.tick()
    tried = pair.store.attempts("a")[0]
    assert (tried.reason, pair.job().state, pair.job().retries_used) == (Reason.node_lost, JobState.scheduled, 0)
    assert "node c has ended it: the owner is back" in tried.message


def test_a_drained_head_has_its_own_job_save(world: World) -> None:
    world.join("head", "b")
    world.add(nodes=1)
    world.tick()
    world.emit(STARTED, PREPARED)
    world.tick()
    world.store.nodes.set_mode("head", "draining")
    world.tick()
    assert (world.job().device, world.local.tasks["a-1"].pauses) == ("cpu", 1)


def test_a_cordoned_node_keeps_its_job_and_gets_no_other(pair: World) -> None:
    pair.store.nodes.set_mode("c", "cordoned")
    pair.add("next", nodes=2)
    pair.join("d")
    pair.tick()
    assert pair.stages() == {Stage.run}
    assert "c is cordoned" in pair.job("next").detail


@pytest.mark.parametrize("versions", [{}, {SPECS: "another"}])
def test_an_agent_of_another_build_keeps_its_training_and_gets_no_other(pair: World, versions: dict[str, str]) -> None:
    pair.join("c", versions=versions)
    pair.add("next", nodes=2)
    pair.join("d")
    pair.tick()
    assert pair.stages() == {Stage.run}
    assert "c is of another build than the service: install the same one there" in pair.job("next").detail
    pair.join("c")
    pair.tick()
    assert "another build" not in pair.job("next").detail


@pytest.mark.parametrize(("rank", "who"), [(0, "node b"), (1, "rank 1 on node c")])
def test_a_rank_that_fails_is_named_with_its_node(pair: World, rank: int, who: str) -> None:
    pair.emit(Failed(rank=rank, reason=Reason.invalid_dataset, message="no rows"))
    for node in "bc":
        pair.exit(node, 1)
    pair.tick()
    pair.gone("b", "c")
    pair.tick()
    assert pair.job().message == f"{who}: no rows"


# Fencing


def test_events_of_a_task_that_was_ordered_to_stop_are_refused(pair: World) -> None:
    size = RunDir(pair.job().run_dir or Path()).events.stat().st_size
    line = STEP.model_dump_json().encode() + b"\n"
    assert pair.uploads.add_events("a-1", "b", size, line) == size + len(line)
    with pytest.raises(Gone, match="no rank 0"):
        pair.uploads.add_events("a-1", "c", 0, line)
    with pytest.raises(Gone, match="no rank 0"):
        pair.uploads.ask("a-1", "c", "checkpoint-2", CheckpointReport(kind="step", files=()))
    with pytest.raises(Gone):
        pair.uploads.add_events("a-1", "d", size + len(line), line)
    pair.store.request_cancel("a")
    pair.tick()
    with pytest.raises(Gone, match="ordered to stop"):
        pair.uploads.add_events("a-1", "b", size + len(line), line)


@pytest.mark.parametrize(("device", "dtype"), [("cuda:0", "bf16"), ("cpu", "fp32")])
def test_a_job_on_auto_trains_in_the_dtype_of_its_node_on_a_service_without_gpus(
    world: World, device: str, dtype: str
) -> None:
    label = {"zone": "b"}
    world.join("b", devices=(DeviceReport(name=device),), labels=label)
    world.add(nodes=1, device="auto", dtype="fp32", dtype_by_device=True, resources={"labels": label})
    world.tick()
    assert world.job().devices == (f"b/{device}",)
    assert world.orders("b")["a-1"].spec["job"]["compute"]["dtype"] == dtype
    assert resources(world.job())["effective_config"]["dtype"] == dtype


def test_all_attempts_of_a_job_on_auto_have_the_kind_of_device_of_the_first(world: World) -> None:
    store = world.store
    world.add(nodes=1, device="auto", dtype="fp32", dtype_by_device=True)
    store.add_job(job_spec("home", device="auto"), "digest")
    assert store.launch("a", 1, "cpu", world.root / "a")
    assert store.launch("home", 1, "cpu", world.root / "home")
    for name in ("a", "home"):
        job = store.get(name)
        assert store.retry(job, Reason.rank_failed, "", 0.0)
    world.join("b", devices=(DeviceReport(name="cuda:0"),))
    assert {job.job_uuid: job.device for job in store.queue()} == {"a": "cpu", "home": "auto"}
    world.tick()
    assert (world.job().devices, world.job().dtype) == (("cpu",), "fp32")


def test_events_of_an_attempt_that_was_replaced_are_refused(pair: World) -> None:
    pair.join("d")
    events = RunDir(pair.job().run_dir or Path()).events
    size = events.stat().st_size
    pair.pass_time(SILENCE + 2, "c", "d")
    pair.gone("c")
    pair.pass_time(8, "c", "d")
    assert pair.job().attempt == 2
    written = events.read_bytes()
    with pytest.raises(Gone):
        pair.uploads.add_events("a-1", "b", size, STEP.model_dump_json().encode() + b"\n")
    assert events.read_bytes() == written


def test_a_checkpoint_of_an_attempt_that_was_replaced_never_becomes_visible(pair: World) -> None:
    staged = pair.root / "checkpoints" / "out" / "a" / "checkpoint-2.1.tmp" / "files"
    staged.mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(b"late")
    write_manifest(staged)
    task = pair.uploads.current("a-1", "b")
    pair.pass_time(SILENCE + 2, "b")
    pair.gone("b")
    pair.pass_time(1, "b")
    with pytest.raises(Gone):
        pair.uploads.ask("a-1", "b", "checkpoint-2", CheckpointReport(kind="step", files=()))
    staged.mkdir(parents=True, exist_ok=True)
    (staged / "model.safetensors").write_bytes(b"late")
    write_manifest(staged)
    files = [CheckpointFileReport(path=name, size=1, sha256="") for name in ("manifest.json", "model.safetensors")]
    report = CheckpointReport(kind="step", files=tuple(files))
    with pytest.raises(Gone, match="ended during the upload of checkpoint-2"):
        pair.uploads._put_in_place(task, staged, pair.root / "checkpoints" / "out" / "a" / "checkpoint-2", report)
    assert not (pair.root / "checkpoints" / "out" / "a" / "checkpoint-2").exists()


def test_it_continues_from_the_checkpoint_that_is_on_the_service(pair: World) -> None:
    pair.join("d")
    place = pair.root / "checkpoints" / "out" / "a" / "checkpoint-2"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"weights")
    write_manifest(place)
    pair.emit(STEP, CheckpointSaved(kind="step", step=2, epoch=1, path=place, train_loss=2.0))
    pair.pass_time(SILENCE + 2, "b", "d")
    pair.gone("b")
    pair.pass_time(8, "b", "d")
    assert AttemptSpec.model_validate(pair.orders("d")["a-2"].spec).resume_from == place


def test_a_job_cannot_be_deleted_while_a_node_may_still_run_it(pair: World) -> None:
    pair.store.request_cancel("a")
    pair.tick()
    pair.gone("b")
    pair.pass_time(SILENCE + 2, "b")
    assert pair.job().state is JobState.cancelled
    with pytest.raises(JobConflict, match="may still have processes on c"):
        pair.store.delete("a")
    pair.store.nodes.remove("c")
    pair.store.delete("a")


def test_of_two_that_ended_in_the_same_moment_rank_0_reports_why(pair: World) -> None:
    pair.exit("c", 1, rank=1)
    pair.exit("b", -9, rank=0)
    pair.tick()
    assert pair.job().message.startswith("rank 0 was killed by SIGKILL")


def test_a_rank_that_fails_after_the_training_was_paused_changes_nothing(pair: World) -> None:
    failed = Failed(reason=Reason.rank_failed, message="lost contact", traceback="", rank=1)
    pair.store.request_pause("a")
    pair.tick()
    pair.emit(Paused(step=2))
    pair.exit("c", 1, failed=failed.model_dump(mode="json"))
    pair.exit("b", 0)
    pair.tick()
    assert pair.job().state is JobState.paused
    assert "lost contact" not in RunDir(pair.job().run_dir or Path()).events.read_text()


@pytest.mark.parametrize(("exit_code", "grace"), [(1, GRACE_FAILED), (0, GRACE_DONE)])
def test_a_node_that_continues_alone_is_ended_after_its_grace(pair: World, exit_code: int, grace: float) -> None:
    pair.exit("c", exit_code)
    pair.tick()
    pair.pass_time(grace - 1, "b", "c")
    assert pair.stages() == {Stage.run}
    pair.pass_time(3, "b")
    assert pair.stages() == {Stage.stop}


def test_the_grace_counts_from_the_first_end_for_the_others_only(world: World) -> None:
    world.join("b", "c", "d")
    world.add(nodes=3)
    world.tick()
    world.run("b", "c", "d")
    world.exit("c", 1)
    world.tick()
    world.pass_time(GRACE_FAILED - 2, "b", "d")
    world.exit("d", 1)
    world.pass_time(4, "b")
    assert world.stages("bcd") == {Stage.stop}


def test_the_grace_waits_for_every_node_that_may_have_gone_down(world: World) -> None:
    world.join("b", "c", "d")
    world.add(nodes=3)
    world.tick()
    world.run("b", "c", "d")
    world.clock.advance(1)
    world.exit("c", 1)
    world.tick()
    world.pass_time(GRACE_FAILED + 2, "b", "c")
    assert world.stages("bcd") == {Stage.run}
    world.pass_time(4, "b", "c")
    world.gone("b", "c")
    world.tick()
    assert "node d is silent since" in world.store.attempts("a")[0].message


def test_a_node_that_ended_well_and_went_home_is_not_missed(pair: World) -> None:
    pair.exit("c", 0)
    pair.tick()
    pair.pass_time(SILENCE + 2, "b")
    assert pair.stages() == {Stage.run}
    pair.emit(Finished(step=4))
    pair.exit("b", 0)
    pair.tick()
    assert pair.job().state is JobState.completed


def test_rank_0_s_node_is_missed_as_long_as_it_has_something_to_ship(pair: World) -> None:
    pair.exit("c", 0)
    pair.exit("b", 0, shipped=False)
    pair.tick()
    pair.pass_time(SILENCE + 2, "c")
    pair.gone("c")
    pair.tick()
    assert "node b is silent since" in pair.store.attempts("a")[0].message


def test_a_node_that_lost_its_task_and_then_fell_silent_has_lost_it(pair: World) -> None:
    pair.gone("c")
    while pair.presence.silence("c") <= SILENCE:
        pair.clock.advance(4)
        pair.presence.note_call("b")
    pair.tick()
    pair.gone("b")
    pair.tick()
    assert "node c no longer has the task" in pair.store.attempts("a")[0].message


def test_a_hang_counts_before_the_error_that_it_led_to(pair: World) -> None:
    pair.exit("b", 1, rank=0)
    pair.tick()
    pair.exit("c", -15, ended=Ended.hung)
    pair.tick()
    assert pair.job().reason is Reason.hung


def test_ranks_that_could_not_be_started_are_reported_with_their_node(pair: World) -> None:
    pair.exit("b", 1, rank=0)
    pair.tick()
    pair.exit("c", None, launch_error="no python there")
    pair.tick()
    assert pair.job().reason is Reason.launch_failed
    assert "node c: no python there" in pair.job().message


def test_a_stage_that_fails_without_a_word_is_named(world: World) -> None:
    world.join("b", "c")
    world.add()
    world.tick()
    world.report("c", "prepare", "failed")
    world.tick()
    world.gone("b", "c")
    world.tick()
    assert "node c: prepare failed without a reason" in world.job().message


def test_a_node_that_does_not_report_where_it_listens_is_not_prepared(world: World) -> None:
    world.join("b", "c")
    world.add()
    world.tick()
    world.report("b", "prepare", port=29500)
    world.report("c", "prepare")
    assert world.launcher.poll(world.task()).state is TaskState.waiting
    assert world.stages() == {Stage.prepare}


def test_ranks_that_wait_for_a_device_wait_and_do_not_run(pair: World) -> None:
    assert pair.launcher.poll(pair.task()).state is TaskState.running
    pair.report("c", "run", "working", observation=seen(TaskState.waiting, detail="cpu is held"))
    found = pair.launcher.poll(pair.task())
    assert (found.state, found.detail) == (TaskState.waiting, "c: cpu is held")
    for node in "bc":
        pair.report(node, "run", "working")
    assert pair.launcher.poll(pair.task()).state is TaskState.waiting  # nothing was started


def test_a_training_that_has_not_begun_is_not_ordered_to_pause(world: World) -> None:
    world.join("b", "c")
    world.add()
    world.tick()
    world.launcher.pause(world.task())
    assert world.stages() == {Stage.prepare}  # from pause it would continue to train unprobed


def test_tasks_on_this_machine_alone_go_to_its_own_launcher(world: World) -> None:
    world.store.add_job(job_spec("a", checkpoint_dir=world.root / "checkpoints" / "out"), "digest")
    world.tick()
    world.launcher.pause(world.task())
    assert world.local.tasks["a-1"].pauses == 1
    assert world.launcher.sweep(world.root, [world.task().run_dir]) == []
    assert world.launcher.sweep(world.root, []) == [world.task().run_dir]
    world.launcher.cancel(world.task())
    assert world.local.tasks["a-1"].cancels == 1
    assert world.store.tasks.of_attempt("a-1") == []


def test_limits_of_time_reach_the_nodes(world: World) -> None:
    world.start(hang_timeout=70.0)
    world.join("b", "c")
    world.add(max_duration=3600.0)
    world.tick()
    assert {(order.time_limit, order.hang_timeout) for order in (world.orders("b")["a-1"],)} == {(3600.0, 70.0)}


def test_the_service_s_own_machine_is_what_the_service_finds_whatever_its_agent_reports(world: World) -> None:
    world.join("head", machine_id="container", devices=(DeviceReport(name="cuda:0"),), cpus=7)
    (head,) = world.cluster.nodes()
    assert (head.devices, head.machine, head.cpus) == (("cpu",), "machine of head", 7)
    assert (head.head, head.joins, head.why_closed) == (True, True, "")
    world.store.nodes.set_mode("head", "cordoned")
    assert world.cluster.nodes()[0].why_closed == "cordoned"


def test_ranks_of_a_job_are_placed_on_whole_gpus_of_a_node_that_reports_slices(world: World) -> None:
    sliced = (DeviceReport(name="cuda:0", is_slice=True), DeviceReport(name="cuda:1"), DeviceReport(name="cuda:2"))
    world.join("b", devices=sliced)
    world.add(nodes=1, ranks=2, device="cuda", resources={"cpus": 1})
    world.tick()
    assert world.job().device == "b/cuda:1,b/cuda:2"


def test_slices_of_the_service_s_own_machine_are_those_that_it_finds(world: World) -> None:
    cluster = Cluster(world.store, world.presence, "head", "machine of head", ["cuda:0", "cuda:1"], 4, ["cuda:1"])
    world.join("head", devices=(DeviceReport(name="cuda:0", is_slice=True),))
    assert cluster.nodes()[0].slices == {"cuda:1"}


def test_it_joins_others_only_while_its_agent_calls(world: World) -> None:
    world.join("head")
    assert world.cluster.nodes()[0].joins
    for _ in range(5):
        world.clock.advance(4)
        world.presence.silence("head")
    assert (world.cluster.nodes()[0].joins, world.cluster.nodes()[0].why_closed) == (False, "")
    world.start()
    assert not world.cluster.nodes()[0].joins


def test_a_job_finds_the_node_with_its_labels_and_its_model(world: World) -> None:
    world.join("b")
    world.join("c", labels={"rack": "7"})
    world.join("d", labels={"rack": "7"}, models=("org/model",))
    world.add(nodes=1, resources={"labels": {"rack": "7"}})
    world.add("next", nodes=1, model="org/model", resources={"model_present": True})
    world.tick()
    assert (world.job().device, world.job("next").device) == ("c/cpu", "d/cpu")


def test_a_node_that_was_removed_has_never_called() -> None:
    clock = FakeClock()
    presence = Presence(clock)
    clock.advance(1)
    presence.note_call("b")
    clock.advance(1)
    assert (presence.has_called("b"), presence.silence("b"), presence.silence("c")) == (True, 1, 2)
    presence.forget("b")
    assert (presence.has_called("b"), presence.silence("b")) == (False, 2)


def test_calls_missed_while_the_service_was_stopped_make_no_node_silent() -> None:
    clock = FakeClock()
    presence = Presence(clock)
    presence.note_call("b")
    for seconds, silence in ((5, 5), (5.5, 0), (4, 4), (3600, 0)):
        clock.advance(seconds)
        assert presence.silence("b") == silence
