"""Compiles patterns and JSON schemas that answers are compared with, and compares within limits of time.

The time of a comparison is bounded: a pattern that backtracks without end, or a schema that branches so, raises
TimeoutError. `regex` has timeouts, which `re` lacks; jsonschema searches with `re`, so its `pattern` is replaced and
`patternProperties` is refused. So are `unevaluatedProperties` and `unevaluatedItems`, which look ahead past the
deadline, and a `$schema` below the top, where jsonschema would continue with its own validator.

To compile a pattern has no such bounds: `regex` writes a repeated part out as often as it occurs at least, so eleven
characters can take all memory, and nested `+` double it. A process that serves requests compiles none: another does,
and tries each on sample texts (`refuse_unbounded`). A pattern that calls itself before it has read a character,
`(?R)?`, takes 0.8 GiB in 4 s, whatever the timeout is, before `regex` raises MemoryError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

TIMEOUT = 1.0
"""Seconds that the comparison of one answer may take, of CPU time where it is a pattern."""
MAX_PATTERN, MAX_SCHEMA = 4096, 65536
"""Characters of a pattern, and of a schema as JSON text."""
_MAX_OUTSIDE = 16
"""Parts that `$ref` names where no schema is expected."""
_MAX_MIXED = 256
"""Values of a list in a schema, if they cannot be sorted: then each is compared with all others."""
_REFUSED = (
    *("$schema", "$id", "$dynamicRef"),
    *("patternProperties", "unevaluatedProperties", "unevaluatedItems"),
)
"""Keywords of a schema, but for $schema at its top."""
_SAMPLE = 2000
"""Characters of a text on which a pattern is tried."""
_SAMPLE_TEXTS = (
    "a1 B_2-\n\t" * 20,
    '{"a": [1, 2.5e3, true, null, {"b": "c"}], "d": "\\u00e9"}\n' * 4,
    "(((((((([[[[{{{{<<<<" + "a" * 20 + ">>>>}}}}]]]]))))))))",
    "Der Stra\u00dfe \ufb05 \u0130 \u4e2d\u6587 \U0001f600 " * 4,
)
_SAMPLE_VALUES: tuple[Any, ...] = (
    *({}, [], "", "a", 0, -1.5, True, None, 10**30),
    *([[[1], "a"], 2], {"a": {"b": [{}]}, "type": "a", "name": "b", "value": 1}),
)
UNBOUNDED = (
    "takes all memory that it may have: it repeats or calls itself ((?R), (?1), (?&name)) without reading a character. "
    "Have it read one first, or write it without recursion"
)
SIMPLER = "make it shorter, repeat parts less often, and nest fewer of them"
"""What to do about a reference that exceeds limits."""
_deadline: ContextVar[float] = ContextVar("deadline")


@lru_cache(maxsize=1024)
def compiled_pattern(pattern: str) -> Any:
    """Raises ValueError: it does not compile."""
    import regex

    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"it has {len(pattern)} characters, at most {MAX_PATTERN} are supported")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not a regular expression ({error}): correct it") from error


def is_found(pattern: Any, text: str) -> bool:
    """Whether a pattern is found in a text. Raises TimeoutError, MemoryError."""
    return pattern.search(text, timeout=TIMEOUT) is not None


@lru_cache(maxsize=256)
def compiled_schema(text: str) -> Any:
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

    What `$ref` names may be where no schema is expected, so each target is checked as one by itself. Raises ValueError,
    SchemaError.
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
        compiled_pattern(part["pattern"])


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
    if isinstance(instance, str) and compiled_pattern(value).search(instance, timeout=left) is None:
        yield ValidationError("it does not match")


def is_valid(validator: Any, value: Any) -> bool:
    token = _deadline.set(time.monotonic() + TIMEOUT)
    try:
        return bool(validator.is_valid(value))
    finally:
        _deadline.reset(token)


def refuse_unbounded(found: Any) -> None:
    """Compare sample texts, or values, with a compiled reference; in a process with limits of memory and time. Raises
    ValueError: one takes more than these limits, or `TIMEOUT`."""
    if not hasattr(found, "is_valid"):
        _try_pattern(found)
        return
    for part in _parts(found.schema):
        if "pattern" in part:
            _try_pattern(compiled_pattern(part["pattern"]))
    for value in _SAMPLE_VALUES:
        try:
            is_valid(found, value)
        except TimeoutError as error:
            raise ValueError(f"to compare {json.dumps(value)} takes more than {TIMEOUT:g} s: {SIMPLER}") from error
        except RecursionError as error:
            raise ValueError("a $ref in it leads back to itself without end: describe the same without it") from error
        except OverflowError:  # of multipleOf: no number passes
            continue


def _try_pattern(pattern: Any) -> None:
    # Its own text has the characters without which it is not even tried.
    for text in ("", "a" * 200, *_SAMPLE_TEXTS, pattern.pattern, pattern.pattern * 4):
        try:
            is_found(pattern, text[:_SAMPLE])
        except TimeoutError as error:
            raise ValueError(
                f"the pattern {shown_pattern(pattern)} takes more than {TIMEOUT:g} s for {len(text[:_SAMPLE])} "
                f"characters: {SIMPLER}"
            ) from error
        except MemoryError as error:
            raise ValueError(f"the pattern {shown_pattern(pattern)} {UNBOUNDED}") from error


def shown_pattern(pattern: Any) -> str:
    return repr(pattern.pattern if len(pattern.pattern) <= 100 else f"{pattern.pattern[:100]}...")


def load_libraries() -> None:
    """Import what `reference` does."""
    import regex  # noqa: F401
    from jsonschema import FormatChecker

    _bounded_validator().check_schema({"$ref": "#"}, FormatChecker(()))
