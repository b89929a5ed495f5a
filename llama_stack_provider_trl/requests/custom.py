"""Resolves the methods that installed packages add (`specs.custom`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequest, MethodUnavailable
from ..specs.custom import ALGORITHMS, InstalledMethod, custom_names, find_method, same_method
from ..specs.custom_limits import FIELDS, within_limits
from ..specs.methods import CustomSpec
from .checks import refusal_of, refuse_infinite
from .choices import nearest_choice


def resolve_custom(name: str, given: dict[str, Any], where: str) -> tuple[InstalledMethod, dict[str, Any]]:
    """The method of an installed package, and the algorithm and spec of a job that it trains. Raises InvalidRequest: it
    cannot be used here, or has no such field or value; LimitReached: too many requests are checked.

    Args:
        given: the fields of the request, `type` among them.
        where: the path of these fields.
    """
    try:
        found = find_method(name)
        parameters = _parameters(found, given, where)
    except MethodUnavailable as error:
        raise InvalidRequest(f"{where}.type", name, str(error)) from error
    spec = CustomSpec(
        algorithm=ALGORITHMS[found.method.rows],
        type=name,
        package=found.package,
        version=found.version,
        parameters=parameters,
    )
    return found, {"method": spec}


def unknown_method(name: Any, built_in: list[str]) -> str:
    """The hint for a type that no method has: the ones there are, of installed packages too."""
    installed = custom_names()
    added = f"installed packages add {', '.join(installed)}" if installed else "no installed package adds a method"
    return f"{nearest_choice(str(name), [*built_in, *installed])}; {added} (docs/how-to/custom-trainers.md)"


def _parameters(found: InstalledMethod, given: dict[str, Any], where: str) -> dict[str, Any]:
    known = list(found.method.fields.model_fields)
    sent = {name: value for name, value in given.items() if name != "type" and value is not None}
    for name, value in sent.items():
        if name not in known:
            hint = f"{found.method.title} has no such field; its fields are: {', '.join(['type', *known])}"
            raise InvalidRequest(f"{where}.{name}", value, hint)
    (outcome,) = within_limits(
        found, "read its fields", FIELDS, _outcome, found.name, found.package, found.version, sent, where
    )
    if (problem := outcome.get("unavailable")) is not None:
        raise MethodUnavailable(problem)
    if (refused := outcome.get("refused")) is not None:
        raise InvalidRequest(*refused)
    parameters: dict[str, Any] = outcome["parameters"]
    return parameters


def _outcome(name: str, package: str, version: str, sent: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The parsed fields, or what is wrong, as JSON values: computed in another process."""
    try:
        found = same_method(name, package, version)
        parsed = found.parameters(sent)
        refuse_infinite(parsed, f"{where}.")
        yield {"parameters": found.written(parsed)}
        return
    except MethodUnavailable as error:
        yield {"unavailable": str(error)}
        return
    except ValidationError as error:
        refused = refusal_of(error, where)
    except InvalidRequest as error:
        refused = error
    value = refused.value
    # What a package's model refuses may be a value of its own.
    yield {"refused": [refused.field, value if isinstance(value, str | int | float) else repr(value), refused.hint]}
