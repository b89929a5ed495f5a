"""The difference of several jobs' configurations, and their results beside each other. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..views.answers import MOST_ANSWERS
from .job_view import Setting, result_of
from .rendering import address


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
_FOUND = re.compile(r"token_cache\..*|memory\..*_bytes")
"""What a training has reported of itself and nobody has set."""


Order = Literal[
    "",
    "job",
    "-job",
    "state",
    "-state",
    "loss",
    "-loss",
    "eval",
    "-eval",
    "steps",
    "-steps",
    "rate",
    "-rate",
    "speed",
    "-speed",
    "memory",
    "-memory",
    "device",
    "-device",
]
"""A column of the table of runs, with a minus the largest first; empty: as they were named."""
COLUMNS = {
    **{"job": "Job", "state": "State", "loss": "Loss", "eval": "Eval loss", "steps": "Steps"},
    **{"rate": "Learning rate", "speed": "Tokens/s", "memory": "Peak memory", "device": "Device"},
}
"""Column of the table of runs -> its head."""
NUMBERS = frozenset({"loss", "eval", "rate", "speed", "memory"})


@dataclass(frozen=True)
class ComparedQuery:
    """What the address of the page requests."""

    jobs: tuple[str, ...]
    hidden: frozenset[str] = frozenset()
    """Jobs whose curves are not drawn."""
    sort: Order = ""

    def address(self, **changes: Any) -> str:
        """The address of the same page, but for some fields."""
        found = replace(self, **changes)
        jobs, hidden = found.jobs, [("hide", name) for name in found.jobs if name in found.hidden]
        return address("/compare", [*(("job", name) for name in jobs), *hidden, ("sort", found.sort)])

    def without(self, job: str) -> str:
        return self.address(jobs=tuple(name for name in self.jobs if name != job))

    def sorted_by(self, column: str) -> str:
        """The address that a click on a head leads to: the smallest first, the largest first, then as they were
        named."""
        return self.address(sort={column: f"-{column}", f"-{column}": ""}.get(self.sort, column))

    def direction(self, column: str) -> str:
        """`aria-sort` of a column; empty: the table is not sorted by it."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.sort, "")


class ComparedRun(NamedTuple):
    """A row of the table of runs. None: not known."""

    job: str
    state: str
    loss: float | None
    eval: float | None
    steps: int | None
    rate: float | None
    speed: float | None
    memory: int | None
    device: str | None
    total_steps: int | None

    @classmethod
    def of(cls, job: str, found: Mapping[str, Any], eval_loss: float | None) -> ComparedRun:
        """
        Args:
            found: `resources_allocated` of the job.
        """
        progress, steps = found["progress"], found["progress"]["total_steps"]
        return cls(
            job=job,
            state=found["state"],
            loss=progress["loss"],
            eval=eval_loss,
            steps=progress["step"] if steps else None,
            rate=rate_of(found["effective_config"]),
            speed=progress["tokens_per_second"],
            memory=progress["peak_memory_bytes"],
            device=found["device"],
            total_steps=steps,
        )


def in_order(runs: Sequence[ComparedRun], sort: Order) -> list[ComparedRun]:
    """Runs by a column, those without a value last."""
    column = sort.removeprefix("-")
    if not column:
        return [*runs]
    known = [run for run in runs if getattr(run, column) is not None]
    known.sort(key=lambda run: getattr(run, column), reverse=sort.startswith("-"))
    return [*known, *(run for run in runs if run not in known)]


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
    return AnswersLink(address("/answers", [("job", name) for name in shown]), text)


def compared(jobs: Sequence[Sequence[Setting]]) -> list[ComparedSetting]:
    """The settings of some jobs beside each other, in the order in which they are first found."""
    found = [{one.name: one.reported or one.submitted for one in job} for job in jobs]
    named = (name for job in found for name in job if not name.startswith(RESULT))
    names = dict.fromkeys(name for name in named if name not in _OF_EVERY_JOB and not _FOUND.fullmatch(name))
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
