"""Finds the models that answer for the graders of a job's rewards."""

from __future__ import annotations

from typing import Any

from ....errors import InvalidRequest, JobNotFound
from ....requests.bases import Base, resolve_served, served_job_of
from ....requests.settings import Settings
from ....specs.grading.graders import asking_of, field_of
from ....specs.rewards import RewardSource
from ....specs.work import FurtherModel
from ...store.store import Store
from ..bases import named_job
from .reward_models import FIELD


def with_grading_models(fields: dict[str, Any], settings: Settings, store: Store | None) -> dict[str, Any]:
    """The fields of a job with what the models are that its graders name.

    Args:
        store: the jobs that there are; None: there are none.

    Raises:
        InvalidRequest: one of them cannot be used.
    """
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
    found = []
    for name, leaf in asking.items():
        field = f"{FIELD}.{number}.check.grader.{field_of(grader, name)}model"
        base = _found(field, leaf.model, job_uuid, settings, store)
        found.append(FurtherModel(**dict(base.source), adapter=base.adapter, lora=base.lora))
    return source.model_copy(update={"grading": tuple(found)})


def _found(field: str, value: str, job_uuid: str, settings: Settings, store: Store | None) -> Base:
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
