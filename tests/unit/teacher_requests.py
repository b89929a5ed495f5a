"""Requests for distillation, resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.inputs.of_methods import with_teacher
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import JobSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import DistillationSpec
from tests.unit.based_jobs import ROWS, request


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path / "data",
        devices=("cpu",),
        sharding=ShardingSpec(strategy="NO_SHARD"),
        max_ranks=2,
        max_nodes=2,
    )


def spec_of(
    config: dict[str, Any], settings: Settings, store: Store | None = None, *, data: Any = None, **options: Any
) -> JobSpec:
    given = ProviderOptions.parse(options)
    body = request("org/student", "dpo", algorithm_config={"type": "distillation", "teacher": "org/teacher", **config})
    rows = body.training_config.data_config.model_copy(update=data or {})
    training = body.training_config.model_copy(update={"data_config": rows})
    resolution = resolve(body.model_copy(update={"training_config": training}), given, settings)
    spec = JobSpec.of(**{**with_teacher(resolution.fields, settings, store), "dataset": ROWS})
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    return spec


def method_of(spec: JobSpec) -> DistillationSpec:
    assert isinstance(spec.method, DistillationSpec)
    return spec.method
