"""Records and starts the attempts of jobs: directories, resume point, `spec.json`, port, task."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...errors import InvalidRequest, JobFailure
from ...launch.base import Launcher, MasterPorts, TaskSpec
from ...requests.untrained import refuse_destination
from ...specs.events import Reason
from ...specs.exports import accounts_of
from ...specs.job import JobSpec, derive
from ...system.data_dir import DataDir
from ...system.files import (
    Blob,
    RunDir,
    atomic_write,
    free_bytes,
    put_lines,
    remove_leftovers,
    resolve_under,
    set_aside,
)
from ...system.ownership import Ownership
from ..decisions.placement import is_remote, nodes_of
from ..inputs.bases import check_checkpoints
from ..inputs.made_rows import with_known_rows
from ..inputs.promotion import with_found_measures
from ..store.records import JobRecord
from ..store.store import Store
from .step_checkpoints import fallbacks, resume_point
from .verdict import has_shrunk

_PIECE = 4 << 20
"""Bytes of rows between two checks of the disk."""


class Attempts:
    """The attempts of one data directory's jobs.

    Args:
        python: interpreter that trains; None: this process's own.
        hang_timeout: seconds without progress after which a training is ended; None: never.
        ports: where the ranks of a job on this machine meet; None: every job has one rank.
        export_destinations: where exports may be sent.
    """

    def __init__(
        self,
        store: Store,
        launcher: Launcher,
        data_dir: Path,
        python: str | None,
        hang_timeout: float | None,
        ports: MasterPorts | None,
        export_destinations: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._data_dir = data_dir
        self._python = python
        self._hang_timeout = hang_timeout
        self._ports = ports
        self._export_destinations = tuple(export_destinations)
        self._ownership = Ownership(data_dir)

    def record(self, job: JobRecord, device: str) -> bool:
        """Record the next attempt of a scheduled job. Returns whether it was scheduled.

        A crash from here until the start leaves `launching`, from which the next pass of the supervisor starts it.
        """
        attempt = job.attempt + 1
        home = resolve_under(DataDir(self._data_dir).jobs, job.job_uuid, "job_uuid")
        run_dir = home / "attempts" / str(attempt)
        # An earlier database may have left another job's files under these names.
        set_aside(run_dir)
        # A directory of others is not moved, and the job fails: see `start`.
        own = attempt == 1 and self._ownership.is_ours(job.spec.checkpoint_dir)
        if own and (aside := set_aside(job.spec.checkpoint_dir)):
            self._store.warn(job.job_uuid, f"{job.spec.checkpoint_dir} existed already and was moved to {aside}")
        self._warn_of_fewer_nodes(job, nodes_of(device.split(",")))
        return self._store.launch(job.job_uuid, attempt, device, run_dir, resume_point(self._store, job))

    def start(self, job: JobRecord, task: TaskSpec) -> None:
        """Start the task of a recorded attempt. May be repeated. Raises InvalidRequest: a checkpoint of another job
        that it reads is damaged or gone; InvalidRows: the rows that another job has made are gone; JobFailure:
        evaluations have not found what the job asks for, or its export may not be sent there any more; JobConflict: the
        job's checkpoint directory belongs to another data directory; OSError: nothing was started."""
        check_checkpoints(job.spec)
        self.check_destination(job.spec)
        spec = with_found_measures(job.spec, self._store)
        self._check_disk(job)
        self._ownership.check_unused(job.spec.checkpoint_dir)
        self._ownership.claim(job.spec.checkpoint_dir, job.job_uuid)
        task.run_dir.mkdir(parents=True, exist_ok=True)
        self._write_spec(job, spec)
        self._launcher.start(self._with_port(task))

    def task(self, job: JobRecord) -> TaskSpec:
        """The task of a job's current attempt."""
        assert job.run_dir is not None
        limit = job.spec.lifecycle.max_duration
        return TaskSpec(
            f"{job.job_uuid}-{job.attempt}",
            job.run_dir,
            job.devices,
            self._python,
            job.spec.ranks_per_node,
            # Only a start reads it. Never 0: even the last attempt may save.
            time_limit=None if limit is None else max(1.0, limit - self._store.seconds_trained(job.job_uuid)),
            hang_timeout=self._hang_timeout,
            accounts=_accounts_of(job.spec),
        )

    def check_destination(self, spec: JobSpec) -> None:
        """Return if a job's export, if it is one, may be sent where it names: the settings may have changed since it
        was submitted. Raises JobFailure: invalid_request."""
        export = spec.does.exporting
        if export is None:
            return
        try:
            refuse_destination(export.upload_to, self._export_destinations)
        except InvalidRequest as error:
            raise JobFailure(Reason.invalid_request, f"{error}. Nothing was uploaded.") from error

    def remove_leftovers(self, job: JobRecord) -> None:
        """Remove what an ended attempt has left incomplete in the job's checkpoint directory."""
        if not self._ownership.is_ours(job.spec.checkpoint_dir):
            return
        listed = {checkpoint.path.name for checkpoint in self._store.checkpoints(job.job_uuid)}
        remove_leftovers(job.spec.checkpoint_dir, listed)

    def _warn_of_fewer_nodes(self, job: JobRecord, nodes: int) -> None:
        requested = job.spec.resources
        if requested is None or nodes >= requested.nodes:
            return
        where = f"{nodes} nodes" if nodes > 1 else "one node"
        same = f"trains on {where}, with the same rows per step"
        if job.attempt and nodes >= requested.min_nodes:
            why = f"fewer are free now (resources.min_nodes is {requested.min_nodes}):"
            effect = f"attempt {job.attempt + 1} {same}, so that a step takes longer"
        else:
            why = "fewer machines can serve the job;"
            effect = f"a second agent on a machine would only slow the first one down: it {same}"
        self._store.warn(job.job_uuid, f"{requested.nodes} nodes were requested, and {why} {effect}")

    def _check_disk(self, job: JobRecord) -> None:
        for directory in (self._data_dir, job.spec.checkpoint_dir):
            free, needed = free_bytes(directory), job.spec.lifecycle.min_free_bytes
            if free < needed:
                sizes = f"{free >> 20} MiB are free and min_free_disk_mb asks for {needed >> 20}"
                raise OSError(errno.ENOSPC, f"the disk of {directory} is full: {sizes}")

    def _write_spec(self, job: JobRecord, known: JobSpec) -> None:
        """Write the attempt's `spec.json`.

        Args:
            known: the job with what other jobs have found.
        """
        assert job.run_dir is not None
        *before, attempt = self._store.attempts(job.job_uuid)
        spec = derive(
            with_known_rows(known, self._store, self._data_dir, partial(self._put, job)),
            job.attempt,
            job.devices[0].rpartition("/")[2],
            job.run_dir,
            attempt.resume_from,
            *fallbacks(self._store, job, attempt.resume_from),
            in_smaller_parts=has_shrunk(before),
            has_trained=any(tried.step > tried.start_step for tried in before),
            nodes=nodes_of(job.devices),
            age=job.age,
        )
        atomic_write(RunDir(job.run_dir).spec, spec.model_dump_json(indent=1).encode())

    def _put(self, job: JobRecord, directory: Path, lines: Iterable[bytes]) -> Blob:
        """Store a part of rows that another job has made, which counts for its token. Raises OSError, StoreError."""

        def checked() -> Iterator[bytes]:
            unchecked = 0
            for line in lines:
                unchecked += len(line)
                if unchecked >= _PIECE:
                    self._check_disk(job)
                    unchecked = 0
                yield line

        blob = put_lines(directory, checked())
        self._store.rows.count_for(job.created_by, blob.sha256, blob.num_bytes)
        return blob

    def _with_port(self, task: TaskSpec) -> TaskSpec:
        """The task with the port at which its ranks meet, if they are several on this machine. The other active jobs
        may have been given ports that they do not listen on yet."""
        if task.ranks == 1 or is_remote(task.devices):
            return task
        assert self._ports is not None, "a job of several ranks on this machine needs a port"
        port, last = self._ports.choose(other.run_dir for other in self._store.active() if other.run_dir)
        return replace(task, master_port=port, last_port=last)


def _accounts_of(spec: JobSpec) -> tuple[str, ...]:
    """What an export uploads with: nothing where code of a model would see it."""
    export = spec.does.exporting
    return () if export is None or spec.source.trust_remote_code else accounts_of(export)
