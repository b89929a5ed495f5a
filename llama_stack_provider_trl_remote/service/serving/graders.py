"""Refuses graders that cannot be used here, before one grades an answer."""

from __future__ import annotations

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.graders import NOT_ALLOWED
from llama_stack_provider_trl.specs.grading.graders import Grader, problem_of, uses_python
from llama_stack_provider_trl.specs.grading.grading import unusable_here

from ..settings import ServiceSettings


def refuse_grader(grader: Grader, settings: ServiceSettings) -> None:
    """Raises InvalidRequest: the operator has not allowed its source, or something that it needs is not here."""
    if uses_python(grader) and not settings.python_graders:
        raise InvalidRequest("grader.type", "python", NOT_ALLOWED)
    if (problem := problem_of(grader) or unusable_here(grader)) is not None:
        name, hint = problem
        raise InvalidRequest(f"grader.{name}", getattr(grader, name, grader.name), hint)
