"""The model's answers to the prompts of a job's `samples`: as the API lists them, and side by side for a page."""

from __future__ import annotations

from typing import NamedTuple

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.reader import read_samples
from llama_stack_provider_trl.jobs.store.records import SamplesRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.job import JobSpec

from ..http.bodies import PromptMessage, SampleAnswer, SampleSet, SamplesResponse
from .events import read_states

COLUMNS = 4
"""Sets between the first and the last one that a page shows beside them."""


class SideBySide(NamedTuple):
    """The first and the last set, and a few between them."""

    prompts: list[list[PromptMessage]]
    sets: list[SampleSet]
    state: JobState
    has_ended: bool
    cursor: str
    """Behind the events that are reflected here."""
    older: int | None
    """`skip` of the sets before these; None: there are none."""
    newer: int | None


def list_samples(store: Store, job_uuid: str, limit: int, offset: int) -> SamplesResponse:
    """A page of a job's sets of answers. Raises JobNotFound."""
    with store.snapshot():
        prompts = _prompts(store.get(job_uuid).spec)
        found, total = read_samples(store, job_uuid, limit, offset)
    return SamplesResponse(prompts=prompts, data=list(map(_shown, found)), total=total)


def side_by_side(store: Store, job_uuid: str, skip: int) -> SideBySide:
    """The sets that a page shows. Raises JobNotFound.

    Args:
        skip: of the sets between the first and the last, so many of the newest are left out.
    """
    with store.snapshot():
        prompts = _prompts(store.get(job_uuid).spec)
        (state,), (cursor,) = read_states(store, [job_uuid])
        first, total = read_samples(store, job_uuid, 1)
        end = max(1, total - 1 - skip)
        begin = max(1, end - COLUMNS)
        between, _ = read_samples(store, job_uuid, end - begin, begin)
        last, _ = read_samples(store, job_uuid, 1, total - 1) if total > 1 else ([], 0)
    sets = [_shown(one) for one in (*first, *between, *last)]
    older = skip + COLUMNS if begin > 1 else None
    newer = max(0, skip - COLUMNS) if skip else None
    return SideBySide(prompts, sets, state, state in TERMINAL, str(cursor), older, newer)


def _prompts(spec: JobSpec) -> list[list[PromptMessage]]:
    given = spec.train.samples.prompts if spec.train.samples else ()
    return [[PromptMessage(role=turn.role, content=turn.content) for turn in prompt] for prompt in given]


def _shown(found: SamplesRecord) -> SampleSet:
    answers = [SampleAnswer(**answer.model_dump()) for answer in found.answers]
    return SampleSet(kind=found.kind, step=found.step, epoch=found.epoch, time=found.time, answers=answers)
