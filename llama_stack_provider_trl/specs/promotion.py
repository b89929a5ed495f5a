"""Conditions on evaluations under which a model is exported or registered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from pydantic import Field

from .bases import Frozen
from .names import CheckedNames

BOUNDS = {
    "at_least": "at least",
    "at_most": "at most",
    "at_least_change": "a change of at least",
    "at_most_change": "a change of at most",
}
"""The fields of a condition that say what is asked, each in words."""


class PromotionCondition(Frozen, CheckedNames):
    """What an evaluation must have found. It has one of the four bounds."""

    evaluation: str = Field(min_length=1, max_length=128)
    """An `evaluate` job that measures what is exported."""
    metric: str = Field(min_length=1, max_length=1024)
    """One of its measures, as its `result` has it: `loss`, `passed`, `checks.NAME`, `tasks.NAME.acc` ..."""
    against: str | None = Field(None, min_length=1, max_length=128)
    """Another `evaluate` job on the same rows, for a bound of the change: of the model before training, say."""
    at_least: float | None = None
    """The least value."""
    at_most: float | None = None
    """The largest value."""
    at_least_change: float | None = None
    """The least value minus that of `against`; below 0 for a measure that may fall by so much."""
    at_most_change: float | None = None
    """The largest value minus that of `against`: a measure, such as a loss, may rise by so much."""

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that it has."""
        return {name: value for name in BOUNDS if (value := getattr(self, name)) is not None}


class CheckedCondition(PromotionCondition):
    """A condition with what was found."""

    found: float | None = None
    """The measure of `evaluation`; None: it is no finite number."""
    before: float | None = None
    """That of `against`; None: there is none, or it is no finite number."""

    @property
    def change(self) -> float | None:
        """`found` minus `before`, without the rounding of a difference of floats: 0.52 - 0.5 is 0.02."""
        if self.found is None or self.before is None:
            return None
        return float(Decimal(str(self.found)) - Decimal(str(self.before)))

    @property
    def holds(self) -> bool:
        """Whether what was found is within the bound."""
        ((name, bound),) = self.bounds.items()
        value = self.found if self.against is None else self.change
        if value is None:
            return False
        return value >= bound if name.startswith("at_least") else value <= bound

    @property
    def sentence(self) -> str:
        """What was found and what was asked, without a full stop."""
        ((name, bound),) = self.bounds.items()
        found = f"{self.metric} of {self.evaluation!r} is {_shown(self.found)}"
        if self.against is not None:
            found += f", a change of {_shown(self.change)} from the {_shown(self.before)} of {self.against!r}"
        return f"{found}, and {BOUNDS[name]} {_shown(bound)} was asked"


def measures(result: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float | None]]:
    """The numbers in the result of an evaluation, each by its dotted name; None: it is no finite number."""
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from measures(value, f"{above}{name}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield f"{above}{name}", value if value is not None and math.isfinite(value) else None


def _shown(value: float | None) -> str:
    """A number with all its digits: what is printed is what was compared."""
    return "no finite number" if value is None else str(value)
