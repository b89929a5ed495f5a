"""What computes the answers of jobs that answer prompts: transformers in their own process, or vLLM."""

from __future__ import annotations

from typing import cast

from ..errors import InvalidRequest
from ..specs.answer_files import answering_of
from ..specs.kinds import EvaluateSpec, GenerateSpec, Work
from .settings import Settings

_LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, but for 0."""


def is_answered_by_vllm(work: Work | None) -> bool:
    """Whether vLLM computes the answers of a job."""
    answering = answering_of(work)
    return answering is not None and answering.engine == "vllm"


def with_engine(work: Work, settings: Settings) -> Work:
    """The work with the interpreter that its answers are computed by.

    Raises:
        InvalidRequest: there is none, or vLLM would answer at another temperature.
    """
    answering = answering_of(work)
    if answering is None or not is_answered_by_vllm(work):
        return work
    if settings.vllm_python is None:
        hint = "this service has no vLLM: leave it out, or have the operator name an interpreter with it (vllm_python)"
        raise InvalidRequest("engine", answering.engine, hint)
    if 0 < answering.temperature < _LEAST_TEMPERATURE:
        hint = f"vLLM has no temperature below {_LEAST_TEMPERATURE} but 0: send one of these, or leave engine out"
        raise InvalidRequest("temperature", answering.temperature, hint)
    found = answering.model_copy(update={"vllm_python": settings.vllm_python})
    return work.model_copy(update={"answers": found}) if isinstance(work, EvaluateSpec) else cast(GenerateSpec, found)
