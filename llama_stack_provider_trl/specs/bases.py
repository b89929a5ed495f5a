"""What the parts of a specification are made of, and how those of one kind are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

MERGED_BASE = "merged-base"
"""Directory in a job's checkpoint directory: the base model with the adapter that the job began with merged in."""


class Frozen(BaseModel):
    """A part of a specification."""

    # Built when the first specification is read or written.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


class BaseJob(Frozen):
    """A job whose checkpoint is read."""

    job_uuid: str
    checkpoint: str
    """Name of its directory: final, merged, merged-base or checkpoint-N."""


class ResumeFrom(Frozen):
    """A step checkpoint of another job to begin with."""

    job_uuid: str
    checkpoint: str | None = None
    """Such as `checkpoint-6`; None: the newest."""
    path: Path | None = None
    """The job's own copy of it; None: not looked up yet."""


def parts_of[T: BaseModel](whole: BaseModel, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The parts of a specification that are of a kind, at any depth, each with the dotted path of its field."""
    for name in type(whole).model_fields:
        value = getattr(whole, name)
        items = [(f"{name}.{n}", item) for n, item in enumerate(value)] if isinstance(value, tuple) else [(name, value)]
        for field, item in items:
            if isinstance(item, kind):
                yield field, item
            if isinstance(item, BaseModel):
                yield from ((f"{field}.{below}", part) for below, part in parts_of(item, kind))


def with_parts[S: BaseModel, T: BaseModel](whole: S, kind: type[T], changed: Callable[[T], T]) -> S:
    """The specification with other parts in place of those of a kind."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(of(item) for item in value)
        if not isinstance(value, BaseModel):
            return value
        return with_parts(changed(value) if isinstance(value, kind) else value, kind, changed)

    values = {name: getattr(whole, name) for name in type(whole).model_fields}
    changes = {name: new for name, value in values.items() if (new := of(value)) != value}
    return whole.model_copy(update=changes) if changes else whole
