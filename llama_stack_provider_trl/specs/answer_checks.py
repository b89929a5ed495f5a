"""Checks of a model's answers: equal text, a regular expression, JSON, a JSON schema. Imports no torch.

A check compares an answer with a *reference*: text, a compiled pattern, a JSON value or a schema's validator. The check
names one for all rows, or a column with that of each row. `reference` reads it, `passes` compares.

The time of a comparison is bounded: a pattern that backtracks without end, or a schema that branches so, raises
TimeoutError. `regex` has timeouts, which `re` lacks; jsonschema searches with `re`, so its `pattern` is replaced and
`patternProperties` is refused.
"""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Literal

from pydantic import Field

from ..errors import InvalidRequest
from .beginnings import Frozen

CheckType = Literal["exact", "regex", "json", "json_schema"]
TIMEOUT = 1.0
"""Seconds that the comparison of one answer may take, of CPU time where it is a pattern."""
MAX_PATTERN, MAX_SCHEMA = 4096, 65536
"""Characters of a pattern, and of a schema as JSON text."""
_VALUES: dict[CheckType, str] = {
    "exact": "expected",
    "regex": "pattern",
    "json": "expected",
    "json_schema": "json_schema",
}
"""Field with the reference for all rows."""
_MODES: dict[CheckType, str] = {"exact": "normalize", "json": "extract", "json_schema": "extract"}
_NEEDS_REFERENCE = ("regex", "json_schema")
_NOT_JSON = object()
_deadline: ContextVar[float] = ContextVar("deadline")


class AnswerCheck(Frozen):
    """A check that every answer of a job passes or fails. Without a reference, `exact` takes the row's own answer, its
    last assistant message, and `json` passes whatever can be parsed."""

    type: CheckType
    """exact: the answer is this text. regex: the pattern is found in it. json: it can be parsed, and is equal to the
    expected value where there is one. json_schema: it can be parsed, and is valid under the schema."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Of its measure; None: the type."""
    column: str | None = Field(None, min_length=1, max_length=512)
    """Column of the rows with the reference of each."""
    expected: Any = None
    """exact: text. json: a value, or its JSON text."""
    pattern: str | None = Field(None, max_length=MAX_PATTERN)
    """regex: of the library `regex`, found anywhere in the answer; `\\A` and `\\Z` are its ends."""
    json_schema: dict[str, Any] | None = None
    """json_schema: a schema of draft 2020-12."""
    normalize: bool = False
    """exact: compare without case, in Unicode's form NFKC, with one space for all white space and none at the ends.
    False: character by character."""
    extract: bool = False
    """json, json_schema: read from the first `{` to the last `}`, whatever is around. False: the whole answer."""

    @property
    def measure(self) -> str:
        """The name of its measure."""
        return self.name or self.type

    @property
    def given(self) -> Any:
        """The reference for all rows, as written; None: there is none."""
        return getattr(self, _VALUES[self.type])

    @property
    def reads_answers(self) -> bool:
        """Whether its reference is the row's own answer."""
        return self.type == "exact" and self.given is None and self.column is None


def refuse_unusable(checks: Sequence[AnswerCheck], field: str) -> None:
    """Refuse checks that cannot be made.

    Args:
        field: of the request, that has them.

    Raises:
        InvalidRequest: names the check's field: one that would be ignored, a reference that is missing or cannot be
            read, a name that two checks have.
    """
    for number, check in enumerate(checks):
        refuse_unusable_check(check, f"{field}.{number}")
        if check.measure in {other.measure for other in checks[:number]}:
            hint = "another check has this name: give each check a name of its own"
            raise InvalidRequest(f"{field}.{number}.name", check.name, hint)


def refuse_unusable_check(check: AnswerCheck, field: str) -> None:
    """As `refuse_unusable`, of one check: `field` has it."""
    _refuse_fields(check, field)
    if check.given is not None:
        try:
            json.dumps(check.given, allow_nan=False)  # which JSON reads of 1e999, and cannot write
            reference(check, check.given)
        except ValueError as error:
            raise InvalidRequest(f"{field}.{_VALUES[check.type]}", check.given, str(error)) from error


def _refuse_fields(check: AnswerCheck, field: str) -> None:
    value, mode = _VALUES[check.type], _MODES.get(check.type)
    for name in sorted({*_VALUES.values(), *_MODES.values()} - {value, mode}):
        if (found := getattr(check, name)) not in (None, False):
            has = ", ".join(filter(None, (value, "column", mode)))
            raise InvalidRequest(f"{field}.{name}", found, f"a check of type {check.type} has {has}: leave it out")
    if check.given is not None and check.column is not None:
        hint = f"{value} is for all rows, column names that of each row: send one of the two"
        raise InvalidRequest(f"{field}.column", check.column, hint)
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
            text = value if isinstance(value, str) else _scalar_text(value)
            return _normalized(text) if check.normalize else text
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
    except RecursionError:  # nested more deeply than Python can follow
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


def _scalar_text(value: Any) -> str:
    """The text of a number or a boolean, as JSON writes it: rows may have numbers as expected answers."""
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
    from jsonschema import FormatChecker, SchemaError
    from referencing import Registry

    if len(text) > MAX_SCHEMA:
        raise ValueError(f"it has {len(text)} characters as JSON, at most {MAX_SCHEMA} are supported")
    schema = json.loads(text)
    try:
        # Without formats: `re` would judge patterns that are compiled by `regex`.
        _bounded_validator().check_schema(schema, FormatChecker(()))
        _refuse_parts(schema)
    except SchemaError as error:
        at = ".".join(map(str, error.path)) or "its top"
        raise ValueError(f"it is not a JSON schema: at {at}, {error.message[:200]}") from error
    return _bounded_validator()(schema, registry=Registry())


def _refuse_parts(schema: dict[str, Any]) -> None:
    """Refuse what cannot be bounded in time, or is not in the schema itself. Raises ValueError."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    if "2020-12" not in schema.get("$schema", "2020-12"):
        raise ValueError(f"$schema is {schema['$schema']!r}: write it in draft 2020-12, and leave $schema out")
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    seen: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        for name in ("patternProperties", "$dynamicRef", "$id"):
            if name in part:
                raise ValueError(f"it has {name}, which is not supported: describe the same without it")
        if "pattern" in part:
            _compiled(part["pattern"])
        if (named := part.get("$ref")) is not None:
            try:
                waiting.append(resolver.lookup(named).contents)
            except (Unresolvable, ValueError) as error:
                raise ValueError(f"$ref {named!r} is not in the schema: refer to one of its own $defs") from error
        waiting += DRAFT202012.subresources_of(part)


@cache
def _bounded_validator() -> Any:
    """jsonschema's validator of draft 2020-12, of which each keyword observes the deadline."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    keywords = {name: _bounded(keyword) for name, keyword in Draft202012Validator.VALIDATORS.items()}
    return extend(Draft202012Validator, {**keywords, "pattern": _pattern})


def _bounded(keyword: Callable[..., Any]) -> Callable[..., Any]:
    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if time.monotonic() > _deadline.get():
            raise TimeoutError
        return keyword(validator, value, instance, schema)

    return checked


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
