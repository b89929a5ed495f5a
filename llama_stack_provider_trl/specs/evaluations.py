"""Consequences of an evaluation: the best checkpoint so far, and early stopping; and of the losses between them.

The rules are those of transformers: the first of equals is the best (`load_best_model_at_end`), and patience counts
consecutive evaluations that do not improve on the best by more than `min_delta` (`EarlyStoppingCallback`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from .job import JobSpec
from .methods import METHODS, Algorithm

HIGHER_IS_BETTER = {
    "eval_loss": False,
    "eval_mean_token_accuracy": True,
    "eval_rewards/accuracies": True,
    "eval_rewards/margins": True,
}
METRICS: dict[Algorithm, tuple[str, ...]] = {name: method.metrics for name, method in METHODS.items()}
"""The metrics that `best_checkpoint` and `early_stopping` accept."""


def perplexity_of(loss: float | None) -> float | None:
    """None of no loss, and beyond 700, where exp overflows a float and a perplexity has no meaning."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def is_better(metric: str, value: float, than: float | None, by: float = 0.0) -> bool:
    """Whether `value` improves on the best so far by more than `by`."""
    if than is None:
        return True
    return value - than > by if HIGHER_IS_BETTER[metric] else than - value > by


def best_step(metric: str, evaluations: Iterable[tuple[int, Mapping[str, float]]]) -> int | None:
    """The step of the best of (step, metrics), given by step; None where none has the metric."""
    best: tuple[int, float] | None = None
    for step, metrics in evaluations:
        if metric in metrics and is_better(metric, metrics[metric], best and best[1]):
            best = step, metrics[metric]
    return best and best[0]


class EarlyStoppingTracker:
    """Tracks the evaluations of a job: the best one so far, and when to stop.

    Args:
        notes: its state, as JSON values. Step checkpoints hold it, so that a resumed job decides as an uninterrupted
            one.
    """

    def __init__(self, spec: JobSpec, notes: dict[str, Any]) -> None:
        self.spec, self.notes = spec, notes

    @property
    def best(self) -> dict[str, Any] | None:
        """`value` of the best evaluation so far, and its `standing`, the fields of a checkpoint event."""
        return self.notes.get("best")

    def is_best(self, metrics: Mapping[str, float], standing: Mapping[str, Any]) -> bool:
        """Record an evaluation, and return whether it is the best so far by the job's `best_checkpoint`."""
        metric = self.spec.train.best_checkpoint
        if metric is None or metric not in metrics:
            return False
        if not is_better(metric, metrics[metric], self.best["value"] if self.best else None):
            return False
        self.notes["best"] = {"value": metrics[metric], "standing": dict(standing)}
        return True

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Record an evaluation, and return whether the job's patience is exhausted."""
        rule = self.spec.train.early_stopping
        if rule is None or rule.metric not in metrics:
            return False
        value = metrics[rule.metric]
        seen = self.notes.setdefault("early_stopping", {"best": None, "best_step": None, "waited": 0})
        if is_better(rule.metric, value, seen["best"], rule.min_delta):
            seen.update(best=value, best_step=step, waited=0)
        else:
            seen["waited"] += 1
        return bool(seen["waited"] >= rule.patience)

    def stop_message(self, step: int, total_steps: int) -> str:
        """The warning of a job that stops early."""
        rule, seen = self.spec.train.early_stopping, self.notes["early_stopping"]
        assert rule is not None
        return (
            f"early_stopping: ended at step {step} of {total_steps}, because {rule.metric} was not better than "
            f"{seen['best']:.6g} (step {seen['best_step']}) by more than min_delta={rule.min_delta:g} in "
            f"{seen['waited']} evaluations in a row"
        )


class LossWatch:
    """Tracks the training loss of an attempt, to report once that it has blown up."""

    POINTS = 20
    """Logged losses whose median is compared: single ones are high where their rows are hard."""
    TIMES, SHARE = 10, 0.5
    """It has blown up above so many times its lowest median, and above this share of the first one."""

    def __init__(self, spec: JobSpec) -> None:
        # The loss of a method that trains on the model's own answers, or of an installed one, may be anything.
        self._is_over = spec.method.answer_tokens is not None or spec.method.installed is not None
        self._last: deque[float] = deque(maxlen=self.POINTS)
        self._first = self._lowest = math.inf

    def problem(self, step: int, loss: float) -> str | None:
        """What the loss at a step shows; None: nothing, or what was reported before."""
        self._last.append(loss)
        if self._is_over or len(self._last) < self.POINTS:
            return None
        median = sorted(self._last)[self.POINTS // 2]
        self._first = median if math.isinf(self._first) else self._first
        self._lowest = min(self._lowest, median)
        if self._lowest < 0 or median <= max(self.TIMES * self._lowest, self.SHARE * self._first):
            return None
        self._is_over = True
        return (
            f"the loss has blown up: around step {step} its median over {self.POINTS} points is {median:.3g}, after "
            f"{self._lowest:.3g} before. Continue from a checkpoint before that with a lower learning rate; a lower "
            "max_grad_norm and a schedule that ends at 0 (lr_scheduler) keep it from coming back"
        )
