"""The exports of a job's checkpoints, and the files of an export."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse
from llama_stack_provider_trl.system.files import file_names


class ListedExport(NamedTuple):
    """An export of a checkpoint of a job."""

    job_uuid: str
    target: str
    checkpoint: str
    state: str


class ExportedFile(NamedTuple):
    path: str
    size: int


def exports_of(store: Store, status: PostTrainingJobStatusResponse) -> list[ListedExport]:
    """The exports of a job's checkpoints, among the jobs that its status says come after it. Raises StoreError."""
    found = []
    for one in status.resources_allocated.get("before") or ():
        with suppress(TrlError):  # it was deleted, or another release wrote it: the page has the rest
            job = store.get(one["job_uuid"])
            if (export := job.spec.does.exporting) is not None:
                read = [base.checkpoint for base in job.spec.bases if base.job_uuid == status.job_uuid]
                found += [ListedExport(job.job_uuid, export.target, name, job.state.value) for name in read]
    return found


def files_of_export(status: PostTrainingJobStatusResponse) -> list[ExportedFile]:
    """The files of an export, with their bytes; empty: there are none, or they are on this machine no longer."""
    work = status.resources_allocated["effective_config"].get("work") or {}
    if work.get("kind") != "export":
        return []
    with suppress(OSError):
        directories = [Path(one.path) for one in status.checkpoints]
        return [ExportedFile(name, (path / name).lstat().st_size) for path in directories for name in file_names(path)]
    return []
