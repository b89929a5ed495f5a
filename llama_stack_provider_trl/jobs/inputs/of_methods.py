"""Finds the models that a method reads beside its own: its teacher, and those that reward and grade its answers."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidRequest, JobNotFound
from ...requests.bases import (
    PREFIX,
    Base,
    NamedJob,
    NamedModel,
    checkpoint_of,
    is_adapter,
    resolve_base,
    resolve_served,
    served_job_of,
)
from ...requests.distillation import TEACHER
from ...requests.settings import Settings
from ...specs.bases import BaseJob
from ...specs.grading.graders import asking_of, field_of
from ...specs.methods import OTHER_VOCABULARY, MethodSpec
from ...specs.model_source import ModelName, ModelSource
from ...specs.rewards import RewardModel, RewardSource
from ...specs.work import FurtherModel
from ..decisions.states import JobState
from ..store.store import Store
from .bases import find_base, named_job
from .vocabularies import refuse_other_vocabularies

REWARDS = "algorithm_config.rewards"


def with_models(fields: dict[str, Any], settings: Settings, store: Store | None) -> dict[str, Any]:
    """The fields of a job with what its teacher is, and the models that reward and grade its answers. Raises
    InvalidRequest: one of them cannot be used, or the teacher has another vocabulary than the model.

    Args:
        store: the jobs that there are; None: there are none.
    """
    fields = with_reward_models(fields, store)
    return with_teacher(with_grading_models(fields, settings, store), settings, store)


def with_reward_models(fields: dict[str, Any], store: Store | None) -> dict[str, Any]:
    """As `with_models`, of the reward models that rewards name."""
    method: MethodSpec = fields["method"]
    if not method.reward_models:
        return fields
    rewards = tuple(
        source if source.model is None else _reward_model(number, source, fields["job_uuid"], store)
        for number, source in enumerate(method.rewards_of_answers)
    )
    return {**fields, "method": method.model_copy(update={"rewards": rewards})}


def _reward_model(number: int, source: RewardSource, job_uuid: str, store: Store | None) -> RewardSource:
    field, given = f"{REWARDS}.{number}.model", source.model
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


def with_grading_models(fields: dict[str, Any], settings: Settings, store: Store | None) -> dict[str, Any]:
    """As `with_models`, of the models that graders ask."""
    method = fields["method"]
    given = method.rewards_of_answers
    rewards = tuple(_with_models(n, source, fields["job_uuid"], settings, store) for n, source in enumerate(given))
    return {**fields, "method": method.model_copy(update={"rewards": rewards})} if rewards != given else fields


def _with_models(
    number: int, source: RewardSource, job_uuid: str, settings: Settings, store: Store | None
) -> RewardSource:
    grader = None if source.check is None else source.check.grader
    if grader is None or not (asking := asking_of(grader)):
        return source
    models = []
    for name, leaf in asking.items():
        field = f"{REWARDS}.{number}.check.grader.{field_of(grader, name)}model"
        base = _answering(field, leaf.model, job_uuid, settings, store)
        models.append(FurtherModel(**dict(base.source), adapter=base.adapter, lora=base.lora))
    return source.model_copy(update={"grading": tuple(models)})


def _answering(field: str, value: str, job_uuid: str, settings: Settings, store: Store | None) -> Base:
    """What a name stands for. A job that is named may still make it. Raises InvalidRequest."""
    served = served_job_of(field, value)
    if served is None:
        return resolve_served(field, value, settings)
    maker, text = served
    if maker == job_uuid:
        raise InvalidRequest(field, value, "a job cannot be graded by its own result: name another model")
    try:
        if store is None:
            raise JobNotFound(maker)
        return resolve_served(field, text, settings, named_job(field, text, maker, store))
    except JobNotFound as error:
        hint = "there is no such job here: submit it first, or correct its name"
        raise InvalidRequest(field, value, hint) from error
    except InvalidRequest as error:
        raise InvalidRequest(field, value, error.hint) from error


def with_teacher(fields: dict[str, Any], settings: Settings, store: Store | None) -> dict[str, Any]:
    """As `with_models`, of the teacher of a distillation."""
    method: MethodSpec = fields["method"]
    teacher, own = method.teacher_source, fields["source"]
    if teacher is None:
        return fields
    named = [("model", own.model), (TEACHER, teacher.model)]
    if teacher.model.startswith(PREFIX):
        teacher = _teacher_of_job(teacher.model, fields["job_uuid"], settings, store)
        fields = {**fields, "method": method.with_reference(source=teacher)}
    if method.other_vocabulary is None:
        refuse_other_vocabularies(named, [own, teacher], OTHER_VOCABULARY)
    return fields


def _teacher_of_job(value: str, job_uuid: str, settings: Settings, store: Store | None) -> ModelSource:
    model = NamedModel(TEACHER, value, job_uuid)
    named = None if store is None else find_base(model, store)
    if named is not None and is_adapter(model, settings, named):
        hint = (
            f"job {named.spec.job_uuid!r} trains an adapter, and a teacher is a whole model: name its checkpoint "
            "'merged', which the provider option merge_adapter writes, or a job that merges it"
        )
        raise InvalidRequest(TEACHER, value, hint)
    return resolve_base(model, settings, named).source
