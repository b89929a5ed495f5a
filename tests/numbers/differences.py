"""What differs between two records, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.contract.stack import Json
from tests.numbers.content import leaves

MOST = 12
"""Rows of a job in the table."""
_WIDTH = 48


class Difference(NamedTuple):
    job: str
    what: str
    recorded: str
    found: str


def differences(recorded: Json, found: Json, jobs: Iterable[str]) -> Iterator[Difference]:
    """What these jobs made otherwise, in the order of the records."""
    for job in jobs:
        before, after = recorded["jobs"].get(job), found["jobs"].get(job)
        if before is None or after is None:
            yield Difference(job, "the job", *("missing" if one is None else "there" for one in (before, after)))
            continue
        for what in {**before, **after}:
            one, other = before.get(what, "missing"), after.get(what, "missing")
            if one != other:
                fields = _fields(recorded["contents"].get(one), found["contents"].get(other))
                yield from (Difference(job, f"{what}: {path}", *values) for path, values in fields)
                if not fields:
                    yield Difference(job, what, one, other)


def _fields(recorded: Json | None, found: Json | None) -> list[tuple[str, tuple[str, str]]]:
    """The values that differ between two JSON files; empty: their contents were not recorded."""
    if recorded is None or found is None:
        return []
    before, after = dict(leaves(recorded)), dict(leaves(found))
    pairs = {path: (before.get(path, "missing"), after.get(path, "missing")) for path in {**before, **after}}
    return [(path, pair) for path, pair in pairs.items() if pair[0] != pair[1]]


def table(rows: Iterable[Difference]) -> str:
    """Differences job by job, the first ones of each."""
    of_jobs: dict[str, list[Difference]] = {}
    for row in rows:
        of_jobs.setdefault(row.job, []).append(row)
    lines = []
    for job, found in of_jobs.items():
        lines.append(f"{job}: {len(found)} differences")
        lines.append(f"  {'what':{_WIDTH}}  {'recorded':{_WIDTH}}  now")
        lines += [f"  {_cut(row.what)}  {_cut(row.recorded)}  {_cut(row.found).rstrip()}" for row in found[:MOST]]
        if len(found) > MOST:
            lines.append(f"  and {len(found) - MOST} more")
    return "\n".join(lines)


def _cut(text: str) -> str:
    text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
    return f"{text:{_WIDTH}}"
