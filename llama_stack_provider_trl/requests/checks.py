"""Refuses fields that would be ignored, by name, with the nearest supported choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import InvalidRequest
from .bodies import (
    EfficiencyConfig,
)
from .choices import no_such_field, problem_of
from .settings import Request

NO_SAVERS = EfficiencyConfig()


def refuse_unknown(request: Request) -> None:
    for path, name, value, known in unknown_fields(request, ""):
        raise InvalidRequest(path + name, value, no_such_field(name, known))


def unknown_fields(model: BaseModel, prefix: str) -> Iterator[tuple[str, str, Any, list[str]]]:
    known = list(type(model).model_fields)
    for name, value in (model.model_extra or {}).items():
        if value is not None:
            yield prefix, name, value, known
    for name in known:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from unknown_fields(value, f"{prefix}{name}.")


def refuse_infinite(model: BaseModel, prefix: str) -> None:
    """Refuse infinity. Python reads JSON's 1e999 as infinity and JSON writes that as null: the stored job would be
    unreadable."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(prefix + name, value, "send a finite number")
        if isinstance(value, BaseModel):
            refuse_infinite(value, f"{prefix}{name}.")


def refuse_unsupported(request: Request, *, sharded: bool) -> None:
    """Refuse the fields whose only supported value is 'off', from one table."""
    savers = request.training_config.efficiency_config or NO_SAVERS
    efficiency = "training_config.efficiency_config."
    one_process = "this provider trains in one process without sharding; leave it out or set false"
    refused = [
        (
            "hyperparam_search_config",
            request.hyperparam_search_config,
            "a search is submitted, nothing else: send {} here",
        ),
        # Under FSDP2 the embeddings are units of their own whether this is requested or not.
        (efficiency + "memory_efficient_fsdp_wrap", savers.memory_efficient_fsdp_wrap and not sharded, one_process),
        (efficiency + "fsdp_cpu_offload", savers.fsdp_cpu_offload and not sharded, one_process),
    ]
    for name, value, hint in refused:
        if value:
            raise InvalidRequest(name, value, hint)


def parse_fields[Model: BaseModel](model: type[Model], value: Any, where: str) -> Model:
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        raise refusal_of(error, where, model) from error
    refuse_infinite(parsed, f"{where}.")
    return parsed


def refusal_of(error: ValidationError, where: str, model: Any = None) -> InvalidRequest:
    """The refusal of the first field that a model does not accept."""
    first = error.errors()[0]
    path = ".".join([where, *map(str, first["loc"])])
    return InvalidRequest(path, first["input"], problem_of(first, model))
