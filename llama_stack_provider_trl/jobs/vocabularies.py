"""Compares the tokenizers of an ensemble's models at POST, as far as their files are on this machine by then.

The evaluation itself compares whole vocabularies, with the library that reads them. Here only what cannot be meant is
refused: a token that has two numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidRequest
from ..requests.bases import Base
from ..system.model_directory import find_model

_FILE = "tokenizer.json"
_MOST = 64 << 20
"""Bytes of a tokenizer that is read here."""


def refuse_other_vocabularies(named: Sequence[tuple[str, str]], found: Sequence[Base]) -> None:
    """Refuse models that give a token another number than the first one does.

    Args:
        named: the field that names each model, and its value.
        found: what each of them is.

    Raises:
        InvalidRequest: names the field, and both models.
    """
    first: tuple[str, bytes] | None = None
    for (field, name), base in zip(named, found, strict=True):
        content = _content(base)
        if content is None:
            continue
        if first is None:
            first = name, content
        elif content != first[1] and (token := _disputed(first[1], content)) is not None:
            hint = (
                f"its tokenizer is not that of {first[0]!r}, which has another number for the token {token!r}: name "
                "models with the same tokenizer"
            )
            raise InvalidRequest(field, name, hint)


def _content(base: Base) -> bytes | None:
    """The file of a model's tokenizer; None: it is not here, or too large to be read now."""
    found = find_model(os.environ, base.model, base.trust.get("revision"))
    if found is None:
        return None
    try:
        with found.open(_FILE) as file:
            content = file.read(_MOST + 1)
    except OSError:
        return None
    return content if len(content) <= _MOST else None


def _disputed(one: bytes, other: bytes) -> str | None:
    """The first token, by its text, that has two numbers; None: there is none, or a file is of another form."""
    try:
        ours, theirs = _vocabulary(json.loads(one)), _vocabulary(json.loads(other))
        return min((token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]), default=None)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _vocabulary(document: Any) -> dict[str, int]:
    """Token -> number, in a file of the library tokenizers."""
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model: pairs of a token and its score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    added = {str(one["content"]): int(one["id"]) for one in document.get("added_tokens") or ()}
    return {**vocabulary, **added}
