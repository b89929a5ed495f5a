"""Grades answers. What goes wrong for one answer is a reward of 0 with a sentence, as OpenAI does, and no exception."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from ...errors import JobFailure, LimitReached
from ...system.limited import Limited, LimitExceeded, TooLate
from ..events import Reason
from .asking import Question, Reply, question_of, score_of
from .errors import ErrorKind, GradingError, NotInTimeError
from .formula import parsed
from .graders import (
    MOST_GRADERS,
    Grader,
    LabelModel,
    Leaf,
    MultiGrader,
    PythonGrader,
    ScoreModel,
    StringCheck,
    TextSimilarity,
    asking_of,
    leaves_of,
)
from .isolated import WALL_S, problem_of_machine, problem_of_source, reward_of_source
from .similarity import load_libraries, problem_of_metric, similarity
from .templates import MissingValue, Values, rendered

LIMITS = Limited(seconds=5, memory=512 << 20, values=MOST_GRADERS)
"""Of the comparisons that a request orders."""
LARGEST = 1e9
"""Magnitude of a reward."""
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before further tries of a job, where the machine is too busy for a grader."""


@dataclass(frozen=True)
class Graded:
    """What a grader gives an answer."""

    reward: float
    """0 where there is an error."""
    error: GradingError | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of the graders that it is made of; without those with errors."""

    @property
    def is_late(self) -> bool:
        """Whether its graders have not ended in time."""
        return isinstance(self.error, NotInTimeError)


Outcome = float | GradingError
"""A score, or why there is none."""
Replied = Mapping[str, Reply | GradingError]
"""What the models of a grader's leaves have written of an answer, by their names, or why there is nothing."""


def values_of(text: str, item: Mapping[str, Any]) -> Values:
    """What templates and sources read of an answer and its row. `output_json` is there where the answer is JSON."""
    sample: dict[str, Any] = {"output_text": text}
    found = _json_of(text)
    if found is not None:
        sample["output_json"] = found
    return {"item": item, "sample": sample}


def questions_of(grader: Grader, text: str, item: Mapping[str, Any]) -> dict[str, Question | GradingError]:
    """What the models of a grader are asked about an answer, by the names of its leaves, or why nothing can be."""
    values = values_of(text, item)
    found: dict[str, Question | GradingError] = {}
    for name, leaf in asking_of(grader).items():
        try:
            found[name] = _rendered(partial(question_of, leaf, values))
        except GradingError as error:
            found[name] = error
    return found


def graded(grader: Grader, text: str, item: Mapping[str, Any], replied: Replied | None = None) -> Graded:
    """Grade an answer. Raises JobFailure: rank_failed, this machine is too busy to run a source, also some seconds
    later: a reward of 0 would teach what nobody has graded.

    Args:
        replied: to `questions_of`, where models answer.
    """
    values, leaves, known = values_of(text, item), leaves_of(grader), _of_replies(grader, replied)
    for wait in (*_WAITS_S, None):
        try:
            found = _combined(grader, _outcomes(leaves, values, known))
        except LimitReached as error:
            problem = str(error)
        else:
            if found.error is None or found.error.kind != "python_grader_server_error":
                return found
            problem = found.error.sentence
        if wait is not None:
            time.sleep(wait)
    raise JobFailure(
        Reason.rank_failed,
        f"the grader {grader.name!r} cannot be run, after {len(_WAITS_S) + 1} tries in {sum(_WAITS_S):g} s: {problem}",
    )


def graded_for_request(grader: Grader, text: str, item: Mapping[str, Any], replied: Replied | None = None) -> Graded:
    """`graded` where requests are served: whatever may be costly is computed by other processes, within limits. Raises
    LimitReached: the caller has used its CPU time, or the machine is too busy."""
    leaves, values = leaves_of(grader), values_of(text, item)
    deadline = time.monotonic() + WALL_S
    outcomes: dict[str, Outcome] = _of_replies(grader, replied)
    if any(_compares(leaf) for leaf in leaves.values()):
        arguments = json.dumps([text, item], default=str)
        try:
            found = LIMITS.call(_comparisons, grader.model_dump_json(), arguments, before=load_libraries, within=WALL_S)
            outcomes |= {name: value if kind is None else GradingError(kind, value) for name, kind, value in found}
        except TooLate:
            raise
        except (LimitExceeded, RuntimeError) as error:
            sentence = f"to compare the texts takes more than {LIMITS.seconds} s or {LIMITS.memory >> 20} MiB"
            raised = GradingError("other_error", sentence if isinstance(error, LimitExceeded) else str(error))
            outcomes |= {name: raised for name, leaf in leaves.items() if _compares(leaf)}
    return _combined(grader, _outcomes(leaves, values, outcomes, deadline))


def _of_replies(grader: Grader, replied: Replied | None) -> dict[str, Outcome]:
    """The score in each reply of a model, or why there is none."""
    found: dict[str, Outcome] = {}
    for name, leaf in asking_of(grader).items():
        reply = (replied or {}).get(name)
        if reply is None:
            found[name] = GradingError("model_grader_server_error", f"no process answers for the model {leaf.model!r}")
            continue
        try:
            found[name] = reply if isinstance(reply, GradingError) else score_of(leaf, reply)
        except GradingError as error:
            found[name] = error
    return found


def _compares(leaf: Leaf) -> bool:
    """Whether a grader compares texts."""
    return isinstance(leaf, StringCheck | TextSimilarity)


def _outcomes(
    leaves: Mapping[str, Leaf], values: Values, known: Mapping[str, Outcome], deadline: float | None = None
) -> dict[str, Outcome]:
    """Of each grader, up to the first one that is too late. Raises LimitReached: as `graded_for_request`.

    Args:
        known: those that are computed.
        deadline: None: `WALL_S` from now on.
    """
    deadline = time.monotonic() + WALL_S if deadline is None else deadline
    outcomes: dict[str, Outcome] = {}
    for name, leaf in leaves.items():
        outcomes[name] = found = known[name] if name in known else _outcome(leaf, values, deadline)
        if isinstance(found, NotInTimeError):
            break
    return outcomes


def _comparisons(grader: str, arguments: str) -> Iterator[tuple[str, ErrorKind | None, Any]]:
    """Name, kind of error, and score or sentence, of each grader that compares texts: in a process of its own."""
    values = values_of(*json.loads(arguments))
    leaves = leaves_of(TypeAdapter[Grader](Grader).validate_json(grader))
    for name, leaf in leaves.items():
        if _compares(leaf):
            found = _outcome(leaf, values)
            yield (name, found.kind, found.sentence) if isinstance(found, GradingError) else (name, None, found)


def _outcome(leaf: Leaf, values: Values, deadline: float | None = None) -> Outcome:
    """Raises LimitReached: that is no result of the grader."""
    try:
        return _finite(_score(leaf, values, deadline))
    except GradingError as found:
        return found


def _combined(grader: Grader, outcomes: Mapping[str, Outcome]) -> Graded:
    scores = {name: one for name, one in outcomes.items() if not isinstance(one, GradingError)}
    for name, one in outcomes.items():
        if isinstance(one, GradingError):
            return Graded(0.0, type(one)(one.kind, f"{name}: {one.sentence}"), scores)
    if not isinstance(grader, MultiGrader):
        return Graded(scores[grader.name], None, scores)
    try:
        return Graded(_finite(parsed(grader.calculate_output).value(scores)), None, scores)
    except ValueError as found:
        return Graded(0.0, GradingError("formula_parse_error", f"calculate_output: {found}"), scores)
    except GradingError as found:
        return Graded(0.0, found, scores)


def _score(leaf: Leaf, values: Values, deadline: float | None) -> float:
    if isinstance(leaf, StringCheck | TextSimilarity):
        one, other = _rendered(lambda: (rendered(leaf.input, values), rendered(leaf.reference, values)))
        if isinstance(leaf, StringCheck):
            return float(_compared(leaf, one, other))
        try:
            return similarity(leaf.evaluation_metric, one, other)
        except ValueError as error:
            raise GradingError("other_error", str(error)) from error
    if isinstance(leaf, ScoreModel | LabelModel):
        raise AssertionError("a grader whose model has not replied")
    sample = {"output_json": None, "output_tools": [], **values["sample"]}
    return reward_of_source(leaf.source, sample, values["item"], deadline)


def _rendered[T](render: Callable[[], T]) -> T:
    """What is rendered. Raises GradingError: a value is missing, or the text is too long."""
    try:
        return render()
    except MissingValue as error:
        # Also where the answer is no JSON, and output_json is named.
        is_of_sample = str(error).startswith("sample")
        raise GradingError("sample_parse_error" if is_of_sample else "invalid_variable_error", str(error)) from error
    except ValueError as error:
        raise GradingError("other_error", str(error)) from error


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
        if isinstance(leaf, PythonGrader) and (problem := problem_of_machine() or problem_of_source(leaf.source)):
            return "source", problem
    return None
