"""Names that come from elsewhere: printable characters only, wherever they enter.

Every text in a model that derives from `CheckedNames` is a name, in lists and in keys and values of objects too, unless
its field is declared otherwise. So a new field is checked without further work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationInfo, field_validator

from ..system.console import hidden_in
from .exact import ExactValues

STORED = {"stored": True}
"""Context in which a document of ours is validated: names in it passed the check of the release that stored it."""
MOST_NAME = 4096
"""Characters of a name: those of the longest path. Fields that need fewer have a bound of their own."""


class FreeText:
    """Marks a field of text that names nothing, such as a prompt: it may have any characters."""


class CheckedElsewhere:
    """Marks a field that another model parses, whose fields are names and free texts of their own."""


def problem_of_name(text: str) -> str:
    """Why a text can be no name; empty: it can."""
    if len(text) > MOST_NAME:
        return f"it has {len(text)} characters, expected at most {MOST_NAME}"
    if text.isascii() and text.isprintable():
        return ""
    at = next(hidden_in(text), None)
    if at is None:
        return ""
    return (
        f"character {at} is U+{ord(text[at]):04X}, which is not printed, hides, or reorders others: "
        "use printable characters"
    )


class CheckedNames(ExactValues):
    """A model whose texts are names. A field of other text is `Annotated[..., FreeText()]`."""

    @field_validator("*")
    @classmethod
    def _check_names(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            info.context is STORED
            or value is None
            or isinstance(value, bool | int | float)
            or not is_checked(cls, info.field_name or "")
        ):
            return value
        for where, text in _texts(value):
            if problem := problem_of_name(text):
                raise ValueError(f"{where}: {problem}" if where else problem)
        return value


@cache
def is_checked(model: type[BaseModel], field: str) -> bool:
    """Whether the texts of a field are names."""
    return not any(isinstance(one, FreeText | CheckedElsewhere) for one in model.model_fields[field].metadata)


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """The texts in a value, with their paths. Other models check their own. Not recursive: JSON may be deep."""
    pending = [("", value)]
    while pending:
        where, one = pending.pop()
        if isinstance(one, str):
            yield where, one
        elif isinstance(one, Mapping):
            yield from ((f"a key in {where}" if where else "a key", key) for key in one if isinstance(key, str))
            pending += [(f"{where}.{key}" if where else str(key), each) for key, each in one.items()]
        elif isinstance(one, list | tuple | set | frozenset):
            pending += [(f"{where}.{at}" if where else str(at), each) for at, each in enumerate(one)]
