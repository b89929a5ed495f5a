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
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import set_seed

from .. import faults
from ..errors import JobFailure
from ..files import RunDir
from . import ranks
from .arguments import dpo_arguments, sft_arguments
from .callbacks import JobCallback, Order
from .checkpoints import first_undamaged, need_space, step_bytes
from .data import DataReport, prepare_dpo, prepare_sft, read_examples, with_filler
from .dpo import DpoRecipe
from .events import CheckpointSaved, EventWriter, Finished, Paused, Reason, Silent, Started, Warned
from .export import export_final, export_merged
from .models import check_length, choose_device, load_adapter, load_model, load_tokenizer, lora_config
from .sampling import Share
from .sft import SftRecipe
from .sharding import is_sharded, sharding_on_any_device, whole_state
from .spec import AttemptSpec, DatasetRef, JobSpec
from .trainers import RecipeTrainer


def train_attempt(attempt: AttemptSpec, writer: EventWriter | Silent) -> None:
    """Train, export and report one attempt; on each of its ranks.

    Raises:
        JobFailure: what the user can mend; anything else is a bug or the machine's end.
    """
    ranks.expect(attempt.world_size)
    spec, share = _shared_out(attempt)
    device = choose_device(spec.device)
    writer.write(Started(pid=os.getpid(), device=str(device), versions=_versions()))
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    faults.reach("started")
    spec.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    set_seed(spec.seed)

    trainer, effective = build_trainer(spec, device, writer, share)
    control = RunDir(attempt.run_dir).control
    resume_from = first_undamaged(attempt.resume_candidates, writer)
    if resume_from is None and spec.resume_from is not None:
        raise JobFailure(
            Reason.invalid_request,
            f"checkpoint {spec.resume_from.checkpoint} of job {spec.resume_from.job_uuid!r} is damaged: name another",
        )
    start_step = trainer.take_up(resume_from) if resume_from else 0
    callback = JobCallback(spec, writer, trainer, control, effective, start_step, resume_from)
    trainer.add_callback(callback)
    needed = step_bytes(trainer.model, spec)
    trainer.need_space = partial(need_space, spec, needed)
    trainer.need_space()  # before hours of training, not after
    if callback.order() is Order.stop:
        return writer.write(Paused(step=start_step), durable=True)
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        trainer.end_saving()
    except BaseException:
        trainer.abandon_saving()
        raise
    if callback.paused:
        return writer.write(Paused(step=trainer.state.global_step), durable=True)
    if spec.validation and (callback.validation is None or callback.validation[0] != trainer.state.global_step):
        trainer.evaluate()
    _export(spec, trainer, callback)
    ranks.wait_for_all()
    faults.reach("finishing")
    writer.write(Finished(step=trainer.state.global_step), durable=True)


def build_trainer(
    spec: JobSpec, device: torch.device, writer: EventWriter | Silent | None = None, share: Share | None = None
) -> tuple[RecipeTrainer, dict[str, Any]]:
    """A trainer ready to run, and what was decided on the way (adapted modules, data counts, attention kernel).

    Args:
        share: how each optimizer step is shared out; None: as the job's own fields say.
    """
    share = share or _own_share(spec)
    tokenizer = load_tokenizer(spec)
    # Data before weights: a bad row is found in a second, a large model takes minutes to load.
    train, report = _prepare(spec, spec.dataset, tokenizer)
    validation, validation_report = _validation(spec, tokenizer)
    warnings = [*report.warnings, *(validation_report.warnings if validation_report else []), *_slow(spec, device)]
    if writer:
        for message in warnings:
            writer.write(Warned(message=message))
    if share.needs_filler:
        train, validation = with_filler(train), validation and with_filler(validation)
    model = load_model(spec, device)
    check_length(model, spec)
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
    trainer.bind(spec, share, writer or Silent())
    effective: dict[str, Any] = {
        "model_class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "data": _counts(report),
    }
    if adapters:
        effective["lora_target_modules"] = sorted(adapters.target_modules or ())
    if validation_report:
        effective["validation_data"] = _counts(validation_report)
    return trainer, effective


def _shared_out(attempt: AttemptSpec) -> tuple[JobSpec, Share]:
    """The job as this attempt's ranks train it: with as many rows per optimizer step, however many ranks there are."""
    rows = attempt.rows_per_step or attempt.job.rows_per_step
    share = Share.of(rows, attempt.job.batch_size, attempt.world_size)
    changes = {
        "ranks": share.world_size,
        "batch_size": share.batch_size,
        "gradient_accumulation_steps": share.accumulation_steps,
    }
    return attempt.job.model_copy(update=changes), share


def _own_share(spec: JobSpec) -> Share:
    return Share.of(spec.rows_per_step, spec.batch_size, spec.ranks)


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
        if is_sharded(spec):
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
