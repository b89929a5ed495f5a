"""What the page of data shows of a preview. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llama_stack_provider_trl.specs.events import PreviewedRow
from llama_stack_provider_trl.specs.previewed import composition_sentence, turn_sentence

_SHOWN = {"\n": "↵\n", "\r": "␍", "\t": "⇥"}
"""Characters that a reader would not see -> what stands for them."""
PART = "·"
"""Stands for a token that has only further bytes of a character before it."""


class ShownToken(NamedTuple):
    text: str
    kind: str
    """Classes of its element: loss, special, cut, part."""
    id: int


class ShownPart(NamedTuple):
    name: str
    tokens: list[ShownToken]


def parts_of(row: PreviewedRow) -> list[ShownPart]:
    """The parts of a row with the tokens that are shown of them."""
    found, begin = [], 0
    marks = list(zip(row.ids, row.texts, row.trained, row.special, row.kept, strict=False))
    for name, length in row.parts.items():
        tokens = [
            ShownToken(_visible(text), _kind(text, trained, special, kept), token)
            for token, text, trained, special, kept in marks[begin : begin + length]
        ]
        begin += length
        if tokens:
            found.append(ShownPart(name, tokens))
    return found


def sentences_of(row: PreviewedRow) -> tuple[str, list[str]]:
    """What a row has beside its texts, and whether inference has the same before each of its trained turns."""
    values = row.model_dump()
    return composition_sentence(values), [turn_sentence(turn) for turn in values["turns"]]


def _kind(text: str, trained: str, special: str, kept: str) -> str:
    marks = (("loss", trained == "1"), ("special", special == "1"), ("cut", kept == "0"), ("part", not text))
    return " ".join(name for name, is_so in marks if is_so)


def _visible(text: str) -> str:
    return "".join(_SHOWN.get(character, character) for character in text) or PART


def left_out(rows: Sequence[PreviewedRow]) -> int:
    """Tokens of the rows that are not shown."""
    return sum(row.tokens - len(row.ids) for row in rows)
