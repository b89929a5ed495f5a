"""Preflights: tasks of the launcher that take no device and report what a job would do."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from llama_stack_provider_trl.errors import JobFailure, RowsRemoved
from llama_stack_provider_trl.jobs.inputs.row_parts import PlannedParts, with_stored_parts
from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.gpus import gpu_of
from llama_stack_provider_trl.specs.bases import parts_of
from llama_stack_provider_trl.specs.chat_templates import UNENDED
from llama_stack_provider_trl.specs.events import Failed, Preflighted, Previewed, Reason, iter_events
from llama_stack_provider_trl.specs.job import AttemptSpec, DatasetRef, JobSpec
from llama_stack_provider_trl.specs.preflight import PreflightSpec, PreviewSpec
from llama_stack_provider_trl.system.cpu_timer import ENDED_BY
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import RunDir, atomic_write, free_bytes, tail
from llama_stack_provider_trl.system.offload import FairSlots, in_work_thread
from llama_stack_provider_trl.system.process import machine_memory

from ..settings import ServiceSettings
from ..space import Space, Use

_AT_ONCE = 2
"""Preflights at a time. Each takes a core and about a gigabyte for seconds; further ones wait."""
_ROWS = "rows"
"""Directory of the parts of a dataset, in that of a task."""
_POLL_INTERVAL = 0.1
"""Seconds between two polls of a task."""


class Preflights:
    """Runs preflights, a few at a time, each within `preflight_timeout` of its request."""

    def __init__(
        self, settings: ServiceSettings, launcher: Launcher, device: str, max_ranks: int, space: Space | None = None
    ) -> None:
        self._settings = settings
        self._space = space or Space(settings.min_free_disk_mb << 20)
        self._launcher = launcher
        self._device = device
        self._max_ranks = max_ranks
        self._directory = DataDir(settings.data_dir).preflights
        self._slots = FairSlots(_AT_ONCE, 1 if settings.credentials else _AT_ONCE)

    def prepare(self) -> None:
        """Recreate the directory, and end what is left there: requests of an earlier service have no client left."""
        self._launcher.sweep(self._directory, ())
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)  # a task that is ending may still write there

    async def run(self, spec: JobSpec, parts: Sequence[PlannedParts] = ()) -> Preflighted:
        """Run a preflight. Raises JobFailure, OSError: see `_run`."""
        return await self._run(spec, self._requested(spec), Preflighted, parts)

    async def preview(self, spec: JobSpec, preview: PreviewSpec, parts: Sequence[PlannedParts] = ()) -> Previewed:
        """Run a preflight that reports rows as they are trained. Raises JobFailure, OSError: see `_run`."""
        requested = self._requested(spec).model_copy(update={"preview": preview})
        return await self._run(spec, requested, Previewed, parts)

    async def _run[Result: (Preflighted, Previewed)](
        self, spec: JobSpec, requested: PreflightSpec, kind: type[Result], parts: Sequence[PlannedParts]
    ) -> Result:
        """Run a task for its result. Raises JobFailure: the job could not even begin, or the time is over; OSError: the
        task cannot be started; RowsRemoved.

        Args:
            parts: of each dataset, which are copied into the directory of the task, and go with it.
        """
        limit = self._settings.preflight_timeout
        run_dir = self._directory / uuid4().hex
        python = str(self._settings.train_python) if self._settings.train_python else None
        # The runner itself ends a task without output for that time, so that a killed service leaves nothing behind.
        task = TaskSpec(f"preflight-{run_dir.name}", run_dir, (), python, hang_timeout=limit)
        starting: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(limit), self._slots.taken():
                starting = asyncio.ensure_future(in_work_thread(self._start, task, spec, requested, parts))
                await asyncio.shield(starting)
                result = await self._end_of(task, requested, kind)
        except (JobFailure, FileNotFoundError):
            await in_work_thread(_require_rows, spec)
            raise
        except TimeoutError as error:
            found = f"the preflight took more than {limit:.0f} s (preflight_timeout of the service)"
            raise JobFailure(Reason.timed_out, f"{found}; repeat it when the machine is less busy") from error
        finally:
            if starting is not None:
                await asyncio.shield(self._end(task, starting))
        return result

    async def _end(self, task: TaskSpec, starting: asyncio.Future[None]) -> None:
        """End a task, and remove its files, once the thread that starts it has done so: else it would start it later,
        and nothing would end it."""
        await asyncio.wait([starting])
        starting.exception()  # raised in `_run`, unless that was cancelled meanwhile
        await in_work_thread(self._clean_up, task)

    def _requested(self, spec: JobSpec) -> PreflightSpec:
        gigabytes = self._settings.device_memory_gb
        return PreflightSpec(
            device=self._device.partition(":")[0],  # type: ignore[arg-type]
            memory_bytes=self._gpu_memory() if gigabytes is None else int(gigabytes * 2**30),
            # Without a number the GPUs are those of other machines.
            machine_memory_bytes=None if self._device == "cuda" else machine_memory(),
            max_ranks=max(self._max_ranks, spec.ranks),
            own_memory_bytes=self._settings.preflight_memory_mb << 20,
            free_bytes=free_bytes(spec.checkpoint_dir),
        )

    def _gpu_memory(self) -> int | None:
        """Bytes of the GPU that a job would get: the process of a preflight, which has no device, sees none."""
        gpu = gpu_of(self._device, os.environ) if self._device.startswith("cuda:") else None
        return gpu.memory_bytes if gpu else None

    def _start(
        self, task: TaskSpec, spec: JobSpec, requested: PreflightSpec, parts: Sequence[PlannedParts] = ()
    ) -> None:
        task.run_dir.mkdir(parents=True)
        if parts:
            # Twice: a part of a shard is a copy of a copy.
            size = sum(of.dataset.path.stat().st_size for of in parts)
            self._space.require(Use.ordered, task.run_dir, 2 * size)
            spec = with_stored_parts(spec, parts, task.run_dir / _ROWS)
        attempt = AttemptSpec(job=spec, attempt=1, run_dir=task.run_dir, preflight=requested)
        atomic_write(RunDir(task.run_dir).spec, attempt.model_dump_json().encode())
        self._launcher.start(task)

    async def _end_of[Result: (Preflighted, Previewed)](
        self, task: TaskSpec, requested: PreflightSpec, kind: type[Result]
    ) -> Result:
        while True:
            seen = await in_work_thread(self._launcher.poll, task)
            if seen.state in (TaskState.exited, TaskState.unknown):
                return await in_work_thread(_result, task.run_dir, seen, requested, kind)
            await asyncio.sleep(_POLL_INTERVAL)

    def _clean_up(self, task: TaskSpec) -> None:
        if task.run_dir.exists():
            self._launcher.cancel(task)  # has no effect on one that has exited
            shutil.rmtree(task.run_dir, ignore_errors=True)


def _require_rows(spec: JobSpec) -> None:
    """Raises RowsRemoved: a dataset was deleted meanwhile, so that nothing holds its rows."""
    for _, rows in parts_of(spec, DatasetRef):
        if rows.of_job is None and not rows.path.exists():
            raise RowsRemoved(f"{rows.path} was removed while a preflight read it")


def _result[Result: (Preflighted, Previewed)](
    run_dir: Path, seen: Observation, requested: PreflightSpec, kind: type[Result]
) -> Result:
    for event in iter_events(RunDir(run_dir).events):
        if isinstance(event, Failed):
            raise JobFailure(event.reason, event.message)
        if isinstance(event, kind):
            return event
    if seen.exit_code == -signal.SIGABRT:  # a library in C++ or Rust whose allocation failed
        raise JobFailure(Reason.invalid_request, requested.too_much_memory)
    if seen.exit_code == -ENDED_BY:
        raise JobFailure(Reason.invalid_model, UNENDED)
    last = seen.launch_error or seen.detail or tail(RunDir(run_dir).log, 3) or "no output"
    raise JobFailure(Reason.no_result, f"the preflight ended with {seen.exit_code}: {last}")
