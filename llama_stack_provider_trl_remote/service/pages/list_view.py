"""What the page of jobs shows beside the rows of the API: addresses, small curves, relative times. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from llama_stack_provider_trl.jobs.decisions.states import ACTIVE, JobState
from llama_stack_provider_trl.specs.state_words import state_word
from llama_stack_provider_trl.specs.work import WORKS as WORKS

from ..http.bodies import QueueRow
from ..views import queue
from ..views.queue import Sort
from .rendering import address

SPARK_POINTS = 24
"""Points of a small curve."""
SPARK_WIDTH, SPARK_HEIGHT = 64, 16
"""Of a small curve, in its own units."""
_MARGIN = 1.5
"""Around it, for the width of its line."""
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60))


class Column(NamedTuple):
    """A column that a list is sorted by."""

    key: str
    text: str
    first: str
    """What a click sorts by at first: a minus where the largest is what is looked for."""


COLUMNS = (
    *(Column("name", "Job", ""), Column("state", "State", ""), Column("method", "Method", "")),
    *(Column("model", "Model", ""), Column("loss", "Loss", ""), Column("eval", "Eval loss", "")),
    *(Column("progress", "Progress", "-"), Column("duration", "Duration", "-"), Column("created", "Submitted", "-")),
    Column("owner", "By", ""),
)


@dataclass(frozen=True)
class Query:
    """What the address of the page requests."""

    state: JobState | None = None
    search: str = ""
    owner: str = ""
    sort: Sort = ""
    opened: tuple[str, ...] = ()
    """Jobs below which those that stand under them are shown."""
    flat: bool = False
    number: int = 1
    """Of the page, from 1."""

    @property
    def folded(self) -> bool:
        """Whether jobs stand under others. A filter shows what it finds."""
        return not (self.flat or self.state or self.search or self.owner)

    def address(self, **changes: Any) -> str:
        """The address of the same list, but for some fields; the first page, unless `number` is given."""
        found = replace(self, **{"number": 1, **changes})
        pairs = [
            ("state", found.state.value if found.state else ""),
            ("search", found.search),
            ("owner", found.owner),
            ("sort", found.sort),
            ("flat", "yes" if found.flat else ""),
            *(("open", name) for name in found.opened),
            ("page", str(found.number) if found.number > 1 else ""),
        ]
        return address("/", pairs)

    def sorted_by(self, column: Column) -> str:
        """The address that a click on the head of a column leads to: its first direction, the other one, then the order
        in which jobs run."""
        first, other = f"{column.first}{column.key}", f"{'' if column.first else '-'}{column.key}"
        return self.address(sort={first: other, other: ""}.get(self.sort, first))

    def direction(self, column: Column) -> str:
        """`aria-sort` of a column; empty: the list is not sorted by it."""
        found = {column.key: "ascending", f"-{column.key}": "descending"}
        return found.get(self.sort, "")

    def toggled(self, name: str) -> str:
        """The address with a job's family open, or closed where it is open."""
        opened = tuple(one for one in self.opened if one != name)
        return self.address(opened=opened if name in self.opened else (*opened, name), number=self.number)


class ShownRow(NamedTuple):
    job: QueueRow
    depth: int
    """1: it stands under the row before it that has 0."""
    family: str
    """What stands under it, in words; empty: nothing does."""
    cut: str = ""
    """How much of what is to stand under it does; empty: all of it."""


def rows_of(jobs: Sequence[QueueRow], members: Sequence[QueueRow], opened: Sequence[str]) -> list[ShownRow]:
    """The rows of a page: each job, and below it those of `members` that stand under it.

    Args:
        members: as `members_of` returns them.
        opened: jobs whose members are all to be shown; of others those that run.
    """
    below: dict[str | None, list[QueueRow]] = {}
    for one in members:
        below.setdefault(one.root, []).append(one)
    found, are_most = [], len(members) >= queue.MOST_TOGETHER
    for job in jobs:
        under = below.get(job.job_uuid, [])
        wanted = sum(count for state, count in job.members.items() if job.job_uuid in opened or state in ACTIVE)
        # Counts are read before members: where no bound is reached, a job has moved meanwhile, and nothing is cut.
        is_cut = are_most or len(under) >= queue.MOST_MEMBERS
        cut = f"{len(under)} of {wanted} are shown" if is_cut and len(under) < wanted else ""
        found.append(ShownRow(job, 0, family_text(job.members), cut))
        found += [ShownRow(one, 1, "") for one in under]
    return found


def family_text(members: Mapping[str, int]) -> str:
    """The number of some jobs, and of those among them that have not completed: `6 jobs, 2 waiting`."""
    if not members:
        return ""
    total = sum(members.values())
    rest = [f"{members[one]} {state_word(one)}" for one in JobState if one in members and one != JobState.completed]
    return ", ".join([f"{total} {'job' if total == 1 else 'jobs'}", *rest])


def short(value: float | None) -> str:
    """A number with four digits, for a narrow column; empty: not known."""
    return "" if value is None else f"{value:.4g}"


def count(number: int) -> str:
    """A number of steps, for a narrow column: in thousands from 10,000 on, rounded down."""
    return f"{number // 100 / 10}".removesuffix(".0") + "k" if number >= 10_000 else str(number)


def spark(values: Sequence[float]) -> str:
    """The `points` of a polyline through some values; empty: they are fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    width = (SPARK_WIDTH - 2 * _MARGIN) / (len(values) - 1)
    height = SPARK_HEIGHT - 2 * _MARGIN
    # Of values without a difference the line is in the middle.
    shares = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    return " ".join(
        f"{_MARGIN + place * width:.1f},{_MARGIN + (1 - share) * height:.1f}" for place, share in enumerate(shares)
    )


def short_model(model: str | None) -> str:
    """The last part of a model's id or directory."""
    return (model or "").rstrip("/").rpartition("/")[2]


def model_of(job: QueueRow) -> str:
    """The model of a job in a few words: of another job's checkpoint that job, and the checkpoint if it is not the
    final one."""
    name = short_model(job.model)
    if job.model_job is None:
        return name
    return f"{job.model_job}/{name}" if name.startswith("checkpoint-") else job.model_job


def ago(value: datetime | None, now: datetime) -> str:
    """How long ago a time was: `5 min ago`; a date, where that is more than 30 days; empty: there is none."""
    if value is None:
        return ""
    seconds = (now - value).total_seconds()
    if seconds >= 30 * 86_400:
        return f"{value.astimezone(UTC):%Y-%m-%d}"
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return "just now"


def seconds_of(job: QueueRow, now: datetime) -> float | None:
    """Seconds from the start of a job to its end, or until now; None: it has not started."""
    return None if job.started_at is None else max(0.0, ((job.completed_at or now) - job.started_at).total_seconds())


def brief(seconds: float | None) -> str:
    """Seconds in at most two units, for a narrow column: `45 s`, `3:05 min`, `2 h 10`, `3 d 4 h`; empty: not known."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes:02}"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def start_text(job: QueueRow, now: datetime) -> str:
    """When a waiting job starts, or why that is not known; empty: it does not wait."""
    if job.unpredicted:
        return f"start not known: {job.unpredicted}"
    if job.predicted_start is None:
        return ""
    seconds = (job.predicted_start - now).total_seconds()
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"starts in about {seconds / length:.0f} {unit}"
    return "starts in about a minute" if seconds > 20 else "starts in a moment"


def wait_text(job: QueueRow, reason: str, now: datetime) -> str:
    """When a waiting job starts, and why it waits."""
    start, reason = start_text(job, now), reason or "waiting to be placed"
    return "; ".join(filter(None, (reason, start) if job.unpredicted else (start, reason)))
