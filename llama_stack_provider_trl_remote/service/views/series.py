"""The metric points of a job as curves, with few enough points to draw.

A range with more points is divided into parts of equally many steps. Of each part the lowest and the highest point of a
metric are kept, so a spike is seen at any scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from sqlite3 import Row
from typing import Any

from pydantic_core import from_json

from llama_stack_provider_trl.jobs.store.store import Store

from ..http.bodies import Curve, SeriesResponse
from .events import read_states

LAST_STEP = 2**53


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
    curves = _Curves(metrics)
    with store.snapshot():  # events and points are stored together: the cursor is exactly behind these points
        _, (cursor,) = read_states(store, [job_uuid])
        found = store.point_range(job_uuid, begin, end)
        if found is not None:
            first, last = found
            width = math.ceil((last - first + 1) / (points // 2))
            rows = store.scan_points(job_uuid, begin, end)
            for _, part in groupby(rows, key=lambda row: (row["step"] - first) // width):
                curves.add(part)
    return SeriesResponse(
        train=curves.of("train"), validation=curves.of("validation"), exact=curves.exact, next=str(cursor)
    )


class _Curves:
    """Collects the points of metrics, part by part."""

    def __init__(self, wanted: Collection[str]) -> None:
        self.exact = True
        self._wanted = frozenset(wanted)
        self._curves: dict[str, dict[str, Curve]] = {}

    def of(self, kind: str) -> dict[str, Curve]:
        return self._curves.get(kind, {})

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


def _extremes(values: Sequence[float]) -> Sequence[int]:
    """Positions of the lowest and the highest of some values. What is no number is left out where others are."""
    if len(values) <= 2:
        return range(len(values))
    if math.isfinite(sum(values)):
        return sorted({values.index(min(values)), values.index(max(values))})
    finite = [number for number, value in enumerate(values) if math.isfinite(value)] or [0]
    return sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})
