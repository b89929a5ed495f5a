"""The configuration on the page of a job and of several: grouped, with what has its default apart. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, TypeAdapter

from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec

from .job_view import Setting, flat

_TITLES = {"source": "Model", "data": "Data", "train": "Training", "compute": "Compute", "lifecycle": "Job"}
"""Part of a JobSpec -> group of its fields."""
_NAMED = {
    "algorithm": "Method",
    "method": "Method",
    "optimizer": "Optimizer",
    "lora": "LoRA",
    "model_path": "Model",
    "bases": "Model",
}
"""First part of a setting's name -> its group, where that is not the one of its part."""
_REPORTED = "Reported by the training"


class Named(Protocol):
    """A row of a table of settings."""

    @property
    def name(self) -> str: ...


class SettingGroup[Row: Named](NamedTuple):
    title: str
    settings: Sequence[Row]


def grouped(settings: Iterable[Setting]) -> tuple[list[SettingGroup[Setting]], list[SettingGroup[Setting]]]:
    """Settings in groups: those that were chosen or found by the training, and those that have their default."""
    chosen, default = list[Setting](), list[Setting]()
    for one in settings:
        is_default = bool(one.submitted) and one.submitted == _defaults().get(one.name) and not one.differs
        (default if is_default else chosen).append(one)
    return in_groups(chosen), in_groups(default)


def in_groups[Row: Named](settings: Iterable[Row]) -> list[SettingGroup[Row]]:
    """Settings by the part of a job that they belong to."""
    found: dict[str, list[Row]] = {}
    for one in settings:
        found.setdefault(_group_of(one.name), []).append(one)
    order = [*("Method", "Model", "Data", "Training", "Optimizer", "LoRA", "Compute", "Job"), _REPORTED]
    return [SettingGroup(title, found[title]) for title in order if title in found]


def _group_of(setting: str) -> str:
    first = setting.partition(".")[0]
    if first in _NAMED:
        return _NAMED[first]
    for part, kind in JobSpec.parts().items():
        if first in kind.model_fields:
            return _TITLES[part]
    return "Job" if first in JobSpec.model_fields else _REPORTED


@cache
def _defaults() -> dict[str, str]:
    """Name of a setting -> its default, as the page shows it."""
    found = _of(JobSpec)
    for part, kind in JobSpec.parts().items():
        found |= {part: _of(kind)} if part == "lifecycle" else _of(kind)
    return dict(flat(found | {"optimizer": _of(OptimizerSpec), "bases": []}))


def _of(kind: type[BaseModel]) -> dict[str, Any]:
    fields = {name: field for name, field in kind.model_fields.items() if not field.is_required()}
    values = {name: field.get_default(call_default_factory=True, validated_data={}) for name, field in fields.items()}
    return dict(TypeAdapter(dict[str, Any]).dump_python(values, mode="json"))
