"""Values of requests and settings: booleans are no numbers, null is a field that is left out, and names of choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.choices import nearest_choice, problem_of
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.search import SearchConfig
from llama_stack_provider_trl.requests.work import EvaluateRequest, GenerateRequest
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.exact import ExactValues
from llama_stack_provider_trl.specs.job import AttentionMask, OptimizerName, OptimizerSpec, SchedulerName
from llama_stack_provider_trl.specs.schedules import problem_of_warmup
from llama_stack_provider_trl_remote.nodes.pools.inventory import InventoryHost
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.loading import fill_in
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

TRAINING = {"n_epochs": 1, "data_config": {"dataset_id": "d", "batch_size": 1}}
BODY = {"job_uuid": "j", "model": "m", "training_config": TRAINING}


def with_value(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {**body, first: with_value(body.get(first) or {}, rest, value) if rest else value}


BOOLEANS: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (SupervisedFineTuneRequest, BODY, "training_config.max_steps_per_epoch"),
    (SupervisedFineTuneRequest, BODY, "training_config.gradient_accumulation_steps"),
    (SupervisedFineTuneRequest, BODY, "training_config.optimizer_config.warmup_ratio"),
    (SupervisedFineTuneRequest, BODY, "training_config.optimizer_config.weight_decay"),
    (SupervisedFineTuneRequest, BODY, "training_config.data_config.train_split_percentage"),
    (ProviderOptions, {}, "seed"),
    (ProviderOptions, {}, "max_grad_norm"),
    (ProviderOptions, {}, "samples.max_new_tokens"),
    (ProviderOptions, {}, "resources.nodes"),
    (ProviderOptions, {}, "lora.rank"),
    (GenerateRequest, {"job_uuid": "j", "model": "m", "dataset_id": "d"}, "temperature"),
    (EvaluateRequest, {"job_uuid": "j", "model": "m", "dataset_id": "d"}, "max_new_tokens"),
    (SearchConfig, {"method": "random", "parameters": {"a": [1]}}, "trials"),
    (AnswerCheck, {"type": "judge", "template": "{answer}"}, "at_least"),
    (TrlConfig, {}, "retries"),
    (TrlConfig, {}, "hang_timeout"),
    (ServiceSettings, {}, "port"),
    (ServiceSettings, {}, "torch_run_config.nproc_per_node"),
    (InventoryHost, {"host": "a"}, "port"),
]


@pytest.mark.parametrize(("model", "body", "path"), BOOLEANS, ids=[one[2] for one in BOOLEANS])
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number(model: type[BaseModel], body: dict[str, Any], path: str, value: bool) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(with_value(body, path, value))
    found = {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}
    assert found[path].endswith("a boolean is no number: send the number itself")


def test_a_boolean_of_the_environment_is_no_number_either() -> None:
    values = {"port": fill_in("${env.PORT}", {"PORT": "true"})}
    with pytest.raises(ValidationError, match="a boolean is no number"):
        ServiceSettings.model_validate(values)


def every_model(root: type[BaseModel]) -> list[type[BaseModel]]:
    return [found for one in root.__subclasses__() for found in (one, *every_model(one))]


def test_every_model_of_requests_and_settings_takes_no_booleans_as_numbers() -> None:
    """A model that is added later and derives from none of ours would."""
    known = set(every_model(ExactValues))
    modules = ("llama_stack_provider_trl.requests.", "llama_stack_provider_trl_remote.service.pool_settings")
    own = {one for one in every_model(BaseModel) if one.__module__.startswith(modules)}
    assert {one.__name__ for one in own - known if any(_takes_numbers(one, name) for name in one.model_fields)} == set()


def _takes_numbers(model: type[BaseModel], field: str) -> bool:
    return model.model_fields[field].annotation in (int, float, int | None, float | None)


@pytest.mark.parametrize(
    ("model", "body", "path"),
    [
        (SupervisedFineTuneRequest, BODY, "training_config.data_config.shuffle"),
        (ProviderOptions, {}, "lora_dropout"),
        (ProviderOptions, {}, "lr_scheduler"),
        (ProviderOptions, {}, "lora.lora_attn_modules"),
        (TrlConfig, {}, "isolation"),
        (ServiceSettings, {}, "fsdp_config.cpu_offload"),
    ],
)
def test_null_is_a_field_that_is_left_out(model: type[BaseModel], body: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    left_out = with_value(body, ".".join(parents), {**_at(body, parents)}) if parents else body
    assert model.model_validate(with_value(left_out, path, None)) == model.model_validate(left_out), last


def _at(body: Any, parents: list[str]) -> dict[str, Any]:
    for one in parents:
        body = body.get(one) or {}
    return body


def test_null_is_no_value_of_a_field_that_is_required() -> None:
    with pytest.raises(ValidationError) as caught:
        SupervisedFineTuneRequest.model_validate(with_value(BODY, "training_config.n_epochs", None))
    assert problem_of(caught.value.errors()[0]).endswith("; null counts as left out, and it is required")


def test_a_kind_in_another_spelling_is_named() -> None:
    with pytest.raises(ValidationError) as caught:
        RegisterDataset.model_validate({"source": {"type": "Rows", "rows": []}})
    assert problem_of(caught.value.errors()[0]).endswith("; the nearest is 'rows'")


OPTIMIZERS, SCHEDULES = get_args(OptimizerName), get_args(SchedulerName)
SPELLINGS = [
    (OPTIMIZERS, "ADAM", "adam"),
    (OPTIMIZERS, "AdamW8bit", "adamw_8bit"),
    (OPTIMIZERS, "adamw-8bit", "adamw_8bit"),
    (OPTIMIZERS, "adamw_torch_fused", "adamw"),
    (OPTIMIZERS, "adamw_bnb_8bit", "adamw_8bit"),
    (OPTIMIZERS, "paged_adamw_8bit", "adamw_8bit"),
    (OPTIMIZERS, "paged_adamw_32bit", "adamw"),
    (OPTIMIZERS, "adamw_hf", "adamw"),
    (OPTIMIZERS, "torch.optim.AdamW", "adamw"),
    (OPTIMIZERS, "torch.optim.SGD", "sgd"),
    (OPTIMIZERS, " Adam ", "adam"),
    (SCHEDULES, "Linear", "linear"),
    (SCHEDULES, "COSINE", "cosine"),
    (SCHEDULES, "cosine_with_restarts", "cosine"),
    (SCHEDULES, "constant_with_warmup", "constant"),
    (SCHEDULES, "WarmupStableDecay", "warmup_stable_decay"),
    (SCHEDULES, "wsd", "warmup_stable_decay"),
    (("bf16", "fp32"), "BF-16", "bf16"),
    (get_args(AttentionMask), "Always", "always"),
    (("sigmoid", "hinge", "ipo", "kto_pair"), "KTO-Pair", "kto_pair"),
    (("sigmoid", "hinge", "ipo"), "sigmiod", "sigmoid"),
]


@pytest.mark.parametrize(("choices", "value", "meant"), SPELLINGS)
def test_a_choice_in_another_spelling_is_named(choices: tuple[str, ...], value: str, meant: str) -> None:
    assert nearest_choice(value, choices).endswith(f"; the nearest is '{meant}'")


@pytest.mark.parametrize("value", ["lion", "adafactor", "", "é"])
def test_a_choice_that_nothing_is_near_to_is_not_guessed(value: str) -> None:
    assert "the nearest" not in nearest_choice(value, OPTIMIZERS)


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("lr_scheduler", "Cosine", "cosine"),
        ("truncation_side", "LEFT", "left"),
        ("dropped_turns", "Refuse", "refuse"),
        ("duplicates", "WARN", "warn"),
        ("gradient_sync", "micro-step", "micro_step"),
        ("preflight", "Warn", "warn"),
        ("priority", "HIGH", "high"),
        ("peft_method", "LoRA", "lora"),
        ("attn_implementation", "flash-attention-2", "flash_attention_2"),
    ],
)
def test_every_option_with_choices_names_the_nearest(option: str, value: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"; the nearest is '{meant}'"):
        ProviderOptions.parse({option: value})


@pytest.mark.parametrize(
    ("warmup", "steps", "reached"),
    [
        ({"warmup_steps": 1000}, 2, "1e-06 of 0.001"),
        ({"warmup_steps": 10}, 10, "0.0009 of 0.001"),
        ({"warmup_ratio": 0.9}, 5, "0.0008 of 0.001"),
        ({"warmup_ratio": 0.1}, 1, "0 of 0.001"),
        ({"warmup_steps": 9}, 10, None),
        ({"warmup_ratio": 0.1}, 2, None),
        ({}, 1, None),
    ],
)
def test_a_warmup_that_leaves_no_step_at_the_learning_rate_is_a_warning(
    warmup: dict[str, Any], steps: int, reached: str | None
) -> None:
    problem = problem_of_warmup(OptimizerSpec(learning_rate=1e-3, **warmup), steps)
    assert (problem is None) == (reached is None)
    assert reached is None or f"the learning rate reaches {reached}" in (problem or "")


def test_data_dir_stays_where_null_is_its_default(tmp_path: Path) -> None:
    assert TrlConfig.model_validate({"data_dir": None}).data_dir == TrlConfig().data_dir
    assert TrlConfig(data_dir=tmp_path).data_dir == tmp_path
