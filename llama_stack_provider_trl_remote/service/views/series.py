"""The metric points of a job as curves, with few enough points to draw.

A range with more points is divided into parts of equally many steps. Of each part the lowest and the highest point of a
metric are kept, so a spike is seen at any scale, and of the range the first and the last one. No point is computed.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic_core import from_json

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.store import Store

from ..http.bodies import Curve, SeriesResponse
from .events import Cursor, read_states

LAST_STEP = 2**53
_AT_ONCE = 400
"""Steps that are read together, at least."""
_ENDS = 2
"""Points of a curve beside those of its parts: the first and the last one."""
_KEPT, _KEPT_BYTES, _LARGEST = 64, 8 << 20, 1 << 20
"""Answers that are kept, their bytes together, and those of one: all curves of a job have about 330 kB."""


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
            span = last - first + 1
            # Of so few steps all points are kept, the ends among them.
            parts = points // 2 if span <= points else max(1, (points - _ENDS) // 2)
            width = math.ceil(span / parts)
            piece = width * math.ceil(_AT_ONCE / width)
            for start in range(first, last + 1, piece):
                read = store.points_together(job_uuid, start, min(last, start + piece - 1))
                for kind, (steps, texts) in read.items():
                    curves.add(kind, steps, from_json(texts), first, width)
        train, validation = (
            curves.of(kind, partial(store.step_times, job_uuid, kind)) for kind in ("train", "validation")
        )
    return SeriesResponse(train=train, validation=validation, exact=curves.exact, next=str(cursor))


class SeriesAnswers:
    """The answers of `read_series` as JSON. Those of jobs that have ended are kept: their points change no more.

    Safe to share between threads.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Asked, bytes] = OrderedDict()
        """The one that was requested last is the last."""
        self._bytes = 0

    def read(self, job_uuid: str, metrics: Collection[str], points: int, begin: int = 0, end: int = LAST_STEP) -> bytes:
        """See `read_series`. Raises JobNotFound."""
        store = self._store
        with store.snapshot():
            (state,), (cursor,) = read_states(store, [job_uuid])
            asked = _Asked(store.age_of(job_uuid), cursor, frozenset(metrics), points, begin, end)
        kept = self._find(asked) if state in TERMINAL else None
        if kept is not None:
            return kept
        found = read_series(store, job_uuid, metrics, points, begin, end)
        answer = found.model_dump_json().encode()
        # Events may have come since. Another job of this name may have come, too: nothing asks for this age again.
        if state in TERMINAL and found.next == str(cursor) and len(answer) + asked.size <= _LARGEST:
            self._keep(asked, answer)
        return answer

    def _find(self, asked: _Asked) -> bytes | None:
        with self._lock:
            kept = self._kept.get(asked)
            if kept is not None:
                self._kept.move_to_end(asked)
            return kept

    def _keep(self, asked: _Asked, answer: bytes) -> None:
        with self._lock:
            if asked in self._kept:  # another thread has read the same
                return
            self._kept[asked] = answer
            self._bytes += len(answer) + asked.size
            while len(self._kept) > _KEPT or self._bytes > _KEPT_BYTES:
                oldest, dropped = self._kept.popitem(last=False)
                self._bytes -= len(dropped) + oldest.size


class _Asked(NamedTuple):
    """What an answer depends on."""

    age: int
    """Of the job: one that is submitted under the name of a deleted one has another."""
    cursor: Cursor
    """Behind the last of its points."""
    metrics: frozenset[str]
    points: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return sum(map(len, self.metrics))


class _Kept(NamedTuple):
    """The points of a curve that are kept, by step."""

    steps: list[int]
    values: list[float]


class _Curves:
    """Collects the points of metrics, part by part."""

    def __init__(self, wanted: Collection[str], *, with_ends: bool) -> None:
        self.exact = True
        self._wanted = frozenset(wanted)
        self._with_ends = with_ends
        self._curves: dict[str, dict[str, _Kept]] = {}
        self._last: dict[tuple[str, str], tuple[int, float]] = {}
        """Of each kind and metric step and value of the last number that is known."""

    def of(self, kind: str, times: Callable[[Iterable[int]], Mapping[int, tuple[float, float]]]) -> dict[str, Curve]:
        """The curves of all points that were added.

        Args:
            times: epoch and time of some steps.
        """
        kept = self._curves.get(kind, {})
        for name, (steps, values) in kept.items():
            last = self._last.get((kind, name))
            if last is not None and steps[-1] < last[0]:
                steps.append(last[0])
                values.append(last[1])
        at = times(sorted({step for curve in kept.values() for step in curve.steps})) if kept else {}
        return {
            name: Curve(
                step=steps,
                epoch=[at[step][0] for step in steps],
                time=[at[step][1] for step in steps],
                value=[*values],
            )
            for name, (steps, values) in kept.items()
        }

    def add(self, kind: str, steps: Sequence[int], points: list[dict[str, Any]], first: int, width: int) -> None:
        """Add points of a kind, by step. Parts begin at step `first` and have `width` steps."""
        curves, begin = self._curves.setdefault(kind, {}), 0
        while begin < len(steps):
            end = bisect_left(steps, first + ((steps[begin] - first) // width + 1) * width, begin)
            for name, (numbers, column) in sorted(self._columns(points[begin:end]).items()):
                kept, last = self._kept(column, is_first=name not in curves)
                if last is not None:
                    self._last[kind, name] = steps[begin + numbers[last]], column[last]
                curve = curves.setdefault(name, _Kept([], []))
                for number in kept:
                    curve.steps.append(steps[begin + numbers[number]])
                    curve.values.append(column[number])
            begin = end

    def _kept(self, column: Sequence[float], *, is_first: bool) -> tuple[Sequence[int], int | None]:
        """Positions of the values of a part that are kept, and that of its last number, where the ends of a curve are.

        Args:
            is_first: no part of the curve was before this one.
        """
        kept, last = _extremes(column), None
        if self._with_ends:
            count = range(len(column))
            last = _finite(column, reversed(count))
            if is_first and (first := _finite(column, count)) is not None:
                kept = sorted({first, *kept})
        self.exact = self.exact and len(kept) == len(column)
        return kept, last

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
