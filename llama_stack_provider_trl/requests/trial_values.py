"""The values of a Bayesian search's trials as the numbers that its proposer works with, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..specs.search import SearchSpec
from .search import RangeConfig, random_draws, rounded, values_of

MOST_DRAWN = 10
"""The first third of the trials are drawn, and at most so many (the default of Optuna's sampler)."""


class ValuedTrial(NamedTuple):
    """A trial that has ended."""

    values: Mapping[str, Any]
    """Path of a field -> its value."""
    objective: float | None
    """None: it gave none."""


def drawn_values(search: SearchSpec, first: int, last: int) -> list[dict[str, Any]] | None:
    """The values of trials that no results decide on, those of a random search; None: results decide on them.

    Args:
        first: number of the first of these trials; if it is drawn, so are the others.
    """
    if first > min(MOST_DRAWN, max(1, search.trials // 3)):
        return None
    draws = random_draws(_possible(search), search.seed or 0)
    drawn = [next(draws) for _ in range(last)]
    return drawn[first - 1 :]


def question(search: SearchSpec, ended: Iterable[ValuedTrial], count: int, seed: int) -> dict[str, Any]:
    """What the proposer is to answer (see `proposer`)."""
    possible = _possible(search)
    return {
        "space": {path: _space(those) for path, those in possible.items()},
        "trials": [
            {
                "numbers": {path: _number(those, one.values[path]) for path, those in possible.items()},
                "value": one.objective,
            }
            for one in ended
        ],
        **{"direction": search.direction, "count": count, "seed": seed},
    }


def answered_values(search: SearchSpec, answer: bytes, count: int) -> list[dict[str, Any]]:
    """The values of the trials in an answer. Raises ValueError: it is no answer to the question."""
    possible = _possible(search)
    try:
        found = json.loads(answer)
        proposed = [{path: _value(those, one[path]) for path, those in possible.items()} for one in found]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"its answer cannot be read: {answer[:200]!r}") from error
    if len(proposed) != count:
        raise ValueError(f"its answer has {len(proposed)} trials in place of {count}")
    return proposed


def _possible(search: SearchSpec) -> dict[str, list[Any] | RangeConfig]:
    return {path: values_of(path, given, search.method) for path, given in search.parameters.items()}


def _space(values: list[Any] | RangeConfig) -> dict[str, Any]:
    if isinstance(values, list):
        return {"choices": len(values)}
    return {"min": values.min, "max": values.max, "log": values.log, "integer": values.is_integer}


def _number(values: list[Any] | RangeConfig, value: Any) -> Any:
    """The position of a value in a list; of a range, the value itself."""
    if not isinstance(values, list):
        return value
    texts = [json.dumps(one, sort_keys=True) for one in values]
    return texts.index(json.dumps(value, sort_keys=True))


def _value(values: list[Any] | RangeConfig, number: Any) -> Any:
    if isinstance(values, list):
        return values[int(number)]
    return int(number) if values.is_integer else rounded(values, float(number))
