"""Grades answers. What goes wrong for one answer is a reward of 0 with a sentence, as OpenAI does, and no exception."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import GradingError
from .formula import parsed
from .graders import Grader, Leaf, MultiGrader, PythonGrader, StringCheck, TextSimilarity, leaves_of
from .isolated import problem_of_machine, reward_of_source
from .similarity import problem_of_metric, similarity
from .templates import MissingValue, Values, rendered

LARGEST = 1e9
"""Magnitude of a reward."""


@dataclass(frozen=True)
class Graded:
    """What a grader gives an answer."""

    reward: float
    """0 where there is an error."""
    error: GradingError | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of the graders that it is made of; without those with errors."""


def values_of(text: str, item: Mapping[str, Any]) -> Values:
    """What templates and sources read of an answer and its row. `output_json` is there where the answer is JSON."""
    sample: dict[str, Any] = {"output_text": text}
    found = _json_of(text)
    if found is not None:
        sample["output_json"] = found
    return {"item": item, "sample": sample}


def graded(grader: Grader, text: str, item: Mapping[str, Any]) -> Graded:
    """Grade an answer.

    Args:
        text: the answer.
        item: all columns of its row.
    """
    values = values_of(text, item)
    scores: dict[str, float] = {}
    error: GradingError | None = None
    for name, leaf in leaves_of(grader).items():
        try:
            scores[name] = _finite(_score(leaf, values))
        except GradingError as found:
            error = error or GradingError(found.kind, f"{name}: {found.sentence}")
    return combined(grader, scores, error)


def combined(grader: Grader, scores: Mapping[str, float], error: GradingError | None) -> Graded:
    """The reward of a grader by the scores of those that it is made of."""
    if error is not None:
        return Graded(0.0, error, scores)
    if not isinstance(grader, MultiGrader):
        return Graded(scores[grader.name], None, scores)
    try:
        return Graded(_finite(parsed(grader.calculate_output).value(scores)), None, scores)
    except ValueError as found:
        return Graded(0.0, GradingError("formula_parse_error", f"calculate_output: {found}"), scores)
    except GradingError as found:
        return Graded(0.0, found, scores)


def _score(leaf: Leaf, values: Values) -> float:
    if isinstance(leaf, StringCheck | TextSimilarity):
        try:
            one, other = rendered(leaf.input, values), rendered(leaf.reference, values)
        except MissingValue as error:
            # Also where the answer is no JSON, and output_json is named.
            is_of_sample = str(error).startswith("sample")
            raise GradingError(
                "sample_parse_error" if is_of_sample else "invalid_variable_error", str(error)
            ) from error
        except ValueError as error:
            raise GradingError("other_error", str(error)) from error
        if isinstance(leaf, StringCheck):
            return float(_compared(leaf, one, other))
        try:
            return similarity(leaf.evaluation_metric, one, other)
        except ValueError as error:
            raise GradingError("other_error", str(error)) from error
    return reward_of_source(leaf.source, {"output_json": None, "output_tools": [], **values["sample"]}, values["item"])


def _compared(check: StringCheck, one: str, other: str) -> bool:
    match check.operation:
        case "eq":
            return one == other
        case "ne":
            return one != other
        case "like":
            return other in one
        case "ilike":
            return other.casefold() in one.casefold()


def _finite(value: float) -> float:
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise GradingError("other_error", f"the reward is {value}, expected a finite number within {LARGEST:g}")
    return value


def _json_of(text: str) -> Any:
    """The value of JSON text; None: it is none, or null."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def unusable_here(grader: Grader) -> tuple[str, str] | None:
    """The field of a grader that cannot be used in this environment, and why; None: all of it can."""
    for leaf in leaves_of(grader).values():
        if isinstance(leaf, TextSimilarity) and (problem := problem_of_metric(leaf.evaluation_metric)):
            return "evaluation_metric", problem
        if isinstance(leaf, PythonGrader) and (problem := problem_of_machine()):
            return "source", problem
    return None
