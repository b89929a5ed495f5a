"""Refuses graders that the operator has not allowed."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvalidRequest
from ..specs.answer_checks import AnswerCheck
from ..specs.grading.graders import uses_python
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
