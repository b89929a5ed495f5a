"""What the playground begins with where it is opened from the page of a job. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import CheckpointRecord, JobRecord
from llama_stack_provider_trl.specs.bases import parts_of
from llama_stack_provider_trl.specs.job import DatasetRef, RowNames

RESULT, CHECKPOINT = "ft:", "job:"
"""What names of a job's result, and of its checkpoints, begin with."""


class JobModels(NamedTuple):
    """The models of a job, as chats name them."""

    base: str
    """What it was trained from."""
    tuned: str
    """Its result, or the first of `others`; empty: it has none yet."""
    others: tuple[str, ...]
    """Its checkpoints: those of its end, then those of its steps, the newest first."""


def models_of(job: JobRecord, checkpoints: Sequence[CheckpointRecord]) -> JobModels:
    """The models of a job.

    Args:
        checkpoints: of the job, by step, and of one step in the order in which it makes them.
    """
    source = job.spec.source if job.spec.adapter is None else job.spec.adapter
    made = source.made_by
    base = source.model if made is None else f"{CHECKPOINT}{made.job_uuid}/{made.checkpoint}"
    # With `best_checkpoint` those of the end have the step of the best one, which may be any.
    made_last = sorted(checkpoints, key=lambda one: (one.kind != "step", one.step))
    others = tuple(f"{CHECKPOINT}{job.job_uuid}/{one.path.name}" for one in reversed(made_last))
    is_known = job.state is JobState.completed or job.spec.search is not None
    return JobModels(base, f"{RESULT}{job.job_uuid}" if is_known else next(iter(others), ""), others)


def dataset_of(job: JobRecord) -> str:
    """The name of the dataset that a job was trained on; empty: it has none of its own."""
    ref = job.spec.data.dataset
    return "" if ref.of_job is not None else ref.dataset_id


def names_of(job: JobRecord, dataset_id: str) -> RowNames | None:
    """The names by which a job reads the rows of a dataset; None: those of shapes."""
    refs = (ref for _, ref in parts_of(job.spec, DatasetRef))
    return next((ref.names for ref in refs if ref.dataset_id == dataset_id), None)


def job_named(model: str) -> str:
    """The job whose result or checkpoint a chat names; empty: it names none."""
    for prefix in (RESULT, CHECKPOINT):
        if model.startswith(prefix):
            return model.removeprefix(prefix).partition("/")[0]
    return ""


def training_link(dataset_id: str, model: str, job: JobRecord | None) -> str:
    """The address of the form of a DPO job on votes.

    Args:
        model: as chats name it, that the job begins with.
        job: the one that `job_named` finds; None: there is none.
    """
    begun_with = f"{CHECKPOINT}{model.removeprefix(RESULT)}" if model.startswith(RESULT) else model
    query = {"dataset": dataset_id, "model": begun_with, "method": "dpo"}
    if job is not None and job.spec.lora is not None and not model.endswith("/merged"):
        query["options"] = json.dumps({"adapter": "continue"})
    return f"/new?{urlencode(query)}"
