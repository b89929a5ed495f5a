"""The trials of a search: sorted, as lines over an axis for each searched field, and how far each field goes along with
the objective. Pure functions."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from .job_view import path_of
from .rendering import number

LEAST_TRIALS = 10
"""Completed trials below which no importance is shown: over ten, chance alone gives a rank correlation beyond 0.33 in a
third of all searches."""
_PERMUTATIONS, _CHANCE = 500, 0.05
"""Orders of the results that are tried, and the share of them whose largest importance is above the level of chance."""
MOST_COMPARED = 8
"""Trials of the link that compares the best ones: as many as the page of a comparison takes."""
_HEIGHT, _TOP, _BOTTOM, _SIDE = 260, 44, 16, 84
_GAP = (150, 260)
"""Least and most units between two axes."""
_WIDTH = 980
_MOST_TICKS = 6
"""Numbers of an axis that are written out, if it has no more."""
_TICK_HEIGHT = 14
"""Units that a number of an axis takes."""
_MOST_NAMES = 12
"""Values of an axis that are written out."""
SHADES = 4
"""Classes of lines, from the best trials to the worst."""

type Trial = Mapping[str, Any]
"""As `resources_allocated.search.trials` has it."""


class Heading(NamedTuple):
    text: str
    address: str
    direction: str
    """`aria-sort`; empty: the table is not sorted by it."""
    is_number: bool


class TrialRow(NamedTuple):
    job_uuid: str
    state: str
    step: int
    total_steps: int | None
    values: list[str]
    """One per searched field."""
    value: float | None
    pruned: str
    is_best: bool


class Tick(NamedTuple):
    y: float
    text: str


class Axis(NamedTuple):
    name: str
    """As it is written above the axis."""
    path: str
    x: float
    ticks: list[Tick]
    is_log: bool


class TrialLine(NamedTuple):
    job_uuid: str
    points: str
    kind: str
    """best, or shade-0 (the best trials) to shade-3 (the worst ones)."""
    text: str


class Plot(NamedTuple):
    width: float
    height: float
    top: float
    bottom: float
    axes: list[Axis]
    lines: list[TrialLine]
    """The best one last: it is drawn over the others."""


class Importance(NamedTuple):
    path: str
    share: float
    """From 0, it goes along with nothing, to 1, the objective follows it in one order."""
    text: str
    """What was computed, and in which direction."""
    is_told: bool
    """Whether it is above what chance gives: see `Shown.chance`."""


@dataclass(frozen=True)
class Shown:
    """What the page of a search shows."""

    paths: list[str]
    headings: list[Heading]
    rows: list[TrialRow]
    plot: Plot | None
    """None: fewer than two trials have a value."""
    importances: list[Importance]
    chance: float
    """What the largest of these importances exceeds in one of 20 searches in which no field has an effect."""
    completed: int
    """Trials that have ended with a value, and count for it."""
    compared: str
    """The address that compares the best trials; empty: fewer than two have a value."""


def shown(job_uuid: str, search: Mapping[str, Any], sort: str = "") -> Shown:
    """What the page of a search shows.

    Args:
        search: `resources_allocated.search` of its job.
        sort: a searched field, or one of `trial`, `state`, `steps`, `value`, with a minus for the largest first; empty,
            or another text: the best trials first.
    """
    given: Sequence[Trial] = search["trials"]
    paths = [*dict.fromkeys(path for one in given for path in one["values"])]
    trials = [_finite(one) for one in given]
    best = (search.get("best") or {}).get("job_uuid")
    is_largest = search["direction"] == "maximize"
    ranked = sorted((one for one in trials if _is_number(one["value"])), key=lambda one: one["value"])
    ranked = ranked[::-1] if is_largest else ranked
    done = [one for one in ranked if one["state"] == "completed" and not one["pruned"]]
    first = [one["job_uuid"] for one in ranked[:MOST_COMPARED]]
    importances, chance = _importances(done, paths, str(search["objective"]))
    return Shown(
        paths,
        _headings(job_uuid, paths, str(search["objective"]), sort),
        [_row(one, paths, best) for one in _sorted(trials, sort, is_largest)],
        _plot(ranked, paths, str(search["objective"]), best),
        importances,
        chance,
        len(done),
        f"/compare?{urlencode([('job', name) for name in first])}" if len(first) > 1 else "",
    )


def _finite(one: Trial) -> Trial:
    """A trial without its values that are no finite numbers, such as NaN, or are larger than floats are: nothing can be
    sorted, drawn or ranked by them."""
    values = {path: value for path, value in one["values"].items() if not _is_endless(value)}
    return {**one, "values": values, "value": None if _is_endless(one["value"]) else one["value"]}


def _headings(job_uuid: str, paths: Sequence[str], objective: str, sort: str) -> list[Heading]:
    found = []
    for key, text, is_number in (
        ("trial", "Trial", False),
        ("value", objective, True),
        *((path, short_path(path), False) for path in paths),
        ("state", "State", False),
        ("steps", "Steps", True),
    ):
        chosen = f"-{key}" if sort == key else key
        direction = {key: "ascending", f"-{key}": "descending"}.get(sort, "")
        address = f"{path_of(job_uuid)}/trials?{urlencode({'sort': chosen})}"
        found.append(Heading(text, address, direction, is_number))
    return found


def _sorted(trials: Sequence[Trial], sort: str, is_largest: bool) -> list[Trial]:
    """Trials without a value of the column come last, whatever the direction."""
    key, reverse = (sort.removeprefix("-"), sort.startswith("-")) if sort else ("value", is_largest)
    places = {id(one): place for place, one in enumerate(trials)}

    def found(one: Trial) -> Any:
        own = {"trial": places[id(one)], "state": one["state"], "steps": one["step"], "value": one["value"]}
        return own[key] if key in own else one["values"].get(key)

    has: list[Trial] = []
    lacks: list[Trial] = []
    for one in trials:
        (lacks if found(one) is None else has).append(one)
    if all(_is_number(found(one)) for one in has):
        return [*sorted(has, key=found, reverse=reverse), *lacks]
    return [*sorted(has, key=lambda one: _written(found(one)), reverse=reverse), *lacks]


def _row(one: Trial, paths: Sequence[str], best: str | None) -> TrialRow:
    return TrialRow(
        one["job_uuid"],
        one["state"],
        one["step"],
        one["total_steps"],
        [_written(one["values"][path]) if path in one["values"] else "" for path in paths],
        one["value"],
        one["pruned"] or "",
        one["job_uuid"] == best,
    )


def short_path(path: str) -> str:
    """The last part of a field's path."""
    return path.rpartition(".")[2]


def _written(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return number(value) if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not _is_endless(value)


def _is_endless(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not math.isfinite(value)
    except OverflowError:  # an integer
        return True


# The plot


def _plot(ranked: Sequence[Trial], paths: Sequence[str], objective: str, best: str | None) -> Plot | None:
    """Lines of the trials that have a value, the best ones first in `ranked`."""
    if len(ranked) < 2:
        return None
    columns = [(path, [one["values"].get(path) for one in ranked]) for path in paths]
    columns.append((objective, [one["value"] for one in ranked]))
    gap = min(max((_WIDTH - 2 * _SIDE) / max(1, len(columns) - 1), _GAP[0]), _GAP[1])
    bottom = float(_HEIGHT - _BOTTOM)
    axes, places = [], []
    for at, (path, values) in enumerate(columns):
        axis, heights = _axis(path, values, round(_SIDE + at * gap, 1), bottom)
        axes.append(axis)
        places.append(heights)
    lines = []
    for row, one in enumerate(ranked):
        points = [
            f"{axis.x:g},{height:g}"
            for axis, heights in zip(axes, places, strict=True)
            if (height := heights[row]) is not None
        ]
        shade = min(SHADES - 1, row * SHADES // len(ranked))
        kind = "best" if one["job_uuid"] == best else f"shade-{shade}"
        named = ", ".join(f"{short_path(path)} {_written(value)}" for path, value in one["values"].items())
        text = f"{one['job_uuid']}: {objective} {number(one['value'])}, {named}"
        lines.append(TrialLine(one["job_uuid"], " ".join(points), kind, text))
    lines.reverse()  # the worst first
    lines.sort(key=lambda line: line.kind == "best")
    return Plot(2 * _SIDE + (len(columns) - 1) * gap, _HEIGHT, _TOP, bottom, axes, lines)


def _axis(path: str, values: Sequence[Any], x: float, bottom: float) -> tuple[Axis, list[float | None]]:
    """An axis, and how high each value is on it; None: the trial has no value for it."""
    known = [value for value in values if value is not None]
    if known and all(_is_number(value) for value in known):
        low, high = min(known), max(known)
        is_log = low > 0 and high / low >= 50
        scaled = (lambda value: math.log(value)) if is_log else (lambda value: value / 2)  # the range may be no float
        begin, end = scaled(low), scaled(high)

        def height(value: float) -> float:
            share = (scaled(value) - begin) / (end - begin) if end > begin else 0.5
            return round(bottom - share * (bottom - _TOP), 1)

        written = sorted({*known})
        if len(written) > _MOST_TICKS:
            written = [low, math.sqrt(low) * math.sqrt(high) if is_log else low / 2 + high / 2, high]
        ticks = [Tick(height(value), f"{value:.3g}") for value in written]
        places: list[float | None] = [None if value is None else height(value) for value in values]
        return Axis(short_path(path), path, x, _apart(ticks), is_log), places
    names = [*dict.fromkeys(_written(value) for value in known)]
    step = (bottom - _TOP) / max(1, len(names) - 1)
    middle = (bottom + _TOP) / 2
    at = {
        name: round(bottom - place * step, 1) if step and len(names) > 1 else middle for place, name in enumerate(names)
    }
    ticks = _apart([Tick(at[name], name[:12]) for name in names[:_MOST_NAMES]])
    return Axis(short_path(path), path, x, ticks, False), [None if v is None else at[_written(v)] for v in values]


def _apart(ticks: Sequence[Tick]) -> list[Tick]:
    """The ticks of an axis, from one end to the other, without those that would touch one before them or the last."""
    kept: list[Tick] = []
    for tick in ticks[:-1]:
        if all(abs(tick.y - other.y) >= _TICK_HEIGHT for other in (*kept[-1:], ticks[-1])):
            kept.append(tick)
    return [*kept, *ticks[-1:]]


# Importance


class _Field(NamedTuple):
    """A field whose importance can be computed."""

    path: str
    places: Sequence[int]
    """Of the trials that have a value for it."""
    ranks: Sequence[float]
    """Of its values; empty: they are no numbers."""
    groups: Mapping[str, Sequence[int]]
    """Of such a one: value -> which of `places` have it."""


def _importances(done: Sequence[Trial], paths: Sequence[str], objective: str) -> tuple[list[Importance], float]:
    """How far each field goes along with the objective, over the trials that have completed, the most first, and what
    chance gives. Empty: they are fewer than `LEAST_TRIALS`."""
    if len(done) < LEAST_TRIALS:
        return [], 0.0
    fields = [field for path in paths if (field := _field(path, done)) is not None]
    results = _ranks([one["value"] for one in done])
    found = [(field, share) for field in fields if (share := _share(field, results)) is not None]
    chance = _chance([field for field, _ in found], results)
    shown = [
        Importance(field.path, abs(share), _how(field, share, results, objective), abs(share) > chance)
        for field, share in found
    ]
    return sorted(shown, key=lambda one: -one.share), chance


def _chance(fields: Sequence[_Field], results: Sequence[float]) -> float:
    """What the largest importance of some fields exceeds in `_CHANCE` of the cases where the results are in an order by
    chance: with their own values, so that ties and groups count. The same for the same trials."""
    chance, shuffled, largest = random.Random(0), [*results], list[float]()
    for _ in range(_PERMUTATIONS):
        chance.shuffle(shuffled)
        largest.append(max((abs(_share(field, shuffled) or 0.0) for field in fields), default=0.0))
    return sorted(largest)[math.ceil((1 - _CHANCE) * _PERMUTATIONS) - 1]


def _field(path: str, done: Sequence[Trial]) -> _Field | None:
    """None: the field has one value only, or too few trials for each of its values."""
    places = [place for place, one in enumerate(done) if path in one["values"]]
    values = [done[place]["values"][path] for place in places]
    if len(values) < LEAST_TRIALS or len({*map(_written, values)}) < 2:
        return None
    if all(_is_number(value) for value in values):
        return _Field(path, places, _ranks(values), {})
    groups: dict[str, list[int]] = defaultdict(list)
    for at, value in enumerate(values):
        groups[_written(value)].append(at)
    return None if 2 * len(groups) > len(values) else _Field(path, places, (), groups)


def _share(field: _Field, results: Sequence[float]) -> float | None:
    """How far a field goes along with the ranks of results: of numbers, which have a direction, with its sign. None:
    one of them does not vary."""
    ranks = _own(field, results)
    if field.ranks:
        return _correlation(field.ranks, ranks)
    mean = sum(ranks) / len(ranks)
    whole = sum((rank - mean) ** 2 for rank in ranks)
    if not whole:
        return None
    within = 0.0
    for group in field.groups.values():
        own = [ranks[at] for at in group]
        mean = sum(own) / len(own)
        within += sum((rank - mean) ** 2 for rank in own)
    # As the corrected R squared of a regression: with many values chance alone would look important.
    explained = 1 - (within / (len(ranks) - len(field.groups))) / (whole / (len(ranks) - 1))
    return math.sqrt(max(0.0, explained))


def _own(field: _Field, results: Sequence[float]) -> Sequence[float]:
    """The ranks of the results among the trials that have the field."""
    return results if len(field.places) == len(results) else _ranks([results[place] for place in field.places])


def _how(field: _Field, share: float, results: Sequence[float], objective: str) -> str:
    if field.ranks:
        goes = "higher" if share > 0 else "lower"
        return f"rank correlation {share:+.2f}: larger values go with a {goes} {objective}"
    ranks = _own(field, results)
    groups = {name: [ranks[at] for at in group] for name, group in field.groups.items()}
    first = min(groups, key=lambda name: sum(groups[name]) / len(groups[name]))
    return f"from the mean ranks of its {len(groups)} values: {objective} is lowest with {first}"


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value from 1; equal ones have the mean of theirs."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    ranks = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end + 1 < len(order) and values[order[end + 1]] == values[order[begin]]:
            end += 1
        for place in order[begin : end + 1]:
            ranks[place] = (begin + end) / 2 + 1
        begin = end + 1
    return ranks


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation; None: one of them does not vary."""
    means = sum(first) / len(first), sum(second) / len(second)
    one, other = [value - means[0] for value in first], [value - means[1] for value in second]
    scale = math.sqrt(math.sumprod(one, one) * math.sumprod(other, other))
    return math.sumprod(one, other) / scale if scale else None
