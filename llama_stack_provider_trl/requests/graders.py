"""Refuses graders that the operator has not allowed, and finds the jobs that graders name."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvalidRequest
from ..specs.answer_checks import AnswerCheck
from ..specs.grading.graders import asking_of, field_of, uses_python
from ..specs.rewards import RewardSource
from .bases import served_job_of
from .settings import JobSettings

NOT_ALLOWED = (
    "the source of graders does not run here: the operator allows it by the setting python_graders. Use a grader of "
    "another type, or a reward function of an installed package"
)


def refuse_python_graders(checks: Iterable[tuple[str, AnswerCheck]], settings: JobSettings) -> None:
    """Refuse checks, by their fields, that run source of a request. Raises InvalidRequest."""
    for field, check in checks:
        if check.grader is not None and uses_python(check.grader) and not settings.python_graders:
            raise InvalidRequest(f"{field}.grader.type", "python", NOT_ALLOWED)


def jobs_that_grade(rewards: Iterable[RewardSource]) -> list[str]:
    """The jobs that graders name as their models. Raises InvalidRequest."""
    found = []
    for number, check in ((n, one.check) for n, one in enumerate(rewards)):
        if check is None or check.grader is None:
            continue
        for name, leaf in asking_of(check.grader).items():
            field = f"algorithm_config.rewards.{number}.check.grader.{field_of(check.grader, name)}model"
            if (served := served_job_of(field, leaf.model)) is not None:
                found.append(served[0])
    return found
