"""The metric points of a job as curves, with few enough points to draw.

A range with more points is divided into parts of equally many steps. Of each part the lowest and the highest point of a
metric are kept, so a spike is seen at any scale, and of the range the first and the last one. No point is computed.
"""

from __future__ import annotations

import math
import threading
from array import array
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
_LONG = 1 << 15
"""Steps of a job from which on its curves are kept while it runs: to read 200,000 points takes 0.7 s, and each page of
the job requests them."""
_FINEST = 1024
"""Parts, at least, into which curves are divided that are kept: a page has parts of several of them."""
_GROWING, _GROWING_POINTS = 16, 1 << 20
"""Jobs whose curves are kept while they run, and the points of all of them, of 16 bytes each: 16 MiB. A curve has up to
4,096: of a job 128 curves are kept, and 4 jobs of 64 curves beside each other."""


def read_series(
    store: Store,
    job_uuid: str,
    metrics: Collection[str],
    points: int,
    begin: int = 0,
    end: int = LAST_STEP,
    growing: Growing | None = None,
) -> SeriesResponse:
    """The curves of a job between two steps. Raises JobNotFound.

    Args:
        points: that a curve may have at most.
        growing: keeps the points of jobs that run, of which only the new ones are read.
    """
    with store.snapshot():  # events and points are stored together: the cursor is exactly behind these points
        _, (cursor,) = read_states(store, [job_uuid])
        found = store.point_range(job_uuid, begin, end)
        curves = None
        if growing is not None and found is not None and (begin, end) == (0, LAST_STEP):
            curves = growing.read(store, job_uuid, metrics, points, *found)
        if curves is None:
            curves = _Curves(metrics, with_ends=points >= 2 + _ENDS)
            if found is not None:
                first, last = found
                curves.read(store, job_uuid, first, first, last, _width(last - first + 1, points))
        train, validation = (
            curves.of(kind, partial(store.step_times, job_uuid, kind)) for kind in ("train", "validation")
        )
    return SeriesResponse(train=train, validation=validation, exact=curves.exact, next=str(cursor))


def _width(span: int, points: int) -> int:
    """Steps of a part, of so many steps, where a curve may have so many points."""
    # Of so few steps all points are kept, the ends among them.
    parts = points // 2 if span <= points else max(1, (points - _ENDS) // 2)
    return math.ceil(span / parts)


class Growing:
    """The curves of long jobs that run, in parts finer than pages show: of a job that is looked at again, only the
    points that have come since are read.

    A point that is kept stays as long as the last of those that are is the same: a later attempt that begins before it
    measures it again, at another time.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Grown] = OrderedDict()
        """By the age of the job: one that is submitted under the name of a deleted one has another. The one that was
        requested last is the last."""

    def read(
        self, store: Store, job_uuid: str, metrics: Collection[str], points: int, first: int, last: int
    ) -> _Curves | None:
        """The curves of all points of a job, from step `first` to `last`; None: it has too few, or more are requested
        than are kept. The store is in a snapshot."""
        span = last - first + 1
        width, wanted = 1 << max(0, (span // _FINEST).bit_length() - 1), _width(span, points)
        if span < _LONG or wanted < 2 * width or points < 2 + _ENDS:
            return None
        age = store.age_of(job_uuid)
        with self._lock:
            kept = self._kept.get(age)
            if kept is not None:
                self._kept.move_to_end(age)
        if kept is None or (kept.first, kept.width) != (first, width) or not kept.is_of(store, job_uuid):
            kept = _Grown(_Curves((), with_ends=True), first, width, first, None)
        end = last - (last - first) % width  # the last part is not over
        if end > kept.end:
            kept = kept.grown(store, job_uuid, end)
            self._keep(age, kept)
        whole = kept.curves.copy()
        whole.read(store, job_uuid, first, end, last, width)
        return whole.thinned(metrics, first, math.ceil(wanted / width) * width)

    def _keep(self, age: int, grown: _Grown) -> None:
        if 2 * grown.curves.points > _GROWING_POINTS:  # of hundreds of metrics: all others would have no place
            return
        with self._lock:
            self._kept[age] = grown
            self._kept.move_to_end(age)
            total = sum(one.curves.points for one in self._kept.values())
            while len(self._kept) > _GROWING or total > _GROWING_POINTS:
                _, dropped = self._kept.popitem(last=False)
                total -= dropped.curves.points


class _Grown(NamedTuple):
    """The points of a job before step `end`. It is not changed: another thread may read it."""

    curves: _Curves
    first: int
    width: int
    end: int
    last: tuple[str, int, tuple[float, float]] | None
    """Kind, step, epoch and time of its last point; None: it has none."""

    def is_of(self, store: Store, job_uuid: str) -> bool:
        """Whether these are still points of the job."""
        if self.last is None:
            return True
        kind, step, at = self.last
        return store.step_times(job_uuid, kind, [step]).get(step) == at

    def grown(self, store: Store, job_uuid: str, end: int) -> _Grown:
        """With the points before a later step."""
        curves = self.curves.copy()
        found = curves.read(store, job_uuid, self.first, self.end, end - 1, self.width)
        last = self.last
        if found is not None:
            kind, step = found
            last = kind, step, store.step_times(job_uuid, kind, [step])[step]
        return _Grown(curves, self.first, self.width, end, last)


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
        self._growing = Growing()

    def read(self, job_uuid: str, metrics: Collection[str], points: int, begin: int = 0, end: int = LAST_STEP) -> bytes:
        """See `read_series`. Raises JobNotFound."""
        store = self._store
        with store.snapshot():
            (state,), (cursor,) = read_states(store, [job_uuid])
            asked = _Asked(store.age_of(job_uuid), cursor, frozenset(metrics), points, begin, end)
        kept = self._find(asked) if state in TERMINAL else None
        if kept is not None:
            return kept
        # Of a job that has ended all points are read once more: its answer is kept as long as it is requested.
        growing = None if state in TERMINAL else self._growing
        found = read_series(store, job_uuid, metrics, points, begin, end, growing)
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

    steps: array[int]
    values: array[float]

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


class _Curves:
    """Collects the points of metrics, part by part."""

    def __init__(self, wanted: Collection[str], *, with_ends: bool) -> None:
        self.exact = True
        self._wanted = frozenset(wanted)
        self._with_ends = with_ends
        self._curves: dict[str, dict[str, _Kept]] = {}
        self._last: dict[tuple[str, str], tuple[int, float]] = {}
        """Of each kind and metric step and value of the last number that is known."""

    @property
    def points(self) -> int:
        """How many points it has."""
        return sum(len(curve.steps) for curves in self._curves.values() for curve in curves.values())

    def copy(self) -> _Curves:
        found = _Curves(self._wanted, with_ends=self._with_ends)
        found.exact, found._last = self.exact, {**self._last}
        found._curves = {
            kind: {name: _Kept(curve.steps[:], curve.values[:]) for name, curve in curves.items()}
            for kind, curves in self._curves.items()
        }
        return found

    def read(self, store: Store, job_uuid: str, first: int, begin: int, end: int, width: int) -> tuple[str, int] | None:
        """Add the points of a job from step `begin`, where a part begins, to step `end`. Returns kind and step of the
        last one; None: there is none.

        Args:
            first: where the first part begins.
            width: steps of a part.
        """
        piece, found = width * math.ceil(_AT_ONCE / width), None
        for start in range(begin, end + 1, piece):
            read = store.points_together(job_uuid, start, min(end, start + piece - 1))
            for kind, (steps, texts) in read.items():
                self.add(kind, steps, from_json(texts), first, width)
                if found is None or steps[-1] >= found[1]:
                    found = kind, steps[-1]
        return found

    def thinned(self, metrics: Collection[str], first: int, width: int) -> _Curves:
        """Some of these curves in parts that are wider: each a number of those that they have."""
        found = _Curves(metrics, with_ends=True)
        for kind, curves in self._curves.items():
            for name, (steps, values) in curves.items():
                if not found._is_wanted(name):
                    continue
                thinned, begin = _Kept(array("q"), array("d")), 0
                if (kind, name) in self._last:
                    found._last[kind, name] = self._last[kind, name]
                while begin < len(steps):
                    end = bisect_left(steps, first + ((steps[begin] - first) // width + 1) * width, begin)
                    kept, _ = found._kept(values[begin:end], is_first=not begin)
                    for number in kept:
                        thinned.add(steps[begin + number], values[begin + number])
                    begin = end
                found._curves.setdefault(kind, {})[name] = thinned
        found.exact = found.exact and self.exact
        return found

    def of(self, kind: str, times: Callable[[Iterable[int]], Mapping[int, tuple[float, float]]]) -> dict[str, Curve]:
        """The curves of all points that were added.

        Args:
            times: epoch and time of some steps.
        """
        kept = self._curves.get(kind, {})
        for name, curve in kept.items():
            last = self._last.get((kind, name))
            if last is not None and curve.steps[-1] < last[0]:
                curve.add(*last)
        at = times(sorted({step for curve in kept.values() for step in curve.steps})) if kept else {}
        return {
            name: Curve(
                step=[*steps],
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
                curve = curves.setdefault(name, _Kept(array("q"), array("d")))
                for number in kept:
                    curve.add(steps[begin + numbers[number]], column[number])
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
