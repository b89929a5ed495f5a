"""Requests for preference methods, resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_stack_provider_trl.requests.bodies import (
    PreferenceOptimizeRequest,
)
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import Resolution, resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec


def request(config: Any = None, kind: Any = PreferenceOptimizeRequest, **data: Any) -> Any:
    body: dict[str, Any] = {"job_uuid": "job-1", "model": "org/base"}
    data = {"dataset_id": "pairs", "batch_size": 2, **data}
    return kind(**body, training_config={"n_epochs": 1, "data_config": data}, algorithm_config=config)


def resolved(config: Any = None, **options: Any) -> Resolution:
    return resolve(request(config), ProviderOptions.parse(options), Settings(data_dir=Path("/data"), devices=("cpu",)))


def spec_of(config: Any = None, **options: Any) -> JobSpec:
    rows = DatasetRef(dataset_id="pairs", path=Path("/rows"), sha256="0" * 64, num_rows=4)
    spec = resolved(config, **options).spec(rows, None)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    return spec
