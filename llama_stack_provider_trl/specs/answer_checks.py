"""Checks of a model's answers: equal text, a regular expression, JSON, a JSON schema, a judge, a grader.

A check compares an answer with a *reference*: text, a compiled pattern, a JSON value or a schema's validator. The check
names one for all rows, or a column with that of each row. `reference` reads it, `passes` compares. A judge is a model:
`judging` has what it reads, and `recipes.evaluation.judge` runs it. A grader is one of OpenAI's (`grading`): it reads
all columns of a row, and gives an answer a reward. Imports no torch.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from ..errors import InvalidRequest, JobFailure
from ..system.limited import Limited, LimitExceeded
from .bases import Frozen
from .compiled_checks import (
    MAX_PATTERN,
    SIMPLER,
    UNBOUNDED,
    compiled_pattern,
    compiled_schema,
    is_found,
    is_valid,
    load_libraries,
    refuse_unbounded,
    shown_pattern,
)
from .events import Reason
from .grading.graders import Grader, asking_of, field_of, paths_of, problem_of
from .grading.grading import Graded, Replied, graded, unusable_here
from .grading.templates import value_at
from .judging import MAX_TEMPLATE, reads_reference, refuse_unusable_judge
from .names import CheckedElsewhere, CheckedNames, FreeText

CheckType = Literal["exact", "regex", "json", "json_schema", "judge", "grader"]
_REQUESTED = Limited(seconds=5, memory=256 << 20)
"""For the patterns and schemas of a request. One of the largest useful schemas takes 0.3 s."""
_VALUES: dict[CheckType, str] = {
    "exact": "expected",
    "regex": "pattern",
    "json": "expected",
    "json_schema": "json_schema",
    "judge": "expected",
    "grader": "grader",
}
"""Field with the reference for all rows."""
_MODES: dict[CheckType, str] = {"exact": "normalize", "json": "extract", "json_schema": "extract"}
_OF_JUDGE = ("model", "template", "scale", "at_least", "max_new_tokens")
_NEEDS_REFERENCE = ("regex", "json_schema")
PASSES = 1.0
"""The least reward with which an answer passes a grader that names none."""
_NOT_JSON = object()


class AnswerCheck(Frozen, CheckedNames):
    """A check that every answer of a job passes or fails. Without a reference, `exact` takes the row's own answer, its
    last assistant message, and so does a judge whose template has `{reference}`; `json` passes whatever can be
    parsed."""

    type: CheckType
    """exact: the answer is this text. regex: the pattern is found in it. json: it can be parsed, and is equal to the
    expected value where there is one. json_schema: it can be parsed, and is valid under the schema. judge: a model
    answers yes, or gives it a score of at least so much. grader: a grader of OpenAI's gives it a reward of at
    least so much."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Of its measure; None: the type."""
    column: str | None = Field(None, min_length=1, max_length=512)
    """Column of the rows with the reference of each."""
    expected: Annotated[Any, FreeText()] = None
    """exact and judge: text. json: a value, or its JSON text."""
    pattern: Annotated[str | None, FreeText()] = Field(None, max_length=MAX_PATTERN)
    """regex: of the library `regex`, found anywhere in the answer; `\\A` and `\\Z` are its ends."""
    json_schema: Annotated[dict[str, Any] | None, FreeText()] = None
    """json_schema: a schema of draft 2020-12."""
    normalize: bool = False
    """exact: compare without case, in Unicode's form NFKC, with one space for all white space and none at the ends.
    False: character by character."""
    extract: bool = False
    """json, json_schema: read from the first `{` to the last `}`, whatever is around. False: the whole answer."""
    model: str | None = Field(None, min_length=1, max_length=4096)
    """judge: a model id, a directory of a model or an adapter, or `job:NAME`, `job:NAME/CHECKPOINT`."""
    template: Annotated[str | None, FreeText()] = Field(None, min_length=1, max_length=MAX_TEMPLATE)
    """judge: what it reads, with `{prompt}`, `{answer}` and, of a check with a reference, `{reference}`."""
    scale: tuple[float, float] | None = None
    """judge: the least and the largest score; None: its verdict is yes, 1, or no, 0."""
    at_least: float | None = None
    """judge with a scale: the least score that passes. grader: the least reward that does; None: 1."""
    grader: Annotated[Grader | None, CheckedElsewhere()] = None
    """grader: as OpenAI's API has them, of type string_check, text_similarity, python or multi; for GRPO also
    score_model and label_model, whose models answer here."""
    max_new_tokens: int | None = Field(None, gt=0, le=10**5)
    """judge: tokens of a verdict at most; None: 256."""

    @property
    def measure(self) -> str:
        """The name of its measure."""
        return self.name or self.type

    @property
    def given(self) -> Any:
        """The reference for all rows, as written; None: there is none."""
        if self.type == "grader":
            return None
        return getattr(self, _VALUES[self.type])

    @property
    def is_compiled(self) -> bool:
        """Whether its references are compiled: patterns, schemas."""
        return self.type in _NEEDS_REFERENCE

    @property
    def reads_answers(self) -> bool:
        """Whether its reference is the row's own answer."""
        takes_own = self.type == "exact" or (self.type == "judge" and reads_reference(self.template))
        return takes_own and self.given is None and self.column is None

    @property
    def has_reference(self) -> bool:
        """Whether answers are compared with something."""
        return self.given is not None or self.column is not None or self.reads_answers


def refuse_unusable(checks: Sequence[AnswerCheck], field: str) -> None:
    """Refuse checks that cannot be made. Raises InvalidRequest: names the check's field: one that would be ignored, a
    reference that is missing or cannot be read, a name that two checks have; LimitReached: too many requests are
    checked."""
    for number, check in enumerate(checks):
        refuse_fields(check, f"{field}.{number}")
        if check.grader is not None and (asking := asking_of(check.grader)):
            name, leaf = next(iter(asking.items()))
            hint = "graders with a model reward GRPO: an evaluation has checks of type judge, with a model of your own"
            raise InvalidRequest(f"{field}.{number}.grader.{field_of(check.grader, name)}type", leaf.type, hint)
    refuse_references({f"{field}.{number}": check for number, check in enumerate(checks)})
    for number, check in enumerate(checks):
        if check.measure in {other.measure for other in checks[:number]}:
            hint = "another check has this name: give each check a name of its own"
            raise InvalidRequest(f"{field}.{number}.name", check.name, hint)


def refuse_references(checks: Mapping[str, AnswerCheck]) -> None:
    """Refuse checks, by their fields, whose reference for all rows cannot be read. Raises as `refuse_unusable`."""
    compiled = {field: check for field, check in checks.items() if check.given is not None and check.is_compiled}
    for field, check in checks.items():
        if check.given is None:
            continue
        try:
            # JSON reads 1e999 and half of a surrogate pair, and cannot write them.
            json.dumps(check.given, allow_nan=False, ensure_ascii=False).encode()
            if field not in compiled:
                reference(check, check.given)
        except ValueError as error:
            raise _unusable(field, check, str(error)) from error
    if compiled:
        _refuse_uncompiled(tuple(compiled), tuple(check.model_dump_json() for check in compiled.values()))


@lru_cache(maxsize=16)
def _refuse_uncompiled(fields: tuple[str, ...], texts: tuple[str, ...]) -> None:
    """Compile the references of checks in another process, and try them on samples. The trials of a search have the
    same ones. Raises InvalidRequest."""
    checks = [AnswerCheck.model_validate_json(text) for text in texts]
    try:
        problems = _REQUESTED.call(_problems, checks, before=load_libraries)
    except LimitExceeded as error:
        problems = [*error.found, f"it takes more than {too_much(_REQUESTED)} to be compiled and tried: {SIMPLER}"]
    for field, check, problem in zip(fields, checks, problems, strict=False):
        if problem is not None:
            raise _unusable(field, check, problem)


def _problems(checks: Sequence[AnswerCheck]) -> Iterator[str | None]:
    return map(_problem, checks)


def _problem(check: AnswerCheck) -> str | None:
    try:
        refuse_unbounded(reference(check, check.given))
    except ValueError as error:
        return str(error)
    return None


def _unusable(field: str, check: AnswerCheck, hint: str) -> InvalidRequest:
    return InvalidRequest(f"{field}.{_VALUES[check.type]}", check.given, hint)


def too_much(limits: Limited) -> str:
    """The limits of a process, in words."""
    return f"{limits.seconds} s or {limits.memory >> 20} MiB"


def refuse_fields(check: AnswerCheck, field: str) -> None:
    """Refuse the fields that a check of its type lacks, or would ignore. Raises InvalidRequest."""
    value, mode = _VALUES[check.type], _MODES.get(check.type)
    own = (value, "column", *filter(None, (mode,)), *(_OF_JUDGE if check.type == "judge" else ()))
    if check.type == "grader":
        own = (value, "at_least")
    for name in sorted({*_VALUES.values(), *_MODES.values(), *_OF_JUDGE, "column"} - {*own}):
        if (found := getattr(check, name)) is not AnswerCheck.model_fields[name].default:
            has = ", ".join(own)
            raise InvalidRequest(f"{field}.{name}", found, f"a check of type {check.type} has {has}: leave it out")
    if check.given is not None and check.column is not None:
        hint = f"{value} is for all rows, column names that of each row: send one of the two"
        raise InvalidRequest(f"{field}.column", check.column, hint)
    if check.type == "grader":
        _refuse_grader(check, field)
    if check.type == "judge":
        of_judge = {name: getattr(check, name) for name in ("model", "template", "scale", "at_least")}
        refuse_unusable_judge(field, **of_judge, given=check.given is not None or check.column is not None)
    if check.type in _NEEDS_REFERENCE and check.given is None and check.column is None:
        hint = f"a check of type {check.type} needs {value} for all rows, or the column that has it"
        raise InvalidRequest(f"{field}.{value}", None, hint)


def _refuse_grader(check: AnswerCheck, field: str) -> None:
    if check.grader is None:
        hint = 'a check of type grader needs one, such as {"type": "string_check", "name": "same", "operation": "eq", '
        hint += '"input": "{{sample.output_text}}", "reference": "{{item.answer}}"}'
        raise InvalidRequest(f"{field}.grader", None, hint)
    if (problem := problem_of(check.grader) or unusable_here(check.grader)) is not None:
        name, hint = problem
        raise InvalidRequest(f"{field}.grader.{name}", getattr(check.grader, name, check.grader.name), hint)
    if any(path[:2] == ("sample", "output_tools") for path in paths_of(check.grader)):
        hint = (
            "answers are texts here, and have no calls of tools: use {{sample.output_text}} or {{sample.output_json}}"
        )
        raise InvalidRequest(f"{field}.grader", "{{sample.output_tools}}", hint)


def reference(check: AnswerCheck, value: Any) -> Any:
    """What answers are compared with: `value`, of the check or of a row's column, read for its type. A grader reads a
    row with all its columns. Raises ValueError: it cannot be read; what was found, and what is expected."""
    match check.type:
        case "grader":
            assert check.grader is not None
            for path in paths_of(check.grader):
                if path[0] == "item":
                    value_at(path, {"item": value})
            return value
        case "exact":
            return _normalized(_text(value)) if check.normalize else _text(value)
        case "judge":
            return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else _text(value)
        case "regex":
            if not isinstance(value, str):
                raise ValueError(f"found {_kind(value)}, expected a pattern as text")
            return compiled_pattern(value)
        case "json":
            found = _parsed(value) if isinstance(value, str) else value
            if found is _NOT_JSON:
                raise ValueError("found text that is not JSON, expected a value, or its JSON text")
            if found is None:
                raise ValueError("found null, expected a value: without one any JSON passes")
            return found
        case "json_schema":
            found = _parsed(value) if isinstance(value, str) else value
            if not isinstance(found, dict):
                raise ValueError(f"found {_kind(found)}, expected a JSON schema: an object, or its JSON text")
            try:
                return compiled_schema(json.dumps(found))
            except RecursionError as error:
                raise ValueError("it is nested too deeply for a JSON schema: make it flatter") from error


def reward_of(check: AnswerCheck, answer: str, item: Mapping[str, Any], replied: Replied | None = None) -> Graded:
    """What a check of type grader gives an answer.

    Args:
        replied: by the models of its graders.
    """
    assert check.grader is not None
    return graded(check.grader, answer, item, replied)


def is_enough(check: AnswerCheck, given: Graded) -> bool:
    """Whether an answer with this reward passes a check of type grader."""
    return given.error is None and given.reward >= (PASSES if check.at_least is None else check.at_least)


def passes(check: AnswerCheck, answer: str, reference: Any = None) -> bool:
    """Whether an answer passes. What a grader gives it: `reward_of`. Raises TimeoutError: it cannot be decided within
    `compiled_checks.TIMEOUT` seconds; JobFailure: invalid_request, a pattern takes all memory that it may have.

    Args:
        reference: of this answer; None: `json` without an expected value.
    """
    if check.type == "grader":
        return is_enough(check, reward_of(check, answer, reference))
    if check.type == "exact":
        return bool((_normalized(answer) if check.normalize else answer) == reference)
    try:
        return _matches(check, answer, reference)
    except MemoryError as error:
        # The samples of the request's check did not show it. A smaller batch, or another try, would not help.
        what = f"pattern {shown_pattern(reference)}" if check.type == "regex" else "JSON schema, or a pattern in it,"
        raise JobFailure(Reason.invalid_request, f"the check {check.measure!r}: its {what} {UNBOUNDED}") from error


def _matches(check: AnswerCheck, answer: str, reference: Any) -> bool:
    if check.type == "regex":
        return is_found(reference, answer)
    value = _parsed(_extracted(answer) if check.extract else answer)
    if value is _NOT_JSON:
        return False
    try:
        if check.type == "json":
            return reference is None or same_json(value, reference)
        return is_valid(reference, value)
    except (RecursionError, OverflowError):  # nested more deeply than Python can follow; multipleOf of 1e999
        return False


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not, the order of keys does not count."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


def _normalized(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _text(value: Any) -> str:
    """A text, or that of a number or a boolean, as JSON writes it: rows may have numbers as expected answers."""
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float):
        raise ValueError(f"found {_kind(value)}, expected text")
    # pandas makes floats of a column of integers with gaps.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return json.dumps(int(value) if is_whole else value)


def _extracted(text: str) -> str:
    begin, end = text.find("{"), text.rfind("}")
    return text[begin : end + 1] if 0 <= begin < end else ""


def _parsed(text: str) -> Any:
    """The value of JSON text; `_NOT_JSON` of other text, NaN and Infinity included."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _kind(value: Any) -> str:
    if value is _NOT_JSON:
        return "text that is not JSON"
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
