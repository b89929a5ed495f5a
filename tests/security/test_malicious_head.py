"""A node that takes orders from a head that is not what it should be: nothing is made outside its data directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl_remote.nodes import localize
from llama_stack_provider_trl_remote.nodes.task import NodeContext, NodeTask
from llama_stack_provider_trl_remote.wire import TaskOrder
from tests.fake_head import FakeHead
from tests.orders import AA, BB, order, spec, write
from tests.unit.agent_world import World

EVIL = [
    {"job_uuid": "../../evil", "task_id": "../../evil-1"},
    {"job_uuid": "..", "task_id": "..-1"},
    {"task_id": "other-1"},
    {"attempt": 0, "task_id": "job-0"},
    {"devices": ("../../evil",)},
    {"spec": spec(job={"dataset": {"dataset_id": "d", "path": "/s", "sha256": "../../../evil", "num_rows": 1}})},
    {
        "spec": spec(
            job={"validation": {"dataset_id": "d", "path": "/s", "sha256": f"{BB}/../../../evil", "num_rows": 1}}
        )
    },
    {"spec": spec(job={"checkpoint_dir": "evil"})},
    {"spec": spec(job={"checkpoint_dir": "/service/../evil"})},
    {"spec": spec(resume_from="/service/checkpoints/job/../../../../evil/checkpoint-1")},
    {"spec": spec(resume_from="/elsewhere/..")},
    {"spec": spec(fall_back_to=["/service/checkpoints/job/a/checkpoint-1"])},
    {"spec": spec(job={"resume_from": {"job_uuid": "x", "path": "/elsewhere/evil"}})},
    {"shared_mark": "/etc/hostname"},
    {"shared_mark": "/service/checkpoints/other/.shared"},
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A node; no thread is waited for, since its clock runs on with every sleep."""

    async def at_once[Value](work: Callable[..., Value], *arguments: Any) -> Value:
        await asyncio.sleep(0)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return World(tmp_path)


def checked(requested: TaskOrder) -> None:
    localize.check_order(requested)


@pytest.mark.parametrize("changes", EVIL, ids=lambda changes: "-".join(changes))
def test_an_order_that_leads_out_of_the_data_directory_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        checked(order(**changes))


def test_what_a_service_orders_is_followed() -> None:
    checked(order())
    checked(order(spec={}))  # cancelled before it began
    more = {
        "validation": {"dataset_id": "d", "path": "/s", "sha256": AA, "num_rows": 1},
        "resume_from": {"job_uuid": "x", "path": "/x/3f/checkpoint-2"},
    }
    resumed = spec(resume_from="/service/checkpoints/job/checkpoint-6", fall_back_to=["/x/3f/checkpoint-2"], job=more)
    checked(order(spec=resumed, shared_mark="/service/checkpoints/job/.shared"))


@pytest.mark.parametrize("changes", EVIL[:6], ids=lambda changes: "-".join(changes))
def test_a_node_reports_an_order_that_it_does_not_follow_and_makes_nothing(
    world: World, changes: dict[str, Any]
) -> None:
    requested = order(**changes)
    before = listed(world.root)

    async def play(head: FakeHead) -> None:
        head.order(requested)
        await head.until(lambda: (report := head.report(requested.task_id)) and "expected" in report.error)

    world.run(play)
    assert not world.launcher.started
    new = {path for path in listed(world.root) - before if not path.startswith(world.data_dir.name)}
    assert not new
    assert not list((world.data_dir / "jobs").iterdir())


def listed(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_an_order_that_becomes_evil_later_changes_nothing(world: World) -> None:
    good = world.order()

    async def play(head: FakeHead) -> None:
        head.order(good)
        await head.until(lambda: world.launcher.started)
        head.order(good.model_copy(update={"job_uuid": "../../evil"}))
        polls = len(head.polls)
        await head.until(lambda: len(head.polls) > polls)

    world.run(play)
    assert not (world.root / "evil").exists()
    assert not (world.root.parent / "evil").exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "other text"])
def test_only_a_regular_file_with_the_tasks_id_marks_a_shared_directory(tmp_path: Path, kind: str) -> None:
    mark = write(tmp_path / "theirs" / ".shared", b"job-1\n")
    requested = order(spec=spec(job={"checkpoint_dir": str(mark.parent)}), shared_mark=str(mark))
    assert localize.sees_the_services_disk(requested)
    mark.unlink()
    if kind == "link":
        mark.symlink_to(write(tmp_path / "text", b"job-1"))
    elif kind == "fifo":
        os.mkfifo(mark)
    elif kind == "directory":
        mark.mkdir()
    else:
        mark.write_text("job-2")
    assert not localize.sees_the_services_disk(requested)


def test_a_shared_directory_that_has_gone_is_not_made_again(world: World) -> None:
    theirs = world.root / "service" / "checkpoints"
    requested = world.order(shared_mark=str(theirs / ".shared"), job={"checkpoint_dir": str(theirs)})

    async def play(head: FakeHead) -> None:
        head.order(requested)
        await head.until(lambda: (report := head.report()) and "is gone from this node" in report.error)

    real = NodeTask.__init__

    def remembers(task: NodeTask, node: NodeContext, order: TaskOrder, *_: Any) -> None:
        real(task, node, order, True)  # an agent that was started again

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NodeTask, "__init__", remembers)
        world.run(play)
    assert not theirs.exists()
