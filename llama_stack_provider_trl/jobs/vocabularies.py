"""Compares the tokenizers of several models of a job at POST, as far as their files are on this machine by then.

The evaluation itself compares whole vocabularies, with the library that reads them. Here only what cannot be meant is
refused: a token that has two numbers. The files are read in a fork with limits: to parse 64 MiB of JSON can take
1.3 GiB, and the requests that are served meanwhile would wait for it (that of Qwen2.5: 73 MiB, 0.2 s).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import InvalidRequest
from ..requests.bases import Base
from ..system.limited import Limited, LimitExceeded
from ..system.model_directory import ModelDirectory, find_model

_FILE = "tokenizer.json"
_MOST = 64 << 20
"""Bytes of a tokenizer that is read here."""
_LIMITS = Limited(seconds=20, memory=1 << 30)
"""For the tokenizers of a request. What exceeds them is left to the evaluation."""


def refuse_other_vocabularies(
    named: Sequence[tuple[str, str]],
    found: Sequence[Base],
    hint: str = "name models with the same tokenizer",
) -> None:
    """Refuse models that give a token another number than the first one does.

    Args:
        named: the field that names each model, and its value.
        found: what each of them is.
        hint: what to do, in the message.

    Raises:
        InvalidRequest: names the field, and both models.
        LimitReached: too many requests are checked.
    """
    directories = [find_model(os.environ, base.model, base.trust.get("revision")) for base in found]
    here = [(name, directory) for name, directory in zip(named, directories, strict=True) if directory is not None]
    if len(set(directories) - {None}) < 2:
        return
    try:
        disputed = _LIMITS.call(lambda: _disputes([directory for _, directory in here]))
    except LimitExceeded as error:
        disputed = error.found
    for ((field, name), _), dispute in zip(here, disputed, strict=False):
        if dispute is not None:
            first, token = here[dispute[0]][0][1], dispute[1]
            problem = f"its tokenizer is not that of {first!r}, which has another number for the token {token!r}"
            raise InvalidRequest(field, name, f"{problem}: {hint}")


def _disputes(directories: Sequence[ModelDirectory]) -> Iterator[tuple[int, str] | None]:
    """For each model the number of the first one whose tokenizer can be read, and a token that has another number
    there; None: there is none, or this tokenizer cannot be read."""
    first: tuple[int, bytes] | None = None
    ours: dict[str, int] | None = None
    for number, directory in enumerate(directories):
        content = _content(directory)
        token = None
        if content is not None and first is None:
            first = number, content
        elif content is not None and first is not None and content != first[1]:
            ours = _vocabulary(first[1]) if ours is None else ours
            token = _disputed(ours, _vocabulary(content))
        yield None if token is None or first is None else (first[0], token)


def _content(directory: ModelDirectory) -> bytes | None:
    """The file of a model's tokenizer; None: it is not here, or too large to be read now."""
    try:
        with directory.open(_FILE) as file:
            content = file.read(_MOST + 1)
    except OSError:
        return None
    return content if len(content) <= _MOST else None


def _disputed(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The first token, by its text, that has two numbers; None: there is none, or a file is of another form."""
    try:
        return min((token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]), default=None)
    except TypeError:
        return None


def _vocabulary(content: bytes) -> dict[str, int]:
    """Token -> number, in a file of the library tokenizers; empty: it is of another form."""
    try:
        document: Any = json.loads(content)
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {str(one["content"]): int(one["id"]) for one in document.get("added_tokens") or ()}
        return {**vocabulary, **added}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return {}
