"""Every request field is honoured or refused by name, before a row is read."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.demands import Demand
from llama_stack_provider_trl.jobs.submission import split_rows
from llama_stack_provider_trl.requests.bodies import (
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
    algorithm_of,
    request_digest,
)
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.evaluations import METRICS
from llama_stack_provider_trl.specs.job import (
    Algorithm,
    DatasetRef,
    JobSpec,
    QatSpec,
    ReferenceSpec,
    ResourcesSpec,
    ResumeFrom,
    ShardingSpec,
    derive,
)
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl_remote.service.http.bodies import SupervisedFineTuneBody

QAT = {"type": "QAT", "quantizer_name": "Int8DynActInt4WeightQATQuantizer", "group_size": 32}
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "rank": 4,
    "alpha": 8,
}
PROMISED: dict[str, Any] = {
    "job_uuid": "dpo-1",
    "model": "org/base",
    "finetuned_model": "my-model",
    "checkpoint_dir": "results",
    "algorithm_config": {"type": "dpo", "reward_scale": 1.0, "reward_clip": 5.0},
    "training_config": {
        "n_epochs": 3,
        "max_steps_per_epoch": 100,
        "learning_rate": 5e-5,
        "data_config": {"dataset_id": "pairs", "batch_size": 4, "shuffle": True},
    },
}


def sft(**changes: Any) -> SupervisedFineTuneRequest:
    body = {
        "job_uuid": "sft-1",
        "model": "org/base",
        "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2}},
        **changes,
    }
    return SupervisedFineTuneRequest.model_validate(body)


def with_training(**changes: Any) -> SupervisedFineTuneRequest:
    return sft(training_config={"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2}, **changes})


def with_data(**changes: Any) -> SupervisedFineTuneRequest:
    return with_training(data_config={"dataset_id": "rows", "batch_size": 2, **changes})


def dpo(**changes: Any) -> PreferenceOptimizeRequest:
    return PreferenceOptimizeRequest.model_validate({**PROMISED, **changes})


def spec_of(request: Any, settings: Settings, **options: Any) -> JobSpec:
    ref = DatasetRef(dataset_id="rows", path=Path("/rows.jsonl"), sha256="0" * 64, num_rows=10)
    return resolve(request, ProviderOptions.parse(options), settings).spec(ref, None)


def test_the_promised_payload_means_what_the_mission_states(settings: Settings) -> None:
    spec = spec_of(dpo(), settings)
    assert (spec.source.model, spec.output_name) == ("org/base", "my-model")
    assert spec.checkpoint_dir == (settings.data_dir / "checkpoints" / "results" / "dpo-1").resolve()
    assert spec.method is not None
    assert (spec.method.beta, spec.method.reward_scale, spec.method.reward_clip) == (0.1, 1.0, 5.0)
    assert (spec.train.n_epochs, spec.train.max_steps_per_epoch, spec.train.optimizer.learning_rate) == (3, 100, 5e-5)
    assert (spec.data.batch_size, spec.train.gradient_accumulation_steps, spec.train.shuffle) == (4, 1, True)


def test_a_dpo_call_with_only_finetuned_model_names_the_base(settings: Settings) -> None:
    spec = spec_of(dpo(model=None, finetuned_model="org/base"), settings)
    assert (spec.source.model, spec.output_name) == ("org/base", "dpo-1")


def test_an_epoch_is_capped_only_when_the_caller_set_a_cap(settings: Settings) -> None:
    assert spec_of(sft(), settings).train.max_steps_per_epoch is None
    assert spec_of(with_training(max_steps_per_epoch=1), settings).train.max_steps_per_epoch == 1


def test_an_unset_dtype_is_the_one_that_the_device_is_fast_in(settings: Settings) -> None:
    assert spec_of(sft(), settings).compute.dtype == "fp32"
    assert spec_of(sft(), Settings(data_dir=settings.data_dir, devices=("cuda:0",))).compute.dtype == "bf16"
    assert spec_of(with_training(dtype="bf16"), settings).compute.dtype == "bf16"


def test_the_devices_of_a_job_decide_its_dtype_where_any_node_may_run_it(settings: Settings, tmp_path: Path) -> None:
    service = settings.model_copy(update={"max_nodes": 2, "max_ranks": 2, "sharding": ShardingSpec()})
    anywhere = spec_of(sft(), service)
    assert (anywhere.compute.dtype, anywhere.compute.dtype_by_device) == ("fp32", True)
    assert [derive(anywhere, 1, device, tmp_path).job.compute.dtype for device in ("cuda:1", "cpu", "mps")] == [
        *("bf16", "fp32", "fp32")
    ]
    requested = spec_of(with_training(dtype="fp32"), service)
    assert derive(requested, 1, "cuda:1", tmp_path).job.compute.dtype == "fp32", "a dtype that was requested stays"
    (tmp_path / "config.json").write_text("{}")
    for known in (spec_of(sft(), service, device="cpu"), spec_of(sft(model=str(tmp_path)), service)):
        assert not known.compute.dtype_by_device, "its device is known"
    assert not spec_of(sft(), settings).compute.dtype_by_device


def test_what_needs_a_gpu_can_be_had_from_a_node_by_naming_the_device(settings: Settings) -> None:
    service = settings.model_copy(update={"max_nodes": 2, "max_ranks": 2, "sharding": ShardingSpec()})
    offloading = {"efficiency_config": {"enable_activation_offloading": True}}
    for training in ({"dtype": "fp16"}, offloading):
        with pytest.raises(InvalidRequest, match=r"provider_options\.device to 'cuda'"):
            spec_of(with_training(**training), service)
        assert spec_of(with_training(**training), service, device="cuda").device == "cuda"
        with pytest.raises(InvalidRequest) as refused:
            spec_of(with_training(**training), settings)
        assert "provider_options.device" not in str(refused.value)


def test_lora_module_names_of_llama_stack_become_those_of_hugging_face(settings: Settings) -> None:
    lora = spec_of(sft(algorithm_config=LORA), settings).lora
    assert lora is not None
    assert lora.target_modules == ("q_proj", "o_proj")
    assert (lora.mlp, lora.rank, lora.alpha) == (True, 4, 8)


def test_a_base_in_4_bits_and_qat_are_part_of_the_job(settings: Settings) -> None:
    sft_lora = spec_of(sft(algorithm_config={**LORA, "quantize_base": True}), settings).lora
    dpo_lora = spec_of(dpo(), settings, lora={**LORA, "quantize_base": True}).lora
    assert sft_lora == dpo_lora is not None
    assert sft_lora.quantize_base
    qat = spec_of(sft(algorithm_config=QAT), settings)
    assert qat.train.qat == QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)
    assert (qat.lora, qat.train.optimizer.learning_rate) == (None, 2e-5)


def test_an_unknown_quantizer_is_answered_with_those_that_exist(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="Int8DynActInt4WeightQATQuantizer, Int4WeightOnlyQATQuantizer"):
        spec_of(sft(algorithm_config={**QAT, "quantizer_name": "Int8"}), settings)
    with pytest.raises(InvalidRequest, match="32, 64, 128, 256"):
        spec_of(
            sft(algorithm_config={**QAT, "quantizer_name": "Int4WeightOnlyQATQuantizer", "group_size": 16}), settings
        )


def test_learning_rate_defaults_follow_algorithm_and_method(settings: Settings) -> None:
    no_rate = {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2}}
    assert spec_of(sft(), settings).train.optimizer.learning_rate == 2e-5
    assert spec_of(sft(algorithm_config=LORA), settings).train.optimizer.learning_rate == 2e-4
    assert spec_of(dpo(training_config=no_rate), settings).train.optimizer.learning_rate == 1e-6
    assert spec_of(dpo(training_config=no_rate), settings, lora=LORA).train.optimizer.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("request_body", "field"),
    [
        (sft(model=None), "model"),
        (sft(model="/no/such/directory"), "model"),
        (sft(job_uuid="a/b"), "job_uuid"),
        (sft(job_uuid="x" * 300), "job_uuid"),
        (sft(job_uuid="checkpoint-7"), "job_uuid"),
        (sft(job_uuid="a.stale-1"), "job_uuid"),
        (sft(checkpoint_dir="a.stale-12/b"), "checkpoint_dir"),
        (sft(checkpoint_dir="../jobs/x"), "checkpoint_dir"),
        (sft(checkpoint_dir="checkpoints/../tokens"), "checkpoint_dir"),
        (sft(job_uuid="..", model="org/base"), "job_uuid"),
        (sft(checkpoint_dir="/etc"), "checkpoint_dir"),
        (sft(checkpoint_dir="../outside"), "checkpoint_dir"),
        (sft(hyperparam_search_config={"lr": [1, 2]}), "hyperparam_search_config"),
        (sft(logger_config={"wandb": True}), "logger_config"),
        (sft(training_config={"n_epochs": 1}), "training_config.data_config"),
        (with_training(dtype="fp16"), "training_config.dtype"),
        (
            with_training(optimizer_config={"optimizer_type": "adamax"}),
            "training_config.optimizer_config.optimizer_type",
        ),
        (with_training(optimizer_config={"lr": 1e-3}, learning_rate=1e-4), "training_config.learning_rate"),
        (with_training(learning_rat=1e-4), "training_config.learning_rat"),
        (
            with_training(efficiency_config={"fsdp_cpu_offload": True}),
            "training_config.efficiency_config.fsdp_cpu_offload",
        ),
        (
            dpo(training_config={"n_epochs": 1, "data_config": {"dataset_id": "x", "batch_size": 2, "packed": True}}),
            "training_config.data_config.packed",
        ),
        (with_data(data_format="preference"), "training_config.data_config.data_format"),
        (sft(algorithm_config={**QAT, "quantizer_name": "int8"}), "algorithm_config.quantizer_name"),
        (sft(algorithm_config={**QAT, "quantizer_name": None}), "algorithm_config.quantizer_name"),
        (sft(algorithm_config={**QAT, "group_size": 1}), "algorithm_config.group_size"),
        (sft(algorithm_config={**QAT, "rank": 8}), "algorithm_config.rank"),
        (sft(algorithm_config={**LORA, "type": "QLoRA"}), "algorithm_config.type"),
        (sft(algorithm_config={**LORA, "apply_lora_to_output": True}), "algorithm_config.apply_lora_to_output"),
        (sft(algorithm_config={**LORA, "rank": 0}), "algorithm_config.rank"),
        (sft(algorithm_config={**LORA, "ranks": 2}), "algorithm_config.ranks"),
        (dpo(algorithm_config={"beta": 0.1, "loss_type": "bco_pair"}), "algorithm_config.loss_type"),
        (dpo(algorithm_config={"loss_type": "ipo", "reward_clip": 5.0}), "algorithm_config.loss_type"),
        (dpo(algorithm_config={"type": "ppo"}), "algorithm_config.type"),
        (dpo(model=None, finetuned_model=None), "finetuned_model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(request_body: Any, field: str, settings: Settings) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(request_body, ProviderOptions(), settings)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("request_body", "field", "meant"),
    [
        (dpo(algorithm_config={"type": "dpo", "betta": 0.1}), "betta", "beta"),
        (sft(algorithm_config={**LORA, "rnk": 2}), "rnk", "rank"),
        (sft(algorithm_config={**LORA, "use_dorra": True}), "use_dorra", "use_dora"),
        (sft(algorithm_config={**QAT, "groupsize": 32}), "groupsize", "group_size"),
        (sft(algorithm_config={**LORA, "xyz": 2}), "xyz", None),
    ],
)
def test_a_misspelt_field_of_an_algorithm_is_refused_with_the_nearest(
    request_body: Any, field: str, meant: str | None, settings: Settings
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(request_body, ProviderOptions(), settings)
    assert caught.value.field == f"algorithm_config.{field}"
    assert (f"; the nearest is '{meant}'" in str(caught.value)) == (meant is not None)
    assert " fields are: " in str(caught.value)


@pytest.mark.parametrize(
    ("request_body", "options"),
    [
        (sft(), {"label_smoothing": 0.1}),
        (dpo(algorithm_config={"loss_type": "hinge"}), {"label_smoothing": 0.1}),
        (dpo(algorithm_config={"loss_type": "ipo"}), {"label_smoothing": 0.1}),
        (dpo(algorithm_config={"loss_type": "kto_pair"}), {"label_smoothing": 0.1}),
        (dpo(), {"label_smoothing": 0.5}),
        (sft(), {"reference_model": "org/base"}),
        (dpo(), {"reference_model": ""}),
        (sft(), {"precompute_reference": True}),
        (dpo(), {"reference_model": "/no/such/directory"}),
    ],
)
def test_a_dpo_option_that_cannot_be_honoured_is_refused_by_name(
    request_body: Any, options: dict[str, Any], settings: Settings
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(request_body, ProviderOptions.parse(options), settings)
    assert caught.value.field == f"provider_options.{next(iter(options))}"


def test_a_reference_model_is_trusted_by_its_own_name(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    trusting = settings.model_copy(update={"trust_remote_code": ("org/other@abc", str(tmp_path))})
    references = [
        spec_of(dpo(), trusting, **options).method.reference
        for options in ({}, {"reference_model": "org/base"}, {"reference_model": "org/other"})
    ]
    assert references[0] == references[1] == ReferenceSpec()
    assert references[2] == ReferenceSpec(source=ModelSource(model="org/other", revision="abc", trust_remote_code=True))
    local = spec_of(dpo(), trusting, reference_model=str(tmp_path)).method.reference
    assert local == ReferenceSpec(source=ModelSource(model=str(tmp_path), trust_remote_code=True))


def test_a_misspelt_field_is_answered_with_the_nearest_one(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="did you mean `learning_rate`"):
        resolve(with_training(learning_rat=1e-4), ProviderOptions(), settings)
    for written, meant in (
        ("save_step", "save_steps"),
        ("lr_scheduler_type", "lr_scheduler"),
        ("maxGradNorm", "max_grad_norm"),
        ("max-seq-length", "max_seq_length"),
    ):
        with pytest.raises(InvalidRequest, match=f"there is no such option; the nearest is '{meant}'; the options"):
            ProviderOptions.parse({written: 1})
    with pytest.raises(InvalidRequest, match="there is no such option; the options are"):
        ProviderOptions.parse({"colour": 1})


def test_what_needs_cuda_is_refused_elsewhere_with_the_nearest(settings: Settings) -> None:
    offloading = with_training(efficiency_config={"enable_activation_offloading": True})
    with pytest.raises(InvalidRequest, match="trains on cpu; set enable_activation_checkpointing instead"):
        resolve(offloading, ProviderOptions(), settings)
    with pytest.raises(InvalidRequest, match=r"dtype='fp16' .* trains on cpu; send 'bf16' \(the nearest\)"):
        resolve(with_training(dtype="fp16"), ProviderOptions(), settings)
    gpus = Settings(data_dir=settings.data_dir, devices=("cuda:0",))
    assert spec_of(offloading, gpus).compute.activation_offloading
    assert spec_of(with_training(dtype="float16"), gpus).compute.dtype == "fp16"


@pytest.mark.parametrize(
    ("recomputes", "options", "message"),
    [
        (False, {"keep_attention": "always"}, "no activations are computed again; set enable_activation_checkpointing"),
        (False, {"keep_attention": "never"}, "no activations are computed again"),
        (True, {"keep_attention": "always", "attn_implementation": "eager"}, "'eager' is none of torch's operators"),
        (True, {"keep_attention": "always", "compile_blocks": "always"}, "computes attention again; send one of them"),
    ],
)
def test_attention_is_kept_where_blocks_are_computed_again_by_torchs_operators(
    settings: Settings, recomputes: bool, options: dict[str, Any], message: str
) -> None:
    requested = with_training(efficiency_config={"enable_activation_checkpointing": recomputes})
    with pytest.raises(
        InvalidRequest, match=rf"provider_options\.keep_attention='{options['keep_attention']}'.*{message}"
    ):
        spec_of(requested, settings, **options)
    saving = settings.model_copy(update={"gradient_checkpointing": True})
    assert spec_of(sft(), saving, keep_attention="always").compute.keep_attention == "always"


def test_ligers_kernels_are_for_gpus_and_for_blocks_that_are_not_compiled(settings: Settings) -> None:
    with pytest.raises(
        InvalidRequest, match=r"provider_options\.liger_kernels='always' .* trains on cpu; leave it out"
    ):
        spec_of(sft(), settings, liger_kernels="always")
    gpus = Settings(data_dir=settings.data_dir, devices=("cuda:0",))
    with pytest.raises(InvalidRequest, match="compile_blocks 'always' makes kernels of the same operations"):
        spec_of(sft(), gpus, liger_kernels="always", compile_blocks="always")
    assert spec_of(sft(), gpus, liger_kernels="always").compute.liger_kernels == "always"


@pytest.mark.parametrize(
    ("changes", "options", "hint"),
    [
        ({}, {}, "products in 8 bits are slower; send compile_blocks 'always', too"),
        ({"algorithm_config": LORA}, {"compile_blocks": "always"}, "frozen weights would be cast again in each pass"),
        ({"algorithm_config": QAT}, {"compile_blocks": "always"}, "train without QAT, or leave it out"),
    ],
)
def test_products_in_8_bits_are_for_compiled_blocks_of_trained_weights(
    settings: Settings, changes: dict[str, Any], options: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"provider_options\.float8='always'.*{hint}"):
        spec_of(sft(**changes), settings, float8="always", **options)
    assert spec_of(sft(), settings, float8="always", compile_blocks="always").compute.float8 == "always"


def test_flash_kernels_are_for_gpus_in_half_precision(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="flash kernels are for cuda, and this job trains on cpu"):
        spec_of(sft(), settings, attn_implementation="flash_attention_2")
    gpus = settings.model_copy(update={"devices": ("cuda:0",)})
    assert spec_of(sft(), gpus, attn_implementation="flash_attention_2").uses_flash_kernels
    with pytest.raises(InvalidRequest, match="dtype is fp32; send 'sdpa'"):
        spec_of(with_training(dtype="fp32"), gpus, attn_implementation="flash_attention_3")
    assert not spec_of(sft(), settings, attn_implementation="eager").uses_flash_kernels


def test_activations_are_not_offloaded_where_ranks_shard_the_model(settings: Settings) -> None:
    offloading = with_training(efficiency_config={"enable_activation_offloading": True})
    gpus = {"devices": ("cuda:0", "cuda:1"), "ranks": 2, "max_ranks": 2}
    sharded = settings.model_copy(update={**gpus, "sharding": SHARDING})
    with pytest.raises(InvalidRequest, match="2 ranks shard the model"):
        spec_of(offloading, sharded)
    assert spec_of(offloading, sharded, nproc_per_node=1).compute.activation_offloading
    copies = settings.model_copy(update={**gpus, "sharding": ShardingSpec(strategy="NO_SHARD")})
    assert spec_of(offloading, copies).compute.activation_offloading


def test_every_second_block_recomputes_where_the_service_sets_it_and_the_job_does_not(settings: Settings) -> None:
    selective = settings.model_copy(update={"gradient_checkpointing": True, "checkpoint_every": 2})
    assert spec_of(sft(), selective).compute.checkpoint_every == 2
    full = with_training(efficiency_config={"enable_activation_checkpointing": True})
    assert (
        spec_of(full, selective).compute.gradient_checkpointing,
        spec_of(full, selective).compute.checkpoint_every,
    ) == (True, 1)


def test_decay_steps_of_a_schedule_that_does_not_decay_are_refused(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options.lr_decay_steps=5 .* 'warmup_stable_decay'"):
        spec_of(sft(), settings, lr_scheduler="cosine", lr_decay_steps=5)
    optimizer = spec_of(sft(), settings, lr_scheduler="warmup_stable_decay", lr_decay_steps=5).train.optimizer
    assert (optimizer.scheduler, optimizer.decay_steps) == ("warmup_stable_decay", 5)


def test_waves_belong_to_the_cosine_schedule(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options.num_cycles=1.5 .* 'linear' .* 'cosine'"):
        spec_of(sft(), settings, num_cycles=1.5)
    assert spec_of(sft(), settings, lr_scheduler="cosine", num_cycles=1.5).train.optimizer.num_cycles == 1.5
    assert spec_of(sft(), settings, lr_scheduler="cosine").train.optimizer.num_cycles == 0.5


@pytest.mark.parametrize("option", ["adam_beta1", "adam_beta2", "adam_epsilon"])
def test_coefficients_of_adam_are_refused_with_an_optimizer_that_has_none(settings: Settings, option: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"provider_options.{option}=0.5 .* 'sgd' .* 'adamw'"):
        spec_of(with_training(optimizer_config={"optimizer_type": "sgd"}), settings, **{option: 0.5})
    for name in ("adam", "adamw", "adamw_8bit"):
        body = with_training(optimizer_config={"optimizer_type": name})
        default = spec_of(body, settings).train.optimizer
        assert spec_of(body, settings, **{option: 0.5}).train.optimizer == default.model_copy(update={option: 0.5})


def test_moments_in_8_bits_are_refused_where_there_is_no_kernel(settings: Settings) -> None:
    body = with_training(optimizer_config={"optimizer_type": "adamw_8bit"})
    assert spec_of(body, settings).train.optimizer.name == "adamw_8bit"
    with pytest.raises(
        InvalidRequest, match=r"optimizer_type='adamw_8bit' .* its kernels are for cuda and cpu.*'adamw'"
    ):
        spec_of(body, settings.model_copy(update={"devices": ("mps",)}))


def evaluated(**changes: Any) -> SupervisedFineTuneRequest:
    return with_data(validation_dataset_id="held-out", **changes)


@pytest.mark.parametrize(
    "options", [{"eval_steps": 2}, {"early_stopping": {"patience": 1}}, {"best_checkpoint": "eval_loss"}]
)
def test_what_follows_from_evaluations_needs_a_validation_dataset(settings: Settings, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidRequest, match="name a validation_dataset_id") as refused:
        resolve(sft(), ProviderOptions.parse(options), settings)
    assert refused.value.field == f"provider_options.{name}"
    resolve(evaluated(), ProviderOptions.parse(options), settings)


def test_a_metric_that_evaluations_do_not_have_is_refused_with_the_nearest(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"best_checkpoint='accuracy' .* eval_mean_token_accuracy"):
        spec_of(evaluated(), settings, best_checkpoint="accuracy")
    with pytest.raises(InvalidRequest, match=r"early_stopping\.metric='rewards/accuracies'"):
        spec_of(evaluated(), settings, early_stopping={"patience": 1, "metric": "rewards/accuracies"})
    assert spec_of(evaluated(), settings, best_checkpoint="loss").train.best_checkpoint == "eval_loss"
    with pytest.raises(
        InvalidRequest, match="no such option; the nearest is 'patience'; the options are: patience, min_d"
    ):
        ProviderOptions.parse({"early_stopping": {"patience": 1, "patients": 1}})
    assert set(METRICS) == set(get_args(Algorithm))


def test_prompts_of_samples_are_texts_or_messages(settings: Settings) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    found = spec_of(sft(), settings, samples={"prompts": ["Hi", turns]}).train.samples
    assert found is not None
    assert found.max_new_tokens == 64
    assert [[(turn.role, turn.content) for turn in prompt] for prompt in found.prompts] == [
        [("user", "Hi")],
        [("system", "Be brief."), ("user", "Hi")],
    ]
    assert spec_of(sft(), settings).train.samples is None


@pytest.mark.parametrize(
    ("samples", "field", "problem"),
    [
        ({"prompts": []}, "prompts", "at least 1"),
        ({"prompts": ["a"] * 17}, "prompts", "at most 16"),
        ({"prompts": "a"}, "prompts", "expected a list of prompts"),
        ({"prompts": [" "]}, "prompts", "prompt 0: it is blank"),
        ({"prompts": ["a", 3]}, "prompts", "prompt 1: expected text, or a list of messages"),
        ({"prompts": [[]]}, "prompts", "prompt 0: expected text"),
        ({"prompts": [[{"role": "user"}]]}, "prompts", "a role and a content"),
        ({"prompts": [[{"role": "poet", "content": "a"}]]}, "prompts", "one of system, user, assistant, tool"),
        ({"prompts": [[{"role": ["user"], "content": "a"}]]}, "prompts", "one of system, user, assistant, tool"),
        ({"prompts": [[{"role": "user", "content": 3}]]}, "prompts", "content of a message is text"),
        ({"prompts": [[{"role": "assistant", "content": "a"}]]}, "prompts", "last message is the assistant's"),
        ({"prompts": ["a" * 32_000, "b"]}, "prompts", "32001 characters, at most 32000"),
        ({"prompts": ["\ud800"]}, "prompts", "half of a UTF-16 surrogate pair"),
        ({"prompts": ["a"], "max_new_tokens": 513}, "max_new_tokens", "less than or equal to 512"),
        ({"prompts": ["a"], "temperature": 1}, "temperature", "the options are: prompts, max_new_tokens"),
        ({}, "prompts", "Field required"),
    ],
)
def test_samples_are_refused_by_name(samples: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        ProviderOptions.parse({"samples": samples})
    assert refused.value.field.startswith(f"provider_options.samples.{field}")


def test_null_false_and_empty_mean_not_requested(settings: Settings) -> None:
    quiet = with_training(
        efficiency_config={"fsdp_cpu_offload": False, "enable_activation_offloading": None},
        data_config={"dataset_id": "rows", "batch_size": 2, "packed": False, "train_on_input": None},
    )
    quiet = quiet.model_copy(update={"hyperparam_search_config": {}, "logger_config": {}})
    assert spec_of(quiet, settings).compute.gradient_checkpointing is False


def test_fields_without_meaning_in_dpo_become_warnings(settings: Settings) -> None:
    old = {"reward_scale": 1.0, "reward_clip": 5.0, "epsilon": 0.1, "gamma": 0.99}
    resolution = resolve(dpo(algorithm_config=old), ProviderOptions(), settings)
    assert [warning.split()[0] for warning in resolution.warnings] == [
        "algorithm_config.epsilon",
        "algorithm_config.gamma",
    ]


def test_a_validation_limit_without_validation_data_is_warned_about(settings: Settings) -> None:
    resolution = resolve(with_training(max_validation_steps=1), ProviderOptions(), settings)
    assert "max_validation_steps" in resolution.warnings[0]
    assert resolve(sft(algorithm_config={}), ProviderOptions(), settings).fields["lora"] is None


def test_a_symlink_cannot_lead_checkpoints_out_of_the_data_directory(settings: Settings, tmp_path: Path) -> None:
    (settings.data_dir / "checkpoints").mkdir(parents=True)
    (settings.data_dir / "checkpoints" / "way-out").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="checkpoint_dir"):
        resolve(sft(checkpoint_dir="way-out/x"), ProviderOptions(), settings)


def test_an_absolute_checkpoint_dir_inside_an_allowed_root_is_taken(settings: Settings, tmp_path: Path) -> None:
    allowed = Settings(data_dir=settings.data_dir, devices=("cpu",), checkpoint_roots=(tmp_path / "big-disk",))
    spec = spec_of(sft(checkpoint_dir=str(tmp_path / "big-disk" / "a")), allowed)
    assert spec.checkpoint_dir == (tmp_path / "big-disk" / "a" / "sft-1").resolve()


@pytest.mark.parametrize("job_uuid", ["data", "above"])
def test_a_job_whose_directory_would_be_the_data_directory_or_hold_it_is_refused(tmp_path: Path, job_uuid: str) -> None:
    # A job's directory that exists already is moved away before the job begins.
    roots = (tmp_path, tmp_path / "above")
    settings = Settings(data_dir=tmp_path / "above" / "data", devices=("cpu",), checkpoint_roots=roots)
    root = tmp_path if job_uuid == "above" else tmp_path / "above"
    with pytest.raises(InvalidRequest, match="checkpoint_dir"):
        spec_of(sft(job_uuid=job_uuid, checkpoint_dir=str(root)), settings)


def test_an_adapter_directory_as_base_model_is_refused_with_the_way_out(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="set the provider option adapter"):
        resolve(sft(model=str(tmp_path)), ProviderOptions(), settings)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sed": 1}, "provider_options.sed"),
        ({"save_steps": 0}, "provider_options.save_steps"),
        ("lora", "provider_options"),
    ],
)
def test_a_provider_option_that_is_unknown_or_wrong_is_refused_by_name(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ProviderOptions.parse(options)
    assert caught.value.field == field


def test_an_option_is_placed_by_the_module_of_its_kind_and_not_where_they_meet() -> None:
    tree = ast.parse(inspect.getsource(sys.modules[resolve.__module__]))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert read & ProviderOptions.model_fields.keys() == set()
    written = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    fields = {name for kind in (JobSpec, *JobSpec.parts().values()) for name in kind.model_fields}
    assert written & (fields - JobSpec.parts().keys()) == {"lora", "method"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("merge_adapter", True),
        ("lora_dropout", 0.1),
        ("use_rslora", True),
        ("peft_method", "vera"),
        ("fuse_lora", "always"),
        ("fuse_lora", "never"),
    ],
)
@pytest.mark.parametrize("request_body", [sft(), sft(algorithm_config=QAT), dpo()])
def test_options_of_adapters_are_refused_by_name_without_one(
    settings: Settings, request_body: Any, option: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest, match=rf"provider_options\.{option}={value!r} .* without LoRA"):
        spec_of(request_body, settings, **{option: value})


def test_adapters_of_both_algorithms_take_the_options_of_lora(settings: Settings) -> None:
    options = {"lora_dropout": 0.25, "use_rslora": True}
    by_sft = spec_of(sft(algorithm_config=LORA), settings, **options).lora
    by_dpo = spec_of(dpo(), settings, lora=LORA, **options).lora
    assert by_sft == by_dpo
    assert (by_dpo.dropout, by_dpo.use_rslora) == (0.25, True)


@pytest.mark.parametrize(
    ("config", "options", "field"),
    [
        ({"use_dora": True}, {}, "use_dora"),
        ({"quantize_base": True}, {}, "quantize_base"),
        ({}, {"lora_dropout": 0.1}, "provider_options.lora_dropout"),
        ({}, {"use_rslora": True}, "provider_options.use_rslora"),
    ],
)
@pytest.mark.parametrize("method", ["ia3", "vera"])
def test_what_lora_alone_has_is_refused_with_another_method(
    settings: Settings, method: str, config: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    lora = {**LORA, **config}
    by_sft = sft(algorithm_config=lora), {"peft_method": method, **options}, "algorithm_config."
    by_dpo = dpo(), {"peft_method": method, "lora": lora, **options}, "provider_options.lora."
    for body, given, where in (by_sft, by_dpo):
        with pytest.raises(InvalidRequest, match=f"peft_method is '{method}'") as refused:
            spec_of(body, settings, **given)
        assert refused.value.field == (field if "." in field else where + field)


def test_shared_matrices_of_vera_are_refused_where_ranks_shard_the_model(settings: Settings) -> None:
    for strategy, ranks in (("FULL_SHARD", 1), ("NO_SHARD", 2)):
        service = settings.model_copy(update={"max_ranks": 2, "sharding": ShardingSpec(strategy=strategy)})  # type: ignore[arg-type]
        spec_of(sft(algorithm_config=LORA), service, peft_method="vera", nproc_per_node=ranks)
    service = settings.model_copy(update={"max_ranks": 2, "sharding": ShardingSpec()})
    spec_of(sft(algorithm_config=LORA), service, peft_method="ia3", nproc_per_node=2)
    with pytest.raises(InvalidRequest, match=r"provider_options\.peft_method='vera' .* 2 ranks shard .* NO_SHARD"):
        spec_of(sft(algorithm_config=LORA), service, peft_method="vera", nproc_per_node=2)


def test_numbers_that_another_method_does_not_have_become_warnings(settings: Settings) -> None:
    expected = {"lora": [], "ia3": ["rank", "alpha"], "vera": ["alpha"]}
    for method, names in expected.items():
        options = ProviderOptions.parse({"peft_method": method})
        given = resolve(sft(algorithm_config=LORA), options, settings)
        assert given.fields["lora"].method == method
        assert [warning.partition(" ")[0] for warning in given.warnings] == [f"algorithm_config.{n}" for n in names]
        assert resolve(sft(algorithm_config={"type": "LoRA"}), options, settings).warnings == []


def test_lora_options_for_sft_are_refused(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options\.lora"):
        spec_of(sft(), settings, lora=LORA)


def test_a_device_that_the_provider_does_not_have_is_refused(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options\.device"):
        spec_of(sft(), settings, device="cuda:7")


def test_impossible_numbers_are_refused_by_the_request_model() -> None:
    for wrong in ({"n_epochs": 0}, {"n_epochs": 1, "learning_rate": -1.0}, {"n_epochs": "many"}):
        with pytest.raises(ValidationError):
            sft(training_config={"data_config": {"dataset_id": "rows", "batch_size": 2}, **wrong})


def test_the_digest_distinguishes_requests_by_what_the_caller_set() -> None:
    none = ProviderOptions()
    assert sft().digest(none) == sft().digest(none)
    assert sft().digest(none) != with_training(learning_rate=1e-4).digest(none)
    assert sft().digest(none) != sft().digest(ProviderOptions(seed=1))


def test_a_request_has_the_digest_that_earlier_releases_have_stored() -> None:
    """By it the inline provider knows a repeated request again; these two were computed by commit a7b999e."""
    training = {"n_epochs": 2, "learning_rate": 1e-3, "data_config": {"dataset_id": "rows", "batch_size": 2}}
    body = {"job_uuid": "job-1", "model": "/models/tiny", "training_config": training}
    options = ProviderOptions(seed=7)
    lora = {"type": "LoRA", "rank": 4}
    by_sft = SupervisedFineTuneRequest.model_validate({**body, "algorithm_config": lora}).digest(options)
    assert by_sft == "cd8726575f06b1c69541dd31893aa59ed77c840e4c0decc8f5d2857623a537d4"
    by_dpo = PreferenceOptimizeRequest.model_validate({**body, "finetuned_model": "tuned"}).digest(options)
    assert by_dpo == "7dbe183751a1b4433e14e7be43386b8472ece473841c2ebe47206e70dd26a43a"
    # As the service takes it, whose bodies have fields besides.
    requested = SupervisedFineTuneBody.model_validate(
        {**body, "algorithm_config": lora, "provider_options": {"seed": 7}}
    )
    given = requested.model_dump(exclude_unset=True, exclude={"provider_options"})
    assert request_digest(SupervisedFineTuneRequest, given, options) == by_sft


@pytest.mark.parametrize(
    ("body", "algorithm"),
    [
        ({}, "sft"),
        ({"algorithm_config": {}}, "sft"),
        ({"algorithm_config": None}, "sft"),
        ({"algorithm_config": {"type": "LoRA", "rank": 4}}, "sft"),
        ({"algorithm_config": {"type": "QAT"}}, "sft"),
        ({"algorithm_config": "LoRA"}, "sft"),
        ({"algorithm_config": {"type": "dpo"}}, "dpo"),
        ({"algorithm_config": {"type": "DPO"}}, "dpo"),
        ({"algorithm_config": {"type": None, "beta": 0.1}}, "dpo"),
        ({"algorithm_config": {"beta": 0.1}}, "dpo"),
        ({"finetuned_model": "tuned"}, "dpo"),
        ({"finetuned_model": None}, "dpo"),
    ],
)
def test_a_body_without_an_algorithm_is_meant_for_the_one_that_has_its_fields(
    body: dict[str, Any], algorithm: str
) -> None:
    assert algorithm_of(body) == algorithm


def test_derive_is_pure_and_places_the_job_on_a_device(settings: Settings, tmp_path: Path) -> None:
    spec = spec_of(sft(), settings)
    first, second = (derive(spec, 1, "cuda:0", tmp_path) for _ in range(2))
    assert first == second
    assert (first.job.device, first.attempt, first.task_id) == ("cuda:0", 1, "sft-1-1")
    assert spec.device == "auto"


SHARDING = ShardingSpec(strategy="SHARD_GRAD_OP")


def test_the_service_trains_with_its_ranks_unless_a_job_names_a_number(settings: Settings) -> None:
    service = settings.model_copy(update={"ranks": 2, "max_ranks": 4, "sharding": SHARDING})
    assert (spec_of(sft(), service).ranks, spec_of(sft(), service).sharding) == (2, SHARDING)
    assert spec_of(sft(), service, nproc_per_node=4).ranks == 4
    alone = spec_of(sft(), service, nproc_per_node=1)
    assert (alone.ranks, alone.sharding) == (1, None)
    with pytest.raises(InvalidRequest, match="devices for 4"):
        spec_of(sft(), service, nproc_per_node=5)


OFFLOADED = ShardingSpec(strategy="FULL_SHARD", cpu_offload=True, forward_prefetch=True)


@pytest.mark.parametrize(
    ("configured", "own", "resolved"),
    [
        (SHARDING, {"sharding_strategy": "NO_SHARD"}, ShardingSpec(strategy="NO_SHARD")),
        (ShardingSpec(strategy="NO_SHARD"), {"sharding_strategy": "FULL_SHARD"}, ShardingSpec()),
        (OFFLOADED, {"sharding_strategy": "NO_SHARD"}, ShardingSpec(strategy="NO_SHARD")),
        (OFFLOADED, {"cpu_offload": False}, ShardingSpec(forward_prefetch=True)),
        (
            SHARDING,
            {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
            ShardingSpec(strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_PRE", forward_prefetch=True),
        ),
        (OFFLOADED, {}, OFFLOADED),
    ],
)
def test_a_job_holds_its_model_as_it_requests_it_on_a_service_that_does_otherwise(
    settings: Settings, configured: ShardingSpec, own: dict[str, Any], resolved: ShardingSpec
) -> None:
    service = settings.model_copy(update={"ranks": 2, "max_ranks": 4, "sharding": configured})
    assert spec_of(sft(), service, fsdp_config=own).sharding == resolved
    assert spec_of(sft(), service).sharding == configured  # a job beside it


def test_ranks_that_share_rows_take_one_batch(settings: Settings) -> None:
    service = settings.model_copy(update={"ranks": 4, "max_ranks": 4, "sharding": ShardingSpec()})
    apart, together = spec_of(sft(), service), spec_of(sft(), service, context_parallel_size=2)
    assert (together.ranks, together.context_parallel_size) == (4, 2)
    assert 2 * together.rows_per_step == apart.rows_per_step


@pytest.mark.parametrize(
    ("request_", "options", "sharding", "message"),
    [
        (sft(), {}, None, "this provider trains in one process"),
        (sft(), {"nproc_per_node": 1}, ShardingSpec(), "this job has 1: set nproc_per_node to a multiple of 2"),
        (sft(), {"nproc_per_node": 3}, ShardingSpec(), "this job has 3: set nproc_per_node to a multiple of 2"),
        (dpo(), {}, ShardingSpec(), "not with the method dpo: leave one of the two out"),
        (sft(), {"padding_free": False}, ShardingSpec(), "not with padding_free false"),
        (sft(), {"attention_mask": "always"}, ShardingSpec(), "not with attention_mask 'always'"),
        (sft(), {"attn_implementation": "eager"}, ShardingSpec(), "not with attn_implementation 'eager'"),
        (sft(), {"mixture": [{"dataset_id": "rows", "rows": 3}]}, ShardingSpec(), "not with mixture"),
        (sft(), {"averaging": {"interval": 2}}, ShardingSpec(strategy="NO_SHARD"), "not with averaging"),
        (sft(algorithm_config={**LORA, "quantize_base": True}), {}, ShardingSpec(), "not with quantize_base"),
        (sft(algorithm_config={**LORA, "use_dora": True}), {}, ShardingSpec(), "not with use_dora"),
        (sft(algorithm_config=LORA), {"lora_dropout": 0.1}, ShardingSpec(), "not with lora_dropout"),
        (sft(algorithm_config=LORA), {"peft_method": "ia3"}, ShardingSpec(), "not with peft_method 'ia3'"),
    ],
)
def test_what_is_not_proven_with_ranks_that_share_rows_is_refused(
    settings: Settings, request_: Any, options: dict[str, Any], sharding: ShardingSpec | None, message: str
) -> None:
    service = settings.model_copy(update={"max_ranks": 4, "ranks": 2 if sharding else 1, "sharding": sharding})
    with pytest.raises(InvalidRequest, match=rf"context_parallel_size=2.*{message}"):
        spec_of(request_, service, context_parallel_size=2, **options)


def test_averaging_and_sharded_jobs_are_on_one_service(settings: Settings) -> None:
    service = settings.model_copy(update={"ranks": 2, "max_ranks": 4, "sharding": ShardingSpec()})
    averaging = {"interval": 20}
    own = {"sharding_strategy": "NO_SHARD"}
    assert spec_of(sft(), service, averaging=averaging, fsdp_config=own).train.averaging is not None
    with pytest.raises(InvalidRequest, match=r"set the provider option fsdp_config\.sharding_strategy to NO_SHARD"):
        spec_of(sft(), service, averaging=averaging)


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        ({"sharding_strategy": "NO_SHARD", "cpu_offload": True}, {}, "cpu_offload would have no effect"),
        (
            {"sharding_strategy": "NO_SHARD", "backward_prefetch": "BACKWARD_POST"},
            {},
            "backward_prefetch would have no",
        ),
        ({"sharding_strategy": "DDP"}, {}, "FULL_SHARD"),
        ({"mixed_precision_policy": "bf16"}, {}, "mixed_precision_policy"),
        ({"sharding_strategy": "FULL_SHARD"}, {"nproc_per_node": 1}, "one process shards nothing"),
    ],
)
def test_an_fsdp_config_that_would_be_ignored_is_refused_by_name(
    settings: Settings, own: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    service = settings.model_copy(update={"ranks": 2, "max_ranks": 4, "sharding": SHARDING})
    with pytest.raises(InvalidRequest, match=rf"provider_options\.fsdp_config.*{message}"):
        spec_of(sft(), service, fsdp_config=own, **options)
    with pytest.raises(InvalidRequest, match=r"fsdp_config"):
        spec_of(sft(), settings, fsdp_config={"sharding_strategy": "FULL_SHARD"})  # inline


def test_the_inline_provider_trains_in_one_process(settings: Settings) -> None:
    assert (spec_of(sft(), settings).ranks, spec_of(sft(), settings).sharding) == (1, None)
    with pytest.raises(InvalidRequest, match="one process"):
        spec_of(sft(), settings, nproc_per_node=2)


def test_a_sharded_job_may_keep_its_parts_in_cpu_memory(settings: Settings) -> None:
    service = settings.model_copy(update={"ranks": 2, "max_ranks": 2, "sharding": SHARDING})
    requested = with_training(efficiency_config={"fsdp_cpu_offload": True, "memory_efficient_fsdp_wrap": True})
    sharding = spec_of(requested, service).sharding
    assert sharding is not None
    assert sharding.cpu_offload
    with pytest.raises(InvalidRequest, match="one process shards nothing"):
        spec_of(requested, service, nproc_per_node=1)
    with pytest.raises(InvalidRequest, match="NO_SHARD"):
        spec_of(requested, service.model_copy(update={"sharding": ShardingSpec(strategy="NO_SHARD")}))


def test_activations_are_recomputed_where_the_configuration_sets_it_and_the_job_does_not(settings: Settings) -> None:
    saving = settings.model_copy(update={"gradient_checkpointing": True})
    assert spec_of(sft(), saving).compute.gradient_checkpointing
    unset = with_training(efficiency_config={"enable_activation_checkpointing": False})
    assert not spec_of(unset, saving).compute.gradient_checkpointing


def test_the_wait_before_retries_is_the_configuration_s(settings: Settings) -> None:
    assert spec_of(sft(), settings).lifecycle.retry_backoff is None
    assert spec_of(sft(), settings.model_copy(update={"retry_backoff": 7.5})).lifecycle.retry_backoff == 7.5


def test_a_models_own_code_runs_only_where_the_operator_has_named_it(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    trusting = settings.model_copy(update={"trust_remote_code": (str(tmp_path / "model"), "org/name@abc123")})
    local = spec_of(sft(model=str(tmp_path / "model")), trusting)
    hub = spec_of(sft(model="org/name"), trusting)
    other = spec_of(sft(model="org/other"), trusting)
    assert [(spec.source.trust_remote_code, spec.source.revision) for spec in (local, hub, other)] == [
        (True, None),
        (True, "abc123"),
        (False, None),
    ]


@pytest.mark.parametrize("value", ["", "a/", "a/final", "/data/checkpoint-3", "../a/checkpoint-3", "a/checkpoint-3/x"])
def test_a_job_continues_from_a_job_and_never_from_a_path(settings: Settings, value: str) -> None:
    assert spec_of(sft(), settings, resume_from="a.b/checkpoint-3").resume_from == ResumeFrom(
        job_uuid="a.b", checkpoint="checkpoint-3"
    )
    with pytest.raises(InvalidRequest) as refused:
        spec_of(sft(), settings, resume_from=value)
    assert refused.value.field == "provider_options.resume_from"


def test_every_attempt_takes_the_rows_per_step_of_the_job(settings: Settings) -> None:
    spec = spec_of(sft(), settings)
    attempt = derive(spec, 2, "cpu", Path("/run"), Path("/c/checkpoint-4"), Path("/c/checkpoint-2"))
    assert attempt.rows_per_step == spec.rows_per_step
    assert attempt.resume_candidates == (Path("/c/checkpoint-4"), Path("/c/checkpoint-2"))
    assert derive(spec, 1, "cpu", Path("/run")).resume_candidates == ()


# Several machines


@pytest.fixture
def cluster(settings: Settings) -> Settings:
    return settings.model_copy(update={"sharding": ShardingSpec(), "max_nodes": 1024})


def test_resources_set_how_many_machines_and_ranks_train(cluster: Settings) -> None:
    spec = spec_of(sft(), cluster, resources={"nodes": 3, "min_nodes": 2, "labels": {"zone": "a"}}, nproc_per_node=2)
    assert (spec.ranks, spec.nodes, spec.ranks_per_node, spec.rows_per_step) == (6, 3, 2, 12)
    assert spec.resources == ResourcesSpec(nodes=3, min_nodes=2, labels={"zone": "a"})
    assert spec.sharding is not None
    attempt = derive(spec, 2, "cpu", Path("/run"), nodes=2)
    assert (attempt.world_size, attempt.rows_per_step) == (4, 12)
    assert derive(spec, 1, "cpu", Path("/run")).world_size == 6


def test_nnodes_is_the_number_of_a_job_that_sets_none(cluster: Settings) -> None:
    four = cluster.model_copy(update={"nodes": 4})
    assert spec_of(sft(), four).resources == ResourcesSpec(nodes=4, min_nodes=4)
    assert spec_of(sft(), four, resources={"cpus": 2}).resources == ResourcesSpec(nodes=4, min_nodes=4, cpus=2)
    assert spec_of(sft(), four, resources={"nodes": 1}).nodes == 1


def test_a_job_stays_where_its_model_and_its_device_are(cluster: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    here = sft(model=str(tmp_path))
    assert spec_of(here, cluster).resources is None
    assert spec_of(sft(), cluster.model_copy(update={"devices": ("cuda:0",)}), device="cuda:0").resources is None
    assert spec_of(here, cluster, resources={}).resources == ResourcesSpec()
    assert spec_of(sft(), cluster).resources == ResourcesSpec()
    assert spec_of(sft(), cluster.model_copy(update={"max_nodes": 1})).resources is None


def test_a_directory_that_other_machines_get_is_trained_on_any_of_them(cluster: Settings, tmp_path: Path) -> None:
    """As a model id: a job without a device waits for the GPUs of a pool then."""
    ((sent := tmp_path / "sent") / "model.safetensors").parent.mkdir()
    (sent / "config.json").write_text("{}")
    (sent / "model.safetensors").write_bytes(b"")
    spec = spec_of(sft(model=str(sent)), cluster)
    assert (spec.resources, spec.device, spec.compute.dtype_by_device) == (ResourcesSpec(), "auto", True)
    assert Demand.of(spec).prefers == str(sent), "a machine that has it comes first"
    assert spec_of(sft(model=str(sent)), cluster.model_copy(update={"max_nodes": 1})).resources is None
    trusting = cluster.model_copy(update={"trust_remote_code": (str(sent),)})
    assert spec_of(sft(model=str(sent)), trusting).resources is None
    (tmp_path / "config.json").write_text("{}")
    assert spec_of(dpo(model=str(sent)), cluster, reference_model=str(tmp_path)).resources is None
    assert spec_of(dpo(model=str(sent)), cluster, reference_model=str(sent)).resources == ResourcesSpec()


def test_a_job_that_uses_no_gpu_of_other_machines_names_the_reason_and_the_choice(
    cluster: Settings, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    beside = cluster.model_copy(update={"gpus_elsewhere": lambda: ["pool gpu", "node b"]})

    def warnings(settings: Settings, **options: Any) -> list[str]:
        return resolve(sft(model=str(tmp_path)), ProviderOptions.parse(options), settings).warnings

    (warning,) = warnings(beside)
    assert warning == (
        "the job runs on device cpu of the service's machine, and on no GPU of pool gpu, node b: no other machine gets "
        f"the directory {tmp_path}, since its weights are in pytorch_model.bin, a format that can run code when it is "
        "read: expected safetensors, which save_pretrained writes; send resources "
        "{'nodes': 1} where other machines have it at this path, or send device cpu to choose this"
    )
    assert warnings(beside, device="cpu") == warnings(beside, resources={"nodes": 1}) == warnings(cluster) == []
    assert warnings(beside.model_copy(update={"devices": ("cuda:0",)})) == []


def test_other_machines_may_have_devices_that_this_one_lacks(cluster: Settings) -> None:
    assert spec_of(sft(), cluster, device="cuda").device == "cuda"
    assert spec_of(sft(), cluster, nproc_per_node=8).ranks == 8
    with pytest.raises(InvalidRequest, match=r"provider_options\.device"):
        spec_of(sft(), cluster.model_copy(update={"max_nodes": 1}), device="cuda")


@pytest.mark.parametrize(
    ("resources", "field", "hint"),
    [
        ({"nodes": 2, "min_nodes": 3}, "resources.min_nodes", "at most nodes, 2"),
        ({"gpu_memory_gb": 80}, "resources.gpu_memory_gb", "device cpu has no memory of its own"),
        ({"gpus": 8}, "resources.gpus", "the options are: nodes, min_nodes"),
        ({"nodes": 0}, "resources.nodes", "greater than 0"),
    ],
)
def test_resources_that_cannot_be_are_refused_by_name(
    cluster: Settings, resources: dict[str, Any], field: str, hint: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec_of(sft(), cluster, resources=resources, device="cpu")
    assert f"provider_options.{field}" in str(caught.value)
    assert hint in str(caught.value)


def test_a_directory_is_in_no_node_s_cache(cluster: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"model_present.*name a model id"):
        spec_of(sft(model=str(tmp_path)), cluster, resources={"model_present": True})


def test_no_node_can_join_a_service_on_loopback_and_the_inline_provider(settings: Settings, cluster: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"resources\.nodes.*TRL_SERVICE_HOST"):
        spec_of(sft(), cluster.model_copy(update={"max_nodes": 1}), resources={"nodes": 2})
    with pytest.raises(InvalidRequest, match="trains on its own machine"):
        spec_of(sft(), settings, resources={"cpus": 1})


def test_warmup_is_a_number_of_steps_or_a_share_of_them(settings: Settings) -> None:
    spec = spec_of(with_training(optimizer_config={"warmup_ratio": 0.1, "num_warmup_steps": 0}), settings)
    assert (spec.train.optimizer.warmup_steps, spec.train.optimizer.warmup_ratio) == (0, 0.1)
    both = with_training(optimizer_config={"warmup_ratio": 0.1, "num_warmup_steps": 5})
    with pytest.raises(
        InvalidRequest, match=r"warmup_ratio=0\.1 .*num_warmup_steps asks for 5 steps; send one of them"
    ):
        spec_of(both, settings)


def test_rewards_of_zero_together_are_not_set_and_one_alone_is_refused(settings: Settings) -> None:
    request = dpo(algorithm_config={"reward_scale": 0.0, "reward_clip": 0.0})
    resolution = resolve(request, ProviderOptions.parse({}), settings)
    assert (resolution.fields["method"].reward_scale, resolution.fields["method"].reward_clip) == (1.0, None)
    assert [warning for warning in resolution.warnings if "read as not set" in warning]
    for field in ("reward_scale", "reward_clip"):
        with pytest.raises(InvalidRequest, match=rf"algorithm_config\.{field}=0\.0 .*send a number above 0"):
            spec_of(dpo(algorithm_config={field: 0.0}), settings)


def test_a_split_stands_in_for_a_validation_dataset_and_not_beside_one(settings: Settings) -> None:
    split = with_data(train_split_percentage=0.9)
    assert resolve(split, ProviderOptions.parse({"eval_steps": 1}), settings).train_share == 0.9
    with pytest.raises(InvalidRequest, match=r"train_split_percentage=0\.9 .*'held-out'; send one of them"):
        spec_of(with_data(train_split_percentage=0.9, validation_dataset_id="held-out"), settings)
    whole = with_data(train_split_percentage=1.0)
    with pytest.raises(InvalidRequest, match="there is nothing to evaluate on"):
        spec_of(whole, settings, eval_steps=1)


@pytest.mark.parametrize(("rows", "share", "held_out"), [(3, 0.9, 1), (10, 0.75, 2), (2, 0.01, 1), (100, 0.5, 50)])
def test_a_split_keeps_every_row_once_and_depends_on_the_seed_only(
    tmp_path: Path, rows: int, share: float, held_out: int
) -> None:
    blob = put_rows(tmp_path, [{"text": f"row {number}"} for number in range(rows)])
    whole = DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=rows)
    train, validation = split_rows(whole, share, 42)
    assert (train.num_rows, validation.num_rows) == (rows - held_out, held_out)
    lines = [ref.path.read_text().splitlines() for ref in (whole, train, validation)]
    assert sorted(lines[1] + lines[2]) == sorted(lines[0])
    assert split_rows(whole, share, 42) == (train, validation)
    assert rows < 100 or split_rows(whole, share, 43) != (train, validation)


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    blob = put_rows(tmp_path, [{"text": "alone"}])
    alone = DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=1)
    with pytest.raises(InvalidRequest, match="dataset 'rows' has one row: nothing can be held out"):
        split_rows(alone, 0.9, 42)
