"""One attempt from spec to exported checkpoint. Heavy imports live here; `recipes.train` is the light door."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
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
from ..specs.events import CheckpointSaved, EventWriter, Finished, NullEventWriter, Paused, Reason, Started, Warned
from ..specs.job import AttemptSpec, JobSpec
from ..system.files import RunDir
from .checkpoint.export import bytes_needed, check_tokenizer, export, exports, take_sample
from .checkpoint.fencing import FencingToken
from .checkpoint.step import first_undamaged, need_space, step_bytes
from .data.packing import num_rows, pack
from .data.prepare import DataReport, prepare, with_filler
from .data.sampling import BatchPlan
from .distributed import ranks
from .distributed.heartbeat import heartbeat
from .distributed.peers import connected_peers
from .model.fsdp import sharding_on_any_device
from .model.loading import (
    check_length,
    choose_device,
    load_adapter,
    load_model,
    load_tokenizer,
    lora_config,
    quantize,
    within_positions,
)
from .model.packing_check import check_isolation
from .model.quantization import keep_adapters_in_fp32
from .preflight import before_training
from .trainer.arguments import dpo_arguments, sft_arguments
from .trainer.base import RecipeTrainer
from .trainer.callbacks import Decision, JobCallback
from .trainer.dpo import DpoRecipe
from .trainer.reference import Precomputation, check_vocabulary, precomputes
from .trainer.sft import SftRecipe


def train_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Train, export and report one attempt; on each of its ranks.

    Raises:
        JobFailure: what the user can mend; anything else is a bug or the machine's end.
    """
    ranks.check_world_size(attempt.world_size)
    spec, batch_plan = _for_ranks(attempt)
    spec, warnings = within_positions(spec)
    device = choose_device(spec.device)
    writer.write(Started(pid=os.getpid(), device=str(device), versions=_versions()))
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    for message in warnings:
        writer.write(Warned(message=message))
    faults.reach("started")
    with connected_peers(device, attempt.run_dir, writer):
        _train(attempt, spec, batch_plan, device, writer)


def _train(
    attempt: AttemptSpec,
    spec: JobSpec,
    batch_plan: BatchPlan,
    device: torch.device,
    writer: EventWriter,
) -> None:
    spec.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    set_seed(spec.seed)

    control = RunDir(attempt.run_dir).control
    with heartbeat(writer):
        trainer, effective = build_trainer(spec, device, writer, batch_plan, FencingToken.of(attempt))
        resume_from = _resume_point(attempt, writer, trainer)
        start_step = trainer.restore(resume_from) if resume_from else 0
    callback = JobCallback(spec, writer, trainer, control, effective, start_step, resume_from)
    trainer.add_callback(callback)
    if ranks.rank() == 0:
        check_tokenizer(trainer.model, trainer.processing_class, spec)
    needed = step_bytes(trainer.model, spec)
    require_space = partial(need_space, spec, uploads=RunDir(attempt.run_dir).uploads, writer=writer)
    trainer.need_space = partial(require_space, needed)
    # Before hours of training, not after; at the end a step checkpoint and the exports lie side by side.
    if trainer.disks.sees_first:
        require_space(needed + sum(bytes_needed(trainer.model, spec, kind) for kind in exports(spec)))
    if callback.decide() is Decision.stop:
        return writer.write(Paused(step=start_step), durable=True)
    if precomputes(spec):
        effective["reference"] = Precomputation(
            trainer, writer.heartbeat, lambda: callback.decide() is Decision.stop
        ).run()
        if effective["reference"] is None:
            return writer.write(Paused(step=start_step), durable=True)
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        trainer.end_saving()
        callback.malloc.end()
    except BaseException:
        trainer.abandon_saving()
        raise
    if callback.paused:
        return writer.write(Paused(step=trainer.state.global_step), durable=True)
    if spec.validation and (callback.validation is None or callback.validation[0] != trainer.state.global_step):
        trainer.evaluate()
    _export(spec, trainer, callback, _take_best(spec, trainer, callback), require_space)
    faults.reach("finishing")
    writer.write(Finished(step=trainer.state.global_step), durable=True)


def _resume_point(attempt: AttemptSpec, writer: EventWriter, trainer: RecipeTrainer) -> Path | None:
    found, given = first_undamaged(attempt.resume_candidates, writer, trainer.disks), attempt.job.resume_from
    if found is None and given is not None:
        raise JobFailure(
            Reason.invalid_request,
            f"checkpoint {given.checkpoint} of job {given.job_uuid!r} is damaged: name another",
        )
    return found


def build_trainer(
    spec: JobSpec,
    device: torch.device,
    writer: EventWriter | None = None,
    batch_plan: BatchPlan | None = None,
    fencing_token: FencingToken | None = None,
) -> tuple[RecipeTrainer, dict[str, Any]]:
    """A trainer ready to run, and what was decided on the way (adapted modules, data counts, attention kernel).

    Args:
        batch_plan: how each optimizer step is shared out; None: as the job's own fields say.
        fencing_token: None: nobody else writes into the job's checkpoint directory.
    """
    batch_plan = batch_plan or BatchPlan.of_job(spec)
    tokenizer = load_tokenizer(spec)
    check_vocabulary(spec, tokenizer)
    # Data before weights: a bad row is found in a second, a large model takes minutes to load.
    train, report = prepare(spec, spec.dataset, tokenizer)
    validation, validation_report = _validation(spec, tokenizer)
    warnings = [*report.warnings, *(validation_report.warnings if validation_report else []), *_slow(spec, device)]
    if writer:
        for message in warnings:
            writer.write(Warned(message=message))
    if spec.packed:
        train, validation = pack(train, spec.max_seq_length), validation and pack(validation, spec.max_seq_length)
    packing = {"rows": num_rows(train), "sequences": len(train)} if spec.packed else None
    memory = before_training(spec, batch_plan, train, device, writer)
    if batch_plan.needs_filler:
        train, validation = with_filler(train), validation and with_filler(validation)
    model = load_model(spec, device)
    check_length(model, spec)
    if spec.packed:
        check_isolation(model)
    quantized = quantize(spec, model)
    adapters = lora_config(model, spec.lora) if spec.lora else None
    recipe, arguments = (SftRecipe, sft_arguments) if spec.algorithm == "sft" else (DpoRecipe, dpo_arguments)
    with sharding_on_any_device():
        trainer = recipe(
            model=model,
            args=arguments(spec, device),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            peft_config=adapters,
        )
    if spec.lora and spec.lora.quantize_base:
        keep_adapters_in_fp32(trainer.model)
    trainer.bind(spec, batch_plan, writer or NullEventWriter(), fencing_token)
    effective: dict[str, Any] = {
        "model_class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "data": _counts(report),
    }
    if packing:
        effective["packing"] = packing
    if memory:
        effective["memory"] = memory
    if quantized:
        effective["quantization"] = quantized
    if adapters:
        effective["lora_target_modules"] = sorted(adapters.target_modules or ())
    if validation_report:
        effective["validation_data"] = _counts(validation_report)
    return trainer, effective


def _for_ranks(attempt: AttemptSpec) -> tuple[JobSpec, BatchPlan]:
    """The job as this attempt's ranks train it: with as many rows per optimizer step, however many ranks there are."""
    rows = attempt.rows_per_step or attempt.job.rows_per_step
    batch_plan = BatchPlan.of(rows, attempt.job.batch_size, attempt.world_size)
    changes = {
        "ranks": batch_plan.world_size,
        "batch_size": batch_plan.batch_size,
        "gradient_accumulation_steps": batch_plan.accumulation_steps,
    }
    return attempt.job.model_copy(update=changes), batch_plan


def _validation(spec: JobSpec, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset | None, DataReport | None]:
    if spec.validation is None:
        return None, None
    dataset, report = prepare(spec, spec.validation, tokenizer)
    if spec.max_validation_steps is not None:
        dataset = dataset.select(range(min(len(dataset), spec.max_validation_steps * spec.batch_size)))
    return dataset, report


def _take_best(spec: JobSpec, trainer: RecipeTrainer, callback: JobCallback) -> dict[str, Any]:
    """Load the best checkpoint's weights where the job asks for them; returns the standing of what is exported."""
    last, best = callback.checkpoint_fields(trainer.state), callback.early_stopping.best
    standing = dict(best["standing"]) if best else last
    step = ranks.broadcast_number(standing["step"])
    if best is None or step == last["step"]:
        return last
    checkpoint = spec.checkpoint_dir / f"checkpoint-{step}"
    there = bool(ranks.broadcast_number(checkpoint.is_dir()))
    there = there and first_undamaged([checkpoint], callback.writer, trainer.disks, on_first_only=True) is not None
    if there:
        trainer.load_weights(checkpoint)
    what = f"{checkpoint.name}, the best by {spec.best_checkpoint} ({best['value']:.6g})"
    said = f"final is {what}" if there else f"{what}, is gone: final is the last step"
    callback.writer.write(Warned(message=f"{said}; training ended at step {last['step']}"))
    return standing if there else last


def _export(
    spec: JobSpec,
    trainer: RecipeTrainer,
    callback: JobCallback,
    standing: dict[str, Any],
    require_space: Callable[[int], None],
) -> None:
    """Every rank gives its parts; rank 0 writes, checks and announces."""
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    sample = take_sample(model, tokenizer, trainer.args.device, spec)
    for kind in exports(spec):
        if kind == "merged" and spec.lora and spec.lora.quantize_base:
            if ranks.rank() != 0:
                continue
            # Into the base as it is on disk, not in 4 bits; rank 0 alone holds all that this takes.
            model = load_adapter(spec, spec.checkpoint_dir / "final")
            sample = take_sample(model, tokenizer, torch.device("cpu"), spec)
        saved = export(
            kind, model, tokenizer, spec, sample, callback.writer.heartbeat, trainer.fencing_token, require_space
        )
        if saved is not None:
            if saved.unchecked_reason:
                callback.writer.write(Warned(message=saved.unchecked_reason))
            checked: dict[str, Any] = {
                "verified": "weights" if saved.logits_difference is None else "logits",
                "logits_difference": saved.logits_difference,
            }
            callback.announce(CheckpointSaved(kind=kind, path=saved.path, **standing, **checked))
    ranks.barrier()


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
