"""Each request field and provider option, changed alone, changes the resolved job and the training: none is ignored.

A new field or option belongs into `CASES`, or into `ELSEWHERE` with the reason why no single training here can show it.
"""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.inputs.row_parts import stored_shard
from llama_stack_provider_trl.jobs.submission import split_rows
from llama_stack_provider_trl.requests import bodies as requests
from llama_stack_provider_trl.requests.options import FsdpOptions, MixtureEntry, ProviderOptions
from llama_stack_provider_trl.requests.resolve import Resolution, resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Evaluated,
    Failed,
    Finished,
    Prepared,
    Progress,
    Warned,
)
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, ResourcesSpec
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, dataset, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
Json = dict[str, Any]

# --- the fields -------------------------------------------------------------------------------------------------------

TRAINING, DATA = "training_config.", "training_config.data_config."
OPTIMIZER, EFFICIENCY = "training_config.optimizer_config.", "training_config.efficiency_config."
ALGORITHM, OPTION = "algorithm_config.", "provider_options."


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of a model's fields, those of the models in it too."""
    for name, field in model.model_fields.items():
        inner = list(models_in(field.annotation))
        if not inner or inner == [requests.LoraFinetuningConfig]:  # an option with all that algorithm_config has
            yield prefix + name
        for part in inner if inner != [requests.LoraFinetuningConfig] else []:
            yield from leaves(part, f"{prefix}{name}.")


def every_field() -> set[str]:
    bodies: list[type[BaseModel]] = [requests.SupervisedFineTuneRequest, requests.PreferenceOptimizeRequest]
    algorithms: list[type[BaseModel]]
    algorithms = [requests.LoraFinetuningConfig, requests.QATFinetuningConfig, requests.DPOAlignmentConfig]
    algorithms += [
        requests.ORPOConfig,
        requests.CPOConfig,
        requests.SimPOConfig,
        requests.RewardConfig,
        requests.KTOConfig,
        requests.GRPOConfig,
        requests.DistillationConfig,
    ]
    names = {name for body in bodies for name in leaves(body)} - {"algorithm_config"}
    names |= {name for algorithm in algorithms for name in leaves(algorithm, ALGORITHM)}
    return names | set(leaves(ProviderOptions, OPTION))


# --- what a training shows --------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What can be seen of a training from outside."""

    spec: JobSpec
    losses: list[float]
    rates: list[float]
    evaluated: list[tuple[int, float]]
    saved: list[tuple[str, int]]
    total_steps: int
    last_step: int
    trainable: int
    effective: Json
    warnings: list[str]
    forwards: int
    """How often a block of the model was computed."""


Seen = Callable[[Outcome, Outcome], Any]


def losses(base: Outcome, changed: Outcome) -> bool:
    """The same steps, other numbers."""
    return len(base.losses) == len(changed.losses) and base.losses != changed.losses


def first_loss(base: Outcome, changed: Outcome) -> bool:
    """Other rows, or another loss of the same ones: before anything is learnt."""
    return base.losses[0] != changed.losses[0]


def steps(expected: int) -> Seen:
    return lambda base, changed: (
        base.total_steps != expected == changed.total_steps == len(changed.losses) == changed.last_step
    )


def ends_at(expected: int) -> Seen:
    return lambda base, changed: base.last_step != expected == changed.last_step < changed.total_steps


def trainable(base: Outcome, changed: Outcome) -> bool:
    return base.trainable != changed.trainable


def saved(*expected: tuple[str, int]) -> Seen:
    return lambda base, changed: base.saved != list(expected) == changed.saved


def evaluated_at(*expected: int) -> Seen:
    return lambda base, changed: [s for s, _ in base.evaluated] != list(expected) == [s for s, _ in changed.evaluated]


def recomputes(base: Outcome, changed: Outcome) -> bool:
    same = changed.losses == pytest.approx(base.losses, rel=1e-5)
    # Once more in each of two blocks and at each step; the export's check of itself has nothing to recompute.
    return bool(same and changed.forwards == base.forwards + 2 * base.total_steps)


def written_to(base: Outcome, changed: Outcome) -> bool:
    written = changed.spec.checkpoint_dir / "final" / "model.safetensors"
    return written.is_file() and changed.spec.checkpoint_dir.parts[-2:] != base.spec.checkpoint_dir.parts[-2:]


def named(base: Outcome, changed: Outcome) -> bool:
    record = json.loads((changed.spec.checkpoint_dir / "final" / "training_job.json").read_text())
    return bool(record["output_name"] != base.spec.output_name)


# --- the table --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A field, and what it does when it alone is changed."""

    value: Any
    """Compared with a request that leaves the field out (or has the fields of `around`)."""
    spec: tuple[str, ...]
    """The fields of the JobSpec that it changes, and no other."""
    seen: Seen
    call: str = "sft"
    around: Mapping[str, Any] = MappingProxyType({})
    """Dotted fields that both requests have, so that the field means something."""


HELD_OUT: Json = {DATA + "validation_dataset_id": "held-out"}
LORA: Json = {"algorithm_config": {"type": "LoRA"}, OPTIMIZER + "lr": 1e-2}
FAST: Json = {OPTIMIZER + "lr": 1e-2}
SHORT: Json = {OPTION + "max_seq_length": 24}
# The loss of rows that are trained on falls a little at every step.
FALLING: Json = {DATA + "validation_dataset_id": "rows", OPTION + "eval_steps": 1, OPTIMIZER + "lr": 1e-4}
PATIENT: Json = {**FALLING, OPTION + "early_stopping": {"patience": 1}}
IMPATIENT: Json = {**FALLING, OPTION + "early_stopping": {"patience": 1, "min_delta": 10.0}}

CASES: dict[str, Case] = {
    "job_uuid": Case("another", ("job_uuid", "output_name", "checkpoint_dir"), written_to),
    "model": Case(str(tiny_model(tied=False)), ("model",), first_loss),
    "checkpoint_dir": Case("results", ("checkpoint_dir",), written_to),
    "finetuned_model": Case("name", ("output_name",), named, "dpo"),
    TRAINING + "n_epochs": Case(2, ("n_epochs",), steps(8)),
    TRAINING + "max_steps_per_epoch": Case(2, ("max_steps_per_epoch",), steps(2)),
    TRAINING + "gradient_accumulation_steps": Case(2, ("gradient_accumulation_steps",), steps(2)),
    TRAINING + "max_validation_steps": Case(
        1, ("max_validation_steps",), lambda base, changed: base.evaluated != changed.evaluated, around=HELD_OUT
    ),
    TRAINING + "dtype": Case("bf16", ("dtype",), first_loss),
    TRAINING + "learning_rate": Case(1e-3, ("optimizer.learning_rate",), losses),
    DATA + "dataset_id": Case("others", ("dataset",), first_loss),
    DATA + "batch_size": Case(4, ("batch_size",), steps(2)),
    DATA + "shuffle": Case(False, ("shuffle",), first_loss),
    DATA + "data_format": Case("dialog", ("data_format",), first_loss, around={DATA + "dataset_id": "two-shapes"}),
    DATA + "validation_dataset_id": Case("held-out", ("validation",), evaluated_at(4)),
    DATA + "train_split_percentage": Case(0.75, ("dataset", "validation"), evaluated_at(3)),
    DATA + "packed": Case(
        True,
        ("packed",),
        lambda base, changed: base.total_steps == 4 > changed.total_steps and changed.effective["packing"]["rows"] == 8,
    ),
    DATA + "train_on_input": Case(True, ("train_on_input",), first_loss),
    OPTIMIZER + "optimizer_type": Case("sgd", ("optimizer.name",), losses),
    OPTIMIZER + "lr": Case(1e-3, ("optimizer.learning_rate",), losses),
    OPTIMIZER + "weight_decay": Case(0.5, ("optimizer.weight_decay",), losses, around=FAST),
    OPTIMIZER + "num_warmup_steps": Case(
        2, ("optimizer.warmup_steps",), lambda base, changed: base.rates[0] > 0 == changed.rates[0]
    ),
    OPTIMIZER + "warmup_ratio": Case(
        0.5, ("optimizer.warmup_ratio",), lambda base, changed: base.rates[0] > 0 == changed.rates[0]
    ),
    EFFICIENCY + "enable_activation_checkpointing": Case(True, ("gradient_checkpointing",), recomputes),
    ALGORITHM + "type": Case("LoRA", ("lora", "optimizer.learning_rate"), trainable),
    ALGORITHM + "lora_attn_modules": Case(["k_proj"], ("lora.target_modules",), trainable, around=LORA),
    ALGORITHM + "apply_lora_to_mlp": Case(True, ("lora.mlp",), trainable, around=LORA),
    ALGORITHM + "rank": Case(2, ("lora.rank",), trainable, around=LORA),
    ALGORITHM + "alpha": Case(64, ("lora.alpha",), losses, around=LORA),
    ALGORITHM + "use_dora": Case(True, ("lora.use_dora",), trainable, around=LORA),
    ALGORITHM + "beta": Case(0.5, ("method.beta",), losses, "dpo", FAST),
    ALGORITHM + "loss_type": Case("hinge", ("method.loss_type",), first_loss, "dpo"),
    ALGORITHM + "reward_scale": Case(2.0, ("method.reward_scale",), losses, "dpo", FAST),
    ALGORITHM + "reward_clip": Case(0.01, ("method.reward_clip",), losses, "dpo", FAST),
    ALGORITHM + "center_rewards_coefficient": Case(
        0.5, ("method.center_rewards_coefficient",), first_loss, "dpo", {ALGORITHM + "type": "reward"}
    ),
    **{
        f"{ALGORITHM}{label}_weight": Case(
            0.5,
            (f"method.{label}_weight",),
            first_loss,
            "dpo",
            {ALGORITHM + "type": "kto", DATA + "dataset_id": "labelled"},
        )
        for label in ("desirable", "undesirable")
    },
    OPTION + "method": Case({"type": "orpo"}, ("method",), first_loss, "dpo"),
    OPTION + "lora": Case({"rank": 4}, ("lora", "optimizer.learning_rate"), trainable, "dpo"),
    OPTION + "peft_method": Case("ia3", ("lora.method", "lora.rank", "lora.alpha"), trainable, around=LORA),
    OPTION + "group_by_length": Case(
        False,
        ("group_by_length",),
        lambda base, changed: (
            ("group_by_length" in base.effective, "group_by_length" in changed.effective) == (True, False)
            and base.losses == pytest.approx(changed.losses, rel=1e-5)
        ),
        around={TRAINING + "gradient_accumulation_steps": 2},
    ),
    OPTION + "token_cache": Case(
        False,
        ("token_cache",),
        lambda base, changed: (
            ("token_cache" in base.effective, "token_cache" in changed.effective) == (True, False)
            and base.losses == changed.losses
        ),
    ),
    OPTION + "padding_free": Case(
        False,
        ("padding_free",),
        lambda base, changed: (
            [base.effective["padding_free"], changed.effective.get("padding_free")] == ["used", None]
            and base.losses == pytest.approx(changed.losses, rel=1e-5)
        ),
    ),
    OPTION + "attn_implementation": Case(
        "eager",
        ("attn_implementation",),
        lambda base, changed: (
            [base.effective["padding_free"], changed.effective["padding_free"]]
            == ["used", "not used: attn_implementation is 'eager'"]
            and changed.effective["attention"] == "eager"
            and base.losses == pytest.approx(changed.losses, rel=1e-5)
        ),
    ),
    OPTION + "attention_mask": Case(
        "always",
        ("attention_mask",),
        lambda base, changed: (
            [base.effective["attention_mask"], changed.effective["attention_mask"]] == ["not passed", "passed"]
            and changed.effective["padding_free"] == "not used: attention_mask is 'always'"
            and base.losses == pytest.approx(changed.losses, rel=1e-6)
        ),
    ),
    OPTION + "lora_dropout": Case(0.5, ("lora.dropout",), losses, around=LORA),
    OPTION + "use_rslora": Case(True, ("lora.use_rslora",), losses, around=LORA),
    OPTION + "merge_adapter": Case(True, ("merge_adapter",), saved(("final", 4), ("merged", 4)), around=LORA),
    OPTION + "max_seq_length": Case(
        24,
        ("max_seq_length", "max_seq_length_is_default"),
        lambda base, changed: changed.effective["data"]["truncated"] == 8,
    ),
    OPTION + "truncation_side": Case("left", ("truncation_side",), first_loss, around=SHORT),
    OPTION + "lr_scheduler": Case("cosine", ("optimizer.scheduler",), losses, around=FAST),
    OPTION + "lr_decay_steps": Case(
        3, ("optimizer.decay_steps",), losses, around={**FAST, OPTION + "lr_scheduler": "warmup_stable_decay"}
    ),
    OPTION + "num_cycles": Case(
        1.5, ("optimizer.num_cycles",), losses, around={**FAST, OPTION + "lr_scheduler": "cosine"}
    ),
    OPTION + "adam_beta1": Case(0.5, ("optimizer.adam_beta1",), losses, around=FAST),
    OPTION + "adam_beta2": Case(0.9, ("optimizer.adam_beta2",), losses, around=FAST),
    OPTION + "adam_epsilon": Case(0.1, ("optimizer.adam_epsilon",), losses, around=FAST),
    OPTION + "max_grad_norm": Case(
        0.01, ("optimizer.max_grad_norm",), losses, around={**FAST, OPTIMIZER + "optimizer_type": "sgd"}
    ),
    OPTION + "save_steps": Case(3, ("save_steps",), saved(("step", 3), ("final", 4))),
    OPTION + "eval_steps": Case(3, ("eval_steps",), evaluated_at(3, 4), around=HELD_OUT),
    OPTION + "early_stopping.patience": Case(2, ("early_stopping.patience",), ends_at(3), around=IMPATIENT),
    OPTION + "early_stopping.min_delta": Case(10.0, ("early_stopping.min_delta",), ends_at(2), around=PATIENT),
    OPTION + "early_stopping.metric": Case(
        "mean_token_accuracy", ("early_stopping.metric",), ends_at(2), around=PATIENT
    ),
    OPTION + "best_checkpoint": Case(
        "eval_loss",
        ("best_checkpoint",),
        saved(("step", 1), ("step", 2), ("step", 3), ("final", 4)),
        around=FALLING,
    ),
    OPTION + "logging_steps": Case(
        2, ("logging_steps",), lambda base, changed: (len(base.losses), len(changed.losses)) == (4, 2)
    ),
    OPTION + "seed": Case(3, ("seed",), first_loss),
    OPTION + "shard.index": Case(1, ("dataset",), first_loss, around={OPTION + "shard": {"index": 0, "count": 2}}),
    OPTION + "shard.count": Case(4, ("dataset",), steps(1), around={OPTION + "shard": {"index": 0, "count": 2}}),
    OPTION + "label_smoothing": Case(0.3, ("method.label_smoothing",), losses, "dpo", FAST),
    OPTION + "reference_model": Case(
        str(tiny_model(tied=False)), ("method.reference.source",), first_loss, "dpo", {"model": str(tiny_model())}
    ),
    OPTION + "precompute_reference": Case(
        True,
        ("method.reference.precompute", "method.reference.cache"),
        lambda base, changed: "reference" not in base.effective and changed.effective["reference"]["train_dataset"],
        "dpo",
    ),
}

REFUSED = "refused: tests/contract/test_api_table.py"
NO_TRAINING = "decides when and where a job runs, nothing in the training: "
QUANTIZED = "tests/process/test_quantization.py"
ELSEWHERE: dict[str, str] = {
    "hyperparam_search_config": "jobs of their own: tests/process/test_search_trials.py",
    "logger_config": NO_TRAINING + "tests/unit/test_trackers_request.py, tests/contract/test_trackers.py",
    EFFICIENCY + "enable_activation_offloading": "cuda only: tests/unit/test_resolve.py, tests/gpu/test_gpu_memory.py",
    EFFICIENCY + "memory_efficient_fsdp_wrap": "several ranks only, and always so: tests/unit/test_resolve.py",
    EFFICIENCY + "fsdp_cpu_offload": "several ranks only: tests/process/test_ranks.py",
    ALGORITHM + "apply_lora_to_output": REFUSED,
    # A process that has trained without them has hidden their libraries from itself.
    ALGORITHM + "quantize_base": QUANTIZED,
    ALGORITHM + "quantizer_name": QUANTIZED,
    ALGORITHM + "group_size": QUANTIZED,
    **{
        ALGORITHM + name: "answers to prompts: tests/unit/test_grpo_request.py, tests/process/test_grpo.py"
        for name in requests.GRPOConfig.model_fields
        if name not in ("type", "beta", "loss_type") and "vllm" not in name
    },
    **{
        ALGORITHM + name: "another interpreter: tests/unit/test_grpo_request.py, tests/process/test_grpo_vllm.py"
        for name in requests.GRPOConfig.model_fields
        if "vllm" in name
    },
    ALGORITHM + "teacher": "another model: tests/process/test_on_policy_distillation.py",
    **{
        ALGORITHM + name: "another model: tests/unit/test_gold_request.py, tests/process/test_gold.py"
        for name in requests.DistillationConfig.model_fields
        if "uld_" in name
    },
    ALGORITHM
    + "margin": "needs rows with margins: tests/process/test_methods.py, tests/unit/test_preference_methods.py",
    ALGORITHM + "lmbda": "1 or refused: tests/unit/test_distillation_request.py",
    ALGORITHM + "epsilon": "noted, without meaning in DPO: tests/contract/test_api_table.py",
    ALGORITHM + "gamma": "noted, without meaning in DPO: tests/contract/test_api_table.py",
    OPTION + "samples.prompts": "changes nothing in the training: tests/process/test_samples.py, test_resolve.py",
    OPTION + "samples.max_new_tokens": "changes nothing in the training: tests/process/test_samples.py",
    OPTION + "columns": "needs other rows: tests/unit/test_row_names.py, tests/contract/test_other_names.py",
    OPTION + "roles": "needs other rows: tests/unit/test_row_names.py, tests/contract/test_other_names.py",
    **{
        f"{OPTION}mixture.{field}": "several datasets: tests/process/test_mixtures.py, unit/test_mixture_request.py"
        for field in MixtureEntry.model_fields
    },
    OPTION + "system_prompt": "tests/process/test_template_by_option.py, tests/unit/test_template_request.py",
    OPTION + "chat_template": "tests/process/test_template_by_option.py, tests/unit/test_template_request.py",
    OPTION + "train_on": "needs conversations: tests/process/test_tool_templates.py",
    OPTION + "reasoning": "needs thoughts: tests/process/test_tool_templates.py",
    OPTION + "duplicates": "fails a job before it trains: tests/process/test_duplicates.py",
    OPTION + "dropped_turns": "fails a job before it trains: tests/process/test_lost_turns.py",
    OPTION + "keep_last": "the supervisor deletes, not the training: tests/unit/test_supervisor.py",
    OPTION + "retries": NO_TRAINING + "tests/unit/test_supervisor.py",
    OPTION + "failover": NO_TRAINING + "tests/unit/test_cluster.py",
    OPTION + "oom_retry": "the attempt after one that failed: tests/process/test_recovery.py",
    OPTION + "resume_from": "needs a job before it: tests/process/test_checkpoints.py, tests/unit/test_resume_from.py",
    OPTION + "adapter": "needs an adapter before it: tests/process/test_adapter_bases.py, tests/unit/test_bases.py",
    OPTION + "after": NO_TRAINING + "tests/unit/test_chains.py, tests/contract/test_jobs_in_chains.py",
    OPTION + "cancel_with": NO_TRAINING + "tests/unit/test_chains.py",
    OPTION + "evaluate": NO_TRAINING + "tests/unit/test_evaluation_after.py",
    OPTION + "preflight": "tests/process/test_preflight.py",
    OPTION + "max_duration": NO_TRAINING + "tests/unit/test_supervisor.py",
    OPTION + "priority": NO_TRAINING + "tests/unit/test_placement.py",
    OPTION + "dataloader_num_workers": "the same batches, from other processes: tests/process/test_loader_workers.py",
    OPTION + "merge_micro_batches": "the same numbers, by larger batches: tests/process/test_merged_batches.py",
    OPTION + "read_metrics_later": "the same numbers, read later: tests/process/test_later_metrics.py",
    **{
        OPTION + name: "the same numbers, by other operations: tests/process/test_fewer_operations.py"
        for name in ("fuse_lora", "head_gradients", "keep_attention", "tile_mlp")
    },
    OPTION + "compile_blocks": "the same numbers, by compiled code: tests/process/test_compiled_blocks.py",
    OPTION + "float8": "compiled blocks, by products in 8 bits: tests/process/test_compiled_blocks.py",
    OPTION + "liger_kernels": "cuda only; the same numbers, by other kernels: tests/process/test_liger.py",
    OPTION + "gradient_sync": "several ranks that shard the model: tests/process/test_ranks.py",
    **{
        f"{OPTION}averaging.{field}": "several workers: tests/process/test_averaging.py, test_averaging_request.py"
        for field in AveragingSpec.model_fields
    },
    **{
        f"{OPTION}fsdp_config.{field}": "several ranks: tests/unit/test_resolve.py, tests/process/test_ranks.py"
        for field in FsdpOptions.model_fields
    },
    OPTION + "metadata": "nothing in the training reads it: tests/contract/test_openai_sdk.py",
    OPTION + "context_parallel_size": "several ranks, with the numbers of one: tests/process/test_context_parallel.py",
    OPTION + "nproc_per_node": "several ranks, with the numbers of one: tests/process/test_ranks.py",
    OPTION + "device": NO_TRAINING + "tests/unit/test_placement.py",
    **{
        f"{OPTION}resources.{field}": NO_TRAINING + "tests/unit/test_placement.py, tests/cluster"
        for field in ResourcesSpec.model_fields
    },
}


def test_every_field_is_tried_here_or_named_with_the_reason() -> None:
    assert set(CASES) & set(ELSEWHERE) == set()
    assert set(CASES) | set(ELSEWHERE) == every_field()


def test_what_is_listed_as_refused_is_refused(tmp_path: Path) -> None:
    values = {ALGORITHM + "quantizer_name": "int8"}
    for field in (field for field, reason in ELSEWHERE.items() if reason == REFUSED):
        around = LORA if field.startswith(ALGORITHM) else {}
        with pytest.raises(InvalidRequest):
            resolved(requested("sft", {**around, field: values.get(field, True)}), "sft", tmp_path)


# --- trying it --------------------------------------------------------------------------------------------------------

BOTH_SHAPES = [
    {**row, "messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Gone."}]}
    for row in SFT_ROWS[:8]
]
ROWS: dict[str, list[Json]] = {
    "rows": SFT_ROWS[:8],
    "others": SFT_ROWS[4:12],
    "held-out": SFT_ROWS[8:12],
    "two-shapes": BOTH_SHAPES,
    "pairs": DPO_ROWS[:8],
    "labelled": [{**row, "label": number % 2 == 0} for number, row in enumerate(SFT_ROWS[:8])],
}


def requested(call: str, fields: Json) -> tuple[Json, Json]:
    """Body and options of a small request with some fields set."""
    body: Json = {"job_uuid": "job", "model": str(tiny_model()), "training_config": {"n_epochs": 1}}
    plain = {DATA + "dataset_id": "rows" if call == "sft" else "pairs", DATA + "batch_size": 2}
    options: Json = {"preflight": "off"}  # its trace computes blocks too
    for path, value in {**plain, **fields}.items():
        target, *_ = (options,) if path.startswith(OPTION) else (body,)
        *parents, name = path.removeprefix(OPTION).split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = copy.deepcopy(value)
    return body, options


def resolved(request: tuple[Json, Json], call: str, root: Path) -> Resolution:
    body, options = request
    model = requests.SupervisedFineTuneRequest if call == "sft" else requests.PreferenceOptimizeRequest
    return resolve(
        model.model_validate(body), ProviderOptions.parse(options), Settings(data_dir=root, devices=("cpu",))
    )


def job(call: str, fields: Json, root: Path) -> JobSpec:
    found = resolved(requested(call, fields), call, root)

    def ref(dataset_id: str) -> DatasetRef:
        return dataset(root, ROWS[dataset_id]).model_copy(update={"dataset_id": dataset_id})

    validation = found.validation_dataset_id
    rows = ref(found.datasets[0].dataset_id)
    if found.shard is not None:
        rows = stored_shard(rows, found.shard)
    if found.train_share < 1.0:
        return found.spec(*split_rows(rows, found.train_share, found.fields["seed"]))
    return found.spec(rows, ref(validation) if validation else None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Json], Outcome]]:
    """What becomes of a request; the same one is trained once."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    from llama_stack_provider_trl.recipes.fast.support import why_padded

    forwards: list[None] = []
    original = LlamaAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards.append(None)
        return original(self, *args, **kwargs)

    @cache
    def train(call: str, fields: str) -> Outcome:
        root = tmp_path_factory.mktemp("job")
        spec = job(call, json.loads(fields), root)
        why_padded(spec)  # computes with a small model, once per process
        forwards.clear()
        status, events = run(root / "run", spec)
        assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
        points, (prepared,) = of_kind(events, Progress), of_kind(events, Prepared)
        return Outcome(
            spec=spec,
            losses=[point.metrics["loss"] for point in points],
            rates=[point.metrics["learning_rate"] for point in points],
            evaluated=[(event.step, event.metrics["eval_loss"]) for event in of_kind(events, Evaluated)],
            saved=[(event.kind, event.step) for event in of_kind(events, CheckpointSaved)],
            total_steps=prepared.total_steps,
            last_step=of_kind(events, Finished)[0].step,
            trainable=prepared.trainable_parameters,
            effective=prepared.effective,
            warnings=[event.message for event in of_kind(events, Warned)],
            forwards=len(forwards),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaAttention, "forward", counted)
        yield lambda call, fields: train(call, json.dumps(fields))


def flat(value: Any, name: str = "") -> Json:
    if not isinstance(value, dict):
        return {name: value}
    return {path: leaf for key, part in value.items() for path, leaf in flat(part, f"{name}.{key}".lstrip(".")).items()}


@pytest.mark.parametrize("field", CASES)
def test_a_field_changed_alone_changes_the_job_and_the_training(
    trained: Callable[[str, Json], Outcome], tmp_path: Path, field: str
) -> None:
    case = CASES[field]
    base, changed = dict(case.around), {**case.around, field: case.value}
    before, after = (flat(job(case.call, fields, tmp_path).flat()) for fields in (base, changed))
    names = (before.keys() | after.keys()) - {"algorithm"}  # which the method names, too
    differing = {name for name in names if before.get(name) != after.get(name)}
    named = {expected: {name for name in differing if f"{name}.".startswith(f"{expected}.")} for expected in case.spec}
    assert set().union(*named.values()) == differing
    assert all(named.values()), named
    one, other = trained(case.call, base), trained(case.call, changed)
    assert case.seen(one, other), (one, other)
