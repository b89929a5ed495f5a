"""Points of the store as trackers get them."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_LONGEST_NAME = 200


@dataclass(frozen=True)
class Measured:
    """What was measured after one step by the training, or by an evaluation."""

    time: float
    """Seconds since the epoch."""
    values: dict[str, float]
    """Name in the tracker -> finite value."""


@dataclass(frozen=True)
class Step:
    """All points of one optimizer step."""

    step: int
    parts: tuple[Measured, ...]

    @property
    def values(self) -> dict[str, float]:
        """The values of all parts."""
        return {name: value for part in self.parts for name, value in part.values.items()}

    @property
    def time(self) -> float:
        return max(part.time for part in self.parts)


def steps_of(rows: Iterable[sqlite3.Row]) -> Iterator[Step]:
    """Group rows of `JobReader.scan_points` by their step."""
    for step, group in groupby(rows, lambda row: row["step"]):
        yield Step(step, tuple(_measured(row) for row in group))


def _measured(row: sqlite3.Row) -> Measured:
    metrics: dict[str, Any] = {"epoch": row["epoch"], **json.loads(row["metrics"])}
    values = {
        name_of(row["kind"], name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Measured(row["time"], values)


def name_of(kind: str, metric: str) -> str:
    """`train/loss`, `eval/loss`. A training names its metrics: what a tracker could refuse becomes `_`."""
    group, plain = ("eval", metric.removeprefix("eval_")) if kind == "validation" else ("train", metric)
    parts = [re.sub(r"[^\w.-]", "_", part, flags=re.ASCII) for part in plain.split("/")]
    return "/".join([group, *("_" if part.strip(".") == "" else part for part in parts)])[:_LONGEST_NAME]
