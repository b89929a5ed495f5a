"""Builds the trainer of one attempt, in stages: data, memory check, model, trainer. Each returns a frozen result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..specs.events import EventWriter, NullEventWriter, Warned
from ..specs.job import Dtype, JobSpec
from .checkpoint.fencing import FencingToken
from .checkpoint.step import need_space
from .data.chat import check_chat_template
from .data.lengths import row_lengths
from .data.mixed import TrainingData, prepared_data
from .data.padding import problem_of_padding
from .data.prepare import DataReport
from .data.prompts import encode_prompts
from .data.sampling import BatchPlan
from .distributed import ranks
from .distributed.workers import Workers
from .fast.attention import limit_accumulators
from .fast.context_parallel import attend_across_ranks
from .fast.kept_attention import described as kept_in
from .fast.liger import use_liger
from .fast.mlp import tile_mlp
from .fast.model import use_rows
from .fast.smaller_batches import in_parts
from .fast.support import with_batches
from .micro_steps import MicroBatches, RowsOnDevice, fix_order, keep_order, merge_micro_steps
from .model.adapters import DEFAULT, continued, continues, has_reference_adapter
from .model.attention import passes_padding_mask, set_attention
from .model.checked import check_models
from .model.deferred import DeferredWeights, has_placeholders
from .model.loading import (
    DTYPES,
    WeightStorage,
    adapter_config,
    load_job_tokenizer,
    load_model,
    load_teacher_tokenizer,
    quantize,
    shallow_model,
    vocabulary_size,
)
from .model.packing_check import check_isolation
from .model.positions import check_length, positions_of
from .model.saving import try_exports
from .preflight import (
    answers_by_freed_blocks,
    before_training,
    choose_answer_weights,
    choose_gradient_sync,
    choose_kept_attention,
    memory_of,
)
from .reward_templates import lost_by_reward_models
from .trainer.base import RecipeTrainer
from .trainer.custom import check_rows_of_jobs, other_version, used_method
from .trainer.methods import trainer_of
from .trainer.reference import check_vocabulary
from .trainer.rewards import other_packages, used_packages
from .trainer.trl_patches import choose_head_kernels, gradients_of_head
from .vision import with_images

_NOT_COUNTS = ("warnings", "lost_turns", "largest_id", "largest_id_row")
"""Of a report on rows: what the job's record lacks."""


@dataclass(frozen=True)
class Policy:
    """The model to train, as it is loaded; TRL's trainer adds new adapters."""

    model: PreTrainedModel
    quantization: dict[str, Any] | None
    """What was quantized, for the job's record."""
    adapters: PeftConfig | None
    deferred: DeferredWeights | None = None
    """Its weights, where they stay in their files until it is sharded."""
    continued: PeftModel | None = None
    """The model with the adapter that the job continues."""
    mlp_tiles: str = ""
    """Whether its feed-forward networks compute in tiles, and why not."""
    liger_kernels: str = ""
    """Whether Liger's kernels compute in its blocks, and why not."""


@dataclass(frozen=True)
class BuiltTrainer:
    """A trainer that is ready to run, and the results of the stages that led to it."""

    trainer: RecipeTrainer
    data: TrainingData
    policy: Policy
    memory: dict[str, Any] | None
    """The estimate of the memory check; None where there was none."""
    head_kernels: str
    """What the fused head computes with: triton or torch."""
    padding_free: str
    """Whether batches have padding, and why; empty: the job asks for it."""
    prompts: list[list[int]]
    """Token ids of the prompts of `samples`; empty: the job has none."""
    merged: MicroBatches
    """Its micro steps."""
    repeats: str
    """Whether the same job has the same bits again, and why not."""
    kept_attention: str
    """Whether outputs of attention are kept, and why not; empty: no activations are computed again."""

    @property
    def passes_mask(self) -> bool:
        spec = self.trainer.spec
        if spec.data.packed:
            return False
        return spec.data.has_images or passes_padding_mask(spec, self.policy.model, self.trainer.args.device.type)

    @property
    def _gradients_of_head(self) -> dict[str, str]:
        if not self.trainer.head_outputs and not self.trainer.spec.compute.padding_free:
            return {"head_gradients": "not used: the method has a head of its own"}
        config = self.policy.model.config.get_text_config()
        capped = getattr(config, "final_logit_softcapping", None) is not None
        return {"head_gradients": gradients_of_head(self.trainer.spec, self.trainer.args.device.type, capped=capped)}

    def effective(self) -> dict[str, Any]:
        """What was decided beyond the spec, for the job's record. What a job has nothing of is left out."""
        trainer, data, policy, memory = self.trainer, self.data, self.policy, self.memory
        spec, model, method = trainer.spec, policy.model, trainer.spec.method
        averaging = spec.train.averaging
        grouped: bool | str = trainer.groups_by_length
        grading = [one.model if one.adapter is None else one.adapter.model for one in method.grading_models]
        always: dict[str, Any] = {
            "model_class": type(model).__name__,
            "attention": model.config._attn_implementation,
            "attention_mask": "passed" if self.passes_mask else "not passed",
            "head_kernels": self.head_kernels,
            **self._gradients_of_head,
            "mlp_tiles": policy.mlp_tiles,
            "liger_kernels": policy.liger_kernels,
            "repeats": self.repeats,
            "compiled_blocks": trainer.compiled_blocks,
            "float8": trainer.float8,
            "weights_dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "dataloader_num_workers": trainer.args.dataloader_num_workers,
            "batches": {
                "batch_size": spec.data.batch_size,
                "gradient_accumulation_steps": spec.train.gradient_accumulation_steps,
            },
            "data": _counts(data.report),
            **self.merged.shown,
        }
        if averaging and spec.data.group_by_length:
            grouped = "not used: the rows of each worker are taken without regard to their length"
        perhaps = {
            "padding_free": self.padding_free,
            "kept_attention": self.kept_attention,
            "accumulator_bytes": spec.compute.accumulator_bytes,
            "method": method.installed and used_method(method.installed),
            "reward_functions": used_packages(method.rewards_of_answers),
            "reward_models": [model.own.location for model in method.reward_models],
            "grading_models": grading,
            "gradient_sync": trainer.gradient_sync,
            "answer_weights": answers_by_freed_blocks(spec) and ("kept" if trainer.keeps_gathered else "per_token"),
            "metrics_read": trainer.metrics_read,
            "group_by_length": grouped,
            "averaging": averaging and {"workers": trainer.workers.count, **averaging.model_dump()},
            "packing": data.packing,
            "mixture": data.mixed.described(),
            "token_cache": data.sources,
            "memory": memory,
            "quantization": policy.quantization,
            "fused_lora": trainer.fused_lora,
            "lora_target_modules": policy.adapters and sorted(policy.adapters.target_modules or ()),
            "adapters": policy.continued
            and {name: "trained" if name == DEFAULT else "frozen" for name in policy.continued.peft_config},
            "validation_data": data.validation_report and _counts(data.validation_report),
        }
        return {**always, **{name: value for name, value in perhaps.items() if value}}


def build_trainer(
    spec: JobSpec,
    device: torch.device,
    writer: EventWriter | None = None,
    batch_plan: BatchPlan | None = None,
    fencing_token: FencingToken | None = None,
    require_space: Callable[[int], None] | None = None,
    trained_batch_size: int | None = None,
    *,
    has_run_out: bool = False,
) -> BuiltTrainer:
    """Build the trainer of a job.

    Args:
        batch_plan: the batches of each optimizer step; None: those that the job's own fields give.
        fencing_token: None: no other attempt writes into the job's checkpoint directory.
        require_space: as in RecipeTrainer; None: `need_space` in the job's checkpoint directory.
        trained_batch_size: rows of a micro batch of the attempt that this one continues; None: there was none.
    """
    writer, batch_plan = writer or NullEventWriter(), batch_plan or BatchPlan.of_job(spec)
    recipe, arguments = trainer_of(spec)  # first: what is not installed cannot train
    warn = partial(_warn, writer)
    tokenizer = load_job_tokenizer(spec, warn)
    check_chat_template(spec, tokenizer)
    check_models(spec, warn)
    spec = with_images(spec)
    check_vocabulary(spec, tokenizer)
    # Data before weights: a bad row is found in a second, a large model takes minutes to load.
    prompts = encode_prompts(
        spec.train.samples, tokenizer, positions_of(spec.source), spec.data.dropped_turns, vocabulary_size(spec.source)
    )
    data = load_data(spec, tokenizer, writer, batch_plan.rows_per_step)
    if ranks.rank() == 0:  # which exports
        try_exports(spec, tokenizer, warn)
    lost = lost_by_reward_models(spec, writer.heartbeat) if ranks.rank() == 0 else []
    spec, padding_free = with_batches(spec)
    requested = spec
    spec, batch_plan = in_parts(spec, batch_plan, data.train, device.type)
    head_kernels, no_triton = choose_head_kernels(device.type)
    others = [*other_packages(spec.method.rewards_of_answers), other_version(spec)]
    of_batches = [problem_of_padding(spec, row_lengths(data.train)), *_slow_dtype(spec.compute.dtype, device)]
    for message in filter(None, [*prompts.lost_turns, *data.warnings, *lost, *of_batches, no_triton, *others]):
        writer.write(Warned(message=message))
    rows_on_device = RowsOnDevice(data.train, device.type, partial(memory_of, spec, device), data.mixed.mixture)
    merged = merge_micro_steps(spec, batch_plan, rows_on_device, trained_batch_size)
    spec, batch_plan = merged.spec, merged.batch_plan
    spec, repeats = fix_order(spec, batch_plan, rows_on_device, gpu=device, may_raise=not has_run_out)
    memory = before_training(
        spec, batch_plan, data.train, device, writer, requested, data.mixed.mixture, merged.unmerged
    )
    spec, repeats = keep_order(spec, repeats, memory)
    unkept, spec = spec, choose_kept_attention(spec, device.type, memory)
    chooses_gradient_sync, spec = spec.train.gradient_sync == "auto", choose_gradient_sync(spec, memory)
    if batch_plan.needs_filler:
        data = data.with_filler()
    policy = load_policy(spec, device, warn)
    trainer = recipe(
        spec=spec,
        batch_plan=batch_plan,
        chooses_gradient_sync=chooses_gradient_sync,
        writer=writer,
        fencing_token=fencing_token or FencingToken(),
        require_space=require_space or partial(need_space, spec),
        model=policy.continued or policy.model,
        deferred=policy.deferred,
        args=arguments(spec, device),
        mixture=data.mixed.mixture,
        source_names=data.mixed.names,
        train_dataset=data.train,
        eval_dataset=data.validation,
        processing_class=tokenizer,
        peft_config=None if policy.continued else policy.adapters,
    )
    trainer.keeps_gathered = choose_answer_weights(spec, memory)
    implementation = policy.model.config._attn_implementation
    kept_attention = kept_in(spec, device.type, unkept, implementation) if spec.compute.gradient_checkpointing else ""
    return BuiltTrainer(
        *(trainer, data, policy, memory, head_kernels, padding_free, prompts.ids, merged, repeats), kept_attention
    )


def load_data(
    spec: JobSpec, tokenizer: PreTrainedTokenizerBase, writer: EventWriter, rows_per_step: int
) -> TrainingData:
    """As `prepared_data`, of a job whose own packages are installed here."""
    check_rows_of_jobs(spec)
    embeddings = vocabulary_size(spec.source)
    return prepared_data(spec, tokenizer, writer, rows_per_step, load_teacher_tokenizer(spec), embeddings)


def load_policy(spec: JobSpec, device: torch.device, warn: Callable[[str], None] = lambda _: None) -> Policy:
    storage = WeightStorage.of(spec)
    model = load_model(spec.source, storage, device, warn)
    set_attention(spec, model)
    if spec.compute.padding_free:
        use_rows(model, device.type)
        limit_accumulators(spec.compute.accumulator_bytes)
    if spec.context_parallel_size > 1:
        attend_across_ranks(model, Workers(spec.context_parallel_size).within, spec.context_parallel_size)
    liger_kernels = use_liger(model, spec, device.type)
    mlp_tiles = tile_mlp(model, spec, device.type)
    check_length(model, spec.data.max_seq_length)
    if spec.data.packed and not spec.compute.padding_free and (spec.uses_flash_kernels or has_placeholders(model)):
        # Flash kernels compute on GPUs in half precision, where the model may be in CPU memory and in fp32.
        shallow = shallow_model(spec.source, DTYPES[spec.compute.dtype], device)
        set_attention(spec, shallow)
        check_isolation(shallow, sequences=1 if spec.uses_flash_kernels else 2)
    elif spec.data.packed and not spec.compute.padding_free:
        check_isolation(model)
    # QAT replaces layers, whose weights are then deferred. A base in 4 bits is measured as it will be.
    quantization = None if storage.in_4_bits else quantize(spec, model)
    deferred = DeferredWeights(model, storage.dtype, device) if storage.is_deferred else None
    if storage.in_4_bits:
        quantization = quantize(spec, model)
    adapters = adapter_config(model, spec.lora, is_reward=spec.trains_reward) if spec.lora else None
    trained = None
    if adapters is not None and continues(spec):
        trained = continued(spec, model, adapters, reference=has_reference_adapter(spec))
    return Policy(model, quantization, adapters, deferred, trained, mlp_tiles, liger_kernels)


def _slow_dtype(dtype: Dtype, device: torch.device) -> list[str]:
    if dtype != "bf16" or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    return ["this CPU has no bf16 instructions: dtype bf16 trains about ten times slower here than fp32"]


def _counts(report: DataReport) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name not in _NOT_COUNTS}


def _warn(writer: EventWriter, message: str) -> None:
    writer.write(Warned(message=message))
