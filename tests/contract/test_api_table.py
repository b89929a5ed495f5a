"""docs/reference/api.md agrees with Llama Stack's real models and with ours: no field is missing, none is invented."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from llama_stack.apis.common import training_types as stack_types
from llama_stack.apis.post_training import post_training as stack_api
from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.post_training import TrlPostTraining
from llama_stack_provider_trl.requests import bodies as our_requests
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import Resolution, resolve
from llama_stack_provider_trl.requests.search import resolve_search
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.trackers import TrackerSettings
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, ShardingSpec
from llama_stack_provider_trl.stack import responses as our_responses
from tests.tiny import REPOSITORY, tiny_adapter

pytestmark = pytest.mark.contract

Json = dict[str, Any]


class Row(NamedTuple):
    field: str
    status: str
    meaning: str


def table(name: str, columns: int) -> list[list[str]]:
    """The rows of the table between `<!-- name -->` and `<!-- /name -->`; the first cell without its backticks."""
    text = (REPOSITORY / "docs" / "reference" / "api.md").read_text()
    inner = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ", columns - 1)] for line in inner.splitlines()[2:]]
    assert all(len(row) == columns and re.fullmatch(r"`[\w.]+`", row[0]) for row in rows)
    return [[row[0].strip("`"), *row[1:]] for row in rows]


FIELDS = [Row(*row) for row in table("fields", 3)]
STATUS = {row.field: row.status for row in FIELDS}


def with_status(status: str) -> list[str]:
    return [row.field for row in FIELDS if row.status == status]


# --- the first column -------------------------------------------------------------------------------------------------


def leaves(name: str, annotation: Any) -> set[str]:
    """Dotted fields below a field: of every model that its annotation mentions, or itself where there is none."""
    models: list[type[BaseModel]] = list(models_in(annotation))
    if not models:
        return {name}
    return {
        leaf
        for model in models
        for field, info in model.model_fields.items()
        for leaf in leaves(f"{name}.{field}", info.annotation)
    }


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def parameters(method: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(method).parameters.items() if name != "self"}


def fields_of_llama_stack() -> set[str]:
    methods = [stack_api.PostTraining.supervised_fine_tune, stack_api.PostTraining.preference_optimize]
    return {leaf for method in methods for name, p in parameters(method).items() for leaf in leaves(name, p.annotation)}


def fields_of_ours() -> set[str]:
    bodies: list[type[BaseModel]]
    bodies = [our_requests.SupervisedFineTuneRequest, our_requests.PreferenceOptimizeRequest]
    top = {leaf for body in bodies for name, f in body.model_fields.items() for leaf in leaves(name, f.annotation)}
    algorithms: list[type[BaseModel]] = [
        our_requests.LoraFinetuningConfig,
        our_requests.QATFinetuningConfig,
        our_requests.DPOAlignmentConfig,
        our_requests.ORPOConfig,
        our_requests.CPOConfig,
        our_requests.SimPOConfig,
        our_requests.RewardConfig,
        our_requests.KTOConfig,
        our_requests.GRPOConfig,
        our_requests.DistillationConfig,
    ]
    inside = {leaf for algorithm in algorithms for leaf in leaves("algorithm_config", algorithm)}
    return (top - {"algorithm_config"}) | inside  # a dict on the wire, so that one method takes all of them


def test_the_table_lists_every_field_of_llama_stack_and_of_ours_once() -> None:
    listed = [row.field for row in FIELDS]
    assert len(listed) == len(set(listed))
    assert set(listed) == fields_of_llama_stack() | fields_of_ours()


def test_our_models_have_every_field_that_llama_stack_has() -> None:
    assert fields_of_llama_stack() <= fields_of_ours()
    # The walk would be worth nothing if it did not reach the bottom.
    assert {
        "training_config.optimizer_config.num_warmup_steps",
        "training_config.efficiency_config.fsdp_cpu_offload",
        "algorithm_config.group_size",
        "algorithm_config.quantize_base",
        "algorithm_config.beta",
    } <= fields_of_llama_stack()


def test_a_row_is_honoured_refused_or_noted() -> None:
    assert {row.status for row in FIELDS} == {"honoured", "refused", "noted"}
    assert all(row.meaning for row in FIELDS)


# --- the second column ------------------------------------------------------------------------------------------------

LORA = {"type": "LoRA"}
IS_JSON = {"check": {"type": "json"}}
IS_WORD = {"check": {"type": "regex", "pattern": "[a-z]"}}
GRPO: Json = {
    "num_generations": 4,
    "max_completion_length": 8,
    "temperature": 0.7,
    "top_p": 0.9,
    "scale_rewards": "none",
}
VLLM: Json = {
    "gpu_memory_utilization": 0.5,
    "mode": "server",
    "importance_sampling_correction": False,
    "importance_sampling_mode": "token_truncate",
    "importance_sampling_clip_max": 2.0,
    "importance_sampling_clip_min": 0.5,
}
DISTILLATION: Json = {"type": "distillation", "teacher": "org/teacher"}
ULD: Json = {**DISTILLATION, "use_uld_loss": True}
HYBRID: Json = {
    **ULD,
    "uld_use_hybrid_loss": True,
    "uld_hybrid_matched_weight": 1.0,
    "uld_hybrid_unmatched_weight": 1.0,
}
QAT = {"type": "QAT", "quantizer_name": "Int8DynActInt4WeightQATQuantizer", "group_size": 32}
INT4 = "Int4WeightOnlyQATQuantizer"
DATA, TRAINING = "training_config.data_config.", "training_config."
SEARCH = "hyperparam_search_config"
OPTIMIZER, EFFICIENCY = "training_config.optimizer_config.", "training_config.efficiency_config."


class Try(NamedTuple):
    """A value that asks for something, in a request that is otherwise plain."""

    value: Any
    call: str = "sft"
    around: Json | None = None
    """Other fields of the request, which it needs to mean anything."""
    options: Json | None = None
    """The same of provider options."""


ASKS: dict[str, Try] = {
    "job_uuid": Try("another-name"),
    "model": Try("org/another"),
    "finetuned_model": Try("name-of-the-result", "dpo"),
    "checkpoint_dir": Try("results"),
    SEARCH: Try({"method": "grid", "parameters": {"training_config.n_epochs": [1, 2]}}),
    "logger_config": Try({"tensorboard": True}),
    TRAINING + "n_epochs": Try(2),
    TRAINING + "max_steps_per_epoch": Try(5),
    TRAINING + "gradient_accumulation_steps": Try(4),
    TRAINING + "max_validation_steps": Try(5, around={DATA + "validation_dataset_id": "held-out"}),
    TRAINING + "dtype": Try("bf16"),
    TRAINING + "learning_rate": Try(1e-3),
    DATA + "dataset_id": Try("other-rows"),
    DATA + "batch_size": Try(7),
    DATA + "shuffle": Try(False),
    DATA + "data_format": Try("dialog"),
    DATA + "validation_dataset_id": Try("held-out"),
    DATA + "train_split_percentage": Try(0.9),
    DATA + "packed": Try(True),
    DATA + "train_on_input": Try(True),
    OPTIMIZER + "optimizer_type": Try("sgd"),
    OPTIMIZER + "lr": Try(1e-3),
    OPTIMIZER + "weight_decay": Try(0.1),
    OPTIMIZER + "num_warmup_steps": Try(5),
    OPTIMIZER + "warmup_ratio": Try(0.1),
    EFFICIENCY + "enable_activation_checkpointing": Try(True),
    EFFICIENCY + "enable_activation_offloading": Try(True, options={"device": "cuda:1"}),
    EFFICIENCY + "memory_efficient_fsdp_wrap": Try(True),
    EFFICIENCY + "fsdp_cpu_offload": Try(True),
    "algorithm_config.type": Try("LoRA"),
    "algorithm_config.lora_attn_modules": Try(["output_proj"], around={"algorithm_config": LORA}),
    "algorithm_config.apply_lora_to_mlp": Try(True, around={"algorithm_config": LORA}),
    "algorithm_config.apply_lora_to_output": Try(True, around={"algorithm_config": LORA}),
    "algorithm_config.rank": Try(3, around={"algorithm_config": LORA}),
    "algorithm_config.alpha": Try(3, around={"algorithm_config": LORA}),
    "algorithm_config.use_dora": Try(True, around={"algorithm_config": LORA}),
    "algorithm_config.quantize_base": Try(True, around={"algorithm_config": LORA}),
    "algorithm_config.quantizer_name": Try(INT4, around={"algorithm_config": QAT}),
    "algorithm_config.group_size": Try(64, around={"algorithm_config": QAT}),
    "algorithm_config.beta": Try(0.3, "dpo"),
    "algorithm_config.loss_type": Try("hinge", "dpo"),
    "algorithm_config.reward_scale": Try(2.0, "dpo"),
    "algorithm_config.reward_clip": Try(5.0, "dpo"),
    "algorithm_config.center_rewards_coefficient": Try(0.1, "dpo", around={"algorithm_config": {"type": "reward"}}),
    "algorithm_config.margin": Try(True, "dpo", around={"algorithm_config": {"type": "reward"}}),
    "algorithm_config.desirable_weight": Try(0.5, "dpo", around={"algorithm_config": {"type": "kto"}}),
    "algorithm_config.undesirable_weight": Try(0.5, "dpo", around={"algorithm_config": {"type": "kto"}}),
    "algorithm_config.rewards": Try(
        [IS_JSON, IS_WORD], "dpo", around={"algorithm_config": {"type": "grpo", "rewards": [IS_JSON]}}
    ),
    **{
        f"algorithm_config.{name}": Try(
            value, "dpo", around={"algorithm_config": {"type": "grpo", "rewards": [IS_JSON]}}
        )
        for name, value in [*GRPO.items(), ("use_vllm", True)]
    },
    **{
        f"algorithm_config.vllm_{name}": Try(
            value, "dpo", around={"algorithm_config": {"type": "grpo", "rewards": [IS_JSON], "use_vllm": True}}
        )
        for name, value in VLLM.items()
    },
    "algorithm_config.vllm_tensor_parallel_size": Try(
        2,
        "dpo",
        around={
            "algorithm_config": {"type": "grpo", "rewards": [IS_JSON], "use_vllm": True, "vllm_mode": "server"},
        },
    ),
    "algorithm_config.vllm_sync": Try(
        "weights",
        "dpo",
        around={"algorithm_config": {"type": "grpo", "rewards": [IS_JSON], "use_vllm": True}},
        options={
            "lora": {"lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False, "rank": 8, "alpha": 8, **LORA},
        },
    ),
    "algorithm_config.teacher": Try("org/other", "dpo", around={"algorithm_config": DISTILLATION}),
    "algorithm_config.lmbda": Try(0.5, "dpo", around={"algorithm_config": DISTILLATION}),
    "algorithm_config.use_uld_loss": Try(True, "dpo", around={"algorithm_config": DISTILLATION}),
    **{
        f"algorithm_config.uld_{name}": Try(value, "dpo", around={"algorithm_config": around})
        for name, value, around in (
            ("token_merge_strategy", "observed", ULD),
            ("use_hybrid_loss", True, ULD),
            ("hybrid_matched_weight", 0.5, HYBRID),
            ("hybrid_unmatched_weight", 0.5, HYBRID),
            ("crossentropy_weight", 0.5, ULD),
            ("distillation_weight", 0.5, ULD),
            ("student_temperature", 0.5, ULD),
            ("teacher_temperature", 0.5, ULD),
            ("skip_student_eos", False, ULD),
            ("skip_teacher_eos", False, ULD),
        )
    },
    "algorithm_config.epsilon": Try(0.1, "dpo"),
    "algorithm_config.gamma": Try(0.99, "dpo"),
}
# The same question where the first one does not settle it.
ALSO_REFUSED: list[tuple[str, Try]] = [
    ("algorithm_config.type", Try("FullFineTune")),
    ("algorithm_config.type", Try("ppo", "dpo")),
    ("algorithm_config.type", Try("QAT", "dpo")),
    ("algorithm_config.loss_type", Try("bco_pair", "dpo")),
    ("algorithm_config.quantizer_name", Try("int4", around={"algorithm_config": LORA})),
    ("algorithm_config.group_size", Try(32, around={"algorithm_config": LORA})),
    ("algorithm_config.group_size", Try(None, around={"algorithm_config": QAT})),
    ("algorithm_config.group_size", Try(48, around={"algorithm_config": {**QAT, "quantizer_name": INT4}})),
    ("algorithm_config.quantizer_name", Try("int4", around={"algorithm_config": QAT})),
    ("algorithm_config.rank", Try(8, around={"algorithm_config": QAT})),
    ("algorithm_config.gamma", Try(0.5, "dpo", around={"algorithm_config": {"type": "orpo"}})),
    ("algorithm_config.beta", Try(0.0, "dpo", around={"algorithm_config": {"type": "simpo"}})),
    ("algorithm_config.loss_type", Try("simpo", "dpo", around={"algorithm_config": {"type": "cpo"}})),
    (DATA + "train_on_input", Try(True, "dpo", around={"algorithm_config": {"type": "cpo"}})),
    (DATA + "packed", Try(True, "dpo", around={"algorithm_config": {"type": "orpo"}})),
    (DATA + "train_on_input", Try(True, "dpo")),
    (DATA + "packed", Try(True, "dpo")),
    (DATA + "data_format", Try("parquet")),
    (TRAINING + "dtype", Try("fp16")),
    (TRAINING + "dtype", Try("fp8")),
    (EFFICIENCY + "enable_activation_offloading", Try(True)),
    (TRAINING + "learning_rate", Try(1e-3, around={OPTIMIZER + "lr": 1e-4})),
    (OPTIMIZER + "warmup_ratio", Try(0.1, around={OPTIMIZER + "num_warmup_steps": 5})),
    (DATA + "train_split_percentage", Try(0.9, around={DATA + "validation_dataset_id": "held-out"})),
    ("algorithm_config.reward_scale", Try(0.0, "dpo")),
    (OPTIMIZER + "optimizer_type", Try("adafactor")),
    (OPTIMIZER + "weight_decay", Try(float("inf"))),
    ("algorithm_config.reward_clip", Try(float("inf"), "dpo")),
    ("job_uuid", Try("a/b")),
    ("checkpoint_dir", Try("../elsewhere")),
]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("llama_stack_provider_trl.requests.trackers.find_spec", lambda name: name)  # installed or not
    trackers = TrackerSettings.model_validate({"tensorboard": {}})
    here = {"devices": ("cpu", "cuda:1"), "vllm_python": tmp_path / "python", "max_ranks": 2}
    return Settings(data_dir=tmp_path, trackers=trackers, **here)


def set_field(body: Json, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        body = body.setdefault(parent, {})
    body[name] = value


def plain(call: str, around: Json | None = None) -> Json:
    data = {"dataset_id": "rows", "batch_size": 2}
    body: Json = {"job_uuid": "job-1", "model": "org/base", "training_config": {"n_epochs": 1, "data_config": data}}
    for path, value in (around or {}).items():
        set_field(body, path, dict(value) if isinstance(value, dict) else value)
    return body


def resolved(body: Json, call: str, settings: Settings, options: Json | None = None) -> Resolution:
    model = our_requests.SupervisedFineTuneRequest if call == "sft" else our_requests.PreferenceOptimizeRequest
    return resolve(model.model_validate(body), ProviderOptions.parse(options), settings)


def resolve_with(field: str, attempt: Try, settings: Settings) -> Resolution:
    body = plain(attempt.call, attempt.around)
    set_field(body, field, attempt.value)
    return resolved(body, attempt.call, settings, attempt.options)


def spec_of(resolution: Resolution) -> JobSpec:
    """The job, with datasets that are known by their ids alone."""

    def ref(dataset_id: str) -> DatasetRef:
        return DatasetRef(dataset_id=dataset_id, path=Path("/rows.jsonl"), sha256="0" * 64, num_rows=8)

    validation = resolution.validation_dataset_id
    return resolution.spec(ref(resolution.datasets[0].dataset_id), ref(validation) if validation else None)


def _all_of(resolution: Resolution) -> tuple[Any, ...]:
    return spec_of(resolution), resolution.train_share, resolution.trackers


def test_every_row_of_the_table_is_tried() -> None:
    assert set(ASKS) == set(STATUS)


@pytest.mark.parametrize("field", [field for field in with_status("honoured") if field != SEARCH])
def test_an_honoured_field_changes_the_job(field: str, settings: Settings) -> None:
    attempt = ASKS[field]
    default = resolved(plain(attempt.call, attempt.around), attempt.call, settings, attempt.options)
    changed = resolve_with(field, attempt, settings)
    assert _all_of(changed) != _all_of(default)
    assert changed.warnings == []


def test_a_search_is_one_job_for_each_of_its_trials() -> None:
    body = {**plain("sft"), SEARCH: ASKS[SEARCH].value}
    search = resolve_search(our_requests.SupervisedFineTuneRequest.model_validate(body), ProviderOptions())
    assert search is not None
    assert [trial.request.training_config.n_epochs for trial in search.trials] == [1, 2]


def test_a_search_is_refused_where_one_job_is_checked_and_not_submitted(settings: Settings) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_with(SEARCH, ASKS[SEARCH], settings)
    assert refused.value.field == SEARCH


@pytest.mark.parametrize("field", with_status("refused"))
def test_a_refused_field_is_refused_by_name(field: str, settings: Settings) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_with(field, ASKS[field], settings)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}=")


@pytest.mark.parametrize(("field", "attempt"), ALSO_REFUSED)
def test_a_value_that_a_field_cannot_have_is_refused_by_name(field: str, attempt: Try, settings: Settings) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_with(field, attempt, settings)
    assert refused.value.field == field


NO_ASKS: tuple[Any, ...] = (None, False, {})
NO_BOOLEANS = {
    "lmbda",  # 0 asks for no answers of the model's own
    "uld_token_merge_strategy",
    "uld_crossentropy_weight",
}
"""Texts and numbers."""
NOTHING = [
    (field, nothing)
    for field in with_status("refused")
    for nothing in NO_ASKS
    if nothing is None or isinstance(nothing, dict) == isinstance(ASKS[field].value, dict)
    if nothing is not False or field.removeprefix("algorithm_config.") not in NO_BOOLEANS
]


@pytest.mark.parametrize(("field", "nothing"), NOTHING)
def test_a_refused_field_that_asks_for_nothing_is_taken(field: str, nothing: Any, settings: Settings) -> None:
    attempt = ASKS[field]
    default = resolved(plain(attempt.call, attempt.around), attempt.call, settings)
    assert spec_of(resolve_with(field, attempt._replace(value=nothing), settings)) == spec_of(default)


@pytest.mark.parametrize("field", with_status("noted"))
def test_a_noted_field_changes_nothing_and_is_warned_about(field: str, settings: Settings) -> None:
    attempt = ASKS[field]
    default = resolved(plain(attempt.call, attempt.around), attempt.call, settings)
    noted = resolve_with(field, attempt, settings)
    assert spec_of(noted) == spec_of(default)
    assert [warning for warning in noted.warnings if field in warning]
    assert default.warnings == []


# --- provider options -------------------------------------------------------------------------------------------------

OPTION_ASKS: dict[str, Try] = {
    "method": Try({"type": "orpo"}, "dpo"),
    "lora": Try({"rank": 4}, "dpo"),
    "label_smoothing": Try(0.1, "dpo"),
    "group_by_length": Try(False),
    "padding_free": Try(False),
    "token_cache": Try(False),
    "attn_implementation": Try("eager"),
    "attention_mask": Try("always"),
    "gradient_sync": Try("micro_step"),
    "merge_micro_batches": Try("never"),
    "read_metrics_later": Try("never"),
    "fuse_lora": Try("never", around={"algorithm_config": LORA}),
    "tile_mlp": Try("never"),
    "keep_attention": Try("never", around={EFFICIENCY + "enable_activation_checkpointing": True}),
    "compile_blocks": Try("never"),
    "float8": Try("always", options={"compile_blocks": "always"}),
    "liger_kernels": Try("never"),
    "head_gradients": Try("backward"),
    "averaging": Try({"interval": 20}, options={"nproc_per_node": 2}),
    "dataloader_num_workers": Try(3),
    "peft_method": Try("vera", around={"algorithm_config": LORA}),
    "lora_dropout": Try(0.1, around={"algorithm_config": LORA}),
    "use_rslora": Try(True, around={"algorithm_config": LORA}),
    "merge_adapter": Try(True, around={"algorithm_config": LORA}),
    "adapter": Try("continue", around={"model": str(tiny_adapter())}, options={"adapter": "merge"}),
    "reference_model": Try("org/another", "dpo"),
    "precompute_reference": Try(True, "dpo"),
    "max_seq_length": Try(77),
    "truncation_side": Try("left"),
    "dropped_turns": Try("refuse"),
    "duplicates": Try("refuse"),
    "columns": Try({"text": "note"}),
    "roles": Try({"user": "customer"}),
    "system_prompt": Try("Answer briefly."),
    "chat_template": Try("chatml"),
    "mixture": Try([{"dataset_id": "rows", "rows": 3}]),
    "train_on": Try("last_turn"),
    "reasoning": Try("drop"),
    "lr_scheduler": Try("cosine"),
    "lr_decay_steps": Try(3, options={"lr_scheduler": "warmup_stable_decay"}),
    "num_cycles": Try(1.5, options={"lr_scheduler": "cosine"}),
    "adam_beta1": Try(0.5),
    "adam_beta2": Try(0.9),
    "adam_epsilon": Try(1e-6),
    "max_grad_norm": Try(0),
    "save_steps": Try(3),
    "eval_steps": Try(2, around={DATA + "validation_dataset_id": "held-out"}),
    "early_stopping": Try({"patience": 2}, around={DATA + "validation_dataset_id": "held-out"}),
    "best_checkpoint": Try("eval_loss", around={DATA + "validation_dataset_id": "held-out"}),
    "samples": Try({"prompts": ["What is 3 plus 3?"]}),
    "keep_last": Try(2),
    "retries": Try(7),
    "oom_retry": Try(False),
    "failover": Try(False),
    "max_duration": Try(60.0),
    "priority": Try("high"),
    "logging_steps": Try(3),
    "seed": Try(3),
    "nproc_per_node": Try(2),
    "context_parallel_size": Try(2, options={"nproc_per_node": 2}),
    "fsdp_config": Try({"cpu_offload": True}, options={"nproc_per_node": 2}),
    "resources": Try({"cpus": 4}),
    "resume_from": Try("job-0/checkpoint-6"),
    "after": Try(["job-0"]),
    "cancel_with": Try(True, options={"after": ["job-0"]}),
    "evaluate": Try({"dataset_id": "held-out"}),
    "shard": Try({"index": 1, "count": 2}),
    "preflight": Try("warn"),
    "metadata": Try({"team": "a"}),
    "device": Try("cuda:1"),
}


def test_the_table_lists_every_provider_option() -> None:
    assert [name for name, _ in table("options", 2)] == list(ProviderOptions.model_fields)


@pytest.mark.parametrize("option", ProviderOptions.model_fields)
def test_every_provider_option_changes_the_job(option: str, settings: Settings) -> None:
    attempt = OPTION_ASKS[option]
    strategy = "NO_SHARD" if option == "averaging" else "FULL_SHARD"
    sharding = ShardingSpec(strategy=strategy)
    settings = settings.model_copy(update={"max_ranks": 2, "sharding": sharding})  # as the service has them
    body = plain(attempt.call, attempt.around)
    around = attempt.options or {}
    default = resolved(body, attempt.call, settings, around)
    changed = resolved(body, attempt.call, settings, {**around, option: attempt.value})
    assert (spec_of(changed), changed.shard) != (spec_of(default), default.shard)  # rows of a shard are written later


# --- methods and answers ----------------------------------------------------------------------------------------------

CALLS = [name for name, call in vars(stack_api.PostTraining).items() if inspect.iscoroutinefunction(call)]


def test_llama_stack_has_the_six_calls_of_the_document() -> None:
    assert len(CALLS) == 6


@pytest.mark.parametrize("call", CALLS)
def test_our_method_takes_every_parameter_of_llama_stacks_and_requires_no_other(call: str) -> None:
    theirs = parameters(getattr(stack_api.PostTraining, call))
    ours = parameters(getattr(TrlPostTraining, call))
    assert set(theirs) <= set(ours)
    required = {name for name, parameter in ours.items() if parameter.default is parameter.empty}
    assert required <= set(theirs)
    # Llama Stack builds its HTTP schema from these; a string there is a 500 on every POST.
    assert not [name for name, parameter in ours.items() if isinstance(parameter.annotation, str)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (our_responses.PostTrainingJob, stack_api.PostTrainingJob),
        (our_responses.ListPostTrainingJobsResponse, stack_api.ListPostTrainingJobsResponse),
        (our_responses.PostTrainingJobStatusResponse, stack_api.PostTrainingJobStatusResponse),
        (our_responses.PostTrainingJobArtifactsResponse, stack_api.PostTrainingJobArtifactsResponse),
        (our_responses.Checkpoint, stack_types.Checkpoint),
        (our_responses.PostTrainingMetric, stack_types.PostTrainingMetric),
    ],
)
def test_our_answers_have_llama_stacks_fields(ours: type[BaseModel], theirs: type[BaseModel]) -> None:
    assert set(ours.model_fields) == set(theirs.model_fields)
