"""Bodies of jobs from the fields of a form, and the same jobs for other clients."""

from __future__ import annotations

import json
import re
import shlex
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl_remote.request_files import read_request
from llama_stack_provider_trl_remote.service.http.bodies import (
    WORK_BODIES,
    PreflightBody,
)
from llama_stack_provider_trl_remote.service.pages.job_form import (
    FORM_KINDS,
    LORA_MODULES,
    PRESETS,
    TUNINGS,
    field_of,
    fields_of,
    job_of,
    next_names,
    same_job,
    validated,
    work_of,
)

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


@pytest.mark.parametrize(
    ("method", "call"),
    [("sft", "supervised-fine-tune"), ("dpo", "preference-optimize"), ("robust", "preference-optimize")],
)
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
        ("[" * 70_000, "provider_options", "more than 20000 values"),
        ('{"a":' * 100 + "1" + "}" * 100, "provider_options", "more than 64 levels deep"),
        ('"' + "x" * (1 << 20), "provider_options", "at most 1048576 are read here"),
        ('{"priority": "low"}', "provider_options.priority", "another field of the form has it, too"),
    ],
)
def test_further_options_that_are_no_object_or_there_twice_are_refused(options: str, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        job_of({**FIELDS, "priority": "high", "options": options})
    assert refused.value.field == field
    assert words in str(refused.value)


DATA = {"dataset_id": "rows", "batch_size": 2, "shuffle": True}
LORA = {"type": "LoRA", "lora_attn_modules": [*LORA_MODULES], "apply_lora_to_mlp": True, "rank": 4, "alpha": 8}
REQUESTS: dict[str, dict[str, Any]] = {
    "sft": {"training_config": {"n_epochs": 2, "learning_rate": 2e-4, "data_config": DATA}, "algorithm_config": LORA},
    "dpo": {
        "training_config": {"n_epochs": 1, "gradient_accumulation_steps": 4, "data_config": DATA},
        "algorithm_config": {"type": "dpo", "beta": 0.2},
        "provider_options": {"lora": {**LORA, "quantize_base": True}, "seed": 3, "max_seq_length": 64},
    },
    "grpo": {
        "training_config": {"n_epochs": 1, "data_config": DATA},
        "algorithm_config": {"type": "grpo", "num_generations": 4, "rewards": [{"function": "short"}]},
    },
    "other adapter": {
        "training_config": {"n_epochs": 1, "dtype": "fp32", "data_config": {**DATA, "data_format": "dialog"}},
        "algorithm_config": {**LORA, "lora_attn_modules": ["q_proj"], "use_dora": True},
        "checkpoint_dir": "mine",
        "hyperparam_search_config": {"method": "grid", "parameters": {"training_config.learning_rate": [1e-4]}},
    },
    "unshuffled": {
        "training_config": {"n_epochs": 1, "data_config": {**DATA, "shuffle": False, "train_on_input": True}},
        "provider_options": {"train_on": "all", "priority": "low", "adapter": "continue"},
    },
    "custom": {
        "training_config": {"n_epochs": 1, "data_config": DATA},
        "algorithm_config": {"type": "robust", "flip_rate": 0.2},
    },
    "empty objects, and null inside of one": {
        "training_config": {"n_epochs": 1, "data_config": DATA},
        "provider_options": {"resources": {}, "evaluate": {"check": {"properties": {"a": {}, "b": {"const": None}}}}},
    },
    "a prompt of lines": {
        "training_config": {"n_epochs": 1, "data_config": DATA},
        "provider_options": {"system_prompt": "\n Be brief.\n\n  Be kind. \n"},
    },
    "a prompt that a browser changes": {
        "training_config": {"n_epochs": 1, "data_config": DATA},
        "provider_options": {"system_prompt": "Be brief.\r\nBe kind."},
    },
    "usual options": {
        "training_config": {
            "n_epochs": 1,
            "optimizer_config": {"weight_decay": 0.1, "num_warmup_steps": 10},
            "data_config": DATA,
        },
        "provider_options": {"eval_steps": 5, "save_steps": 10, "lr_scheduler": "cosine", "preflight": "off"},
    },
    "a share of warmup": {
        "training_config": {"n_epochs": 1, "optimizer_config": {"warmup_ratio": 0.05}, "data_config": DATA},
    },
    "a share of warmup without a point": {
        "training_config": {"n_epochs": 1, "optimizer_config": {"warmup_ratio": 1e-5}, "data_config": DATA},
    },
    "an empty prompt": {
        "training_config": {"n_epochs": 1, "data_config": DATA},
        "provider_options": {"system_prompt": ""},
    },
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_comes_out_of_the_form_as_it_was_sent(kind: str) -> None:
    body = {"job_uuid": "one", "model": "org/m", **REQUESTS[kind]}
    sent = json.dumps(body)
    fields = fields_of(body, is_sft=kind not in ("dpo", "grpo", "custom"))
    sent_back = {name: re.sub("\r\n|\r|\n", "\r\n", value) for name, value in fields.items()}  # as browsers do
    assert job_of(sent_back) == body
    assert json.dumps(body) == sent
    assert all(isinstance(value, str) for value in fields.values())


def test_a_request_fills_in_the_usual_fields() -> None:
    fields = fields_of({"model": "m", **REQUESTS["dpo"]}, is_sft=False)
    expected = {"method": "dpo", "tuning": "qlora", "lora_rank": "4", "batch_size": "2", "max_seq_length": "64"}
    assert {name: fields[name] for name in expected} == expected
    assert (json.loads(fields["options"]), json.loads(fields["request"])) == (
        {"seed": 3},
        {"algorithm_config": {"beta": 0.2}},
    )
    rate = {"training_config": {"n_epochs": 1, "optimizer_config": {"lr": 1e-5}, "data_config": DATA}}
    assert fields_of({"finetuned_model": "tuned", **rate}, is_sft=False)["learning_rate"] == "1e-05"
    assert fields_of({"finetuned_model": "tuned", **rate}, is_sft=False)["model"] == "tuned"


def test_a_method_among_the_options_comes_out_where_the_form_has_methods() -> None:
    method = {"type": "kto", "beta": 0.2, "desirable_weight": 2.0}
    rest = {"model": "m", "training_config": {"n_epochs": 1, "data_config": DATA}, "job_uuid": "one"}
    beta, rate = ("provider_options.method.beta", "training_config.learning_rate")
    for given in ({}, {"algorithm_config": None}, {"algorithm_config": {"beta": 0.1}}):
        search = {"method": "grid", "parameters": {beta: [0.1, 0.2], rate: [1e-5]}}
        options = {"method": method, "seed": 3}
        body = {**rest, **given, "provider_options": options, "hyperparam_search_config": search}
        fields = fields_of(body, is_sft=False)
        assert fields["method"] == "kto"
        assert job_of(fields) == {
            **rest,
            "algorithm_config": method,
            "provider_options": {"seed": 3},
            "hyperparam_search_config": {
                **search,
                "parameters": {"algorithm_config.beta": [0.1, 0.2], rate: [1e-5]},
            },
        }


def test_a_preference_request_without_a_method_is_one_of_dpo() -> None:
    rest = {"model": "m", "training_config": {"n_epochs": 1, "optimizer_config": None, "data_config": DATA}}
    for given in ({}, {"algorithm_config": None}, {"algorithm_config": {}}):
        job = job_of(fields_of({**rest, **given, "provider_options": None}, is_sft=False))
        assert job["algorithm_config"] == {"type": "dpo"}
        assert job["training_config"] == {"n_epochs": 1, "data_config": DATA}


def test_an_adapter_of_a_preference_method_with_its_defaults_is_one() -> None:
    body = {"model": "m", **REQUESTS["dpo"], "provider_options": {"lora": {}}}
    assert fields_of(body, is_sft=False)["tuning"] == "lora"


def test_what_a_lora_request_leaves_out_is_what_its_default_says() -> None:
    body = {"model": "m", **REQUESTS["sft"], "algorithm_config": {"type": "lora"}}
    fields = fields_of(body, is_sft=True)
    assert (fields["tuning"], fields["lora_rank"], fields["lora_alpha"]) == ("lora", "8", "16")
    adapter = {"type": "LoRA", "rank": 8, "alpha": 16, "lora_attn_modules": ["q_proj", "v_proj"]}
    assert job_of(fields)["algorithm_config"] == {**adapter, "apply_lora_to_mlp": False}
    qat = {"type": "QAT", "group_size": 32}
    fields = fields_of({**body, "algorithm_config": qat}, is_sft=True)
    assert (fields["tuning"], job_of(fields)["algorithm_config"]) == ("request", qat)


def test_further_request_fields_are_added_and_none_is_there_twice() -> None:
    more = '{"training_config": {"dtype": "fp32", "data_config": {"shuffle": false}}}'
    training = job_of({**FIELDS, "request": more})["training_config"]
    assert (training["dtype"], training["n_epochs"], training["data_config"]["shuffle"]) == ("fp32", 3, False)
    with pytest.raises(InvalidRequest, match="another field of the form has it, too") as refused:
        job_of({**FIELDS, "request": '{"training_config": {"n_epochs": 4}}'})
    assert refused.value.field == "training_config.n_epochs"


def test_lora_is_trained_where_the_form_says_so() -> None:
    assert job_of({**FIELDS, "tuning": "lora"})["algorithm_config"]["rank"] == 16
    assert job_of({**FIELDS, "tuning": "qlora", "lora_rank": "4"})["algorithm_config"]["quantize_base"] is True
    assert "algorithm_config" not in job_of({**FIELDS, "tuning": "full", "lora_rank": "4"})
    with pytest.raises(InvalidRequest, match="expected one of lora, qlora, full, request"):
        job_of({**FIELDS, "tuning": "some"})


@pytest.mark.parametrize(
    ("name", "following"),
    [("run", ["run-2", "run-3"]), ("run-9", ["run-10", "run-11"]), ("x" * 128, ["x" * 126 + "-2", "x" * 126 + "-3"])],
)
def test_a_copy_has_a_name_of_its_own(name: str, following: list[str]) -> None:
    assert [*islice(next_names(name), 2)] == following


def test_the_yaml_of_a_job_is_what_a_file_is_read_as(tmp_path: Path) -> None:
    rates = {"training_config": {"n_epochs": 1, "learning_rate": 1e-5, "data_config": DATA}, "model": "2026-01-02"}
    for body, call in (({"job_uuid": "a b", **rates}, None), ({"job_uuid": "e", "model": "on"}, "evaluate")):
        same = same_job(body, "http://127.0.0.1:8322", call)
        file = tmp_path / same["file"]
        file.write_text(same["yaml"])
        assert read_request(str(file)) == ({"kind": call, **body} if call else body)
        assert same["run"] == f"trl-remote run {file.name} --url http://127.0.0.1:8322"


def test_a_search_over_the_rate_of_an_optimizer_keeps_its_path() -> None:
    path = "training_config.optimizer_config.lr"
    search = {"method": "grid", "parameters": {path: [1e-4, 1e-3]}}
    training = {"n_epochs": 1, "optimizer_config": {"lr": 1e-4}, "data_config": DATA}
    body = {"job_uuid": "one", "model": "m", "training_config": training, "hyperparam_search_config": search}
    fields = fields_of(body, is_sft=True)
    assert "learning_rate" not in fields
    assert job_of(fields) == body
    assert fields_of({**body, "hyperparam_search_config": None}, is_sft=True)["learning_rate"] == "0.0001"


def test_a_request_of_a_mebibyte_is_one_of_the_form_again() -> None:
    prompts = ["x" * 100_000 for _ in range(9)]
    training = {"n_epochs": 1, "data_config": DATA}
    body = {"job_uuid": "one", "model": "m", "training_config": training, "provider_options": {"texts": prompts}}
    assert job_of(fields_of(body, is_sft=True)) == body
    many = {**body, "provider_options": {"texts": [["y"] for _ in range(9000)]}}
    assert job_of(fields_of(many, is_sft=True)) == many


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("evaluate", {"request": FORM_KINDS["evaluate"].example}, {"dataset_id": "rows"}),
        (
            "evaluate",
            {"check": "same", "check_column": "answer", "request": '{"max_new_tokens": 8}'},
            {"checks": [{"type": "exact", "normalize": True, "column": "answer"}]},
        ),
        ("evaluate", {"check": "regex", "check_pattern": "[0-9]"}, {"checks": [{"type": "regex", "pattern": "[0-9]"}]}),
        (
            "generate",
            {"output": "answers"},
            {"dataset_id": "rows", "output": {"dataset_id": "answers"}},
        ),
        ("merge", {"request": FORM_KINDS["merge"].example}, {}),
        ("export", {"to": "gguf", "request": FORM_KINDS["export"].example}, {"to": "gguf"}),
    ],
)
def test_each_kind_of_job_is_one_of_the_form_as_a_file_of_trl_remote_has_it(
    kind: str, given: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    body = work_of({**FIELDS, "kind": kind, "priority": "low", **given})
    assert body["job_uuid"] == "one"
    assert body.get("model") == (None if kind == "merge" else "org/m")
    assert {name: body[name] for name in expected} == expected
    assert "training_config" not in body
    assert body["provider_options"] == {"priority": "low"}
    validated(WORK_BODIES[kind], body)
    same = same_job(body, "http://127.0.0.1:8322", kind)
    (tmp_path / same["file"]).write_text(same["yaml"])
    assert read_request(str(tmp_path / same["file"])) == {"kind": kind, **body}


def test_a_field_of_another_kind_is_there_once() -> None:
    with pytest.raises(InvalidRequest, match="another field of the form has it"):
        work_of({**FIELDS, "kind": "evaluate", "request": '{"dataset_id": "b"}'})


def test_usual_options_have_fields_of_their_own() -> None:
    for kind, expected in (
        ("usual options", {"weight_decay": "0.1", "warmup": "10", "eval_steps": "5", "preflight": "off"}),
        ("a share of warmup", {"warmup": "0.05"}),
    ):
        fields = fields_of({"model": "m", **REQUESTS[kind]}, is_sft=True)
        assert {name: fields.get(name) for name in expected} == expected
        assert (fields["options"], fields["request"]) == ("", "")


@pytest.mark.parametrize(
    ("sentence", "field"),
    [
        ("training_config.data_config.dataset_id='a' is not supported: ...", "dataset"),
        ("checks.0.column='a' is not supported: ...", "check_column"),
        ("model='gpt2' is not supported: ...", "model"),
        ("none of the 8 rows has a token left within max_seq_length=2: raise max_seq_length", "max_seq_length"),
        ("the model cannot be read: send it again to the service", ""),
    ],
)
def test_a_sentence_leads_to_the_field_that_it_names(sentence: str, field: str) -> None:
    assert field_of(sentence) == field


def test_presets_have_fields_of_the_form_and_lora_is_the_first() -> None:
    assert next(iter(PRESETS)) == "lora"
    for preset in PRESETS.values():
        assert preset.fields["tuning"] in TUNINGS
        validated(PreflightBody, {**job_of({**FIELDS, **preset.fields}), "algorithm": "dpo"})
