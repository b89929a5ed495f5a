"""Metric points as the curves of a plot: chosen, smoothed and thinned. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest

from .points import PlotPoint

LOSS = "loss"
SMOOTHING = 0.8
"""Weight of the points before; about five of them count."""
MOST_POINTS = 4000
"""Points of a curve in a file: two for each pixel of a wide screen."""
Axis = Literal["step", "epoch", "time"]
AXES: dict[Axis, str] = {"step": "optimizer step", "epoch": "epoch", "time": "minutes since the first point"}
"""Axis -> its label."""
Values = list[float]


class PlotCurve(NamedTuple):
    """A metric of one job. `x`, `y` and `smoothed` have one value for each point."""

    job_uuid: str
    kind: str
    """train or validation"""
    x: Values
    y: Values
    smoothed: Values
    """Empty: the same as `y`."""


class Panel(NamedTuple):
    """The axes of one metric."""

    metric: str
    curves: list[PlotCurve]


def curves_of(
    points: Mapping[str, Sequence[PlotPoint]], metrics: Sequence[str], x: Axis, smoothing: float = SMOOTHING
) -> list[Panel]:
    """The curves of each metric, job by job; an evaluation's value (`eval_loss`) is beside the training's (`loss`).
    Raises InvalidRequest: a job has no points, no job has one of the metrics, or a value is none of those expected.

    Args:
        points: job -> its metric points, by step.
        smoothing: weight of the points before, 0 (none) to less than 1.
    """
    if not points:
        raise InvalidRequest("JOB", None, "name at least one job.")
    if x not in AXES:
        raise InvalidRequest("x", x, f"expected one of {', '.join(AXES)}.")
    if not 0 <= smoothing < 1:
        raise InvalidRequest("smoothing", smoothing, "expected a number from 0 to less than 1.")
    for job_uuid, found in points.items():
        if not found:
            raise InvalidRequest("JOB", job_uuid, "it has no metric points yet.")
    return [_panel(points, metric, x, smoothing) for metric in dict.fromkeys(metrics)]


def _panel(points: Mapping[str, Sequence[PlotPoint]], metric: str, x: Axis, smoothing: float) -> Panel:
    wanted = (("train", metric), ("validation", metric), ("validation", f"eval_{metric}"))
    curves = [_curve(job, points[job], kind, name, x, smoothing) for job in points for kind, name in wanted]
    drawn = [curve for curve in curves if curve.x]
    if not drawn:
        known = sorted({name for found in points.values() for point in found for name in point.metrics})
        raise InvalidRequest("metric", metric, f"expected one of {', '.join(known)}.")
    return Panel(metric, drawn)


def _curve(job: str, points: Sequence[PlotPoint], kind: str, metric: str, x: Axis, smoothing: float) -> PlotCurve:
    began = min(point.time for point in points)
    found = [
        ((point.time - began) / 60 if x == "time" else float(getattr(point, x)), float(value))
        for point in points
        if point.kind == kind and (value := point.metrics.get(metric)) is not None and math.isfinite(value)
    ]
    xs, ys = [one for one, _ in found], [other for _, other in found]
    smoothed = smooth(ys, smoothing) if kind == "train" and smoothing and len(ys) > 2 else []
    kept = thin(ys)
    return PlotCurve(job, kind, *([values[i] for i in kept] if values else [] for values in (xs, ys, smoothed)))


def smooth(values: Sequence[float], weight: float) -> Values:
    """Exponential moving average. The first values are not drawn towards 0: the weights of each average sum to 1."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def thin(values: Sequence[float]) -> list[int]:
    """Positions of at most MOST_POINTS values, in order: the ends, and the lowest and highest of equal parts."""
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))
    parts = (MOST_POINTS - 2) // 2
    kept = {0, len(values) - 1}
    for part in range(parts):
        positions = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        kept |= {min(positions, key=values.__getitem__), max(positions, key=values.__getitem__)}
    return sorted(kept)
