"""Finds the content of a turn in what a chat template writes, by marks in the content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...specs.rows import Message
from .marks import Marking, markings

Render = Callable[[Sequence[Message]], str | None]
"""What a chat template writes; None: it refuses the conversation."""


class ContentPlace(NamedTuple):
    start: int
    end: int
    mark: int
    """Where the first mark was: after a thought's beginning, which the template may have read."""
    marking: Marking
    """By which it was found."""


def find_content(render: Render, messages: Sequence[Message], turn: int, text: str) -> ContentPlace | None:
    """The place of a turn's content in `text`, the rendered conversation. None: the template does not write it, or
    writes something else for every marking of the turn."""
    tried: list[tuple[Marking, str]] = []
    for marking in markings(messages[turn]):
        marked = render(marking.put_into(messages, turn))
        if marked is None:
            continue
        if bounds := marking.bounds(marked, text):
            return ContentPlace(*bounds, marking)
        tried.append((marking, marked))
    for marking, marked in tried:
        if bounds := marking.bounds(marked, text, exact=False):
            return ContentPlace(*bounds, marking)
    return None
