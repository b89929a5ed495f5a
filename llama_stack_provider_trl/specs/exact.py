"""Values of fields that pydantic would convert into something else than was meant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""Of a setting: `~` is the home directory, and a relative one begins where the process does."""
_NO_NUMBER = PydanticCustomError("boolean_as_number", "a boolean is no number: send the number itself")


class ExactValues(BaseModel):
    """A model in which null is a field that is left out, and a boolean is no number.

    pydantic refuses null where a field has another default, and reads true as 1.
    """

    # One for all fields: a validator of each field costs more, and a field that decides a union may have none.
    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        numbers = _numbers(cls)
        wrong = [name for name, value in values.items() if name in numbers and _has_boolean(value)]
        if wrong:
            found: list[InitErrorDetails] = [
                {"type": _NO_NUMBER, "loc": (name,), "input": values[name]} for name in wrong
            ]
            raise ValidationError.from_exception_data(cls.__name__, found)
        if None not in values.values():
            return values
        with_default = _with_default(cls)
        return {name: value for name, value in values.items() if value is not None or name not in with_default}


@cache
def _with_default(model: type[BaseModel]) -> frozenset[str]:
    """The fields that need not be there and cannot be None."""
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if not field.is_required() and field.default is not None and type(None) not in _kinds(field.annotation)
    )


@cache
def _numbers(model: type[BaseModel]) -> frozenset[str]:
    """The fields that take numbers, alone, in lists or in objects, and no booleans."""
    found = ((name, _kinds(field.annotation)) for name, field in model.model_fields.items())
    return frozenset(name for name, kinds in found if kinds & {int, float} and not kinds & {bool, Any})


def _kinds(annotation: Any) -> frozenset[Any]:
    """The types that an annotation consists of."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    parts = get_args(annotation) if get_origin(annotation) in (list, tuple, dict, Union, UnionType) else ()
    return frozenset().union(*map(_kinds, parts)) if parts else frozenset([annotation])


def _has_boolean(value: Any) -> bool:
    """Whether a value is a boolean, or holds one in lists and objects. Not recursive: JSON may be deep."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, bool):
            return True
        if isinstance(one, Mapping):
            pending += one.values()
        elif isinstance(one, list | tuple):
            pending += one
    return False


def numbers_as_text(value: Any) -> Any:
    """An object whose whole numbers are texts: YAML reads the label `rack: 7`, or the amount `1`, as a number."""
    if not isinstance(value, dict):
        return value
    return {key: str(one) if isinstance(one, int) and not isinstance(one, bool) else one for key, one in value.items()}
