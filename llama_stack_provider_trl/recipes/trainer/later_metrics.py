"""Metrics that are read a step later.

To read a step's loss Python waits until the device has computed it, and queues nothing meanwhile. Here what a step logs
is copied to CPU memory behind it, and read once the next step's first forward and backward are queued. Where anything
depends on it (an evaluation, a checkpoint, a pause, the end), it is read in its step, by Trainer itself, and after a
failure before that is reported. No rank waits for another one to read: what ranks exchange for a log is exchanged in
the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.trainer_pt_utils import nested_gather
from transformers.training_args import ParallelMode

from ... import faults
from ...errors import JobFailure
from ...specs.job import JobSpec
from ..fast.layout import moved
from .metrics import TrainingMetrics


def why_in_step(spec: JobSpec) -> str:
    """Why a job's metrics are read in their step: what reads them may not wait. Empty: it may."""
    if spec.train.averaging is not None:
        return "workers with weights of their own sum theirs when they log"
    if spec.method.answer_tokens is not None:
        return "the model answers prompts before each step, for which Python waits at every token"
    if spec.method.installed is not None:
        return "an installed method may decide by them"
    if spec.compute.activation_offloading:
        # TRL's OffloadActivations synchronizes its streams when it ends, so that nothing is queued before a read.
        return "enable_activation_offloading waits for the device in every micro step"
    return ""


class DeviceClock:
    """When a device gets to a point of its queue, by `time.perf_counter`. A CPU has no queue."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._known: tuple[torch.cuda.Event, float] | None = None
        """The last point whose time is known. Times from point to point are short: CUDA gives them in fp32."""

    def now(self) -> float:
        """The time; the device has done all that is queued."""
        now = time.perf_counter()
        if self._is_cuda:
            self._known = self._recorded(), now
        return now

    def mark(self) -> torch.cuda.Event | float:
        return self._recorded() if self._is_cuda else time.perf_counter()

    def time_of(self, mark: torch.cuda.Event | float) -> float:
        """When the device got to a mark, which is later than those before. Waits for it."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        if self._known is None:
            self._known = mark, time.perf_counter()
        else:
            before, seconds = self._known
            self._known = mark, seconds + before.elapsed_time(mark) / 1000
        return self._known[1]

    @staticmethod
    def _recorded() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class HeldStep:
    """What a step logs, on its way to CPU memory."""

    steps: int
    """Since the last log."""
    loss: torch.Tensor
    """Summed over them."""
    grad_norm: torch.Tensor | float | None
    learning_rate: float
    sums: dict[str, torch.Tensor]
    num_tokens: torch.Tensor | float
    operations: torch.Tensor | float
    """Floating point operations since the last log."""
    start_time: float
    beside: Any
    computed: torch.cuda.Event | float
    """A mark of the clock: behind it all of this is in CPU memory."""


class LoggedStep(NamedTuple):
    """What the callback of `log` needs of a step that is logged later."""

    computed_at: float
    """When the device had computed it, by `time.perf_counter`."""
    beside: Any
    """What `beside_metrics` returned in that step."""


class LaterMetrics(TrainingMetrics):
    """A trainer that reads what a step logs after the next one is queued, where the job does."""

    logged: LoggedStep | None = None
    """While a step is logged later; None: what is logged is of the step at hand, which the device has computed."""
    _held: HeldStep | None = None
    _globalstep_last_logged: int

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.clock = DeviceClock(self.args.device)
        self.beside_metrics: Callable[[], Any] = lambda: None
        """What is logged beside a step's metrics, called in the step. A collective. Set by `JobCallback`."""
        may = self.spec.may_read_later(self.args.device.type)
        self._why_in_step = why_in_step(self.spec) if may else "the job does not request it"
        self.metrics_read: str | None = None
        """For the job's record; None: the job's option leaves them in their step."""
        if may:
            self.metrics_read = f"in their step: {self._why_in_step}" if self._why_in_step else "a step later"

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.read_metrics()
        return loss

    def read_metrics(self) -> None:
        """Log the step whose metrics are not read yet, if there is one. Raises JobFailure: diverged, at that step."""
        held, self._held = self._held, None
        if held is None:
            return
        computed_at = self.clock.time_of(held.computed)
        loss = float(held.loss)
        logs: dict[str, float] = {"loss": loss / held.steps}
        if held.grad_norm is not None:
            logs["grad_norm"] = float(held.grad_norm)
        logs["learning_rate"] = held.learning_rate
        self._total_loss_scalar += loss
        self.state.total_flos += float(held.operations)
        with self._as_of(held):
            self.logged = LoggedStep(computed_at, held.beside)
            self.log(logs, held.start_time)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: torch.nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Trainer's, which finds nothing to log where that is put off."""
        in_step = (
            self.control.should_save
            or self.control.should_evaluate
            or self.control.should_training_stop
            or self.control.should_epoch_stop
            or self.state.global_step >= self.state.max_steps
        )
        is_due = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if in_step:
            self.read_metrics()
        if is_due and not in_step and not self._why_in_step:
            self._held = self._hold(tr_loss, grad_norm, start_time, learning_rate)
            faults.reach(f"held-{self.state.global_step}")
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )

    def _hold(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        start_time: float,
        learning_rate: float | None,
    ) -> HeldStep:
        """What Trainer would log now, copied behind what is queued. A collective."""
        step, sums = self.state.global_step, self._sums["train"]
        steps = step - self._globalstep_last_logged
        self._globalstep_last_logged = step
        loss = nested_gather(tr_loss, self.args.parallel_mode).mean()
        tr_loss -= tr_loss
        if hasattr(grad_norm, "full_tensor"):  # of shards
            grad_norm = grad_norm.full_tensor()
        stacked = _copied(torch.stack(list(sums.values()))) if sums else ()
        operations, self.current_flos = self._all_operations(), 0
        held = HeldStep(
            steps=steps,
            loss=_copied(loss),
            grad_norm=_copied(grad_norm),
            learning_rate=self._get_learning_rate() if learning_rate is None else learning_rate,
            sums=dict(zip(sums, stacked, strict=True)),
            num_tokens=_copied(self.num_tokens),
            operations=_copied(operations),
            start_time=start_time,
            beside=self.beside_metrics(),
            computed=self.clock.mark(),
        )
        sums.clear()
        return held

    def _all_operations(self) -> torch.Tensor | float:
        """Those since the last log, of all ranks: Trainer's sum, which it waits for. A collective."""
        own: float = self.current_flos
        if self.args.parallel_mode is not ParallelMode.DISTRIBUTED:
            return own
        gathered: torch.Tensor = self.accelerator.gather(moved(torch.tensor([float(own)]), self.args.device))
        return gathered.sum()

    @contextmanager
    def _as_of(self, held: HeldStep) -> Iterator[None]:
        """While this is open, the trainer has the sums of the step that is logged. Its number and epoch are still those
        of the state: the step that is queued counts once its optimizer has stepped."""
        now = self._sums["train"], self.num_tokens
        self._sums["train"], self.num_tokens = held.sums, held.num_tokens
        try:
            yield
        finally:
            self._sums["train"], self.num_tokens = now
            self.logged = None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. A step that was computed is reported before what ends the training after it."""
        try:
            return super()._inner_training_loop(*args, **kwargs)
        except BaseException:
            self._read_after_failure()
            raise

    def _read_after_failure(self) -> None:
        try:
            self.model.train()  # what is logged is of the training, wherever it failed
            self.read_metrics()
        except JobFailure:  # numbers that are none: the cause of what failed
            raise
        except Exception:  # the device has failed, or the disk is full: the failure at hand says so
            return

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.read_metrics()
        return super()._finalize_training(*args, **kwargs)


def _copied(value: Any) -> Any:
    """A tensor's values in CPU memory, complete when the device has done what is queued now; a number as it is."""
    if not torch.is_tensor(value):
        return value
    if value.device.type != "cuda":
        return value.detach().to("cpu", copy=True)
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value.detach(), non_blocking=True)
