"""Marks in the content of a turn, by which the content is found in what a chat template writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...specs.rows import Message

OPEN, CLOSE = "\ue000\ue002\ue001", "\ue000\ue003\ue001"
"""Private-use characters, so that no content matches, and none that a filter such as `upper` changes."""
_TAG = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")
"""What may begin or end a thought: `</think>`, Gemma's `<channel|>`, Mistral's `[/THINK]`. Other tags do no harm."""


@dataclass(frozen=True)
class Marking:
    """A turn with two marks in its content, which is otherwise the same: so a template that reads contents takes the
    branch that it takes for the row."""

    role: str
    parts: tuple[str, str, str]
    """The content before, between and after the marks."""

    def put_into(self, messages: Sequence[Message], turn: int) -> list[Message]:
        before, between, after = self.parts
        marked: Message = {**messages[turn], "content": f"{before}{OPEN}{between}{CLOSE}{after}"}
        return [*messages[:turn], marked, *messages[turn + 1 :]]

    def is_in(self, marked: str) -> bool:
        return OPEN in marked or CLOSE in marked

    def bounds(self, marked: str, text: str | None = None, *, exact: bool = True) -> tuple[int, int, int] | None:
        """Start and end of the turn's content, and where the first mark was, in what the template has written with the
        marks, these taken away. Returns None where a mark is missing, or the texts differ.

        Args:
            text: what the template writes without marks; None: that is not known.
            exact: `text` has to be the same. Else it may differ before the content, or behind it, as where a template
                counts characters.
        """
        first, last = marked.rfind(OPEN), marked.rfind(CLOSE)
        if first < 0 or last < first:
            return None
        head, between, tail = (unmarked(part) for part in (marked[:first], marked[first:last], marked[last:]))
        whole = head + between + tail
        text, start = whole if text is None else text, len(head)
        if exact and text != whole:
            return None
        if text.endswith(between + tail):
            start += len(text) - len(whole)
        elif not text.startswith(head + between):
            return None
        end = start + len(between)
        # What is before the marks is part of the content where all of it is written as it is: of a part, such as ">",
        # the template may have written the same. So may it white space.
        before, _, after = self.parts
        before = before.lstrip()
        written = len(before) * text[:start].endswith(before)
        return start - written, end + common_prefix(after, text[end:]), start


def markings(message: Message) -> list[Marking]:
    """Ways to mark a turn, the most exact one first: around its content; around its text, since many templates trim
    contents; after what is read as a thought; within the text, which leaves its beginning and its end as they are."""
    content = message["content"]
    text_start, text_end = len(content) - len(content.lstrip()), len(content.rstrip())
    places = [(0, len(content)), (text_start, text_end)]
    for found, tag in ((content.find("<think>"), "<think>"), (content.rfind("</think>"), "</think>")):
        if found >= 0:
            at = found + len(tag)
            places += [(at, len(content)), (len(content) - len(content[at:].lstrip()), text_end)]
    words = [word.start() for word in re.finditer(r"(?<=\s)\w", content)]
    inner = [*words[:2], *words[-1:], (text_end - len(visible(message)) + text_end) // 2]
    return [
        Marking(message["role"], (content[:start], content[start:end], content[end:]))
        for start, end in dict.fromkeys([*places, *((at, at) for at in inner)])
        if start <= end
    ]


def visible(message: Message) -> str:
    """What a template has to write of a turn: templates leave out what an answer thought before."""
    content: str = message["content"]
    return (content.rpartition("</think>")[2] if message["role"] == "assistant" else content).strip()


def marked_texts(message: Message) -> list[tuple[Message, int]]:
    """The turn with marks in each text between its tags (thoughts, and what is before and after them), and the number
    of these texts: with the marks around each text, and in its middle."""
    pieces = _TAG.split(message["content"])  # texts and tags in turn
    count = sum(bool(piece.strip()) for piece in pieces[::2])
    found: list[tuple[Message, int]] = []
    for is_around in (True, False):
        texts = [_marked(piece, is_around) if number % 2 == 0 else piece for number, piece in enumerate(pieces)]
        found.append(({**message, "content": "".join(texts)}, count))
    return found


def _marked(piece: str, is_around: bool) -> str:
    text = piece.strip()
    if not text:
        return piece
    before, _, after = piece.partition(text)
    half = len(text) // 2
    return before + (f"{OPEN}{text}{CLOSE}" if is_around else f"{text[:half]}{OPEN}{CLOSE}{text[half:]}") + after


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def unmarked(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")
