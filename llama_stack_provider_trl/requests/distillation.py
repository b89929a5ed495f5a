"""Resolves on-policy distillation: its parameters and its teacher."""

from __future__ import annotations

import re

from ..errors import InvalidRequest
from ..specs.methods import DistillationSpec
from ..specs.model_source import ReferenceSpec
from .answering import refuse_options
from .bases import PREFIX
from .bodies import JOB_UUID_PATTERN, DistillationConfig
from .options import ProviderOptions
from .paths import resolve_base_model, resolve_trust
from .settings import Settings

TEACHER = "algorithm_config.teacher"
_OF_THE_CONFIG = ("max_completion_length", "temperature", "top_p", "beta")


def resolve_distillation(config: DistillationConfig, options: ProviderOptions, where: str) -> DistillationSpec:
    """The parameters of a job, with its teacher as the request names it. Raises InvalidRequest."""
    refuse_options(options, "distillation", "what a distillation compares with is its teacher, in algorithm_config")
    if config.lmbda not in (None, 1.0):
        hint = "the model answers all prompts itself, as with 1; train on given answers with SFT. Leave it out"
        raise InvalidRequest(f"{where}.lmbda", config.lmbda, hint)
    if not config.teacher:
        hint = "name the teacher: a local directory, a model id such as org/name, or job:NAME"
        raise InvalidRequest(f"{where}.teacher", config.teacher, hint)
    if config.teacher.startswith(PREFIX):
        job_uuid, slash, checkpoint = config.teacher.removeprefix(PREFIX).partition("/")
        if not re.fullmatch(JOB_UUID_PATTERN, job_uuid) or (slash and not checkpoint):
            hint = "send job:NAME, or job:NAME/CHECKPOINT, such as job:sft-1/checkpoint-100"
            raise InvalidRequest(f"{where}.teacher", config.teacher, hint)
    given = {name: value for name in _OF_THE_CONFIG if (value := getattr(config, name)) is not None}
    return DistillationSpec(reference=ReferenceSpec(model=config.teacher), **given)


def with_model(method: DistillationSpec, settings: Settings) -> DistillationSpec:
    """The parameters with the model that the teacher is; `jobs.teachers` looks up one that is a job's.

    Raises:
        InvalidRequest: it cannot be used.
    """
    given = method.reference.model
    if given is None or given.startswith(PREFIX):
        return method
    model = resolve_base_model(TEACHER, given, settings)
    return method.model_copy(update={"reference": ReferenceSpec(model=model, **resolve_trust(model, settings))})
