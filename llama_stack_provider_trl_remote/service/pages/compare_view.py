"""The difference of several jobs' configurations, and their results beside each other. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ..views.answer_rows import MOST_ANSWERS
from .job_view import Setting, result_of


class ComparedSetting(NamedTuple):
    name: str
    values: list[str]
    """Of each job, as its training has reported it, else as submitted; empty: the job has none."""

    @property
    def differs(self) -> bool:
        return len({*self.values}) > 1


RESULT = "result."
"""Beginning of the settings that are the result of a job which does not train."""
_OF_EVERY_JOB = ("job_uuid", "checkpoint_dir", "output_name", "run_dir")
"""Settings that differ between any two jobs."""


class AnswersLink(NamedTuple):
    address: str
    text: str
    """What the link leads to; where it is not all, it says so."""


def answers_link(answered: Sequence[str]) -> AnswersLink | None:
    """The page that shows the answers of jobs beside each other; None: no job has any."""
    if not answered:
        return None
    shown = answered[:MOST_ANSWERS]
    text = "Their answers beside each other"
    if len(answered) > len(shown):
        text = f"Answers of the first {len(shown)} of {len(answered)} jobs beside each other"
    return AnswersLink(f"/answers?{urlencode([('job', name) for name in shown])}", text)


def compared(jobs: Sequence[Sequence[Setting]]) -> list[ComparedSetting]:
    """The settings of some jobs beside each other, in the order in which they are first found."""
    found = [{one.name: one.reported or one.submitted for one in job} for job in jobs]
    named = (name for job in found for name in job if not name.startswith(RESULT))
    names = dict.fromkeys(name for name in named if name not in _OF_EVERY_JOB)
    return [ComparedSetting(name, [job.get(name, "") for job in found]) for name in names]


def measured(jobs: Sequence[Mapping[str, Any]]) -> list[ComparedSetting]:
    """What jobs that do not train have found: a row for each value, beside what each of them has read.

    Args:
        jobs: `resources_allocated` of each.

    Returns:
        Empty: none of them has a result.
    """
    found = [dict(result_of(job.get("result") or {})) for job in jobs]
    if not any(found):
        return []
    read = [_read(job["effective_config"]) if result else "" for job, result in zip(jobs, found, strict=True)]
    names = dict.fromkeys(name for job in found for name in job)
    return [
        ComparedSetting("model", read),
        *(ComparedSetting(name, [job.get(name, "") for job in found]) for name in names),
    ]


def rate_of(config: Mapping[str, Any]) -> float | None:
    """The learning rate of a job; None: it trains nothing, or its trials each have their own."""
    trains = (config.get("work") or {"kind": "train"})["kind"] == "train" and not config.get("search")
    return config["optimizer"]["learning_rate"] if trains and config.get("optimizer") else None


def _read(config: Mapping[str, Any]) -> str:
    """What a job that does not train has read: checkpoints of jobs, or what the request named."""
    named = [f"job:{base['job_uuid']}/{base['checkpoint']}" for base in config.get("bases") or ()]
    work = config.get("work") or {}
    merge, several = work.get("merge") or {}, work.get("members") or ()
    if several or merge:
        models = [*several, *(merge.get("inputs") or ()), *([merge["base"]] if merge.get("base") else [])]
        read = dict.fromkeys(_given(model) for model in models if not _is_of_job(model))
        return ", ".join([*named, *read])
    # The others are below its adapter, or judges.
    return named[0] if named and _is_of_job(config) else _given(config)


def _given(config: Mapping[str, Any]) -> str:
    """The model, or the adapter, in the fields of a job or of one of its models."""
    return str((config.get("adapter") or config).get("model") or "")


def _is_of_job(config: Mapping[str, Any]) -> bool:
    """Whether that is another job's checkpoint."""
    return bool((config.get("adapter") or config).get("made_by"))
