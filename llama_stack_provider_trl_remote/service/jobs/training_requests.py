"""The engine's requests out of bodies that were validated already. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import (
    DataConfig,
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
    TrainingConfig,
    algorithm_of,
    request_digest,
)
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Request
from llama_stack_provider_trl.specs.methods import Call

from ..http.bodies import NOT_OF_JOBS, PreferenceOptimizeBody, PreflightBody, SupervisedFineTuneBody
from ..settings import ServiceSettings

OURS = ("provider_options", "dataset_digests")
"""Fields of a body that the engine's request lacks."""
type TrainingBody = SupervisedFineTuneBody | PreferenceOptimizeBody


def training_request(body: TrainingBody, settings: ServiceSettings) -> Request:
    """The request of a body, with the configuration's values where it has none and the engine has no setting for them.
    Raises InvalidRequest: neither has the rows that each rank takes at once."""
    kind: type[Request] = SupervisedFineTuneRequest
    if isinstance(body, PreferenceOptimizeBody) and _call_of(body) == "dpo":
        kind = PreferenceOptimizeRequest
    # A preflight's body may lack the name.
    given = {**_given(body), "job_uuid": body.job_uuid, "training_config": _training_config(body, settings)}
    return _of_validated(kind, {name: value for name, value in given.items() if name not in (*OURS, *NOT_OF_JOBS)})


def digest_of(body: TrainingBody, options: ProviderOptions) -> str:
    """Identifies what a caller has set. Defaults of the configuration are left out: a request that is repeated after
    these were changed is still the same."""
    kind = PreferenceOptimizeRequest if isinstance(body, PreferenceOptimizeBody) else SupervisedFineTuneRequest
    return request_digest(kind, body.model_dump(exclude_unset=True, exclude=set(OURS)), options)


def _call_of(body: PreferenceOptimizeBody) -> Call:
    return (body.algorithm or algorithm_of(_given(body))) if isinstance(body, PreflightBody) else "dpo"


def _training_config(body: TrainingBody, settings: ServiceSettings) -> TrainingConfig:
    config = body.training_config
    given = _given(config)
    if config.data_config is not None:
        data = _given(config.data_config)
        if config.data_config.batch_size is None:
            if settings.batch_size is None:
                field = "training_config.data_config.batch_size"
                raise InvalidRequest(field, None, "set the rows that each rank takes at once, such as 4")
            data["batch_size"] = settings.batch_size
        given["data_config"] = _of_validated(DataConfig, data)
    if config.dtype is None and settings.fsdp_config.mixed_precision_policy:
        given["dtype"] = settings.fsdp_config.mixed_precision_policy
    return _of_validated(TrainingConfig, given)


def _given(model: BaseModel) -> dict[str, Any]:
    """What a caller has set, unknown fields too."""
    known = {name: getattr(model, name) for name in model.model_fields_set & type(model).model_fields.keys()}
    return {**known, **(model.model_extra or {})}


def _of_validated[Model: BaseModel](kind: type[Model], given: Mapping[str, Any]) -> Model:
    """A model of values that another one has validated."""
    known = kind.model_fields.keys() & given.keys()
    made = kind.model_construct(set(given), **{name: given[name] for name in known})
    # Not by keywords, which the names of unknown fields may collide with.
    made.__pydantic_extra__ = {name: value for name, value in given.items() if name not in known}
    return made
