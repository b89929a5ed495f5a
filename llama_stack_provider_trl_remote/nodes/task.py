"""Drives one task on this node, from its order to the upload of its last result."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable, TrlError
from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.ports import given_port
from llama_stack_provider_trl.launch.torchrun import LOOPBACK
from llama_stack_provider_trl.system.files import (
    atomic_write,
    atomic_write_json,
    read_regular,
)
from llama_stack_provider_trl.system.fork import THREADS

from ..pull import OtherBytes
from ..wire import MOST_JSON, MOST_TEXT, Stage, StageProgress, TaskOrder, TaskReport
from . import uploader
from .calls import NodeClient, is_gone
from .inputs import Inputs
from .localize import PathMap, check_order, sees_the_services_disk
from .models import ModelMissing, Models
from .outbox import first_failed
from .probe import ProbeListener, listen, probe
from .uploader import Damaged, Uploader

log = logging.getLogger(__name__)
_TEMPORARY = (408, 429)
"""Refusals that another try may not get: too slow, or too many at a time."""
RECORD = "order.json"
POLL_INTERVAL = 0.25
"""Seconds between two polls of the processes of a task."""
_FAILURES = 30
"""Duration of nothing but 500 after which the service counts as failed. Other statuses mean that it is away or full,
which passes."""
_STAGES = list(Stage)


@dataclass(frozen=True)
class NodeContext:
    """Fields of the node that its tasks use."""

    name: str
    address: str
    boot_id: str
    data_dir: Path
    calls: NodeClient
    launcher: Launcher
    changed: Callable[[], None]
    """Called when there are news to report."""
    ports_given: Callable[[], Collection[int]] = tuple
    """Ports of other tasks of the node: their ranks may not listen yet."""
    models: Models | None = None
    """None: those in `data_dir` and in the cache of this process's environment."""
    models_used: Callable[[], Collection[str]] = tuple
    """Digests or names of the models of all tasks of the node."""
    python: str | None = None
    """Interpreter that trains; None: the interpreter of this process."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class NodeTask:
    """One task: its order and its state on this node.

    The state that must survive the agent is in `order.json`, beside the runner's own files."""

    def __init__(
        self, node: NodeContext, order: TaskOrder, shared: bool | None = None, port: int | None = None
    ) -> None:
        self._node, self.order = node, order
        self._shared, self._port = shared, port
        self._ordered = asyncio.Event()
        self._exited = asyncio.Event()
        self._done: set[Stage] = set()
        self._error = ""
        self._is_lasting = False
        self._detail = ""
        self._observation: Observation | None = None
        self._failed: dict[str, Any] | None = None
        self._shipped = False
        self._listener: ProbeListener | None = None
        self._has_finished = False
        self._work: asyncio.Task[None] | None = None
        self.gone = False
        """Whether no process of it is left and it was ordered to stop."""
        self.forgotten = False
        """Whether the service no longer names it."""

    @property
    def paths(self) -> PathMap:
        return PathMap(self.order, self._node.data_dir, bool(self._shared))

    @property
    def port(self) -> int | None:
        """Port at which it listens for its peers and then, on rank 0's node, its ranks do."""
        return given_port(self.paths.run_dir) if self._port is None else self._port

    @property
    def begun(self) -> bool:
        """Whether this agent has started to drive it, or has ended it."""
        return self._work is not None

    @property
    def has_exited(self) -> bool:
        """Whether no process of it is left here."""
        return self.gone or (self._observation is not None and self._observation.state is TaskState.exited)

    @property
    def has_finished(self) -> bool:
        return self._has_finished

    def begin(self) -> None:
        """Start to drive the task, or continue after a restart of the agent."""
        try:
            self._keep()
        except OSError as error:  # a full disk
            if self.order.stage is not Stage.stop:
                return self._fail(error)
        self._work = asyncio.create_task(self._end() if self.order.stage is Stage.stop else self._drive())

    def follow(self, order: TaskOrder) -> None:
        """Follow a newer order. A stage is never followed by an earlier one."""
        if self.order.stage is Stage.stop or order == self.order:
            return
        if _STAGES.index(order.stage) < _STAGES.index(self.order.stage):
            return
        self.order = order
        if order.stage is Stage.stop:
            self._cancel_work()
            self._work = asyncio.create_task(self._end())
        else:
            with suppress(OSError):  # a full disk: after a restart the service sends the order again
                self._keep()
        self._ordered.set()
        self._node.changed()

    def end(self, why: str) -> None:
        """End the task without an order: the service no longer has it here, or the machine's owner needs it."""
        if self.order.stage is not Stage.stop:
            log.info("task %s: %s", self.order.task_id, why)
            self.follow(self.order.model_copy(update={"stage": Stage.stop}))
            self._error = why

    async def settle(self) -> None:
        """Wait for the current step."""
        while self._work is not None and not self._work.done():
            await asyncio.wait([self._work])

    async def leave(self) -> None:
        """Stop driving the task; its processes continue."""
        self._cancel_work()
        with suppress(asyncio.CancelledError):
            await self.settle()
        await self._close_listener()

    def forget(self, last: bool) -> None:
        """Remove the task's files, and those of its job where no other task needs them.

        Args:
            last: no other task of the job is here.
        """
        home = self.paths.home
        shutil.rmtree(self.paths.run_dir, ignore_errors=True)
        if self._has_finished:
            shutil.rmtree(home, ignore_errors=True)
            return
        # On a node without rank 0 often only these are left. Another task may be about to fill them.
        for path in (home / "attempts", home / "checkpoints", home) if last else ():
            with suppress(OSError):  # it is not empty
                path.rmdir()
        with suppress(OSError):
            os.utime(home)  # KEEP begins here

    def report(self) -> TaskReport:
        stage, seen = self.order.stage, self._observation
        if stage is Stage.stop:
            progress = StageProgress.done if self.gone else StageProgress.working
        elif self._error:
            progress = StageProgress.failed
        else:
            over = stage in self._done or (seen is not None and seen.state is TaskState.exited)
            progress = StageProgress.done if over else StageProgress.working
        return TaskReport(
            task_id=self.order.task_id,
            stage=stage,
            progress=progress,
            detail=_cut(self._detail or (seen.detail if seen else "")),
            error=_cut(self._error),
            lasting=self._is_lasting,
            port=self.port,
            observation=None if seen is None else _cut_all(asdict(seen)),
            failed=None if self._failed is None else _cut_all(self._failed),
            shipped=self._shipped,
        )

    async def _drive(self) -> None:
        try:
            seen = await asyncio.to_thread(self._node.launcher.poll, self._spec())
            if seen.state is TaskState.unknown:
                await self._prepare_patiently()
                await self._until(Stage.probe if self.order.nodes > 1 else Stage.run)
                if self.order.stage is Stage.probe:
                    await probe(self._node.name, self.order)
                    self._finish(Stage.probe)
                    await self._until(Stage.run)
                await self._close_listener()
                await asyncio.to_thread(self._node.launcher.start, self._spec())
            await self._supervise()
        except (TrlError, OSError, ValidationError) as error:
            self._fail(error)
        except Exception as error:
            log.exception("task %s", self.order.task_id)
            self._fail(RuntimeError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: Exception) -> None:
        self._error = str(error) or type(error).__name__
        self._is_lasting = isinstance(error, ModelMissing)
        log.warning("task %s: %s", self.order.task_id, self._error)
        self._node.changed()

    async def _prepare_patiently(self) -> None:
        """Prepare, repeatedly while the service is away; this costs no attempt.

        The service stops a task that waits for too long. A reachable service that keeps failing fails the task."""
        self._note_detail("checks its files")
        trouble, failures = "", 0
        while True:
            try:
                return await self._prepare()
            except OtherBytes:
                raise
            except (ServiceUnreachable, ServiceRefusal) as error:
                status = error.status if isinstance(error, ServiceRefusal) else None
                failures = failures + 1 if status == 500 else 0
                if failures == _FAILURES or (status is not None and status < 500 and status not in _TEMPORARY):
                    raise
                if str(error) != trouble:
                    log.warning("task %s: %s", self.order.task_id, error)
                trouble = str(error)
                self._note_detail(trouble)
                await self._node.sleep(uploader.RETRY)

    async def _prepare(self) -> None:
        """Fetch all files that the ranks will read, then listen for the other nodes."""
        models = await self._provide_models()
        if self._shared is None:
            may_share = not self.paths.answer_files
            self._shared = may_share and await asyncio.to_thread(sees_the_services_disk, self.order)
            self._keep()
        paths = self.paths
        inputs = Inputs(paths, self._node.calls, self._note_detail)
        await inputs.fetch_rows()
        spec = paths.spec(await inputs.fetch_checkpoints(), models)
        if paths.shared:
            if not paths.checkpoint_dir.is_dir():
                raise FileNotFoundError(
                    f"the shared checkpoint directory {paths.checkpoint_dir} is gone from this node"
                )
        else:
            paths.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        await inputs.fetch_answers()
        atomic_write(paths.files.spec, spec.model_dump_json(indent=1).encode())
        if _STAGES.index(self.order.stage) < _STAGES.index(Stage.run):
            await self._open_listener()
        self._note_detail("")
        self._finish(Stage.prepare)

    async def _provide_models(self) -> dict[str, Path]:
        """Have the task's models here, once the service has listed their files. See `Models.provide`."""
        while self.order.awaits_models:
            self._note_detail("waits for the digests of its model")
            self._ordered.clear()
            await self._ordered.wait()
        node = self._node
        models = node.models or Models(node.data_dir)
        job = self.paths.attempt.job
        return await models.provide(self.order, job, node.name, node.calls, self._note_detail, node.models_used)

    async def _open_listener(self) -> None:
        """Listen for the probes of the other nodes, after a restart at the port that they know."""
        ports = self.order.ports if self._port is None else (self._port, 1)
        others = [port for port in self._node.ports_given() if port != self._port]
        self._listener = ProbeListener(listen(self._node.address, ports, others), self.order.task_id)
        self._port = self._listener.port
        self._keep()
        await self._listener.open()

    async def _supervise(self) -> None:
        """Watch the processes and upload their results until neither has anything left."""
        gone: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self._ship())
        except* Exception as errors:  # a group has no useful message
            gone = _flat(errors)[0]
        if gone is None:
            self._shipped = True
            self._node.changed()
        elif is_gone(gone):
            # Not from here: `end` cancels this very task.
            asyncio.get_running_loop().call_soon(self.end, f"the service no longer has it on this node: {gone}")
        else:
            if isinstance(gone, Damaged):
                self._failed = {"type": "failed", "rank": 0, "reason": "rank_failed", "message": str(gone)}
            raise gone

    async def _watch(self) -> None:
        while True:
            seen = await asyncio.to_thread(self._node.launcher.poll, self._spec())
            if seen.state is TaskState.unknown:
                seen = Observation(TaskState.exited, detail=f"{self.paths.run_dir} was removed")
            if self.order.node_rank:
                self._failed = first_failed(self.paths.files.events)
            if seen != self._observation:
                self._observation = seen
                self._node.changed()
            if seen.state is TaskState.exited:
                return self._exited.set()
            if self.order.stage is Stage.pause and self.order.node_rank == 0:
                try:
                    await asyncio.to_thread(self._node.launcher.pause, self._spec())
                except OSError as error:  # a full disk, which may pass
                    self._note_detail(f"the order to pause cannot be written: {error}")
            await self._node.sleep(POLL_INTERVAL)

    async def _ship(self) -> None:
        work = Uploader(self.paths, self._node.calls, self._exited, self._note_detail, self._node.sleep)
        try:
            await work.run()
        finally:
            self._has_finished = work.has_finished

    async def _end(self) -> None:
        """End all processes of the task."""
        await self._close_listener()
        task = self._spec()
        while (seen := await asyncio.to_thread(self._node.launcher.poll, task)).state is not TaskState.exited:
            try:
                await asyncio.to_thread(self._node.launcher.cancel, task)
            except OSError as error:
                self._note_detail(f"it cannot be ended: {error}")
                if seen.state is TaskState.unknown:
                    break  # it could not be started either, so nothing is left
            await self._node.sleep(POLL_INTERVAL)
        self._observation = seen
        self.gone = True
        self._node.changed()

    def _spec(self) -> TaskSpec:
        order, master = self.order, self.order.master
        first, count = order.ports
        # Only rank 0's node has events, and so progress; and only rank 0 can save before its time is over.
        leads = order.node_rank == 0
        return TaskSpec(
            task_id=order.task_id,
            run_dir=self.paths.run_dir,
            devices=order.devices,
            python=self._node.python,
            ranks=order.ranks,
            nodes=order.nodes,
            node_rank=order.node_rank,
            address=self._node.address if order.nodes > 1 else LOOPBACK,
            master_addr=master.address if order.nodes > 1 and master else LOOPBACK,
            master_port=master.port if master else first,
            last_port=first + count - 1,
            time_limit=order.time_limit if leads else None,
            hang_timeout=order.hang_timeout if leads else None,
            env={THREADS: str(order.threads)} if order.threads else {},
        )

    async def _until(self, stage: Stage) -> None:
        """Wait until the service orders this stage or a later one."""
        while _STAGES.index(self.order.stage) < _STAGES.index(stage):
            self._ordered.clear()
            await self._ordered.wait()

    def _finish(self, stage: Stage) -> None:
        self._done.add(stage)
        self._node.changed()

    def _note_detail(self, detail: str) -> None:
        if detail != self._detail:
            self._detail = detail
            self._node.changed()

    def _keep(self) -> None:
        self.paths.run_dir.mkdir(parents=True, exist_ok=True)
        record = {
            "boot_id": self._node.boot_id,
            "shared": self._shared,
            "port": self._port,
            "order": self.order.model_dump(mode="json"),
        }
        atomic_write_json(self.paths.run_dir / RECORD, record, mode=0o600)

    def _cancel_work(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def _close_listener(self) -> None:
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()


def kept_tasks(node: NodeContext) -> list[NodeTask]:
    """The tasks that an earlier agent has left on this node. Those of an earlier boot are gone, and so is their
    directory."""
    found = []
    for record in sorted(node.data_dir.glob(f"jobs/*/attempts/*/{RECORD}")):
        try:
            kept = json.loads(read_regular(record))
            order = TaskOrder.model_validate(kept["order"])
            check_order(order)  # its training can write it
            if PathMap(order, node.data_dir).run_dir != record.parent:
                raise ValueError("it is the order of another task")
        except (OSError, ValueError, KeyError, TypeError, TrlError) as error:
            log.warning("%s cannot be read and is ignored: %s", record, error)
            continue
        if kept["boot_id"] == node.boot_id:
            found.append(NodeTask(node, order, kept["shared"], kept["port"]))
        else:
            shutil.rmtree(record.parent, ignore_errors=True)
    return found


def _cut(text: str) -> str:
    """The part of a text that the service accepts."""
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


def _cut_all(values: dict[str, Any]) -> dict[str, Any]:
    """The part of an observation, or an event, that the service accepts."""
    if len(json.dumps(values)) <= MOST_JSON:
        return values
    return {name: _cut(value) if isinstance(value, str) else value for name, value in values.items()}


def _flat(errors: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [
        leaf
        for error in errors.exceptions
        for leaf in (_flat(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
