"""Compares the tokenizers of several models of a job at POST, as far as their files are on this machine by then.

The job itself compares whole vocabularies, with the library that reads them. Here only what it would refuse for certain
is refused: a token that has two numbers, or that one of two tokenizers has in none of its files. The files are read in
a process with limits: to parse 64 MiB of JSON can take 1.3 GiB, and the requests that are served meanwhile would wait
for it (that of Qwen2.5: 73 MiB, 0.2 s).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import InvalidRequest
from ...specs.model_source import ModelSource
from ...system.limited import Limited, LimitExceeded
from ...system.model_directory import ModelDirectory, find_model

_FILE = "tokenizer.json"
_ADDING = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
"""Files that may add tokens to those of `_FILE`."""
_SPECIAL = re.compile(r"[<\[].*[>\]]", re.DOTALL)
"""Form of the tokens that the class of a tokenizer may add by itself."""
_MOST = 64 << 20
"""Bytes of a tokenizer that is read here."""
_LIMITS = Limited(seconds=20, memory=1 << 30)
"""For the tokenizers of a request. What exceeds them is left to the job."""


def refuse_other_vocabularies(
    named: Sequence[tuple[str, str]],
    found: Sequence[ModelSource],
    hint: str,
) -> None:
    """Refuse models that give a token another number than the first one does, or lack it, or have further ones. Raises
    InvalidRequest: names the field, and both models; LimitReached: too many requests are checked.

    Args:
        named: the field that names each model, and its value.
    """
    directories = [find_model(os.environ, source.model, source.revision) for source in found]
    here = [(name, directory) for name, directory in zip(named, directories, strict=True) if directory is not None]
    if len(set(directories) - {None}) < 2:
        return
    try:
        disputed = _LIMITS.call(_disputes, [directory for _, directory in here])
    except LimitExceeded as error:
        disputed = error.found
    for ((field, name), _), dispute in zip(here, disputed, strict=False):
        if dispute is not None:
            problem = f"its tokenizer is not that of {here[dispute[0]][0][1]!r}, {dispute[1]}"
            raise InvalidRequest(field, name, f"{problem}: {hint}")


def _disputes(directories: Sequence[ModelDirectory]) -> Iterator[tuple[int, str] | None]:
    """For each model the number of the first one whose tokenizer can be read, and what that one has of another form;
    None: nothing, or this tokenizer cannot be read."""
    first: tuple[int, bytes] | None = None
    ours: dict[str, int] | None = None
    for number, directory in enumerate(directories):
        content = _content(directory)
        problem = None
        if content is not None and first is None:
            first = number, content
        elif content is not None and first is not None and content != first[1]:
            ours = _vocabulary(first[1]) if ours is None else ours
            theirs = _vocabulary(content)
            if (token := _disputed(ours, theirs)) is not None:
                problem = f"which has another number for the token {token!r}"
            elif (token := _lacking(directory, theirs, ours)) is not None:
                problem = f"whose token {token!r} it lacks"
            elif (token := _lacking(directories[first[0]], ours, theirs)) is not None:
                problem = f"which lacks its token {token!r}"
        yield None if problem is None or first is None else (first[0], problem)


def _content(directory: ModelDirectory, name: str = _FILE) -> bytes | None:
    """A file of a model's tokenizer; None: it is not here, or too large to be read now."""
    try:
        return directory.read(name, _MOST)
    except OSError:
        return None


def _disputed(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The first token, by its text, that has two numbers; None: there is none, or a file is of another form."""
    try:
        return min((token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]), default=None)
    except TypeError:
        return None


def _lacking(directory: ModelDirectory, own: dict[str, int], others: dict[str, int]) -> str | None:
    """The first token, by its text, that another tokenizer has, and this one has in none of its files; None: there is
    none, or a file is of another form."""
    if not own or not others:
        return None
    further = others.keys() - own.keys()
    absent = [token for token in further if isinstance(token, str) and not _SPECIAL.fullmatch(token)]
    added = {text for name in _ADDING for text in _strings(_content(directory, name))} if absent else set()
    return min((token for token in absent if token not in added), default=None)


def _strings(content: bytes | None) -> list[str]:
    """All texts and keys in a JSON file; empty: there is none."""
    found: list[str] = []
    try:
        left: list[Any] = [json.loads(content or b"null")]
    except (ValueError, RecursionError):
        return found
    while left:
        value = left.pop()
        found += [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return found


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
