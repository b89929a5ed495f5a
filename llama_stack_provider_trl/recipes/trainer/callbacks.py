"""Turns Trainer's callbacks into events, and decides when to save, evaluate and stop."""

from __future__ import annotations

import math
import resource
import sys
import time
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ... import faults
from ...errors import JobFailure
from ...specs.averaging import passes_multiple
from ...specs.bases import parts_of
from ...specs.evaluations import EarlyStoppingTracker, LossWatch, perplexity_of
from ...specs.events import Evaluated, EventWriter, Prepared, Progress, Reason, Sampled, Warned
from ...specs.job import JobSpec
from ...specs.model_source import AdapterSpec, ModelSource
from ...specs.search import rung_steps
from ...system.malloc import Malloc
from ...system.process import resident_memory
from ..checkpoint import random_state
from ..distributed import ranks
from ..model import fsdp
from ..model.adapters import adapter_weights
from ..model.files import whole_weights
from ..model.loading import parameter_counts
from ..model.shapes import first_not_finite
from . import parallel
from .base import RecipeTrainer

if TYPE_CHECKING:
    from .samples import PromptAnswers

SAVE_SECONDS = 1800.0
"""Seconds between saves of a job without `save_steps`: a crash costs half an hour, not an epoch."""


_SCARCE = (
    "the machine has little memory left: from now on this training gives back at once what it does not use, and may "
    "take twice as long. End other programs, or run the job when they are over"
)


class Decision(IntEnum):
    """What all ranks do after a step, as decided by rank 0."""

    proceed = 0
    save = 1
    stop = 2


class JobCallback(TrainerCallback):
    """Reports one attempt. Decides when to save: every `save_steps`, or at the end of each epoch and every
    `SAVE_SECONDS`; never at the last step, whose weights the final export holds.

    Args:
        control: a file; the job is to stop once it exists.
        start_step: optimizer steps done in the checkpoint that training resumes from.
        answers: of the job's `samples`; None: it has none.
        mbit_per_s: between the job's nodes; None: there is one, or it was not measured.
    """

    def __init__(
        self,
        spec: JobSpec,
        writer: EventWriter,
        trainer: RecipeTrainer,
        control: Path,
        effective: dict[str, Any],
        start_step: int = 0,
        resumed_from: Path | None = None,
        answers: PromptAnswers | None = None,
        mbit_per_s: float | None = None,
    ) -> None:
        self.spec, self.writer, self.trainer, self.control_file = spec, writer, trainer, control
        self.effective = effective
        self.start_step, self.resumed_from, self._answers = start_step, resumed_from, answers
        self.early_stopping = EarlyStoppingTracker(spec, trainer.notes)
        self.malloc = Malloc()
        self._parallel = None if mbit_per_s is None else parallel.ParallelCheck(mbit_per_s)
        self.paused = self.stopped = False
        self.last_logged = self._last_saved = start_step
        self.validation: tuple[int, float] | None = None
        self._losses: list[tuple[int, float]] = []
        self._loss_watch = LossWatch(spec)
        self._tokens = float(trainer.num_tokens)
        self._busy_since: float | None = None
        self._random: dict[str, Any] | None = None
        self._saved_at = time.monotonic()
        trainer.checkpoint_fields = lambda: self.checkpoint_fields(trainer.state)
        trainer.beside_metrics = self._memory
        if answers is not None:
            trainer.before_checkpoint = self._sample_checkpoint

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prove that the model is sharded, and report what will be trained."""
        spec, model = self.spec, self.trainer.model
        state.logging_steps = spec.train.logging_steps  # a checkpoint of another job has that job's value
        if self.start_step >= state.max_steps:
            raise JobFailure(
                Reason.invalid_request,
                f"the checkpoint to resume from has {self.start_step} optimizer steps, the job "
                f"{state.max_steps}: raise n_epochs, or name an earlier checkpoint",
            )
        sharding = fsdp.describe(model, spec) if spec.ranks > 1 else None
        if sharding and self.trainer.ref_model is not None:
            sharding["reference"] = fsdp.describe(self.trainer.ref_model, spec)
        if spec.sharding and fsdp.is_sharded(spec):
            fsdp.prefetch(model, spec.sharding)
        trainable, total = parameter_counts(model)
        self._keep_memory()
        self.writer.write(
            Prepared(
                total_steps=state.max_steps,
                start_step=self.start_step,
                resumed_from=self.resumed_from,
                num_rows=self.trainer.num_rows,
                tokens_seen=int(self._tokens),
                trainable_parameters=trainable,
                total_parameters=total,
                effective={
                    **self.effective,
                    **self.trainer.compile_seconds,
                    "global_batch_size": self.trainer.batch_plan.rows_per_step,
                    "sharding": sharding,
                },
            )
        )
        faults.reach("prepared")
        requested = spec.resume_from
        if self.resumed_from is None or (requested is not None and self.resumed_from == requested.path):
            self.sample("before", self.start_step)  # a checkpoint of the job itself came with samples

    def sample(self, kind: Literal["before", "checkpoint", "after"], step: int) -> None:
        """Report the model's answers to the prompts of the job's `samples`, where it has any. A collective."""
        if self._answers is None:
            return
        answers = self._answers.take_first() if kind == "before" else self._answers.take()
        steps = self.trainer.state.max_steps / self.spec.train.n_epochs
        self.writer.write(Sampled(kind=kind, step=step, epoch=round(step / steps, 6), answers=answers))

    def _sample_checkpoint(self) -> None:
        state = self.trainer.state
        # Who pauses a job waits for its device: a checkpoint that is made for this alone has no answers.
        if not self.paused or self._is_planned(state):
            self.sample("checkpoint", state.global_step)

    def _keep_memory(self) -> None:
        """On a CPU, decide whether malloc keeps large blocks, by rank 0's estimate; a GPU's allocator always does."""
        if self.trainer.args.device.type != "cpu":
            return
        need = ranks.broadcast_number((self.effective.get("memory") or {}).get("estimate_bytes", 0))
        self.malloc.begin(need * ranks.local_world_size())
        if self.malloc.is_ours:
            self.effective["malloc"] = "keeps large blocks" if self.malloc.keeps else "gives large blocks back"

    def _heartbeat(self) -> None:
        self.writer.heartbeat()
        if self.malloc.poll():
            self.writer.write(Warned(message=_SCARCE))

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.begin_epoch(math.floor((state.epoch or 0.0) + 1e-6))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._busy_since is None:
            self._busy_since = self.trainer.clock.now()
        if self._parallel:
            self._parallel.begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._parallel and self._parallel.end_step():
            self._judge_nodes(self._parallel)
        self._heartbeat()
        if not self.trainer.is_common:  # nothing is decided or saved while each worker has weights of its own
            return faults.reach(f"step-{state.global_step}")
        self.trainer.average()
        self.trainer.saver.check()
        decision = self.decide()
        if state.global_step >= state.max_steps:
            control.should_log = True
        elif state.global_step in rung_steps(self.spec.pruning, state.max_steps):
            self._pause_at_rung(state, control)
        elif decision is not Decision.proceed:
            self.paused = control.should_training_stop = decision is Decision.stop
            # An evaluation that was not planned here would use random numbers that the job has planned for later.
            self._save(control, evaluate=self._is_planned(state) or self._is_evaluated(state))
        elif (self.spec.train.save_steps or self.spec.train.averaging) and self._is_planned(state):
            self._save(control)
        elif self._is_evaluated(state):
            control.should_log = control.should_evaluate = True
        faults.reach(f"step-{state.global_step}")

    def _pause_at_rung(self, state: TrainerState, control: TrainerControl) -> None:
        """Evaluate, save and end: the search compares its trials here. What was not planned uses no random numbers of
        the job, so that a trial that continues is the job that was never compared."""
        if self.spec.data.validation is not None and not (self._is_planned(state) or self._is_evaluated(state)):
            self._random = random_state.capture(self.trainer.args.device)
        self.paused = control.should_training_stop = True
        self._save(control)

    def _judge_nodes(self, check: parallel.ParallelCheck) -> None:
        """Report where several nodes do not train faster than one."""
        trainable, total = parameter_counts(self.trainer.model)
        is_sharded = self.trainer.ref_model is not None and fsdp.is_sharded(self.spec)
        reference = parameter_counts(self.trainer.ref_model)[1] if is_sharded else 0
        exchange = parallel.exchange_of(self.spec, trainable, total, reference, self.trainer.gradient_sync)
        verdict = check.conclude(exchange)
        if not verdict.helps:
            advice = "train on one node, on a faster link, or with more rows per step (gradient_accumulation_steps)"
            self.writer.write(Warned(message=f"{verdict.reason}: {advice}"))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._heartbeat()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._heartbeat()

    def decide(self) -> Decision:
        """What to do after this step. Rank 0 reads the file and the clock for all ranks: a rank that decided otherwise
        would wait forever."""
        decision = Decision.proceed
        if ranks.rank() == 0:
            overdue = self.spec.train.save_steps is None and time.monotonic() - self._saved_at > SAVE_SECONDS
            decision = Decision.stop if self.control_file.exists() else Decision.save if overdue else Decision.proceed
        return Decision(ranks.broadcast_number(decision))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        unsaved = self._last_saved < state.global_step < state.max_steps
        at_end = self.spec.train.save_steps is None and self.spec.train.averaging is None
        if at_end and unsaved and not self.paused and not self.stopped:
            evaluated = self.validation is not None and self.validation[0] == state.global_step
            self._save(control, evaluate=not evaluated)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        self._losses.append((state.global_step - self.last_logged, logs["loss"]))
        is_first, self.last_logged = self.last_logged == 0, state.global_step
        metrics = {name: float(value) for name, value in logs.items() if name != "epoch" and math.isfinite(value)}
        logged = self.trainer.logged
        computed_at, memory = (self.trainer.clock.now(), self._memory()) if logged is None else logged
        metrics["tokens_per_second"] = self._tokens_per_second(logs, computed_at)
        self.writer.write(
            Progress(
                # When the step was computed: steps that are read later are not read at equal distances.
                time=time.time() - (time.perf_counter() - computed_at),
                step=state.global_step,
                epoch=round(state.epoch or 0.0, 6),
                metrics=metrics,
                peak_memory_bytes=memory[0][1],
                rank_memory_bytes=tuple(now for now, _ in memory),
                rank_peak_memory_bytes=tuple(peak for _, peak in memory),
                tokens_seen=int(self._tokens),
                link_mbit_per_s=round(self._parallel.mbit_per_s, 3) if self._parallel else None,
                parallel_speedup=self._parallel.speedup if self._parallel else None,
                not_finite=tuple(name for name, value in logs.items() if not math.isfinite(value)),
            )
        )
        if diverged := _divergence(state.global_step, logs, scaled=self.spec.compute.dtype == "fp16"):
            # Before the first step nothing has been trained: weights that were no numbers then are the cause.
            raise (is_first and self._ruined_model()) or diverged
        if message := self._loss_watch.problem(state.global_step, logs["loss"]):
            self.writer.write(Warned(message=message))

    def _ruined_model(self) -> JobFailure | None:
        """The failure of a job one of whose models has weights in its files that are no numbers; None: none has."""
        for _, source in parts_of(self.spec, ModelSource):
            is_adapter = isinstance(source, AdapterSpec)
            paths = adapter_weights(source.directory) if is_adapter else whole_weights(source).paths
            if weight := first_not_finite(paths, self._heartbeat):
                return JobFailure(
                    Reason.invalid_model,
                    f"{'adapter' if is_adapter else 'model'} {source.model!r}: {weight.name} in {weight.file} has "
                    "values that are not finite (NaN or infinity). Download it again, or name one whose training "
                    "did not diverge.",
                )
        return None

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._busy_since = None  # an evaluation follows a log
        shown = {name: float(value) for name, value in (metrics or {}).items() if name != "epoch"}
        shown = {name: value for name, value in shown.items() if math.isfinite(value)}
        if "eval_loss" in shown:
            self.validation = (state.global_step, shown["eval_loss"])
        self.writer.write(Evaluated(step=state.global_step, epoch=round(state.epoch or 0.0, 6), metrics=shown))
        self._apply_evaluation(shown, state, control)
        if self._random is not None:
            random_state.restore(self._random, self.trainer.args.device)
            self._random = None

    def _apply_evaluation(self, metrics: dict[str, float], state: TrainerState, control: TrainerControl) -> None:
        """Save the best model so far, and stop early where the job requests it. Rank 0 decides for all."""
        is_best = self.early_stopping.is_best(metrics, self.checkpoint_fields(state))
        should_stop = self.early_stopping.should_stop(metrics, state.global_step)
        is_best, should_stop = (bool(ranks.broadcast_number(own)) for own in (is_best, should_stop))
        if state.global_step >= state.max_steps:
            return  # the job ends with this step
        if should_stop:
            # No checkpoint of the last step: a job that dies now repeats this evaluation, and stops here again.
            self.stopped, self.paused = True, False
            control.should_training_stop, control.should_save = True, False
            self.writer.write(Warned(message=self.early_stopping.stop_message(state.global_step, state.max_steps)))
        elif is_best:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._busy_since = None
        self._losses.clear()
        self._last_saved = state.global_step
        self._saved_at = time.monotonic()
        state.log_history.clear()  # it is in the event file; each checkpoint would hold all of it
        if self.paused:
            self.trainer.saver.wait()

    def checkpoint_fields(self, state: TrainerState) -> dict[str, Any]:
        """The fields of a checkpoint event that describe the progress of training."""
        steps = sum(count for count, _ in self._losses)
        fresh = self.validation is not None and self.validation[0] == state.global_step
        validation_loss = self.validation[1] if self.validation and fresh else None
        return {
            "step": state.global_step,
            "epoch": max(1, math.ceil(round(state.epoch or 0.0, 6))),
            "train_loss": sum(count * loss for count, loss in self._losses) / steps if steps else None,
            "validation_loss": validation_loss,
            "perplexity": perplexity_of(validation_loss) if self.spec.algorithm == "sft" else None,
        }

    def _is_planned(self, state: TrainerState) -> bool:
        """Whether a checkpoint is planned after this step; with periodic averaging, or was since the last average."""
        steps = self.spec.train.save_steps or state.max_steps // self.spec.train.n_epochs
        interval = self.spec.train.averaging.interval if self.spec.train.averaging else 1
        return passes_multiple(state.global_step, interval, steps)

    def _is_evaluated(self, state: TrainerState) -> bool:
        return self.spec.train.eval_steps is not None and state.global_step % self.spec.train.eval_steps == 0

    def _save(self, control: TrainerControl, evaluate: bool = True) -> None:
        control.should_log = True
        control.should_evaluate = evaluate and self.spec.data.validation is not None
        control.should_save = True

    def _memory(self) -> list[list[int]]:
        """What each rank holds now, and its peak. A collective."""
        device = self.trainer.args.device
        return ranks.gather_numbers([memory_bytes(device), peak_memory_bytes(device)])

    def _tokens_per_second(self, logs: dict[str, float], now: float) -> float:
        """Tokens without padding per second since the last log, without evaluations and saves.

        Args:
            now: when the device had computed these steps. In `on_step_end` it may not have.
        """
        tokens, self._tokens = logs.get("num_tokens", 0.0) - self._tokens, logs.get("num_tokens", 0.0)
        busy, self._busy_since = now - self._busy_since if self._busy_since is not None else 0.0, now
        return round(tokens / busy, 3) if busy else 0.0


def memory_bytes(device: torch.device) -> int:
    """cuda: allocated by torch. Elsewhere: resident set of this process."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else resident_memory()


def peak_memory_bytes(device: torch.device) -> int:
    """cuda: peak allocated by torch. Elsewhere: peak resident set of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux, bytes on macOS


def _divergence(step: int, logs: dict[str, float], *, scaled: bool) -> JobFailure | None:
    # Loss scaling finds its scale by overflows: it skips such a step, and halves the scale.
    for name in ("loss",) if scaled else ("loss", "grad_norm"):
        if not math.isfinite(logs.get(name, 0.0)):
            return JobFailure(
                Reason.diverged,
                f"{name} became {logs[name]} at step {step}, so every later step would be wasted: earlier checkpoints "
                "are kept.",
            )
    return None
