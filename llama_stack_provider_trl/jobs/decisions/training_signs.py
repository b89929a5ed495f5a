"""What the points of a training show to be wrong, each with what to do about it. Pure functions.

A sentence keeps its words while its cause lasts: who reads the status again and again can tell what is new.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...specs.job import JobSpec

WINDOW = 20
"""Points at the begin and at the end of a training that are compared."""
_GROUPS, _SILENT = 10, 9
"""Of so many steps of GRPO, the ones without any signal that are too many."""
_NO_RATE = 1e-3
"""A learning rate below this share of the requested one trains next to nothing."""
_WORSE = 1.02
"""An evaluation is worse where its loss is higher than the best one by this factor."""
_NEGLIGIBLE = 1e-3
"""A difference of losses below this share of the loss at the beginning tells nothing."""
_LEAST_EVALUATIONS = 2
"""So many evaluations in a row are worse than the best."""
_FAR_CLIPPED = 5
"""The median norm of the gradient is above so many times the clip. Norms a little above it are common in trainings that
learn well."""


class WatchedPoint(NamedTuple):
    """Metrics after an optimizer step."""

    step: int
    metrics: Mapping[str, float]


class Watched(NamedTuple):
    """The points of a job that its signs are read from, each part by step."""

    first: Sequence[WatchedPoint] = ()
    """The first `WINDOW` training points."""
    last: Sequence[WatchedPoint] = ()
    """The last `WINDOW` training points."""
    evaluations: Sequence[WatchedPoint] = ()
    """The last evaluations."""
    at_best: Sequence[WatchedPoint] = ()
    """The last training points up to the evaluation of the lowest `eval_loss`."""


NOTHING_WATCHED = Watched()


def best_evaluation(evaluations: Sequence[WatchedPoint]) -> WatchedPoint | None:
    """The evaluation of the lowest `eval_loss`, the first of equal ones; None: none has a number."""
    known = [one for one in evaluations if math.isfinite(one.metrics.get("eval_loss", math.nan))]
    return min(known, key=lambda one: one.metrics["eval_loss"], default=None)


def signs_of(spec: JobSpec, watched: Watched, total_steps: int | None) -> list[str]:
    """Sentences on a training; empty: nothing is conspicuous.

    Args:
        total_steps: of the job; None: not known.
    """
    rate = _no_rate(spec, watched, total_steps)
    found = [_no_signal(watched), rate, _overfits(spec, watched), _always_clipped(spec, watched)]
    if rate is None:  # which explains it
        found.append(_flat_loss(spec, watched))
    return [sentence for sentence in found if sentence is not None]


def _no_signal(watched: Watched) -> str | None:
    """Of GRPO: the answers to a prompt have equal rewards, so that none is better than another."""
    silent = list(_values(watched.last, "frac_reward_zero_std"))[-_GROUPS:]
    if len(silent) < _GROUPS or sum(share >= 1 for share in silent) < _SILENT:
        return None
    return (
        f"no reward signal: in at least {_SILENT} of the last {_GROUPS} steps all answers to each prompt had the same "
        "reward, so the step learned nothing from it. Look at the answers (provider option samples) and at "
        "rewards/NAME/mean: a mean of 0 asks for easier prompts or a reward in parts, a mean at its maximum for harder "
        "prompts; raise temperature or num_generations so that answers differ"
    )


def _no_rate(spec: JobSpec, watched: Watched, total_steps: int | None) -> str | None:
    rates = list(_values(watched.last, "learning_rate"))
    least = spec.train.optimizer.learning_rate * _NO_RATE
    if len(rates) < WINDOW or max(rates) > least:
        return None
    if total_steps is not None and watched.last[-1].step > 0.9 * total_steps:  # a schedule ends at 0
        return None
    return (
        f"the learning rate is below {least:.3g}, a thousandth of the requested "
        f"{spec.train.optimizer.learning_rate:g}, for {WINDOW} points: nothing is trained. Lower num_warmup_steps (or "
        "warmup_ratio) where it is still to rise; where it has fallen too early, choose another lr_scheduler"
    )


def _overfits(spec: JobSpec, watched: Watched) -> str | None:
    best = best_evaluation(watched.evaluations)
    if best is None:
        return None
    lowest = best.metrics["eval_loss"]
    later = [one.metrics["eval_loss"] for one in watched.evaluations if one.step > best.step and _has_loss(one)]
    at_begin = [abs(loss) for loss in _values(watched.first, "loss")]
    limit = lowest + max(abs(lowest) * (_WORSE - 1), _NEGLIGIBLE * _median(at_begin) if at_begin else 0)
    if len(later) < _LEAST_EVALUATIONS or min(later[-_LEAST_EVALUATIONS:]) <= limit:
        return None
    before, now = list(_values(watched.at_best, "loss")), list(_values(watched.last, "loss"))[-len(watched.at_best) :]
    if not before or not now or _median(now) >= _median(before):
        return None
    keeps = "" if spec.train.best_checkpoint else " set best_checkpoint, which keeps it as the result;"
    return (
        f"eval_loss rises while the training loss falls: it was lowest at step {best.step} ({lowest:.4g}), the model "
        f"overfits. Use the checkpoint nearest to that step;{keeps} train fewer epochs or with early_stopping, lower "
        "the learning rate, or add rows"
    )


def _always_clipped(spec: JobSpec, watched: Watched) -> str | None:
    limit, norms = spec.train.optimizer.max_grad_norm, list(_values(watched.last, "grad_norm"))
    if not limit or len(norms) < WINDOW or min(norms) <= limit or _median(norms) <= _FAR_CLIPPED * limit:
        return None
    return (
        f"the gradient is clipped at each of the last {WINDOW} logged points, and the median of grad_norm is above "
        f"{_FAR_CLIPPED * limit:g}, {_FAR_CLIPPED} times max_grad_norm={limit:g}. Look for rows that do not belong to "
        "the data, raise num_warmup_steps (or warmup_ratio), or raise max_grad_norm where the loss falls as it should"
    )


def _flat_loss(spec: JobSpec, watched: Watched) -> str | None:
    """Not of a method that trains on the model's own answers, whose loss is of other answers each time, and not of an
    installed method, whose loss may be anything."""
    method = spec.method
    if method.answer_tokens is not None or method.installed is not None:
        return None
    begin, end = list(_values(watched.first, "loss")), list(_values(watched.last, "loss"))
    if len(begin) < WINDOW or len(end) < WINDOW:
        return None
    if watched.last[0].step <= watched.first[-1].step:
        return None
    rates = list(_values(watched.last, "learning_rate"))
    if rates and rates[-1] > rates[0]:  # the warmup is not over
        return None
    if _median(end) < _median(begin):
        return None
    return (
        f"the loss does not fall: the median of the last {WINDOW} points is not below that of the first {WINDOW} "
        f"({_median(begin):.4g}). Raise the learning rate (LoRA takes about ten times that of full fine-tuning); lower "
        "it where the curve jumps; check on the page Data that the loss covers the answers"
    )


def _median(values: Sequence[float]) -> float:
    """Not that of `statistics`, whose import takes each Llama Stack and each service with it."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def _has_loss(point: WatchedPoint) -> bool:
    return math.isfinite(point.metrics.get("eval_loss", math.nan))


def _values(points: Sequence[WatchedPoint], name: str) -> Iterator[float]:
    """Finite values of a metric, of the points that have it."""
    for point in points:
        value = point.metrics.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            yield value
