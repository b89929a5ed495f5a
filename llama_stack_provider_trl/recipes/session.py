"""One attempt from spec to exported checkpoint. Imports torch and TRL; `recipes.train` is the light entry point."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
import transformers
import trl
from peft.helpers import disable_input_dtype_casting
from transformers.trainer_utils import set_seed

from .. import faults
from ..errors import JobFailure
from ..specs.events import CheckpointSaved, EventWriter, Finished, Paused, Reason, Started, Warned
from ..specs.job import AttemptSpec, JobSpec
from ..system.files import RunDir
from .build import BuiltTrainer, build_trainer
from .checkpoint.export import bytes_needed, export, take_sample
from .checkpoint.fencing import FencingToken
from .checkpoint.merged_base import with_merged_base
from .checkpoint.step import first_undamaged, need_space
from .checkpoint.transfer import Disks
from .data.sampling import BatchPlan
from .distributed import ranks
from .distributed.heartbeat import heartbeat
from .distributed.peers import connected_peers
from .distributed.replicas import Heartbeats
from .fast.compiled import compiler_failures, why_eager
from .model.loading import choose_device, load_adapter
from .model.positions import within_positions
from .model.saving import exports
from .trainer.base import RecipeTrainer
from .trainer.callbacks import Decision, JobCallback
from .trainer.reference import Precomputation, precomputes
from .trainer.step_checkpoints import trained_batch_size
from .trainer.trl_patches import require_releases

if TYPE_CHECKING:
    from .trainer.samples import PromptAnswers


@dataclass(frozen=True)
class Run:
    spec: JobSpec
    """As this attempt's ranks train it."""
    writer: EventWriter
    trainer: RecipeTrainer
    callback: JobCallback
    resume_from: Path | None
    require_space: Callable[[int], None]
    """Returns if so many bytes fit on the disk of the job's checkpoints; raises where they do not."""


def train_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Train, export and report one attempt. Every rank calls it. Raises JobFailure: a failure that the user can
    correct; any other exception is a bug or a limit of the machine."""
    ranks.check_world_size(attempt.world_size)
    require_releases()
    spec, batch_plan = plan_batches(attempt)
    spec, warnings = within_positions(spec)
    device = choose_device(spec.device)
    _report_start(spec, device, warnings, writer)
    compiler: AbstractContextManager[None] = nullcontext()
    if attempt.compiled is not None:  # other jobs keep the directory that the operator has set
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(attempt.compiled)
        compiler = compiler_failures(spec)
    with connected_peers(device, attempt.run_dir, writer) as mbit_per_s, compiler:
        run = _prepare(attempt, spec, batch_plan, device, writer, mbit_per_s)
        _check_room(run)
        if not _score_reference(run):
            return writer.write(Paused(step=run.callback.start_step), durable=True)
        _train(run)
        if run.callback.paused:
            return writer.write(Paused(step=run.trainer.state.global_step), durable=True)
        _evaluate_last_step(run)
        exported = _load_best(run)
        run.callback.sample("after", exported["step"])
        _export(run, exported)
        faults.reach("finishing")
        writer.write(Finished(step=run.trainer.state.global_step), durable=True)


def plan_batches(attempt: AttemptSpec) -> tuple[JobSpec, BatchPlan]:
    """The job as this attempt's ranks train it. Rows per optimizer step do not depend on the number of ranks."""
    rows = attempt.rows_per_step or attempt.job.rows_per_step
    job = attempt.job
    batch_plan = BatchPlan.of(rows, job.data.batch_size, attempt.world_size, job.context_parallel_size)
    return batch_plan.applied(job), batch_plan


def _report_start(spec: JobSpec, device: torch.device, warnings: list[str], writer: EventWriter) -> None:
    writer.write(Started(pid=os.getpid(), device=str(device), versions=_versions()))
    if spec.compute.num_threads:
        torch.set_num_threads(spec.compute.num_threads)
    for message in warnings:
        writer.write(Warned(message=message))
    faults.reach("started")


def _prepare(
    attempt: AttemptSpec,
    spec: JobSpec,
    batch_plan: BatchPlan,
    device: torch.device,
    writer: EventWriter,
    mbit_per_s: float | None,
) -> Run:
    spec.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    set_seed(spec.data.seed)
    run_dir = RunDir(attempt.run_dir)
    require_space = partial(need_space, spec, uploads=run_dir.uploads, writer=writer)
    with heartbeat(writer):
        spec = with_merged_base(spec, require_space)
        trained = _trained_batch_size(attempt, batch_plan)
        built = build_trainer(
            *(spec, device, writer, batch_plan, FencingToken.of(attempt), require_space, trained),
            has_run_out=attempt.has_run_out,
        )
        trainer = built.trainer
        resume_from = _checkpoint_to_resume(attempt, writer, trainer.saver.disks)
        start_step = trainer.restore(resume_from) if resume_from else 0
        effective = built.effective()
    _show_progress(trainer, run_dir)
    answers = _answers(spec, built, writer)
    callback = JobCallback(
        spec, writer, trainer, run_dir.control, effective, start_step, resume_from, answers, mbit_per_s
    )
    trainer.add_callback(callback)
    return Run(spec, writer, trainer, callback, resume_from, require_space)


def _trained_batch_size(attempt: AttemptSpec, batch_plan: BatchPlan) -> int | None:
    """Rows of a micro batch of the attempts before this one; None: there were none, or they had other ranks."""
    requested = attempt.job.resume_from
    own = [path for path in attempt.resume_candidates if requested is None or path != requested.path]
    found = (trained_batch_size(path, batch_plan.world_size) for path in own)
    return next((size for size in found if size is not None), None)


def _show_progress(trainer: RecipeTrainer, run_dir: RunDir) -> None:
    """Have ranks beyond the first write heartbeats while they answer prompts: the first one may wait for them."""
    if ranks.rank() == 0:
        return
    from .trainer.answering import AnswersPrompts

    if isinstance(trainer, AnswersPrompts):
        trainer.alive = Heartbeats(EventWriter(run_dir.events)).heartbeat


def _answers(spec: JobSpec, built: BuiltTrainer, writer: EventWriter) -> PromptAnswers | None:
    if spec.train.samples is None:
        return None
    from .trainer.samples import PromptAnswers

    return PromptAnswers(built.trainer, built.prompts, spec.train.samples.max_new_tokens, writer.heartbeat)


def _checkpoint_to_resume(attempt: AttemptSpec, writer: EventWriter, disks: Disks) -> Path | None:
    checkpoint, requested = first_undamaged(attempt.resume_candidates, writer, disks), attempt.job.resume_from
    if checkpoint is None and requested is not None:
        raise JobFailure(
            Reason.invalid_request,
            f"checkpoint {requested.checkpoint} of job {requested.job_uuid!r} is damaged: name another",
        )
    return checkpoint


def _check_room(run: Run) -> None:
    """Check before hours of training, not after, that the exports fit on the disk."""
    spec, trainer = run.spec, run.trainer
    needed = trainer.step_bytes
    # At the end of a job a step checkpoint and the exports are on the disk together.
    if trainer.saver.disks.sees_first:
        run.require_space(needed + sum(bytes_needed(trainer.model, spec, kind) for kind in exports(spec)))


def _score_reference(run: Run) -> bool:
    """Precompute the reference's log-probabilities where the job does; returns whether to continue with training."""
    if run.callback.decide() is Decision.stop:
        return False
    if not precomputes(run.spec):
        return True
    should_stop = lambda: run.callback.decide() is Decision.stop  # noqa: E731
    # Blocks are compiled for the first batch of a training, whose kernels are to be those of its resumed attempts.
    # Without any the compiler is not imported, which takes 1 s and 147 MiB in each rank.
    is_eager = bool(why_eager(run.spec, run.trainer.args.device.type))
    with nullcontext() if is_eager else torch.compiler.set_stance("force_eager"):
        record = Precomputation(run.trainer, run.writer.heartbeat, should_stop).run()
    run.callback.effective["reference"] = record
    return record is not None


def _train(run: Run) -> None:
    try:
        with _without_casts(run):
            run.trainer.train(resume_from_checkpoint=str(run.resume_from) if run.resume_from else None)
        run.trainer.saver.finish()
        run.callback.malloc.end()
    except BaseException:
        run.trainer.saver.abandon()
        raise


def _without_casts(run: Run) -> AbstractContextManager[None]:
    """While this is open, LoRA layers do not cast their inputs to fp32, which autocast casts back: the same numbers
    with less memory traffic. Dropout and DoRA compute with the inputs before autocast does."""
    lora = run.spec.lora
    is_plain = lora is not None and lora.method == "lora" and not lora.use_dora and not lora.dropout
    return disable_input_dtype_casting(run.trainer.model, active=is_plain)


def _evaluate_last_step(run: Run) -> None:
    evaluated = run.callback.validation
    if run.spec.data.validation and (evaluated is None or evaluated[0] != run.trainer.state.global_step):
        with _without_casts(run):  # as in training: torch's compiler would compile it again
            run.trainer.evaluate()


def _load_best(run: Run) -> dict[str, Any]:
    """Load the best checkpoint's weights where the job exports those; returns the event fields of what is exported."""
    callback, trainer = run.callback, run.trainer
    last, best = callback.checkpoint_fields(trainer.state), callback.early_stopping.best
    fields = dict(best["standing"]) if best else last
    step = ranks.broadcast_number(fields["step"])
    if best is None or step == last["step"]:
        return last
    checkpoint = run.spec.checkpoint_dir / f"checkpoint-{step}"
    is_there = bool(ranks.broadcast_number(checkpoint.is_dir()))
    is_there = (
        is_there and first_undamaged([checkpoint], run.writer, trainer.saver.disks, on_first_only=True) is not None
    )
    if is_there:
        trainer.load_weights(checkpoint)
    what = f"{checkpoint.name}, the best by {run.spec.train.best_checkpoint} ({best['value']:.6g})"
    outcome = f"final is {what}" if is_there else f"{what}, is gone: final is the last step"
    run.writer.write(Warned(message=f"{outcome}; training ended at step {last['step']}"))
    return fields if is_there else last


def _export(run: Run, fields: dict[str, Any]) -> None:
    spec, trainer = run.spec, run.trainer
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    sample = take_sample(model, tokenizer, trainer.args.device, spec)
    for kind in exports(spec):
        if kind == "merged" and spec.lora and spec.lora.quantize_base:
            if ranks.rank() != 0:
                continue
            # Into the base as it is on disk, not in 4 bits. Rank 0 alone holds all that this takes.
            model = load_adapter(spec, spec.checkpoint_dir / "final")
            sample = take_sample(model, tokenizer, torch.device("cpu"), spec)
        began = time.monotonic()
        saved = export(
            kind, model, tokenizer, spec, sample, run.writer.heartbeat, trainer.saver.fencing_token, run.require_space
        )
        if saved is not None:
            if saved.unchecked_reason:
                run.writer.write(Warned(message=saved.unchecked_reason))
            checked: dict[str, Any] = {
                "verified": "weights" if saved.logits_difference is None else "logits",
                "logits_difference": saved.logits_difference,
                "write_seconds": time.monotonic() - began,
            }
            run.writer.write(CheckpointSaved(kind=kind, path=saved.path, **fields, **checked), durable=True)
    ranks.barrier()


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
