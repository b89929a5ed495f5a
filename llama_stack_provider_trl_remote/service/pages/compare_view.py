"""The difference of several jobs' configurations. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .job_view import Setting


class ComparedSetting(NamedTuple):
    name: str
    values: list[str]
    """Of each job, as its training has reported it, else as submitted; empty: the job has none."""

    @property
    def differs(self) -> bool:
        return len({*self.values}) > 1


_OF_EVERY_JOB = ("job_uuid", "checkpoint_dir", "output_name", "run_dir")
"""Settings that differ between any two jobs."""


def compared(jobs: Sequence[Sequence[Setting]]) -> list[ComparedSetting]:
    """The settings of some jobs beside each other, in the order in which they are first found."""
    found = [{one.name: one.reported or one.submitted for one in job} for job in jobs]
    names = dict.fromkeys(name for job in found for name in job if name not in _OF_EVERY_JOB)
    return [ComparedSetting(name, [job.get(name, "") for job in found]) for name in names]
