"""Reads the prompt of one stored row, in a process with limits where requests are served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict

from ..errors import InvalidRows
from ..system.limited import Limited
from .limited_rows import read_within
from .row_files import read_ndjson

if TYPE_CHECKING:
    from .job import RowNames

MOST_CHARACTERS = 1 << 17
"""Of the texts of a prompt."""
_PIECE = 1 << 20


class RowPrompt(TypedDict):
    """The prompt of a row."""

    messages: list[dict[str, Any]]
    """Turns as rows have them, tools beside the first one; empty: there is no such row, or it has no prompt."""
    num_rows: int
    """Rows of the file, where it has no such row; else 0."""
    error: str | None
    """Why the row has no prompt."""


def prompt_within(limits: Limited, path: Path, number: int, names: RowNames | None = None) -> RowPrompt:
    """The prompt of a row of an NDJSON file, read in another process. Raises InvalidRows: it takes more than the limits
    allow; LimitReached: the machine is too busy; OSError: the file cannot be read, or there can be no further process.

    Args:
        number: of the row, from 0.
        names: of its columns and roles, where they are not those of shapes.
    """
    advice = "take a row nearer to the beginning, or split long rows"
    return read_within(limits, _prompt, path, number, names, doing=f"reading row {number}", advice=advice)


def _prompt(path: Path, number: int, names: RowNames | None) -> Iterator[RowPrompt]:
    with open(path, "rb") as file:
        skipped = _skip(file, number)
        try:
            # Lines before this one are not parsed, so that a reader counts it as its first one.
            row = next(read_ndjson(file), None) if skipped == number else None
            if row is None:
                yield RowPrompt(messages=[], num_rows=skipped, error=None)
                return
            yield RowPrompt(messages=_messages(row, names), num_rows=0, error=None)
        except InvalidRows as error:
            yield RowPrompt(messages=[], num_rows=0, error=f"row {number}: {error.hint.removeprefix('row 0: ')}")


def _skip(file: BinaryIO, count: int) -> int:
    """Skip lines. Returns how many there were."""
    for skipped in range(count):
        piece = file.readline(_PIECE)
        if not piece:
            return skipped
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(_PIECE)
    return count


def _messages(row: dict[str, Any], names: RowNames | None) -> list[dict[str, Any]]:
    """Raises InvalidRows: the row has no prompt, or a very long one."""
    from .rows import LabelledExample, PreferenceExample, PromptExample, parse_row

    try:
        example = parse_row(row, 0, "prompts", None, names)
    except InvalidRows as no_prompt:
        try:  # pairs and labelled answers may have their prompt within their answers' conversations
            example = parse_row(row, 0, "dpo", None, names)
        except InvalidRows:
            try:
                example = parse_row(row, 0, "kto", None, names)
            except InvalidRows:
                raise no_prompt from None
    if isinstance(example, PromptExample):
        messages = example.messages
    else:
        assert isinstance(example, PreferenceExample | LabelledExample)
        messages = example.prompt
        if any("images" in message for message in messages):
            raise InvalidRows("its prompt has images, expected text alone: take another row")
    length = sum(len(str(message)) for message in messages)
    if length > MOST_CHARACTERS:
        raise InvalidRows(f"its prompt has {length} characters, expected at most {MOST_CHARACTERS}: take another row")
    return messages
