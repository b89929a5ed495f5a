"""Checks of a model's answers: equal text, a regular expression, JSON, a JSON schema, a judge. Imports no torch.

A check compares an answer with a *reference*: text, a compiled pattern, a JSON value or a schema's validator. The check
names one for all rows, or a column with that of each row. `reference` reads it, `passes` compares. A judge is a model:
`judging` has what it reads, and `recipes.judge` runs it.

The time of a comparison is bounded: a pattern that backtracks without end, or a schema that branches so, raises
TimeoutError. `regex` has timeouts, which `re` lacks; jsonschema searches with `re`, so its `pattern` is replaced and
`patternProperties` is refused. So are `unevaluatedProperties` and `unevaluatedItems`, which look ahead past the
deadline, and a `$schema` below the top, where jsonschema would continue with its own validator.

To compile a pattern has no such bounds: `regex` writes a repeated part out as often as it occurs at least, so eleven
characters can take all memory, and nested `+` double it. A process that serves requests compiles none: another does.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Literal

from pydantic import Field

from ..errors import InvalidRequest
from ..system.limited import Limited, LimitExceeded
from .beginnings import Frozen
from .judging import MAX_TEMPLATE, reads_reference, refuse_unusable_judge

CheckType = Literal["exact", "regex", "json", "json_schema", "judge"]
TIMEOUT = 1.0
"""Seconds that the comparison of one answer may take, of CPU time where it is a pattern."""
MAX_PATTERN, MAX_SCHEMA = 4096, 65536
"""Characters of a pattern, and of a schema as JSON text."""
_REQUESTED = Limited(seconds=5, memory=256 << 20)
"""For the patterns and schemas of a request. One of the largest useful schemas takes 0.3 s."""
_MAX_OUTSIDE = 16
"""Parts that `$ref` names where no schema is expected."""
_MAX_MIXED = 256
"""Values of a list in a schema, if they cannot be sorted: then each is compared with all others."""
_REFUSED = (
    *("$schema", "$id", "$dynamicRef"),
    *("patternProperties", "unevaluatedProperties", "unevaluatedItems"),
)
"""Keywords of a schema, but for $schema at its top."""
_VALUES: dict[CheckType, str] = {
    "exact": "expected",
    "regex": "pattern",
    "json": "expected",
    "json_schema": "json_schema",
    "judge": "expected",
}
"""Field with the reference for all rows."""
_MODES: dict[CheckType, str] = {"exact": "normalize", "json": "extract", "json_schema": "extract"}
_OF_JUDGE = ("model", "template", "scale", "at_least", "max_new_tokens")
_NEEDS_REFERENCE = ("regex", "json_schema")
_NOT_JSON = object()
_deadline: ContextVar[float] = ContextVar("deadline")


class AnswerCheck(Frozen):
    """A check that every answer of a job passes or fails. Without a reference, `exact` takes the row's own answer, its
    last assistant message, and so does a judge whose template has `{reference}`; `json` passes whatever can be
    parsed."""

    type: CheckType
    """exact: the answer is this text. regex: the pattern is found in it. json: it can be parsed, and is equal to the
    expected value where there is one. json_schema: it can be parsed, and is valid under the schema. judge: a model
    answers yes, or gives it a score of at least so much."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Of its measure; None: the type."""
    column: str | None = Field(None, min_length=1, max_length=512)
    """Column of the rows with the reference of each."""
    expected: Any = None
    """exact and judge: text. json: a value, or its JSON text."""
    pattern: str | None = Field(None, max_length=MAX_PATTERN)
    """regex: of the library `regex`, found anywhere in the answer; `\\A` and `\\Z` are its ends."""
    json_schema: dict[str, Any] | None = None
    """json_schema: a schema of draft 2020-12."""
    normalize: bool = False
    """exact: compare without case, in Unicode's form NFKC, with one space for all white space and none at the ends.
    False: character by character."""
    extract: bool = False
    """json, json_schema: read from the first `{` to the last `}`, whatever is around. False: the whole answer."""
    model: str | None = Field(None, min_length=1, max_length=4096)
    """judge: a model id, a directory of a model or an adapter, or `job:NAME`, `job:NAME/CHECKPOINT`."""
    template: str | None = Field(None, min_length=1, max_length=MAX_TEMPLATE)
    """judge: what it reads, with `{prompt}`, `{answer}` and, of a check with a reference, `{reference}`."""
    scale: tuple[float, float] | None = None
    """judge: the least and the largest score; None: its verdict is yes, 1, or no, 0."""
    at_least: float | None = None
    """judge with a scale: the least score that passes."""
    max_new_tokens: int | None = Field(None, gt=0, le=10**5)
    """judge: tokens of a verdict at most; None: 256."""

    @property
    def measure(self) -> str:
        """The name of its measure."""
        return self.name or self.type

    @property
    def given(self) -> Any:
        """The reference for all rows, as written; None: there is none."""
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
    """Refuse checks that cannot be made.

    Args:
        field: of the request, that has them.

    Raises:
        InvalidRequest: names the check's field: one that would be ignored, a reference that is missing or cannot be
            read, a name that two checks have.
        LimitReached: too many requests are checked.
    """
    for number, check in enumerate(checks):
        refuse_fields(check, f"{field}.{number}")
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
    """Compile the references of checks in another process. The trials of a search have the same ones. Raises
    InvalidRequest."""
    checks = [AnswerCheck.model_validate_json(text) for text in texts]
    try:
        problems = _REQUESTED.call(_problems, checks, before=load_libraries)
    except LimitExceeded as error:
        problems = [*error.found, f"it takes more than {too_much(_REQUESTED)} to be compiled: {SIMPLER}"]
    for field, check, problem in zip(fields, checks, problems, strict=False):
        if problem is not None:
            raise _unusable(field, check, problem)


def _problems(checks: Sequence[AnswerCheck]) -> Iterator[str | None]:
    return map(_problem, checks)


def _problem(check: AnswerCheck) -> str | None:
    try:
        reference(check, check.given)
    except ValueError as error:
        return str(error)
    return None


def _unusable(field: str, check: AnswerCheck, hint: str) -> InvalidRequest:
    return InvalidRequest(f"{field}.{_VALUES[check.type]}", check.given, hint)


SIMPLER = "make it shorter, repeat parts less often, and nest fewer of them"
"""What to do about a reference that exceeds limits."""


def too_much(limits: Limited) -> str:
    """The limits of a process, in words."""
    return f"{limits.seconds} s or {limits.memory >> 20} MiB"


def load_libraries() -> None:
    """Import what `reference` does."""
    import regex  # noqa: F401
    from jsonschema import FormatChecker

    _bounded_validator().check_schema({"$ref": "#"}, FormatChecker(()))


def refuse_fields(check: AnswerCheck, field: str) -> None:
    """Refuse the fields that a check of its type lacks, or would ignore. Raises InvalidRequest."""
    value, mode = _VALUES[check.type], _MODES.get(check.type)
    own = (value, "column", *filter(None, (mode,)), *(_OF_JUDGE if check.type == "judge" else ()))
    for name in sorted({*_VALUES.values(), *_MODES.values(), *_OF_JUDGE} - {*own}):
        if (found := getattr(check, name)) is not AnswerCheck.model_fields[name].default:
            has = ", ".join(own)
            raise InvalidRequest(f"{field}.{name}", found, f"a check of type {check.type} has {has}: leave it out")
    if check.given is not None and check.column is not None:
        hint = f"{value} is for all rows, column names that of each row: send one of the two"
        raise InvalidRequest(f"{field}.column", check.column, hint)
    if check.type == "judge":
        of_judge = {name: getattr(check, name) for name in ("model", "template", "scale", "at_least")}
        refuse_unusable_judge(field, **of_judge, given=check.given is not None or check.column is not None)
    if check.type in _NEEDS_REFERENCE and check.given is None and check.column is None:
        hint = f"a check of type {check.type} needs {value} for all rows, or the column that has it"
        raise InvalidRequest(f"{field}.{value}", None, hint)


def reference(check: AnswerCheck, value: Any) -> Any:
    """What answers are compared with: `value`, of the check or of a row's column, read for its type.

    Raises:
        ValueError: it cannot be read; what was found, and what is expected.
    """
    match check.type:
        case "exact":
            return _normalized(_text(value)) if check.normalize else _text(value)
        case "judge":
            return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else _text(value)
        case "regex":
            if not isinstance(value, str):
                raise ValueError(f"found {_kind(value)}, expected a pattern as text")
            return _compiled(value)
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
                return _validator(json.dumps(found))
            except RecursionError as error:
                raise ValueError("it is nested too deeply for a JSON schema: make it flatter") from error


def passes(check: AnswerCheck, answer: str, reference: Any = None) -> bool:
    """Whether an answer passes.

    Args:
        reference: of this answer; None: `json` without an expected value.

    Raises:
        TimeoutError: it cannot be decided within `TIMEOUT` seconds.
    """
    if check.type == "exact":
        return bool((_normalized(answer) if check.normalize else answer) == reference)
    if check.type == "regex":
        return reference.search(answer, timeout=TIMEOUT) is not None
    value = _parsed(_extracted(answer) if check.extract else answer)
    if value is _NOT_JSON:
        return False
    try:
        if check.type == "json":
            return reference is None or same_json(value, reference)
        return _is_valid(reference, value)
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


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    """Raises ValueError: it does not compile."""
    import regex

    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"it has {len(pattern)} characters, at most {MAX_PATTERN} are supported")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not a regular expression ({error}): correct it") from error


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    """The validator of a schema. Raises ValueError: it is none, or cannot be used here."""
    from jsonschema import SchemaError
    from referencing import Registry

    if len(text) > MAX_SCHEMA:
        raise ValueError(f"it has {len(text)} characters as JSON, at most {MAX_SCHEMA} are supported")
    schema = json.loads(text)
    if "2020-12" not in str(draft := schema.pop("$schema", "2020-12")):
        raise ValueError(f"$schema is {draft!r}: write it in draft 2020-12, and leave $schema out")
    _refuse_mixed_lists(schema)
    try:
        _refuse_parts(schema)
    except SchemaError as error:
        at = ".".join(map(str, error.path)) or "its top"
        raise ValueError(f"it is not a JSON schema: at {at}, {error.message[:200]}") from error
    return _bounded_validator()(schema, registry=Registry())


def _refuse_mixed_lists(value: Any) -> None:
    """Raises ValueError. A list of words, or of numbers, is sorted before its values are compared."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list) and len(part) > _MAX_MIXED:
            kinds = {float if type(one) is int else type(one) for one in part}
            if kinds not in ({str}, {float}):
                raise ValueError(f"it has a list of {len(part)} values that are mixed, at most {_MAX_MIXED} can be")
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _refuse_parts(schema: dict[str, Any]) -> None:
    """Refuse what is no schema, cannot be bounded in time, or is not in the schema itself.

    What `$ref` names may be where no schema is expected, so each target is checked as one by itself.

    Raises:
        ValueError, SchemaError.
    """
    from jsonschema import FormatChecker
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    # Without formats: `re` would judge patterns that are compiled by `regex`.
    check, formats = _bounded_validator().check_schema, FormatChecker(())
    check(schema, formats)
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    known: dict[int, Any] = {}
    targets: list[Any] = [schema]
    outside = 0
    while targets:
        target = targets.pop()
        if isinstance(target, bool) or id(target) in known:
            continue
        if target is not schema:
            if (outside := outside + 1) > _MAX_OUTSIDE:
                raise ValueError(f"$ref names more than {_MAX_OUTSIDE} parts that are no schemas: put them into $defs")
            check(target, formats)
        for part in _parts(target):
            known[id(part)] = part
            _refuse_keywords(part)
            if (named := part.get("$ref")) is not None:
                try:
                    targets.append(resolver.lookup(named).contents)
                except (Unresolvable, ValueError, TypeError, AttributeError) as error:
                    raise ValueError(f"$ref {named!r} is not in the schema: refer to one of its own $defs") from error


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema, and all schemas in it that are objects."""
    from referencing.jsonschema import DRAFT202012

    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += DRAFT202012.subresources_of(part)


def _refuse_keywords(part: dict[str, Any]) -> None:
    for name in _REFUSED:
        if name in part:
            raise ValueError(f"it has {name}, which is not supported: describe the same without it")
    if "pattern" in part:
        _compiled(part["pattern"])


@cache
def _bounded_validator() -> Any:
    """jsonschema's validator of draft 2020-12, of which each keyword observes the deadline."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    keywords = {name: _bounded(keyword) for name, keyword in Draft202012Validator.VALIDATORS.items()}
    return extend(Draft202012Validator, {**keywords, "pattern": _pattern, "uniqueItems": _bounded(_unique_items)})


def _bounded(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.monotonic() > _deadline.get():
            raise TimeoutError
        return keyword(validator, value, instance, schema)

    return checked


def _unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """As jsonschema's, which compares each value with all others where they cannot be sorted."""
    from jsonschema import ValidationError

    if value and isinstance(instance, list) and len({_key(one) for one in instance}) < len(instance):
        yield ValidationError("two of its values are equal")


def _key(value: Any) -> Any:
    """Equal for equal JSON values, as `same_json` compares them."""
    match value:
        case bool() | None:
            return repr(value)
        case dict():
            return "object", frozenset((name, _key(one)) for name, one in value.items())
        case list():
            return "list", tuple(map(_key, value))
        case _:
            return "value", value


def _pattern(validator: Any, value: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    left = _deadline.get() - time.monotonic()
    if left <= 0:
        raise TimeoutError
    if isinstance(instance, str) and _compiled(value).search(instance, timeout=left) is None:
        yield ValidationError("it does not match")


def _is_valid(validator: Any, value: Any) -> bool:
    token = _deadline.set(time.monotonic() + TIMEOUT)
    try:
        return bool(validator.is_valid(value))
    finally:
        _deadline.reset(token)
