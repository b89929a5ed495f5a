"""One attempt from spec to exported checkpoint. Heavy imports live here; `recipes.train` is the light door."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from typing import Any

import peft
import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import set_seed

from .. import faults
from ..files import RunDir
from . import ranks
from .arguments import dpo_arguments, sft_arguments
from .callbacks import JobCallback, Order
from .checkpoints import need_space, step_bytes
from .data import DataReport, prepare_dpo, prepare_sft, read_examples, with_filler
from .dpo import DpoRecipe
from .events import CheckpointSaved, EventWriter, Finished, Paused, Silent, Started, Warned
from .export import export_final, export_merged
from .models import (
    check_length,
    choose_device,
    linear_modules,
    load_adapter,
    load_model,
    load_tokenizer,
    lora_config,
)
from .quantization import fake_quantize, keep_adapters_in_fp32, settle_base
from .sft import SftRecipe
from .sharding import is_sharded, sharding_on_any_device, whole_state
from .spec import AttemptSpec, DatasetRef, JobSpec
from .trainers import RecipeTrainer


def train_attempt(attempt: AttemptSpec, writer: EventWriter | Silent) -> None:
    """Train, export and report one attempt; on each of its ranks.

    Raises:
        JobFailure: what the user can mend; anything else is a bug or the machine's end.
    """
    spec = attempt.job
    ranks.expect(spec.ranks)
    device = choose_device(spec.device)
    writer.write(Started(pid=os.getpid(), device=str(device), versions=_versions()))
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    faults.reach("started")
    spec.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    set_seed(spec.seed)

    trainer, effective = build_trainer(spec, device, writer)
    control = RunDir(attempt.run_dir).control
    start_step = trainer.take_up(attempt.resume_from) if attempt.resume_from else 0
    callback = JobCallback(spec, writer, trainer, control, effective, start_step)
    trainer.add_callback(callback)
    needed = step_bytes(trainer.model, spec)
    trainer.need_space = partial(need_space, spec, needed)
    trainer.need_space()  # before hours of training, not after
    if callback.order() is Order.stop:
        return writer.write(Paused(step=start_step), durable=True)
    trainer.train(resume_from_checkpoint=str(attempt.resume_from) if attempt.resume_from else None)
    if callback.paused:
        return writer.write(Paused(step=trainer.state.global_step), durable=True)
    if spec.validation and (callback.validation is None or callback.validation[0] != trainer.state.global_step):
        trainer.evaluate()
    _export(spec, trainer, callback)
    ranks.wait_for_all()
    faults.reach("finishing")
    writer.write(Finished(step=trainer.state.global_step), durable=True)


def build_trainer(
    spec: JobSpec, device: torch.device, writer: EventWriter | Silent | None = None
) -> tuple[RecipeTrainer, dict[str, Any]]:
    """A trainer ready to run, and what was decided on the way (adapted modules, data counts, attention kernel)."""
    tokenizer = load_tokenizer(spec)
    # Data before weights: a bad row is found in a second, a large model takes minutes to load.
    train, report = _prepare(spec, spec.dataset, tokenizer)
    validation, validation_report = _validation(spec, tokenizer)
    warnings = [*report.warnings, *(validation_report.warnings if validation_report else []), *_slow(spec, device)]
    if writer:
        for message in warnings:
            writer.write(Warned(message=message))
    if spec.ranks > 1:
        train, validation = with_filler(train), validation and with_filler(validation)
    model = load_model(spec, device)
    check_length(model, spec)
    quantized = _quantize(spec, model)
    adapters = lora_config(model, spec.lora) if spec.lora else None
    recipe, arguments = (SftRecipe, sft_arguments) if spec.algorithm == "sft" else (DpoRecipe, dpo_arguments)
    # Under LoRA the reference is the model without its adapter.
    reference = {"ref_model": load_model(spec, device)} if spec.algorithm == "dpo" and not spec.lora else {}
    with sharding_on_any_device():
        trainer = recipe(
            model=model,
            args=arguments(spec, device),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            peft_config=adapters,
            **reference,
        )
    if spec.lora and spec.lora.quantize_base:
        keep_adapters_in_fp32(trainer.model)
    trainer.bind(spec)
    effective: dict[str, Any] = {
        "model_class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "data": _counts(report),
    }
    if quantized:
        effective["quantization"] = quantized
    if adapters:
        effective["lora_target_modules"] = sorted(adapters.target_modules or ())
    if validation_report:
        effective["validation_data"] = _counts(validation_report)
    return trainer, effective


def _quantize(spec: JobSpec, model: PreTrainedModel) -> dict[str, Any] | None:
    """Few bits, where the job asks for them; what was done, for its record."""
    if spec.qat:
        attention, mlp = linear_modules(model)
        return fake_quantize(model, [*attention, *mlp], spec.qat)
    return settle_base(model) if spec.lora and spec.lora.quantize_base else None


def _prepare(spec: JobSpec, dataset: DatasetRef, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, DataReport]:
    if spec.algorithm == "sft":
        examples = read_examples(dataset.path, "sft", spec.data_format)
        return prepare_sft(examples, tokenizer, spec.max_seq_length, spec.train_on_input)
    return prepare_dpo(read_examples(dataset.path, "dpo"), tokenizer, spec.max_seq_length)


def _validation(spec: JobSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset | None, DataReport | None]:
    if spec.validation is None:
        return None, None
    dataset, report = _prepare(spec, spec.validation, tokenizer)
    if spec.max_validation_steps is not None:
        dataset = dataset.select(range(min(len(dataset), spec.max_validation_steps * spec.batch_size)))
    return dataset, report


def _export(spec: JobSpec, trainer: RecipeTrainer, callback: JobCallback) -> None:
    """Every rank gives its parts; rank 0 writes and announces."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = whole_state(model, trainable_only=spec.lora is not None) if is_sharded(spec) else None
    if ranks.rank() != 0:
        return
    tokenizer = trainer.processing_class
    standing = callback.standing(trainer.state)
    final = export_final(model, tokenizer, spec, state)
    callback.announce(CheckpointSaved(kind="final", path=final, **standing))
    if spec.merge_adapter and spec.lora:
        if is_sharded(spec) or spec.lora.quantize_base:  # merged into the base as it is on disk, not in 4 bits
            model = load_adapter(spec, final)
        callback.announce(CheckpointSaved(kind="merged", path=export_merged(model, tokenizer, spec), **standing))


def _slow(spec: JobSpec, device: torch.device) -> list[str]:
    if spec.dtype != "bf16" or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    return ["this CPU has no bf16 instructions: dtype bf16 trains about ten times slower here than fp32"]


def _counts(report: DataReport) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name != "warnings"}


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
