"""Finds the jobs whose reward models reward a job's answers."""

from __future__ import annotations

from typing import Any

from ....errors import InvalidRequest, JobNotFound
from ....requests.bases import PREFIX, NamedJob, checkpoint_of
from ....requests.options import ProviderOptions
from ....requests.settings import Settings
from ....specs.bases import BaseJob
from ....specs.methods import MethodSpec
from ....specs.model_source import ModelName, ModelSource
from ....specs.rewards import RewardModel, RewardSource
from ...decisions.states import JobState
from ...store.store import Store

FIELD = "algorithm_config.rewards"


def with_reward_models(
    fields: dict[str, Any], options: ProviderOptions, settings: Settings, store: Store | None
) -> dict[str, Any]:
    """The fields of a job with what the reward models are that its rewards name.

    Args:
        store: the jobs that there are; None: there are none.

    Raises:
        InvalidRequest: one of them cannot be used.
    """
    method: MethodSpec = fields["method"]
    if not method.reward_models:
        return fields
    rewards = tuple(
        source if source.model is None else _found(number, source, fields["job_uuid"], options, settings, store)
        for number, source in enumerate(method.rewards_of_answers)
    )
    return {**fields, "method": method.model_copy(update={"rewards": rewards})}


def _found(
    number: int,
    source: RewardSource,
    job_uuid: str,
    options: ProviderOptions,
    settings: Settings,
    store: Store | None,
) -> RewardSource:
    field, given = f"{FIELD}.{number}.model", source.model
    assert given is not None
    value = f"{PREFIX}{given.job_uuid}{f'/{given.checkpoint}' if given.checkpoint else ''}"
    if given.job_uuid == job_uuid:
        raise InvalidRequest(field, value, "a job cannot be rewarded by its own result: name a reward model's job")
    named = None if store is None else _named(given.job_uuid, store)
    if named is None:
        raise InvalidRequest(field, value, "there is no such job here: submit it first, or correct its name")
    job = named.spec
    if job.work is not None or job.search is not None or not job.trains_reward:
        hint = f"job {job.job_uuid!r} trains no reward model: name a job of the type 'reward'"
        raise InvalidRequest(field, value, hint)
    checkpoint = checkpoint_of(field, value, named, wants_adapter=job.lora is not None)
    is_adapter = job.lora is not None
    own = ModelSource(
        model=str(job.checkpoint_dir / checkpoint),
        trust_remote_code=job.source.trust_remote_code,
        made_by=BaseJob(job_uuid=job.job_uuid, checkpoint=checkpoint),
    )
    model = RewardModel(
        job_uuid=job.job_uuid,
        checkpoint=checkpoint,
        source=own,
        is_adapter=is_adapter,
        base=job.source if is_adapter else None,
        trained_from=None if is_adapter else ModelName(**job.source.model_dump(include=set(ModelName.model_fields))),
        max_seq_length=job.data.max_seq_length,
        truncation_side=job.data.truncation_side,
    )
    return source.model_copy(update={"model": model})


def _named(job_uuid: str, store: Store) -> NamedJob | None:
    try:
        job = store.get(job_uuid)
    except JobNotFound:
        return None
    names = tuple(checkpoint.path.name for checkpoint in store.checkpoints(job_uuid))
    return NamedJob(job.spec, job.state is JobState.completed, names)
