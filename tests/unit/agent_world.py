"""An agent with a service and a launcher that are played."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from llama_stack_provider_trl.specs.events import CheckpointSaved, Progress
from llama_stack_provider_trl.system.files import write_manifest
from llama_stack_provider_trl.system.logs import Unsent
from llama_stack_provider_trl_remote.nodes.agent import Agent
from llama_stack_provider_trl_remote.wire import (
    DeviceReport,
    Load,
    NodeReport,
    OwnerUse,
    Stage,
    StageProgress,
    TaskOrder,
    TaskReport,
)
from tests.fake_head import FakeHead
from tests.fakes import FakeClock, FakeLauncher
from tests.orders import order, spec, write

ROWS = b'{"a": 1}\n'


DIGEST = hashlib.sha256(ROWS).hexdigest()


class FakeOwner:
    """The owner of a loaned machine, who uses it as the test sets."""

    def __init__(self) -> None:
        self.use, self.overdue, self.changed = OwnerUse.unknown, False, True
        self.measured: list[list[Path]] = []

    def measure(self, run_dirs: Iterable[Path]) -> bool:
        self.measured = [*self.measured[-5:], list(run_dirs)]
        changed, self.changed = self.changed, False
        return changed

    def is_overdue(self) -> bool:
        return self.overdue

    def uses(self, use: OwnerUse) -> None:
        self.use, self.changed = use, True


class World:
    """A node, its service, and the processes that run there."""

    def __init__(self, root: Path) -> None:
        self.root, self.data_dir = root, root / "node"
        self.head, self.launcher, self.clock = FakeHead(), FakeLauncher(), FakeClock(0.0)
        self.head.blobs[DIGEST] = ROWS
        self.boot_id, self.address = "boot-1", "127.0.0.1"
        self.models: tuple[str, ...] = ()
        self.heartbeat_interval = 60.0
        self.unsent = Unsent()
        self.owner: FakeOwner | None = None
        self.trusted: tuple[str, ...] = ()

    def agent(self) -> Agent:
        return Agent(
            self.head,
            lambda: self.report(),
            self.data_dir,
            self.launcher,
            load=self.load,
            unsent=self.unsent,
            heartbeat_interval=self.heartbeat_interval,
            owner=self.owner,
            trusted=self.trusted,
            clock=self.clock,
            sleep=self.sleep,
        )

    def load(self) -> Load:
        return Load(cpu_percent=12.5, memory_used_bytes=1, disk_free_bytes=1)

    def report(self) -> NodeReport:
        return NodeReport(
            name="b",
            machine_id="m",
            boot_id=self.boot_id,
            address=self.address,
            cpus=1,
            memory_bytes=1,
            disk_free_bytes=0,
            devices=(DeviceReport(name="cpu"),),
            versions={},
            models=self.models,
        )

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def order(self, stage: Stage = Stage.run, **changes: Any) -> TaskOrder:
        job = {"dataset": {"dataset_id": "d", "path": f"/s/{DIGEST}", "sha256": DIGEST, "num_rows": 1}}
        job |= changes.pop("job", {})
        return order(stage, **{"spec": spec(job=job), "ports": (0, 1), **changes})

    async def begin(self, order: TaskOrder | None = None, **changes: Any) -> None:
        """Order the task, and wait for its training to be started."""
        self.head.order(order or self.order(**changes))
        await self.head.until(lambda: self.launcher.started)

    async def failure(self, order: TaskOrder | None = None) -> TaskReport:
        """What the node reports of a task that fails; it is ordered here, or was before."""
        if order is not None:
            self.head.order(order)
        return await self.head.reported(lambda report: report.progress is StageProgress.failed)

    @property
    def home(self) -> Path:
        return self.data_dir / "jobs" / "job"

    @property
    def run_dir(self) -> Path:
        return self.home / "attempts" / "1"

    def save(self, name: str, kind: str = "step") -> CheckpointSaved:
        """Write a checkpoint as rank 0 would; returns its event."""
        path = self.home / "checkpoints" / name
        write(path / "additional_chat_templates" / "a.jinja", name.encode())
        write_manifest(path)
        step = int(name.rpartition("-")[2]) if kind == "step" else 9
        return CheckpointSaved(kind=kind, step=step, epoch=1, path=path, train_loss=None)  # type: ignore[arg-type]

    def run(self, play: Callable[[FakeHead], Awaitable[None]]) -> None:
        """One agent's life: from its start to the end of `play`, then it is stopped as by a signal."""

        async def both() -> None:
            # Its events belong to the loop.
            self.head._news = asyncio.Event()
            agent = asyncio.create_task(self.agent().run())
            playing = asyncio.ensure_future(play(self.head))
            done, _ = await asyncio.wait([agent, playing], return_when=asyncio.FIRST_COMPLETED)
            for one in (agent, playing):
                one.cancel()
            await asyncio.gather(agent, playing, return_exceptions=True)
            for one in done:
                one.result()

        asyncio.run(both())

    def fail(self, order: TaskOrder) -> TaskReport:
        """What an agent reports of a task that fails."""
        reports: list[TaskReport] = []

        async def play(head: FakeHead) -> None:
            reports.append(await self.failure(order))

        self.run(play)
        return reports[0]

    def emit(self, *events: BaseModel) -> None:
        self.launcher.emit("job-1", *events)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Where the world's clock runs on with every sleep, however busy the machine is, no thread may be waited for."""

    async def at_once[Value](work: Callable[..., Value], *arguments: Any) -> Value:
        await asyncio.sleep(0)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return World(tmp_path)


def progress(step: int) -> Progress:
    return Progress(step=step, epoch=0.5, metrics={"loss": 1.0}, peak_memory_bytes=1)
