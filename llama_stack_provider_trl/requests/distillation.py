"""Resolves on-policy distillation: its parameters and its teacher."""

from __future__ import annotations

import re
from typing import Any

from ..errors import InvalidRequest
from ..specs.methods import DistillationSpec, UldSpec
from ..specs.model_source import ModelSource, ReferenceSpec
from .answering import refuse_options
from .bases import PREFIX
from .bodies import DistillationConfig
from .names import JOB_UUID_PATTERN
from .options import ProviderOptions
from .paths import resolve_base_model, resolve_trust
from .settings import Settings

TEACHER = "algorithm_config.teacher"
_OF_THE_CONFIG = ("max_completion_length", "temperature", "top_p", "beta")
_WEIGHTS = ("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight")
_HYBRID_BETA = 0.5
"""TRL's default there. With 1 a part of a distribution is nearest to the teacher's where it is 1/e of that."""


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
    if (uld := _uld(config, where)) and uld.hybrid:
        given.setdefault("beta", _HYBRID_BETA)
    return DistillationSpec(reference=ReferenceSpec(source=ModelSource(model=config.teacher)), uld=uld, **given)


def _uld(config: DistillationConfig, where: str) -> UldSpec | None:
    """How spans of text are compared, for a teacher with another vocabulary; None: tokens are."""

    def refuse(name: str, hint: str) -> None:
        raise InvalidRequest(f"{where}.{name}", getattr(config, name), hint)

    given = {name for name, value in config if value is not None}
    if not config.use_uld_loss:
        for name in sorted(name for name in given if name.startswith("uld_")):
            refuse(name, "it belongs to use_uld_loss, which compares other vocabularies: set that, or leave this out")
        return None
    if config.uld_token_merge_strategy not in (None, "bayesian"):
        refuse("uld_token_merge_strategy", "send 'bayesian': TRL's 'observed' gives tokens the odds of the next ones")
    if config.uld_crossentropy_weight:
        hint = "the answers are the model's own, and their cross entropy teaches it nothing; leave it out"
        refuse("uld_crossentropy_weight", hint)
    if not config.uld_use_hybrid_loss:
        for name in ("beta", *_WEIGHTS):
            if name in given:
                refuse(name, "it belongs to uld_use_hybrid_loss: set that, or leave this out")
    for name, other in (_WEIGHTS, _WEIGHTS[::-1]):
        if name in given and other not in given:
            refuse(name, f"send {other} too, or neither")
    if config.uld_hybrid_matched_weight == config.uld_hybrid_unmatched_weight == 0:
        refuse("uld_hybrid_matched_weight", "with both weights 0 nothing is learned; raise one")
    skips = {value for value in (config.uld_skip_student_eos, config.uld_skip_teacher_eos) if value is not None}
    if len(skips) > 1:
        refuse(
            "uld_skip_teacher_eos", "the end of an answer is compared in both or in none; send one of the two fields"
        )
    return UldSpec(skip_end=False not in skips, **_values(config))


def _values(config: DistillationConfig) -> dict[str, Any]:
    named = {
        "student_temperature": config.uld_student_temperature,
        "teacher_temperature": config.uld_teacher_temperature,
        "distillation_weight": config.uld_distillation_weight,
        "hybrid": config.uld_use_hybrid_loss,
        "matched_weight": config.uld_hybrid_matched_weight,
        "unmatched_weight": config.uld_hybrid_unmatched_weight,
    }
    return {name: value for name, value in named.items() if value is not None}


def with_model(method: DistillationSpec, settings: Settings) -> DistillationSpec:
    """The parameters with the model that the teacher is; `jobs.inputs.teachers` looks up one that is a job's. Raises
    InvalidRequest: it cannot be used."""
    given = method.teacher.model
    if given.startswith(PREFIX):
        return method
    model = resolve_base_model(TEACHER, given, settings)
    return method.with_reference(source=ModelSource(model=model, **resolve_trust(model, settings)))
