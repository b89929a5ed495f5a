"""A body that was validated once becomes the engine's request that validation would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl_remote.service.http.bodies import (
    PreferenceOptimizeBody,
    PreflightBody,
    PreviewBody,
    SupervisedFineTuneBody,
)
from llama_stack_provider_trl_remote.service.jobs.training_requests import TrainingBody, training_request
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

DATA = {"dataset_id": "d", "batch_size": 2, "unknown": [1]}
TRAINING = {"n_epochs": 1, "data_config": DATA, "optimizer_config": {"lr": 1e-3, "num_warmup_steps": None}}
JOB = {"job_uuid": "a", "model": "m", "training_config": TRAINING}
HOSTILE = {"_fields_set": ["model"], "cls": 1, "self": 2, "__pydantic_extra__": 3, "model_config": 4}
"""Names of fields that a client may send, and that Python uses for others."""
LORA = {"type": "LoRA", "rank": 4, "lora_attn_modules": ["q_proj"]}
CASES: list[tuple[type[TrainingBody], dict[str, Any], type[Any]]] = [
    (SupervisedFineTuneBody, JOB, SupervisedFineTuneRequest),
    (SupervisedFineTuneBody, {**JOB, **HOSTILE, "algorithm_config": LORA}, SupervisedFineTuneRequest),
    (SupervisedFineTuneBody, {**JOB, "finetuned_model": "f"}, SupervisedFineTuneRequest),
    (PreferenceOptimizeBody, {**JOB, "finetuned_model": "f", "logger_config": {}}, PreferenceOptimizeRequest),
    (PreflightBody, {**JOB, "algorithm_config": LORA, **HOSTILE}, SupervisedFineTuneRequest),
    (PreflightBody, {**JOB, "finetuned_model": "f"}, PreferenceOptimizeRequest),
    (PreflightBody, {**JOB, "finetuned_model": "f", "algorithm": "sft"}, SupervisedFineTuneRequest),
    (PreflightBody, {**JOB, "provider_options": {"method": "orpo"}}, PreferenceOptimizeRequest),
    (PreviewBody, {**JOB, "algorithm": "dpo", "first_row": 3, "rows": 4}, PreferenceOptimizeRequest),
]
OF_OTHERS = ("provider_options", "dataset_digests", "algorithm", "first_row", "rows")


def settings(root: Path, **values: Any) -> ServiceSettings:
    return ServiceSettings.model_validate({"data_dir": root, **values})


@pytest.mark.parametrize(("kind", "given", "expected"), CASES)
def test_a_validated_body_becomes_the_request_that_validation_makes_of_it(
    kind: type[TrainingBody], given: dict[str, Any], expected: type[Any], tmp_path: Path
) -> None:
    digests = {"dataset_digests": {"d": "0" * 64}}
    made = training_request(kind.model_validate({**given, **digests}), settings(tmp_path))
    other = expected.model_validate({name: value for name, value in given.items() if name not in OF_OTHERS})
    assert type(made) is expected
    assert made == other
    assert made.model_extra == other.model_extra
    assert made.model_fields_set == other.model_fields_set
    assert made.training_config.model_fields_set == other.training_config.model_fields_set
    for exclude_unset in (True, False):
        assert made.model_dump(mode="json", exclude_unset=exclude_unset) == other.model_dump(
            mode="json", exclude_unset=exclude_unset
        )


def test_a_preflight_without_a_name_has_that_of_no_job(tmp_path: Path) -> None:
    body = PreflightBody.model_validate({name: value for name, value in JOB.items() if name != "job_uuid"})
    assert training_request(body, settings(tmp_path)).job_uuid == "preflight"


def test_values_of_the_configuration_count_where_a_body_has_none(tmp_path: Path) -> None:
    body = SupervisedFineTuneBody.model_validate(
        {**JOB, "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "d"}}}
    )
    chosen = settings(tmp_path, batch_size=3, fsdp_config={"mixed_precision_policy": "bf16"})
    found = training_request(body, chosen).training_config
    assert (found.dtype, found.data_config and found.data_config.batch_size) == ("bf16", 3)
    with pytest.raises(InvalidRequest, match="batch_size=None"):
        training_request(body, settings(tmp_path))
    assert body.training_config.model_fields_set == {"n_epochs", "data_config"}, "the body itself stays as it is"


def test_the_values_of_a_body_are_not_validated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = SupervisedFineTuneBody.model_validate(JOB)
    assert training_request(body, settings(tmp_path)).training_config.optimizer_config is (
        body.training_config.optimizer_config
    )
