"""Bodies of jobs from the fields of a form, and the same jobs for other clients."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl_remote.service.http.bodies import PreflightBody
from llama_stack_provider_trl_remote.service.pages.job_form import job_of, same_job, validated

FIELDS = {"job": "one", "model": "org/m", "dataset": "rows", "method": "sft", "epochs": "3", "batch_size": "4"}


def test_empty_fields_are_left_out_and_the_others_are_where_a_request_has_them() -> None:
    fields = {**FIELDS, "learning_rate": "2e-4", "max_seq_length": "", "priority": "low", "validation_dataset": "held"}
    assert job_of(fields) == {
        "job_uuid": "one",
        "model": "org/m",
        "training_config": {
            "n_epochs": 3,
            "learning_rate": 2e-4,
            "data_config": {
                "dataset_id": "rows",
                "shuffle": True,
                "batch_size": 4,
                "validation_dataset_id": "held",
            },
        },
        "provider_options": {"priority": "low"},
    }


@pytest.mark.parametrize(("method", "given"), [("sft", {}), ("dpo", {"type": "dpo"})])
def test_lora_is_where_the_method_has_it(method: str, given: dict[str, Any]) -> None:
    body = job_of({**FIELDS, "method": method, "lora_rank": "4"})
    lora = body["provider_options"]["lora"] if method == "dpo" else body["algorithm_config"]
    assert (lora["rank"], lora["alpha"]) == (4, 8)
    assert not given or body["algorithm_config"] == given
    assert job_of({**FIELDS, "lora_rank": "4", "lora_alpha": "5"})["algorithm_config"]["alpha"] == 5


def test_fields_of_sft_alone_are_left_out_of_a_dpo_job() -> None:
    fields = {**FIELDS, "train_on_input": "yes", "data_format": "dialog"}
    assert job_of(fields)["training_config"]["data_config"]["train_on_input"] is True
    for method in ("dpo", "kto"):
        job = job_of({**fields, "method": method})
        assert job["algorithm_config"] == {"type": method}
        assert not {"train_on_input", "data_format"} & job["training_config"]["data_config"].keys()


@pytest.mark.parametrize(("field", "named"), [("epochs", "n_epochs"), ("batch_size", "batch_size")])
def test_a_number_that_is_none_is_named_by_the_model_of_the_body(field: str, named: str) -> None:
    with pytest.raises(RequestValidationError) as refused:
        validated(PreflightBody, job_of({**FIELDS, field: "many"}))
    assert refused.value.errors()[0]["loc"][-1] == named


@pytest.mark.parametrize(("method", "call"), [("sft", "supervised-fine-tune"), ("dpo", "preference-optimize")])
def test_a_shell_sends_the_same_job_whatever_is_in_its_names(method: str, call: str) -> None:
    body = job_of({**FIELDS, "method": method, "dataset": 'it\'s $HOME `id` "x" 你好'})
    same = same_job(body, "http://127.0.0.1:8322")
    assert json.loads(same["json"]) == body
    curl = shlex.split(same["curl"])
    assert json.loads(curl[curl.index("-d") + 1]) == body
    assert curl[-1] == f"http://127.0.0.1:8322/v1/post-training/{call}"
    assert json.loads(shlex.split(same["trl_remote"])[2]) == body


def test_further_options_are_written_as_json() -> None:
    fields = {
        **FIELDS,
        "system_prompt": "Be brief.",
        "train_on": "last_turn",
        "options": '{"columns": {"prompt": "q"}}',
    }
    assert job_of(fields)["provider_options"] == {
        "system_prompt": "Be brief.",
        "train_on": "last_turn",
        "columns": {"prompt": "q"},
    }
    assert "train_on" not in job_of({**fields, "method": "dpo"})["provider_options"]


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ("{seed: 1}", "provider_options", "it is no JSON"),
        ("[1]", "provider_options", "expected an object"),
        ('{"seed": 1, "seed": 2}', "provider_options", "it is no JSON"),
        ("[" * 70_000, "provider_options", "at most 65536 are read here"),
        ('{"priority": "low"}', "provider_options.priority", "another field of the form has it, too"),
    ],
)
def test_further_options_that_are_no_object_or_there_twice_are_refused(options: str, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        job_of({**FIELDS, "priority": "high", "options": options})
    assert refused.value.field == field
    assert words in str(refused.value)
