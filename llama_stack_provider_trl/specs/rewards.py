"""Rewards of answers: the checks that there are, and the functions of installed packages.

A package adds a function by an entry point of the group `llama_stack_provider_trl.rewards`. Requests name it, and never
bring code of their own.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..errors import InvalidRows
from .beginnings import Frozen

GROUP = "llama_stack_provider_trl.rewards"
Check = Literal["exact", "regex", "json", "json_schema"]


class RewardSource(Frozen):
    """A part of a reward: a check, or a function of an installed package."""

    name: str
    """In metrics, one of its own."""
    weight: float = 1.0
    check: Check | None = None
    column: str | None = None
    """Of the row, that the answer is compared with."""
    pattern: str | None = None
    """`regex`: what is searched in the answer; its first group, or all of it, is compared with the column."""
    json_schema: str | None = None
    """`json_schema`: JSON text."""
    function: str | None = Field(None)
    """Name of an entry point: `function(prompts, completions, rows)` returns a number for each completion."""


def installed_rewards() -> dict[str, EntryPoint]:
    """The functions that installed packages add, by name; none is imported.

    Read at each call, so that a package is found which was installed meanwhile.
    """
    importlib.invalidate_caches()
    return {point.name: point for point in entry_points(group=GROUP)}


def check_columns(rewards: tuple[RewardSource, ...], path: Path) -> None:
    """Return if every row has the columns that the rewards read.

    Args:
        path: NDJSON, whose rows have a prompt.

    Raises:
        InvalidRows: the first row that lacks one.
    """
    columns = {source.column: source.name for source in rewards if source.column is not None}
    if not columns:
        return
    with open(path, encoding="utf-8") as file:
        for index, line in enumerate(file):
            row: Mapping[str, Any] = json.loads(line)
            for column, name in columns.items():
                if row.get(column) is None:
                    found = ", ".join(key for key, value in row.items() if value is not None)
                    expected = f"the column {column!r}, which the reward {name!r} reads"
                    raise InvalidRows(f"found the columns {found}, expected {expected}", row=index)
