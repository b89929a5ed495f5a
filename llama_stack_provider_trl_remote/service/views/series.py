"""The metric points of a job as curves, with few enough points to draw.

A range with more points is divided into parts of equally many steps. Of each part the lowest and the highest point of a
metric are kept, so a spike is seen at any scale, and of the range the first and the last one. No point is computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from sqlite3 import Row
from typing import Any

from pydantic_core import from_json

from llama_stack_provider_trl.jobs.store.store import Store

from ..http.bodies import Curve, SeriesResponse
from .events import read_states

LAST_STEP = 2**53
_ENDS = 2
"""Points of a curve beside those of its parts: the first and the last one."""


def read_series(
    store: Store, job_uuid: str, metrics: Collection[str], points: int, begin: int = 0, end: int = LAST_STEP
) -> SeriesResponse:
    """The curves of a job between two steps.

    Args:
        metrics: their names; empty: all.
        points: that a curve may have at most.

    Raises:
        JobNotFound.
    """
    curves = _Curves(metrics, with_ends=points >= 2 + _ENDS)
    with store.snapshot():  # events and points are stored together: the cursor is exactly behind these points
        _, (cursor,) = read_states(store, [job_uuid])
        found = store.point_range(job_uuid, begin, end)
        if found is not None:
            first, last = found
            parts = max(1, (points - _ENDS) // 2)
            width = math.ceil((last - first + 1) / parts)
            rows = store.scan_points(job_uuid, begin, end)
            for _, part in groupby(rows, key=lambda row: (row["step"] - first) // width):
                curves.add(part)
    return SeriesResponse(
        train=curves.of("train"), validation=curves.of("validation"), exact=curves.exact, next=str(cursor)
    )


class _Curves:
    """Collects the points of metrics, part by part."""

    def __init__(self, wanted: Collection[str], *, with_ends: bool) -> None:
        self.exact = True
        self._wanted = frozenset(wanted)
        self._with_ends = with_ends
        self._curves: dict[str, dict[str, Curve]] = {}
        self._last: dict[tuple[str, str], tuple[Row, float]] = {}
        """Of each kind and metric the last point that is known."""

    def of(self, kind: str) -> dict[str, Curve]:
        """The curves of all points that were added."""
        found = self._curves.get(kind, {})
        if self._with_ends:
            for name, curve in found.items():
                row, value = self._last.get((kind, name), (None, 0.0))
                if row is not None and curve.step[-1] < row["step"]:
                    _append(curve, row, value)
        return found

    def add(self, rows: Iterator[Row]) -> None:
        """Add the points of one part, which are in the order of their steps."""
        all_rows = list(rows)
        for kind in sorted({row["kind"] for row in all_rows}):
            part = [row for row in all_rows if row["kind"] == kind]
            # At once: a call for each of 200,000 points takes half of the time.
            values = from_json(f"[{','.join([row['metrics'] for row in part])}]")
            curves = self._curves.setdefault(kind, {})
            for name, (numbers, column) in sorted(self._columns(values).items()):
                kept = _extremes(column)
                if self._with_ends:
                    count = range(len(column))
                    if name not in curves and (first := _finite(column, count)) is not None:
                        kept = sorted({first, *kept})
                    if (last := _finite(column, reversed(count))) is not None:
                        self._last[kind, name] = part[numbers[last]], column[last]
                self.exact = self.exact and len(kept) == len(column)
                curve = curves.setdefault(name, Curve(step=[], epoch=[], time=[], value=[]))
                for number in kept:
                    _append(curve, part[numbers[number]], column[number])

    def _columns(self, values: Sequence[dict[str, Any]]) -> dict[str, tuple[Sequence[int], Sequence[float]]]:
        """Metric -> the numbers of the points that have it, and its values there."""
        names = [*values[0]]
        if all([*point] == names for point in values):
            every = range(len(values))
            found = zip(names, zip(*(point.values() for point in values), strict=True), strict=True)
            return {name: (every, column) for name, column in found if self._is_wanted(name)}
        columns = dict[str, tuple[Sequence[int], Sequence[float]]]()
        for name in {name for point in values for name in point if self._is_wanted(name)}:
            numbers = [number for number, point in enumerate(values) if name in point]
            columns[name] = numbers, [values[number][name] for number in numbers]
        return columns

    def _is_wanted(self, name: str) -> bool:
        return not self._wanted or name in self._wanted


def _append(curve: Curve, row: Row, value: float) -> None:
    curve.step.append(row["step"])
    curve.epoch.append(row["epoch"])
    curve.time.append(row["time"])
    curve.value.append(value)


def _finite(values: Sequence[float], places: Iterable[int]) -> int | None:
    """The first of some places whose value is a finite number; None: none is."""
    return next((place for place in places if math.isfinite(values[place])), None)


def _extremes(values: Sequence[float]) -> Sequence[int]:
    """Positions of the lowest and the highest of some values. What is no number is left out where others are."""
    if len(values) <= 2:
        return range(len(values))
    if math.isfinite(sum(values)):
        return sorted({values.index(min(values)), values.index(max(values))})
    finite = [number for number, value in enumerate(values) if math.isfinite(value)] or [0]
    return sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})
