"""The choice that a name of another trainer, or another spelling, most likely means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

COMPARED = 100
"""Characters of a name that is compared with known ones: the time grows with the square of its length."""


def nearest_choice(value: str, choices: Sequence[str]) -> str:
    """What is expected in place of a value, with the nearest choice where one is near."""
    return f"expected one of {', '.join(choices)}{nearest(value, choices)}"


def nearest(value: Any, choices: Sequence[str], alike: float = 0.7) -> str:
    """The end of a sentence that names the nearest choice; empty: none is near.

    Args:
        alike: part of the letters that it has in common at least.
    """
    found = _nearest(value[:COMPARED], choices, alike) if isinstance(value, str) else None
    return f"; the nearest is '{found}'" if found else ""


def no_such_field(name: str, known: Sequence[str]) -> str:
    """What to do about an unknown field."""
    close = _nearest(name[:COMPARED], known)
    hint = f"there is no such field: did you mean `{close}`?" if close else "there is no such field: leave it out."
    return f"{hint} docs/reference/api.md lists every field"


def no_such_setting(error: Mapping[str, Any], model: Any, page: str) -> str:
    """What follows the name of an unknown setting.

    Args:
        error: one of pydantic's for it, with its place from the model on.
    """
    *path, name = error["loc"]
    close = _nearest(str(name)[:COMPARED], fields_at(model, path))
    return f"is not a setting: {f'did you mean `{close}`? ' if close else ''}{page} lists them all"


def problem_of(error: Mapping[str, Any], model: Any = None) -> str:
    """The problem of a field that a model does not accept, with the nearest choice.

    Args:
        error: one of pydantic's, with its place from the model on.
        model: names the fields that there are; None: not known.
    """
    if error["type"] == "extra_forbidden":
        *path, name = error["loc"]
        close = _nearest(str(name)[:COMPARED], fields_at(model, path))
        return f"there is no such field: did you mean `{close}`?" if close else "there is no such field: leave it out"
    message = str(error["msg"]).removeprefix("Value error, ")
    quoted = re.findall(r"'([^']*)'", message)  # errors of forms have no `ctx`
    if error["type"] == "literal_error":
        return message + nearest(error["input"], quoted)
    if error["type"] == "union_tag_invalid":  # the tag, the name of its field, and what it may be
        return message + nearest("".join(quoted[:1]), quoted[2:])
    if error.get("input", "") is None and isinstance(error["loc"][-1], str):
        return f"{message}; null counts as left out, and it is required"
    return message


def fields_at(model: Any, path: Sequence[int | str]) -> list[str]:
    """The names of the fields at a place in a model, or in what annotates a field."""
    kinds = list(_models_in(model))
    for step in path:
        # First, since a union's tag may also be the name of a field: {"type": "rows", "rows": []}.
        tagged = [kind for kind in kinds if any(step in get_args(f.annotation) for f in kind.model_fields.values())]
        if tagged and len(kinds) > 1:
            kinds = tagged
        elif fields := [kind.model_fields[str(step)] for kind in kinds if step in kind.model_fields]:
            kinds = [kind for field in fields for kind in _models_in(field.annotation)]
    return list(dict.fromkeys(name for kind in kinds for name in kind.model_fields))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _nearest(value: str, choices: Sequence[str], alike: float = 0.7) -> str | None:
    """Another spelling (AdamW), the choice whose words are all among the value's (adamw_torch_fused,
    torch.optim.AdamW, cosine_with_restarts), initials (wsd), or what has most letters in common."""
    spelled = {_letters(choice): choice for choice in reversed(choices)}
    if found := spelled.get(_letters(value)):
        return found
    words = _words(value)
    contained = [choice for choice in choices if _words(choice) <= words]
    if contained:
        return max(contained, key=len)
    initials = {"".join(word[0] for word in re.findall(r"[a-z0-9]+", choice.lower())): choice for choice in choices}
    if len(value) > 1 and (found := initials.get(value.lower())):
        return found
    close = difflib.get_close_matches(_letters(value), list(spelled), n=1, cutoff=alike)
    return spelled[close[0]] if close else None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
