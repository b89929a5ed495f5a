"""Scores of answers that need no model and no code of others: whether an answer is what a row or a rule expects.

Patterns are searched with `regex`, which has timeouts: one that backtracks without end would hang a training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from .rewards import Check, RewardSource

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NO_VALUE = object()
"""What text that is not JSON stands for."""
_SECONDS = 1.0
"""That the search of a pattern may take; the answer does not pass then."""
_ANNOTATIONS = {"$schema", "title", "description", "default", "examples"}


def score(source: RewardSource, answer: str, row: Mapping[str, Any]) -> float:
    """1.0 where the answer passes the check of the source, else 0.0."""
    if source.check is None:
        raise AssertionError("a reward without a check")
    try:
        return float(_CHECKS[source.check](source, answer, row))
    except TimeoutError:
        return 0.0


def schema_problem(schema: Any, where: str = "") -> str:
    """Why a JSON schema cannot be checked; empty: it can. A part of draft 2020-12 is supported, and nothing ignored."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"{where or 'it'} is not an object"
    for keyword, value in schema.items():
        path = f"{where}.{keyword}" if where else keyword
        if keyword not in _ANNOTATIONS and (problem := _keyword_problem(keyword, value, path)):
            return problem
    return ""


def matches(value: Any, schema: Any) -> bool:
    """Whether a JSON value is valid by a schema that `schema_problem` accepts."""
    if isinstance(schema, bool):
        return schema
    return all(_KEYWORDS[name](value, given, schema) for name, given in schema.items() if name not in _ANNOTATIONS)


def _keyword_problem(keyword: str, value: Any, path: str) -> str:
    if keyword not in _KEYWORDS:
        return f"{path} is not among the supported keywords {', '.join(sorted(_KEYWORDS))}"
    kind = _KINDS.get(keyword)
    if kind is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        return f"{path} is {value!r}"
    if keyword == "type" and not all(one in _TYPES for one in (value if isinstance(value, list) else [value])):
        return f"{path} is {value!r}, expected one of {', '.join(_TYPES)}"
    if keyword == "pattern":
        try:
            re.compile(value)
        except re.error as error:
            return f"{path} is no regular expression ({error})"
    return next(
        (problem for place, part in _parts(keyword, value, path) if (problem := schema_problem(part, place))), ""
    )


def _parts(keyword: str, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The schemas in a keyword's value, each with its place."""
    if keyword == "properties":
        yield from ((f"{path}.{name}", part) for name, part in value.items())
    elif keyword in ("anyOf", "allOf"):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif keyword in ("items", "additionalProperties", "not"):
        yield path, value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    whole = name != "integer" or isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _TYPES[name]) and whole


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1, 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _additional(value: Any, given: Any, schema: Mapping[str, Any]) -> bool:
    known = schema.get("properties", {})
    return not isinstance(value, dict) or all(matches(one, given) for key, one in value.items() if key not in known)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "type": (str, list),
    "enum": list,
    "properties": dict,
    "required": list,
    "anyOf": list,
    "allOf": list,
    "pattern": str,
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), int),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (int, float)),
}
_KEYWORDS: dict[str, Callable[[Any, Any, Mapping[str, Any]], bool]] = {
    "type": lambda value, given, _: any(_has_type(value, n) for n in (given if isinstance(given, list) else [given])),
    "enum": lambda value, given, _: any(_same(value, one) for one in given),
    "const": lambda value, given, _: _same(value, given),
    "properties": lambda value, given, _: (
        not isinstance(value, dict) or all(matches(value[key], part) for key, part in given.items() if key in value)
    ),
    "required": lambda value, given, _: not isinstance(value, dict) or all(key in value for key in given),
    "additionalProperties": _additional,
    "items": lambda value, given, _: not isinstance(value, list) or all(matches(one, given) for one in value),
    "minItems": lambda value, given, _: not isinstance(value, list) or len(value) >= given,
    "maxItems": lambda value, given, _: not isinstance(value, list) or len(value) <= given,
    "minLength": lambda value, given, _: not isinstance(value, str) or len(value) >= given,
    "maxLength": lambda value, given, _: not isinstance(value, str) or len(value) <= given,
    "pattern": lambda value, given, _: not isinstance(value, str) or _search(given, value) is not None,
    "minimum": lambda value, given, _: not _is_number(value) or value >= given,
    "maximum": lambda value, given, _: not _is_number(value) or value <= given,
    "exclusiveMinimum": lambda value, given, _: not _is_number(value) or value > given,
    "exclusiveMaximum": lambda value, given, _: not _is_number(value) or value < given,
    "anyOf": lambda value, given, _: any(matches(value, part) for part in given),
    "allOf": lambda value, given, _: all(matches(value, part) for part in given),
    "not": lambda value, given, _: not matches(value, given),
}
"""Keyword -> whether a value satisfies it, with the schema that it is in."""


def _search(pattern: str, text: str) -> Any:
    """Where a pattern is found first; None: nowhere. Raises TimeoutError."""
    import regex

    return regex.search(pattern, text, timeout=_SECONDS)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).strip()


def _parsed(text: str) -> Any:
    """The JSON value of a text; `_NO_VALUE`: it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NO_VALUE


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _exact(source: RewardSource, answer: str, row: Mapping[str, Any]) -> bool:
    return answer.strip() == _text(row[source.column or ""])


def _regex(source: RewardSource, answer: str, row: Mapping[str, Any]) -> bool:
    found = _search(source.pattern or "", answer)
    if found is None or source.column is None:
        return found is not None
    text = found[1] if found.re.groups else found[0]
    return text is not None and text.strip() == _text(row[source.column])


def _json(source: RewardSource, answer: str, row: Mapping[str, Any]) -> bool:
    value = _parsed(answer)
    if value is _NO_VALUE or source.column is None:
        return value is not _NO_VALUE
    expected = row[source.column]
    if isinstance(expected, str) and (parsed := _parsed(expected)) is not _NO_VALUE:
        expected = parsed
    return _same(value, expected)


def _json_schema(source: RewardSource, answer: str, row: Mapping[str, Any]) -> bool:
    value = _parsed(answer)
    return value is not _NO_VALUE and matches(value, json.loads(source.json_schema or "true"))


_CHECKS: dict[Check, Callable[[RewardSource, str, Mapping[str, Any]], bool]] = {
    "exact": _exact,
    "regex": _regex,
    "json": _json,
    "json_schema": _json_schema,
}
assert set(_CHECKS) == set(get_args(Check))
