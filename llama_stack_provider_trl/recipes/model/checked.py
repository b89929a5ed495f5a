"""Checks the files of all models of a job, before anything is computed."""

from __future__ import annotations

from ...specs.job import JobSpec
from ...specs.kinds import CheckedAnswering, EvaluateSpec, members_of
from ...specs.methods import reward_models
from ...specs.model_source import ModelSource
from .files import check_adapter_files
from .loading import check_weights


def check_models(spec: JobSpec) -> None:
    """Return if the models and adapters of a job that are on this machine are whole, as far as their headers show.

    Raises:
        JobFailure: invalid_model, as `check_weights` and `check_adapter_files`.
    """
    check_weights(spec.source, is_reward=spec.trains_reward)
    if spec.reference_source != spec.source:
        check_weights(spec.reference_source)
    for reward in reward_models(spec.method):
        if reward.path is None or reward.base is None or not reward.path.is_dir():
            continue  # another job makes it
        if reward.is_adapter:
            check_weights(reward.base, is_reward=True)
            check_adapter_files(reward.path)
        else:
            own = ModelSource(model=str(reward.path), trust_remote_code=reward.base.trust_remote_code)
            check_weights(own, is_reward=True)
    answers = spec.work.answers if isinstance(spec.work, EvaluateSpec) else None
    judges = answers.judges if isinstance(answers, CheckedAnswering) else ()
    for further in (*members_of(spec.work), *judges):
        check_weights(further.source)
    for adapter in (spec.adapter, *(further.adapter for further in (*members_of(spec.work), *judges))):
        if adapter is not None:
            check_adapter_files(adapter.path)
