"""The agent of a node, from joining to the last byte that a task leaves; processes and service are played."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import ServiceRefusal
from llama_stack_provider_trl.launch.base import Observation, TaskState
from llama_stack_provider_trl.launch.torchrun import LOOPBACK, training_environment
from llama_stack_provider_trl.specs.events import CheckpointSaved, Failed, Finished, Reason
from llama_stack_provider_trl.system.files import write_manifest
from llama_stack_provider_trl_remote.nodes import agent as agents
from llama_stack_provider_trl_remote.nodes import task as tasks
from llama_stack_provider_trl_remote.nodes import uploader
from llama_stack_provider_trl_remote.nodes.agent import Agent
from llama_stack_provider_trl_remote.nodes.identity import CredentialFile, NodeError
from llama_stack_provider_trl_remote.nodes.inputs import Inputs
from llama_stack_provider_trl_remote.nodes.localize import PathMap
from llama_stack_provider_trl_remote.nodes.outbox import Outbox
from llama_stack_provider_trl_remote.nodes.task import RECORD, NodeTask
from llama_stack_provider_trl_remote.nodes.uploader import Uploader
from llama_stack_provider_trl_remote.pull import OtherBytes
from llama_stack_provider_trl_remote.wire import OwnerUse, Peer, Stage
from llama_stack_provider_trl_remote.wire import StageProgress as Going
from tests.fake_head import FakeHead, away, refusal
from tests.orders import order, spec, write
from tests.unit.agent_world import DIGEST, ROWS, FakeOwner, World, progress
from tests.unit.agent_world import world as world

pytestmark = pytest.mark.timeout(30)
HOUR = 3600.0


def test_a_task_runs_with_this_nodes_paths_and_all_its_events_reach_the_service(world: World) -> None:
    async def play(head: FakeHead) -> None:
        head.order(world.order(Stage.prepare))
        report = await head.reported(lambda report: report.progress is Going.done)
        assert report.port
        assert world.launcher.started == []
        master = Peer(node="b", address="127.0.0.1", port=report.port)
        await world.begin(master=master, time_limit=60.0, hang_timeout=5.0)
        task = world.launcher.tasks["job-1"].spec
        assert (task.run_dir, task.devices, task.master_port) == (world.run_dir, ("cpu",), report.port)
        assert (task.nodes, task.address, task.master_addr) == (1, LOOPBACK, LOOPBACK)
        assert (task.time_limit, task.hang_timeout) == (60.0, 5.0)
        with socket.create_server(("127.0.0.1", report.port)):
            pass  # the probe has left it to the ranks
        assert json.loads((world.run_dir / "spec.json").read_text())["run_dir"] == str(world.run_dir)
        assert (world.data_dir / "datasets" / f"{DIGEST}.jsonl").read_bytes() == ROWS
        world.launcher.print("job-1", "epoch 1\n")
        world.emit(progress(1), world.save("checkpoint-1"), progress(2), world.save("final", "final"), Finished(step=2))
        await head.until(lambda: len(head.received_events) == 5)
        kinds = [event["type"] for event in head.received_events]
        assert kinds == ["progress", "progress", "checkpoint", "checkpoint", "finished"]
        assert head.received_events[2]["path"] == "/service/checkpoints/job/checkpoint-1"
        assert head.checkpoints["checkpoint-1"]["additional_chat_templates/a.jinja"] == b"checkpoint-1"
        assert "manifest.json" in head.checkpoints["final"]
        assert not any(task.shipped for poll in head.polls for task in poll.tasks)
        world.launcher.exit("job-1", 0)
        report = await head.reported(lambda report: report.shipped)
        assert report.observation is not None
        assert (report.progress, report.observation["exit_code"]) == (Going.done, 0)
        assert head.logs["rank-0.log"] == b"epoch 1\n"
        head.order()
        await head.until(lambda: not world.home.exists())

    world.run(play)
    assert len(world.head.joined) == 1
    assert world.launcher.started == ["job-1"]
    assert world.launcher.tasks["job-1"].cancels == 0


def test_an_agent_whose_machine_is_taken_away_ends_once_its_jobs_have_saved(world: World) -> None:
    agents_: list[Agent] = []
    made = world.agent
    world.agent = lambda: agents_.append(made()) or agents_[-1]  # type: ignore[func-returns-value, method-assign]

    async def play(head: FakeHead) -> None:
        await world.begin()
        agents_[0].leave()
        await head.until(lambda: head.polls[-1].leaving)
        head.release()
        await head.until(lambda: len(head.polls) > 3)
        head.order(world.order(Stage.stop))  # the service has paused the job
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.stage is Stage.stop)
        head.order()
        await asyncio.Event().wait()

    world.run(play)  # ends with the agent
    assert not world.head.polls[0].leaving
    assert world.launcher.started == ["job-1"]


def test_files_of_a_job_are_removed_once_the_service_reports_that_it_is_over(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        world.emit(world.save("checkpoint-1"))
        world.launcher.exit("job-1", 1)
        await head.reported(lambda report: report.shipped)
        assert head.kept == []  # a task is here
        head.order()
        await head.until(lambda: head.kept == ["job"])
        assert (world.home / "checkpoints" / "checkpoint-1").exists()  # its next attempt may come here
        head.over = {"job", "other", ".."}
        head.release()
        await head.until(lambda: not world.home.exists())
        assert world.data_dir.exists()
        await head.until(lambda: head.kept == [])

    world.run(play)


def test_an_agent_sends_its_log_until_the_service_has_it(world: World) -> None:
    world.heartbeat_interval = 0.01
    for number in range(1, 102):
        world.unsent.handle(logging.makeLogRecord({"msg": f"entry {number}"}))

    async def play(head: FakeHead) -> None:
        await head.until(lambda: any(poll.log and poll.log.number == 101 for poll in head.polls))
        await head.until(lambda: not head.polls[-1].log)

    world.run(play)
    sent = [poll.log for poll in world.head.polls if poll.log]
    assert {log.run for log in sent} == {sent[0].run}
    received = {log.number + place: line for log in sent for place, line in enumerate(log.lines)}
    assert received == {number: f"entry {number}" for number in range(1, 102)}


def test_an_agent_of_a_loaned_machine_reports_its_owners_use_at_once(world: World) -> None:
    world.owner = owner = FakeOwner()

    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls and head.polls[-1].owner is OwnerUse.unknown)
        owner.uses(OwnerUse.low)
        await head.until(lambda: head.polls[-1].owner is OwnerUse.low)

    world.run(play)
    world.owner = None
    world.run(lambda head: head.until(lambda: head.polls[-1].owner is None))


def test_a_task_that_has_not_ended_when_the_owner_needs_the_machine_is_ended_once(world: World) -> None:
    world.owner = owner = FakeOwner()

    async def play(head: FakeHead) -> None:
        head.order(world.order())
        await head.until(lambda: "job-1" in world.launcher.tasks)
        owner.uses(OwnerUse.high)
        await head.until(lambda: owner.measured[-1] == [world.run_dir])
        assert world.launcher.tasks["job-1"].cancels == 0
        owner.overdue = True
        await head.reported(lambda report: report.stage is Stage.stop)
        report = await head.reported(lambda report: report.progress is Going.done)
        assert report.error.startswith("the owner of this machine uses it")
        head.order()  # the service has given the job to another node
        await head.until(lambda: not world.run_dir.exists())

    world.run(play)
    assert world.launcher.tasks["job-1"].cancels == 1


def test_a_task_that_has_ended_may_still_upload_when_the_owner_needs_the_machine(world: World) -> None:
    world.owner = owner = FakeOwner()

    async def play(head: FakeHead) -> None:
        head.order(world.order())
        await head.until(lambda: "job-1" in world.launcher.tasks)
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.shipped)
        owner.overdue = True
        await head.until(lambda: len(owner.measured) > 4)
        await head.reported(lambda report: report.stage is Stage.run)

    world.run(play)


def test_an_agent_calls_again_after_its_heartbeat_interval(world: World) -> None:
    world.heartbeat_interval = 0.01

    async def play(head: FakeHead) -> None:
        await head.until(lambda: len(head.polls) == 6)  # the service answers none of the waiting ones

    world.run(play)
    assert [poll.seen for poll in world.head.polls][1:5] == [-1, 0, -1, 0]
    assert [poll.number for poll in world.head.polls] == [1, 2, 3, 4, 5, 6]
    assert len({poll.run for poll in world.head.polls} - {""}) == 1
    assert {poll.load for poll in world.head.polls} == {world.load()}


def test_an_agent_that_is_started_again_continues_where_it_was(world: World) -> None:
    async def first(head: FakeHead) -> None:
        await world.begin()
        head.only, head.trouble = "upload", [away() for _ in range(10_000)]
        world.emit(world.save("checkpoint-1"), progress(2))
        await head.until(lambda: len(head.received_events) == 1)

    async def second(head: FakeHead) -> None:
        head.trouble = []
        world.emit(progress(3))
        await head.until(lambda: len(head.received_events) == 3)
        world.emit(Finished(step=3))
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.shipped)

    world.run(first)
    assert world.launcher.tasks["job-1"].seen.state is TaskState.running  # it outlives the agent
    world.run(second)
    assert sorted(event.get("step") for event in world.head.received_events) == [1, 2, 3, 3]
    assert [event["type"] for event in world.head.received_events].count("checkpoint") == 1
    assert world.launcher.started == ["job-1"]


def test_what_the_service_does_not_want_any_more_is_ended_and_removed(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        world.emit(world.save("checkpoint-1"))
        await head.until(lambda: head.received_events)
        head.order(world.order(Stage.stop))
        report = await head.reported(lambda report: report.progress is Going.done)
        assert report.stage is Stage.stop
        assert report.observation is not None
        assert report.observation["state"] == "exited"
        head.order()
        await head.until(lambda: not world.run_dir.exists())
        assert head.polls[-1].tasks or head.polls[-1].seen
        assert (world.home / "checkpoints" / "checkpoint-1").exists()  # its next attempt may come here

    world.run(play)
    assert world.launcher.tasks["job-1"].cancels == 1


@pytest.mark.parametrize("only", ["events", "log", "offer", "upload"])
def test_a_task_of_which_nothing_is_taken_any_more_ends(world: World, only: str) -> None:
    async def play(head: FakeHead) -> None:
        head.only, head.trouble = only, [refusal(410, "attempt 2 runs elsewhere")]
        await world.begin()
        world.launcher.print("job-1", "x")
        world.emit(progress(1), world.save("checkpoint-1"))
        report = await head.reported(lambda report: report.stage is Stage.stop and report.progress == "done")
        assert "attempt 2 runs elsewhere" in report.error

    world.run(play)
    assert world.launcher.tasks["job-1"].seen.exit_code == -15


@pytest.mark.parametrize(
    ("only", "trouble"),
    [
        *((only, away) for only in ("poll", "events", "log", "offer", "upload", "listed", "join")),
        *((only, lambda: refusal(507, "full")) for only in ("events", "upload")),
        *((only, lambda: refusal(503)) for only in ("poll", "join")),
    ],
)
def test_a_service_that_is_away_for_a_minute_costs_nothing(world: World, only: str, trouble: Any) -> None:
    async def play(head: FakeHead) -> None:
        # What is still listed is requested once for every checkpoint.
        head.only, head.trouble = only, [trouble() for _ in range(1 if only == "listed" else 30)]
        await world.begin(job={"best_checkpoint": "eval_loss"})
        world.launcher.print("job-1", "x")
        world.emit(progress(1), world.save("checkpoint-1"), Finished(step=1))
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.shipped)

    world.run(play)
    assert not world.head.trouble
    assert [event["type"] for event in world.head.received_events] == ["progress", "checkpoint", "finished"]
    assert world.launcher.started == ["job-1"]
    assert world.launcher.tasks["job-1"].cancels == 0


def test_a_task_can_be_ended_after_its_operator_has_withdrawn_a_consent(world: World) -> None:
    code = {"job": {"model": "org/name", "revision": "a1b2", "trust_remote_code": True}}
    world.trusted = ("org/name@a1b2",)

    async def begin(head: FakeHead) -> None:
        await world.begin(**code)

    world.run(begin)
    world.trusted = ()

    async def end(head: FakeHead) -> None:
        head.order(world.order(Stage.stop, **code))
        await head.until(lambda: world.launcher.tasks["job-1"].cancels)

    world.run(end)


@pytest.fixture
def ended(world: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When tasks were ended: the end itself takes a thread's time, in which the world's clock runs on."""
    ended: list[float] = []
    end = NodeTask.end

    def noted(task: NodeTask, why: str) -> None:
        ended.append(world.clock())
        end(task, why)

    monkeypatch.setattr(NodeTask, "end", noted)
    return ended


@pytest.mark.parametrize("trouble", [away(), refusal(401), refusal(403), refusal(429), refusal(500), refusal(503)])
def test_without_the_service_a_node_trains_on_and_delivers_everything_later(
    world: World, ended: list[float], trouble: Exception
) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        await head.until(lambda: head.polls[-1].tasks)
        began = world.clock()
        head.only, head.trouble = "", [trouble] * 1_000_000
        head.release()
        world.emit(world.save("checkpoint-1"))
        await head.until(lambda: world.clock() - began > HOUR / 3)
        assert world.launcher.tasks["job-1"].seen.state is TaskState.running
        assert not head.checkpoints
        head.trouble = []
        await head.until(lambda: "checkpoint-1" in head.checkpoints)
        await head.until(lambda: any(event["type"] == "checkpoint" for event in head.received_events))

    world.run(play)
    assert not ended


def test_what_a_node_reports_all_the_time_hides_neither_a_service_that_is_there_nor_one_that_is_gone(
    world: World, ended: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        task = world.launcher.tasks["job-1"]

        async def chatter(until: float) -> None:
            while world.clock() < until:
                task.seen = replace(task.seen, detail=str(world.clock()))
                await asyncio.sleep(0)

        await chatter(world.clock() + 600)
        assert "trainings continue" not in caplog.text
        head.cut = True
        async with asyncio.timeout(60):  # of real time: the node does not only wait by the world's clock
            while "trainings continue" not in caplog.text:
                await chatter(world.clock() + 1)

    world.run(play)
    assert not ended


def test_only_the_node_with_rank_0_ships_events_and_the_others_report_a_failure(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin(node_rank=1, time_limit=60.0, hang_timeout=5.0)
        task = world.launcher.tasks["job-1"].spec
        assert (task.node_rank, task.time_limit, task.hang_timeout) == (1, None, None)  # it sees no progress
        write(world.run_dir / "rank-1.log", b"boom\n")
        write(world.run_dir / "torchrun.log", b"met\n")
        world.emit(Failed(rank=1, reason=Reason.rank_failed, message="boom"))
        world.launcher.exit("job-1", 1, rank=1)
        report = await head.reported(lambda report: report.shipped)
        assert report.failed is not None
        assert (report.failed["message"], report.failed["rank"]) == ("boom", 1)

    world.run(play)
    assert world.head.events == b""
    assert world.head.logs == {"rank-1.log": b"boom\n", "torchrun.log": b"met\n"}


def test_a_log_that_is_far_behind_is_cut_short(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        world.launcher.print("job-1", "a" * (3 << 20) + "end")
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.shipped)

    world.run(play)
    log = world.head.logs["rank-0.log"]
    assert log.endswith(b"aend")
    assert world.head.skipped["rank-0.log"] == len(log) - (1 << 18)


@pytest.mark.parametrize(
    ("best", "left"),
    [(None, {"checkpoint-5"}), ("eval_loss", {"checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-5"})],
)
def test_of_the_uploaded_checkpoints_the_newest_and_the_best_stay_here(
    world: World, best: str | None, left: set[str]
) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin(job={"best_checkpoint": best})
        world.emit(*(world.save(f"checkpoint-{step}") for step in (1, 2, 3)))
        await head.until(lambda: len(head.received_events) == 3)
        head.listed = {"checkpoint-1", "checkpoint-3", "final"}  # of the fourth the service has no report yet
        world.emit(*(world.save(f"checkpoint-{step}") for step in (4, 5)))
        await head.until(lambda: len(head.received_events) == 5)
        assert {path.name for path in (world.home / "checkpoints").iterdir()} == left

    world.run(play)


def test_the_training_reads_the_number_of_pending_uploads(world: World) -> None:
    uploads = world.run_dir / "uploads"

    async def play(head: FakeHead) -> None:
        head.order(world.order())
        await head.until(lambda: uploads.exists() and uploads.read_text() == "0")
        head.only, head.trouble = "offer", [away() for _ in range(1000)]
        world.emit(world.save("checkpoint-1"), world.save("checkpoint-2"))
        await head.until(lambda: uploads.read_text() == "2")
        head.trouble = []
        await head.until(lambda: uploads.read_text() == "0")

    world.run(play)


def test_a_checkpoint_that_is_damaged_here_ends_the_attempt(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        saved = world.save("checkpoint-1")
        write(saved.path / "additional_chat_templates" / "a.jinja", b"short")
        world.emit(saved, progress(2))
        report = await world.failure()
        assert "damaged before it could be uploaded" in report.error
        assert report.failed is not None
        assert report.failed["reason"] == "rank_failed"
        assert [event["type"] for event in head.received_events if event["type"] != "progress"] == []

    world.run(play)
    assert not world.head.checkpoints


def test_an_event_that_the_service_will_never_take_ends_the_attempt(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        head.only, head.trouble = "events", [refusal(400, "it does not exist: upload its files before its event")]
        world.emit(progress(1))
        report = await world.failure()
        assert "upload its files before its event" in report.error

    world.run(play)


def test_a_task_begins_with_the_services_checkpoint(world: World) -> None:
    source = world.root / "service" / "checkpoint-6"
    write(source / "additional_chat_templates" / "a.jinja", b"weights")
    write_manifest(source)
    damaged = world.root / "service" / "checkpoint-8"
    shutil.copytree(source, damaged)
    write(damaged / "additional_chat_templates" / "a.jinja", b"weight")
    world.head.sources = {("job", "checkpoint-6"): source, ("job", "checkpoint-8"): damaged}
    theirs = "/service/checkpoints/job"
    resuming = world.order()
    resuming.spec.update(resume_from=f"{theirs}/checkpoint-8", fall_back_to=[f"{theirs}/checkpoint-6"])

    async def play(head: FakeHead) -> None:
        await world.begin(resuming)

    world.run(play)
    written = json.loads((world.run_dir / "spec.json").read_text())
    here = world.home / "checkpoints" / "checkpoint-6"
    assert (written["resume_from"], written["fall_back_to"]) == (str(here), [])
    assert (here / "additional_chat_templates" / "a.jinja").read_bytes() == b"weights"
    fetched = [call for call in world.head.calls if call.startswith("file checkpoint-6")]
    assert fetched == ["file checkpoint-6/additional_chat_templates/a.jinja", "file checkpoint-6/manifest.json"]
    # The next attempt on this node finds it, and does not take what has changed meanwhile for it.
    later = resuming.model_copy(update={"task_id": "job-2", "attempt": 2})

    async def again(head: FakeHead) -> None:
        head.order(later)
        await head.until(lambda: "job-2" in world.launcher.started)

    world.run(again)
    assert [call for call in world.head.calls if call.startswith("file checkpoint-6")] == fetched
    write(here / "additional_chat_templates" / "a.jinja", b"WEIGHTS")

    async def third(head: FakeHead) -> None:
        head.order(later.model_copy(update={"task_id": "job-3", "attempt": 3}))
        await head.until(lambda: "job-3" in world.launcher.started)

    world.run(third)
    assert (here / "additional_chat_templates" / "a.jinja").read_bytes() == b"weights"


def test_a_job_that_begins_with_another_ones_checkpoint_fetches_its_own_copy(world: World) -> None:
    theirs = "/service/jobs/job/resume/3f/checkpoint-2"
    source = world.root / "service" / "checkpoint-2"
    write(source / "additional_chat_templates" / "a.jinja", b"weights")
    write_manifest(source)
    world.head.sources = {("job", "resume-from"): source}
    given = {"job_uuid": "deleted", "checkpoint": "checkpoint-2", "path": theirs}
    order = world.order(job={"resume_from": given})
    order.spec.update(resume_from=theirs)

    async def play(head: FakeHead) -> None:
        await world.begin(order)

    world.run(play)
    written = json.loads((world.run_dir / "spec.json").read_text())
    here = world.home / "borrowed" / "checkpoint-2"
    assert (written["resume_from"], written["job"]["resume_from"]["path"]) == (str(here), str(here))
    assert (here / "additional_chat_templates" / "a.jinja").read_bytes() == b"weights"


def test_with_the_services_disk_in_sight_checkpoints_go_straight_there(world: World) -> None:
    theirs = world.root / "service" / "checkpoints"
    mark = write(theirs / ".shared", b"job-1")
    write(theirs / "checkpoint-1" / "a.json", b"a")
    write_manifest(theirs / "checkpoint-1")
    shared = world.order(shared_mark=str(mark), job={"checkpoint_dir": str(theirs)})
    shared.spec["resume_from"] = str(theirs / "checkpoint-1")

    async def play(head: FakeHead) -> None:
        await world.begin(shared)
        saved = CheckpointSaved(kind="final", step=2, epoch=1, path=theirs / "final", train_loss=None)
        world.emit(saved, Finished(step=2))
        await head.until(lambda: len(head.received_events) == 2)

    world.run(play)
    assert world.head.received_events[0]["path"] == str(theirs / "final")
    written = json.loads((world.run_dir / "spec.json").read_text())
    assert (written["resume_from"], written["turn"]) == (str(theirs / "checkpoint-1"), str(mark))
    assert not (world.run_dir / "uploads").exists()  # nothing leaves this disk: who finds it full need not wait
    assert not [call for call in world.head.calls if call.startswith(("offer", "upload", "file"))]


def test_an_agent_that_is_started_again_knows_that_it_sees_the_services_disk(world: World) -> None:
    theirs = world.root / "service" / "checkpoints"
    mark = write(theirs / ".shared", b"job-1")

    async def first(head: FakeHead) -> None:
        await world.begin(shared_mark=str(mark), job={"checkpoint_dir": str(theirs)})

    async def second(head: FakeHead) -> None:
        await head.reported(lambda report: report.observation)
        for step in (1, 2):
            path = theirs / f"checkpoint-{step}"
            write_manifest(write(path / "a.json", b"a").parent)
            world.emit(CheckpointSaved(kind="step", step=step, epoch=1, path=path, train_loss=None))
        await head.until(lambda: len(head.received_events) == 2)

    world.run(first)
    world.run(second)
    assert (theirs / "checkpoint-1").exists()  # the service's own, and only it knows which are needed
    assert not [call for call in world.head.calls if call.startswith(("offer", "upload"))]


def test_a_disk_that_another_attempt_has_marked_is_not_the_services(world: World) -> None:
    theirs = world.root / "service" / "checkpoints"
    mark = write(theirs / ".shared", b"job-0")  # of the same path on another disk, where it was left

    async def play(head: FakeHead) -> None:
        await world.begin(shared_mark=str(mark), job={"checkpoint_dir": str(theirs)})

    world.run(play)
    written = json.loads((world.run_dir / "spec.json").read_text())
    assert (written["turn"], written["job"]["checkpoint_dir"]) == (None, str(world.home / "checkpoints"))


@pytest.mark.parametrize("path", ["../../../evil", "pytorch_model.bin", "modeling_own.py", "optimizer/evil.pkl"])
def test_a_checkpoint_that_holds_more_than_its_data_is_not_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    requested = world.order()
    requested.spec["resume_from"] = "/service/checkpoints/job/checkpoint-1"

    async def files(job_uuid: str, checkpoint: str) -> list[dict[str, Any]]:
        return [{"path": path, "size": 1, "sha256": "0" * 64}]

    monkeypatch.setattr(world.head, "checkpoint_files", files)

    assert f"checkpoint file='{path}' is not supported" in world.fail(requested).error
    assert not [call for call in world.head.calls if call.startswith("file ")]
    assert not world.launcher.started


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"job": {"model": "/models/big"}}, "the model /models/big is not on node b"),
        (
            {"job": {"method": {"algorithm": "dpo", "reference": {"source": {"model": "/models/ref"}}}}},
            "the model /models/ref is not on node b",
        ),
    ],
)
def test_a_model_that_is_not_here_is_named(world: World, changes: Any, text: str) -> None:
    async def play(head: FakeHead) -> None:
        report = await world.failure(world.order(Stage.prepare, **changes))
        assert text in report.error
        assert report.lasting
        head.order(world.order(Stage.stop, **changes))
        await head.reported(lambda report: report.progress is Going.done)

    world.run(play)
    assert world.launcher.started == []


def test_a_peer_that_does_not_answer_fails_the_probe(world: World) -> None:
    async def play(head: FakeHead) -> None:
        head.order(world.order(Stage.prepare, nodes=2))
        report = await head.reported(lambda report: report.progress is Going.done)
        assert report.port is not None
        unreachable = Peer(node="a", address="127.0.0.1", port=1)
        report = await world.failure(world.order(Stage.probe, nodes=2, master=unreachable, peers=(unreachable,)))
        assert "node b cannot reach node a at 127.0.0.1 port 1" in report.error
        assert not report.lasting

    world.run(play)


@pytest.mark.parametrize("only", ["rows", "files", "file "])
@pytest.mark.parametrize("trouble", [away, lambda: refusal(503)])
def test_a_service_that_is_away_while_a_task_is_prepared_costs_no_attempt(
    world: World, only: str, trouble: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    source = world.root / "service" / "checkpoint-6"
    write(source / "additional_chat_templates" / "a.jinja", b"weights")
    write_manifest(source)
    world.head.sources = {("job", "checkpoint-6"): source}
    resuming = world.order()
    resuming.spec.update(resume_from="/service/checkpoints/job/checkpoint-6")

    async def play(head: FakeHead) -> None:
        head.only, head.trouble = only, [trouble() for _ in range(40)]
        await world.begin(resuming)
        assert not any(task.error for poll in head.polls for task in poll.tasks)

    world.run(play)
    assert caplog.text.count("task job-1: the training service at") == 1


@pytest.mark.parametrize("trouble", [refusal(404, "no such blob"), OtherBytes("http://head:8322", "sent other bytes")])
def test_what_the_service_does_not_have_fails_the_attempt(world: World, trouble: Exception) -> None:
    async def play(head: FakeHead) -> None:
        head.only, head.trouble = "rows", [trouble]
        head.order(world.order())
        await head.reported(lambda report: report.progress is Going.failed)

    world.run(play)
    assert world.launcher.started == []


@pytest.mark.parametrize(("times", "fails"), [(29, False), (30, True)])
def test_a_service_that_fails_for_a_minute_at_what_a_task_needs_fails_the_attempt(
    world: World, times: int, fails: bool
) -> None:
    async def play(head: FakeHead) -> None:
        head.only, head.trouble = "rows", [refusal(500, "it has a bug") for _ in range(times)]
        head.order(world.order())
        await head.until(lambda: world.launcher.started or ((report := head.report()) and report.error))
        report = head.report()
        assert report is not None
        assert bool(report.error) == fails
        assert "it has a bug" in report.error or not fails

    world.run(play)
    assert bool(world.launcher.started) != fails


def test_a_task_that_waits_for_the_service_can_be_stopped(world: World) -> None:
    async def play(head: FakeHead) -> None:
        head.only, head.trouble = "rows", [away() for _ in range(100_000)]
        head.order(world.order())
        await head.reported(lambda report: "accepts no connection" in report.detail)
        head.order(world.order(Stage.stop))
        await head.reported(lambda report: report.progress is Going.done)

    world.run(play)


def test_an_unexpected_error_is_named(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        write(world.run_dir / "events.jsonl", b"\0\0\n")
        report = await world.failure()
        assert report.error.startswith("JSONDecodeError: ")

    world.run(play)


@pytest.mark.parametrize("stage", [Stage.prepare, Stage.probe])
def test_an_agent_that_is_started_again_before_the_ranks_listens_where_it_did(world: World, stage: Stage) -> None:
    ports: list[int | None] = []

    async def play(head: FakeHead) -> None:
        head.polls.clear()
        head.order(world.order(stage if ports else Stage.prepare, nodes=2))
        report = await head.reported(
            lambda report: report.progress is not Going.working and report.stage in ("prepare", stage)
        )
        assert report.error == ""
        ports.append(report.port)

    world.run(play)
    world.run(play)
    assert ports[0]
    assert ports[0] == ports[1]


def test_a_training_that_cannot_be_started_is_reported(world: World) -> None:
    world.launcher.refuse = OSError("no runner")
    assert "no runner" in world.fail(world.order()).error


def test_a_full_disk_ends_the_task_and_not_the_agent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(head: FakeHead) -> None:
        monkeypatch.setattr(tasks.NodeTask, "_keep", lambda task: _full(task.paths.run_dir))
        report = await world.failure(world.order(Stage.prepare))
        assert "No space left on device" in report.error
        assert str(world.run_dir) in report.error
        head.order(world.order(Stage.stop))
        await head.reported(lambda report: report.progress is Going.done)

    world.run(play)
    assert world.launcher.started == []


def test_a_disk_that_fills_up_later_stops_no_training(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        monkeypatch.setattr(tasks.NodeTask, "_keep", lambda task: _full(task.paths.run_dir))
        head.order(world.order(Stage.pause))
        await head.until(lambda: world.launcher.tasks["job-1"].pauses)

    world.run(play)


def _full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_what_ran_in_another_boot_is_gone_with_its_directory(world: World) -> None:
    async def first(head: FakeHead) -> None:
        await world.begin()

    async def second(head: FakeHead) -> None:
        head.order()
        await head.until(lambda: len(head.joined) == 2 and head.polls[-1].boot_id == "boot-2")
        assert head.polls[-1].tasks == ()

    world.run(first)
    assert (world.run_dir / RECORD).exists()
    world.boot_id = "boot-2"
    world.run(second)
    assert not world.run_dir.exists()
    assert world.launcher.tasks["job-1"].seen.exit_code == -9  # swept


@pytest.mark.parametrize(("call", "status"), [("join", 409), ("join", 401), ("both", 409), ("both", 410)])
def test_a_node_that_is_not_taken_ends_with_the_services_sentence(world: World, call: str, status: int) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        head.only, head.trouble = "", [refusal(status, "because")] * 2
        head.release()
        await asyncio.Event().wait()

    if call == "join":
        world.head.only, world.head.trouble = "join", [refusal(status, "because")]
    with pytest.raises(ServiceRefusal, match="because"):
        world.run(play)
    assert all(task.seen.state is TaskState.exited for task in world.launcher.tasks.values())
    assert len(world.launcher.tasks) == (call != "join")


@pytest.mark.parametrize(
    ("only", "status"), [*(("join", status) for status in (400, 401, 403, 429)), ("poll", 403), ("poll", 429)]
)
def test_a_node_that_had_joined_bears_refusals(
    world: World, only: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        head.only, head.trouble = only, [refusal(status, "because")] * 30
        if only == "join":
            world.clock.advance(agents.REPORT + 1)
            world.models = ("org/new",)  # it joins again to report it
        head.release()
        await head.until(lambda: not head.trouble)
        polls = len(head.polls)
        await head.until(lambda: len(head.polls) > polls)

    world.run(play)
    assert world.launcher.tasks["job-1"].seen.state is TaskState.running
    assert caplog.text.count("because") == 1


@pytest.mark.parametrize("status", [401, 404, 409])
def test_a_service_with_another_database_is_joined_again(world: World, status: int) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        head.only, head.trouble = "poll", [refusal(status)]
        head.release()
        await head.until(lambda: len(head.joined) == 2 and len(head.polls) > 1)

    world.run(play)


def test_a_machine_that_has_changed_reports_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        world.clock.advance(agents.REPORT + 1)
        head.release()
        await head.until(lambda: len(head.polls) > 1)
        assert len(head.joined) == 1  # nothing has
        before = world.report
        report = before().model_copy(update={"models": ("org/new",)})
        monkeypatch.setattr(world, "report", lambda: report)
        world.clock.advance(agents.REPORT + 1)
        head.release()
        await head.until(lambda: len(head.joined) == 2)
        assert head.joined[-1].models == ("org/new",)

    world.run(play)
    shrunk = world.report().model_copy(update={"disk_free_bytes": 2 << 30})
    assert agents._differs(shrunk, shrunk.model_copy(update={"disk_free_bytes": 0}))
    assert not agents._differs(shrunk, shrunk.model_copy(update={"disk_free_bytes": (2 << 30) - 5}))
    assert agents._differs(shrunk, shrunk.model_copy(update={"models": ("a",)}))


def test_a_data_directory_has_one_agent(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        with pytest.raises(NodeError, match="another agent runs on"):
            await world.agent().run()

    world.run(play)


def test_files_that_are_no_longer_used_are_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old, rows = world.data_dir / "jobs" / "old", write(world.data_dir / "datasets" / "x.jsonl", b"")
    old.mkdir(parents=True)
    (world.data_dir / "jobs" / "gone").symlink_to(world.root / "nowhere")  # as what another process removes meanwhile
    monkeypatch.setattr(agents, "KEEP", -1.0)

    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        assert not old.exists()
        assert not rows.exists()
        await world.begin()
        old.mkdir()
        world.clock.advance(agents.REPORT + 1)
        head.order(world.order(Stage.pause))
        await head.until(lambda: world.launcher.tasks["job-1"].pauses)
        await head.until(lambda: not old.exists())

    world.run(play)
    assert world.run_dir.exists()
    assert (world.data_dir / "datasets" / f"{DIGEST}.jsonl").exists()


def test_an_order_to_end_before_the_first_report_ends_the_task_at_the_next_cleanup(world: World) -> None:
    world.launcher.obedient = False

    async def ended(head: FakeHead) -> None:
        head.order(world.order(Stage.stop, spec={}))  # cancelled before there was one
        await head.until(lambda: world.launcher.tasks)
        world.launcher.tasks["job-1"].seen = Observation(TaskState.running)
        world.clock.advance(agents.REPORT + 1)
        head.release()
        await head.until(lambda: world.clock() - agents.REPORT > 2 and len(head.polls) > 2)

    async def started_again(head: FakeHead) -> None:
        world.launcher.exit("job-1", None)
        await head.reported(lambda report: report.progress is Going.done)

    world.run(ended)
    world.head.polls.clear()
    world.run(started_again)


def test_stages_only_move_forward(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        for stage in (Stage.prepare, Stage.stop, Stage.run):
            head.order(world.order(stage))
            await head.until(lambda: head.polls[-1].seen == head.revision)
            assert (await head.reported(lambda _: True)).stage is not Stage.prepare
        await head.reported(lambda report: report.stage is Stage.stop and report.progress == "done")

    world.run(play)
    assert world.launcher.started == ["job-1"]


def test_what_stays_missing_is_sent_again_after_a_pause(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = world.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(world, "sleep", noted)
    monkeypatch.setattr(uploader, "RETRY", 7.0)
    upload, lost = world.head.upload, ["additional_chat_templates/a.jinja"] * 3

    async def losing(task_id: str, checkpoint: str, name: str, sha256: str, file: Path) -> None:
        if lost and name == lost[0]:
            lost.pop()
            return world.head._meet(f"upload {checkpoint}/{name}")
        await upload(task_id, checkpoint, name, sha256, file)

    monkeypatch.setattr(world.head, "upload", losing)

    async def play(head: FakeHead) -> None:
        await world.begin()
        world.emit(world.save("checkpoint-1"))
        await head.until(lambda: head.checkpoints)

    world.run(play)
    assert world.head.calls.count("upload checkpoint-1/additional_chat_templates/a.jinja") == 4
    assert pauses.count(7.0) == 3


def test_an_agent_that_is_started_while_the_service_is_away_has_its_trainings_continue(world: World) -> None:
    async def first(head: FakeHead) -> None:
        await world.begin()

    async def second(head: FakeHead) -> None:
        began = world.clock()
        head.only, head.trouble = "join", [away() for _ in range(100_000)]
        await head.until(lambda: world.clock() - began > HOUR / 3)
        head.trouble, head.polls = [], []
        await head.reported(lambda report: report.observation is not None)
        assert world.launcher.tasks["job-1"].seen.state is TaskState.running

    world.run(first)
    world.run(second)
    assert world.launcher.started == ["job-1"]


def test_a_refusal_of_the_service_is_one_sentence_in_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        head.only, head.trouble = "poll", [refusal(401, "No.")]
        head.release()
        await head.until(lambda: not head.trouble)
        await head.until(lambda: "trainings continue" in caplog.text)

    world.run(play)
    (logged,) = [record.getMessage() for record in caplog.records if "trainings continue" in record.getMessage()]
    assert logged.endswith("; trainings continue, and the service is called again")
    assert ".;" not in logged


def test_a_node_without_its_address_reports_it_before_it_joins(world: World) -> None:
    world.address = "192.0.2.77"

    async def play(head: FakeHead) -> None:
        await asyncio.Event().wait()

    with pytest.raises(NodeError, match=r"TRL_NODE_ADDRESS must be an address of this machine: .*192\.0\.2\.77"):
        world.run(play)
    assert world.head.joined == []


# The node's credential


def kept_credential(world: World) -> dict[str, str]:
    return dict(json.loads((world.data_dir / "credential.json").read_text()))


def test_a_credential_is_kept_for_the_node_alone_and_used_from_then_on(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        assert head.sent == "credential-1"

    world.run(play)
    assert kept_credential(world) == {"service": "http://head:8322", "node": "b", "credential": "credential-1"}
    assert (world.data_dir / "credential.json").stat().st_mode & 0o777 == 0o600
    world.run(play_until_joined(2))
    assert world.head.joined_with == [None, "credential-1"]
    assert kept_credential(world)["credential"] == "credential-2"


def play_until_joined(times: int) -> Callable[[FakeHead], Awaitable[None]]:
    async def play(head: FakeHead) -> None:
        polls = len(head.polls)
        await head.until(lambda: len(head.joined) == times and len(head.polls) > polls)

    return play


@pytest.mark.parametrize("of", [{"service": "http://other:8322"}, {"node": "c"}])
def test_a_credential_of_another_service_or_name_is_not_sent(world: World, of: dict[str, str]) -> None:
    world.data_dir.mkdir()
    kept = {"service": "http://head:8322", "node": "b", "credential": "theirs", **of}
    (world.data_dir / "credential.json").write_text(json.dumps(kept))
    world.run(play_until_joined(1))
    assert world.head.joined_with == [None]


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "\0"])
def test_a_credential_that_cannot_be_read_is_replaced(world: World, text: str) -> None:
    world.data_dir.mkdir()
    (world.data_dir / "credential.json").write_text(text)
    world.run(play_until_joined(1))
    assert kept_credential(world)["credential"] == "credential-1"


@pytest.mark.parametrize("status", [401, 410])
def test_a_service_without_this_credential_is_joined_with_the_token(world: World, status: int) -> None:
    """It has another database, or the node was removed while its agent was stopped."""
    world.run(play_until_joined(1))
    world.head.only, world.head.trouble = "join with", [refusal(status, "the token is not one")]
    world.run(play_until_joined(2))
    assert world.head.joined_with == [None, None]
    assert kept_credential(world)["credential"] == "credential-2"


def test_an_agent_that_runs_while_its_node_is_removed_does_not_join_again(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        head.only, head.trouble = "join", [refusal(410, "was removed")]
        world.clock.advance(agents.REPORT + 1)
        world.models = ("org/new",)
        head.release()
        await head.until(lambda: False)

    with pytest.raises(ServiceRefusal, match="was removed"):
        world.run(play)
    assert len(world.head.joined) == 1


def test_a_service_that_accepts_neither_is_tried_with_both_until_it_is_back(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        head.only, head.trouble = "", [refusal(401, "the token is not one") for _ in range(20)]
        head.release()
        await head.until(lambda: not head.trouble)
        await head.until(lambda: len(head.joined) == 2)

    world.run(play)
    calls = [call for call in world.head.calls if call.startswith("join")]
    assert {"join", "join with credential-1"} == set(calls)


def test_a_credential_is_replaced_every_day(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)
        for hours, joined in ((23, 1), (25, 2)):
            world.clock.now = hours * 3600.0
            head.release()
            polls = len(head.polls)
            await head.until(lambda polls=polls: len(head.polls) > polls + 1 or head.release())
            assert len(head.joined) == joined
        assert head.sent == "credential-2"

    world.run(play)
    assert world.head.joined_with == [None, "credential-1"]


def test_a_new_credential_that_cannot_be_kept_is_not_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is started again has the one on its disk, which the service forgets once the new one was used."""
    world.run(play_until_joined(1))
    monkeypatch.setattr(CredentialFile, "write", lambda file, credential: _full(world.data_dir))
    world.run(play_until_joined(2))
    assert world.head.sent == "credential-1"
    (world.data_dir / "credential.json").unlink()
    world.run(play_until_joined(3))
    assert world.head.sent == "credential-3"  # it has no other


def test_what_a_report_would_not_hold_is_cut(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        task = world.launcher.tasks["job-1"]
        task.seen = replace(task.seen, detail="d" * 10_000, stacks="s" * (1 << 20))
        report = await head.reported(lambda report: report.detail.startswith("d"))
        assert (len(report.detail), report.detail[-4:]) == (8192, "d...")
        assert report.observation is not None
        assert len(report.observation["stacks"]) == 8192

    world.run(play)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_kept_is_for_its_owner_only(world: World, there: bool) -> None:
    if there:
        (world.data_dir / "jobs").mkdir(parents=True, mode=0o755)
        world.data_dir.chmod(0o755)

    async def play(head: FakeHead) -> None:
        await world.begin()

    world.run(play)
    assert there or world.data_dir.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in world.data_dir.iterdir() if path.is_dir()} == {0o700}


def test_a_task_that_was_ordered_to_stop_ships_nothing_more(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        head.only, head.trouble = "events", [away() for _ in range(10_000)]
        world.emit(progress(1))
        await head.until(lambda: len(head.trouble) < 10_000)
        head.order(world.order(Stage.stop))
        await head.reported(lambda report: report.progress is Going.done)
        head.trouble, before = [], len(head.calls)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not [call for call in head.calls[before:] if call.startswith("events")]

    world.run(play)
    assert world.head.received_events == []


def test_a_job_without_a_file_here_leaves_no_directory(world: World) -> None:
    async def play(head: FakeHead) -> None:
        here = Peer(node="a", address="127.0.0.1", port=1)
        head.order(world.order(nodes=2, node_rank=1, master=here))  # only rank 0's node learns that a job is finished
        await head.until(lambda: world.launcher.started)
        assert (world.home / "checkpoints").exists()
        world.launcher.exit("job-1", 0)
        head.order()
        await head.until(lambda: not world.home.exists())

    world.run(play)


def test_the_next_attempt_of_a_job_finds_its_directories_where_the_one_before_is_removed(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        head.order(world.order(task_id="job-2", attempt=2))
        await head.until(lambda: not world.run_dir.exists() and len(world.launcher.started) == 2)
        assert (world.home / "checkpoints").exists()
        assert (world.home / "attempts" / "2" / "spec.json").exists()

    world.run(play)


def test_an_unfinished_job_is_kept_for_a_day_from_its_end_on(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        world.save("checkpoint-1")
        os.utime(world.home, (0, 0))  # it has trained for long
        head.order()
        await head.until(lambda: not world.run_dir.exists())
        world.clock.advance(agents.REPORT + 1)
        before = len(head.polls)
        head.release()
        await head.until(lambda: len(head.polls) > before + 1 or head.polls[-1].seen == head.revision)

    world.run(play)
    assert world.home.exists()
    assert world.home.stat().st_mtime > 0


def test_young_files_of_other_jobs_stay_and_old_ones_go(world: World) -> None:
    young, old = (write(world.data_dir / "jobs" / name / "file", b"").parent for name in ("young", "old"))
    rows = [write(world.data_dir / "datasets" / f"{name}.jsonl", b"") for name in ("young", "old")]
    now = young.stat().st_mtime
    for path, age in ((young, 23), (rows[0], 23), (old, 25), (rows[1], 25)):
        os.utime(path, (now - age * 3600, now - age * 3600))

    async def play(head: FakeHead) -> None:
        await head.until(lambda: head.polls)

    world.run(play)
    assert [path.exists() for path in (young, old, *rows)] == [True, False, True, False]


def test_what_runs_is_not_prepared_again(world: World) -> None:
    async def first(head: FakeHead) -> None:
        await world.begin()

    async def second(head: FakeHead) -> None:
        await head.reported(lambda report: report.observation)
        world.emit(progress(1))
        await head.until(lambda: head.received_events)

    world.run(first)
    (world.data_dir / "datasets" / f"{DIGEST}.jsonl").unlink()  # the ranks have read it
    world.run(second)
    assert [call for call in world.head.calls if call.startswith("rows")] == [f"rows {DIGEST}"]


def test_nodes_of_one_training_meet_where_the_master_is(world: World) -> None:
    async def play(head: FakeHead) -> None:
        master = Peer(node="a", address="10.0.0.9", port=29511)
        await world.begin(nodes=2, node_rank=1, master=master, ports=(29500, 100), threads=3)

    world.run(play)
    task = world.launcher.tasks["job-1"].spec
    assert (task.nodes, task.address) == (2, "127.0.0.1")
    # What the service orders for all nodes counts, also where a node's own variable is another one.
    assert training_environment(task, {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "3"
    assert (task.master_addr, task.master_port, task.last_port) == ("10.0.0.9", 29511, 29599)


def test_a_disk_that_is_full_here_delays_events_and_loses_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read_events, full = Outbox.read_events, [OSError(28, "No space left on device")] * 5

    def once(outbox: Outbox) -> None:
        if full:
            raise full.pop()
        read_events(outbox)

    monkeypatch.setattr(Outbox, "read_events", once)

    async def play(head: FakeHead) -> None:
        await world.begin()
        world.emit(world.save("checkpoint-1"), Finished(step=1))
        world.launcher.exit("job-1", 0)
        await head.reported(lambda report: report.shipped)

    world.run(play)
    assert [event["type"] for event in world.head.received_events] == ["checkpoint", "finished"]


def test_checkpoints_are_looked_for_until_all_events_of_an_ended_training_were_read(world: World) -> None:
    places = PathMap(world.order(), world.data_dir)
    places.run_dir.mkdir(parents=True)

    async def run() -> None:
        work = Uploader(places, world.head, asyncio.Event(), lambda _: None, world.sleep)
        assert not await work._ship_events(False)
        assert not await work._ship_checkpoints(True)  # it exited since
        assert await work._ship_events(True)
        assert await work._ship_checkpoints(True)

    asyncio.run(run())


def test_a_service_that_has_more_events_than_were_written_is_reported(world: World) -> None:
    async def play(head: FakeHead) -> None:
        head.events += b'{"type": "progress"}\n' * 50
        await world.begin()
        world.emit(progress(1))
        report = await head.reported(lambda report: "bytes of events" in report.detail)
        assert report.detail.endswith("end the job")

    world.run(play)


def test_tasks_of_two_jobs_fetch_the_same_rows_once(tmp_path: Path) -> None:
    fetched: list[Path] = []

    class Calls(FakeHead):
        async def rows(self, sha256: str, path: Path) -> None:
            fetched.append(path)
            for _ in range(20):
                await asyncio.sleep(0)
            write(path, ROWS)

    dataset = {"dataset_id": "d", "path": f"/service/datasets/{DIGEST}.jsonl", "sha256": DIGEST, "num_rows": 1}

    async def run() -> None:
        orders = [order(spec=spec(job={"job_uuid": name, "dataset": dataset}), job_uuid=name) for name in ("a", "b")]
        calls = Calls()
        await asyncio.gather(*(Inputs(PathMap(one, tmp_path), calls, print).fetch_rows() for one in orders))

    asyncio.run(run())
    assert fetched == [tmp_path / "datasets" / f"{DIGEST}.jsonl"]
    assert fetched[0].read_bytes() == ROWS


@pytest.mark.parametrize(("found", "fetched"), [(ROWS, 0), (b"half", 1)])
def test_rows_that_are_here_are_used_if_they_are_whole(world: World, found: bytes, fetched: int) -> None:
    rows = write(world.data_dir / "datasets" / f"{DIGEST}.jsonl", found)
    os.utime(rows, (rows.stat().st_mtime - 23 * 3600,) * 2)
    before = rows.stat().st_mtime

    async def play(head: FakeHead) -> None:
        await world.begin()

    world.run(play)
    assert rows.read_bytes() == ROWS
    assert rows.stat().st_mtime > before + 3600  # they are kept for another day
    assert len([call for call in world.head.calls if call.startswith("rows")]) == fetched


def test_a_port_that_ranks_will_listen_at_is_given_to_no_other_task(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = server.getsockname()[1]
    one = world.order(ports=(first, 50))
    other = world.order(Stage.prepare, task_id="other-1", job_uuid="other", ports=(first, 50))

    async def play(head: FakeHead) -> None:
        head.order(one.model_copy(update={"stage": Stage.prepare}))
        await head.reported(lambda report: report.progress is Going.done)
        await world.begin(one)
        head.order(one, other)
        await head.until(lambda: (report := head.report("other-1")) and report.progress is Going.done)
        ports = {report.port for name in ("job-1", "other-1") if (report := head.report(name))}
        assert len(ports) == 2

    world.run(play)


def test_a_training_whose_directory_was_removed_has_ended(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin()
        del world.launcher.tasks["job-1"]
        report = await head.reported(lambda report: report.observation and report.progress is Going.done)
        assert "was removed" in report.detail

    world.run(play)


def test_a_node_without_rank_0_orders_no_rank_to_pause(world: World) -> None:
    async def play(head: FakeHead) -> None:
        await world.begin(node_rank=1)
        head.order(world.order(Stage.pause, node_rank=1))
        await head.reported(lambda report: report.stage is Stage.pause)
        for _ in range(100):
            await asyncio.sleep(0)

    world.run(play)
    assert world.launcher.tasks["job-1"].pauses == 0


@pytest.mark.parametrize(("call", "stage"), [("pause", Stage.pause), ("cancel", Stage.stop)])
def test_a_disk_that_is_full_delays_the_orders_to_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, stage: Stage
) -> None:
    send, full = getattr(world.launcher, call), [OSError(28, "No space left on device")] * 3

    def reported(task: Any) -> None:
        if full:
            raise full.pop()
        send(task)

    monkeypatch.setattr(world.launcher, call, reported)

    async def play(head: FakeHead) -> None:
        await world.begin()
        head.order(world.order(stage))
        task = world.launcher.tasks["job-1"]
        await head.until(lambda: task.pauses or task.seen.state is TaskState.exited)

    world.run(play)
    assert not full


def test_a_task_that_was_never_started_ends_on_a_full_disk_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(task: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world.launcher, "cancel", full)

    async def play(head: FakeHead) -> None:
        head.order(world.order(Stage.prepare))
        report = await head.reported(lambda report: report.progress is Going.done)
        head.order(world.order(Stage.stop))
        await head.reported(lambda report: report.stage is Stage.stop and report.progress is Going.done)
        with socket.create_server(("127.0.0.1", report.port or 0)):
            pass  # the listener is gone

    world.run(play)
