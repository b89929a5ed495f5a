"""What a tokenization has counted, as JSON, so that parts of a dataset have one report.

The order counts: of texts and ends of answers a report has the first, and of equal largest ids the first row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from typing import Any

from .chat import Chat, LostTexts, LostTurns
from .duplicates import ExampleDigests
from .endings import Examples
from .prepare import Tokenization, TruncationCounter

_SUMS = (
    "expanded",
    "diverged",
    "two_prompts",
    "empty_thoughts",
    "only_thoughts",
    "unplaced_turns",
    "equal_answers",
)
"""All numbers that a `Chat` counts."""
Counts = dict[str, Any]


def counts_of(tokenization: Tokenization) -> Counts:
    """What was counted in the rows that a tokenization has read."""
    teacher, counter = tokenization.teacher, tokenization.counter
    rows = {field.name: getattr(counter, field.name) for field in fields(counter)}
    return {
        "rows": {**rows, "digests": counter.digests.stored()},
        "chat": _of_chat(tokenization.chat),
        "teacher": None if teacher is None else _of_chat(teacher),
    }


def add_counts(tokenization: Tokenization, later: Counts) -> None:
    """Count what `counts_of` has of the rows that follow those of a tokenization."""
    rows = later["rows"]
    tokenization.counter.add(TruncationCounter(**{**rows, "digests": ExampleDigests.read(rows["digests"])}))
    _add_to_chat(tokenization.chat, later["chat"])
    if tokenization.teacher is not None:
        _add_to_chat(tokenization.teacher, later["teacher"])


def _of_chat(chat: Chat) -> Counts:
    return {
        "sums": {name: getattr(chat, name) for name in _SUMS},
        "template_warning": chat.template_warning,
        "has_rendered": chat.has_rendered,
        "lost": {**vars(chat.lost), "roles": dict(chat.lost.roles)},  # of a Counter asdict makes another one
        "lost_texts": asdict(chat.lost_texts),
        "trained_headers": asdict(chat.trained_headers),
        "left_out": asdict(chat.endings.left_out),
        "doubtful": asdict(chat.endings.doubtful),
        "open": chat.endings.open,
    }


def _add_to_chat(chat: Chat, later: Counts) -> None:
    for name, count in later["sums"].items():
        setattr(chat, name, getattr(chat, name) + count)
    chat.template_warning = chat.template_warning or later["template_warning"]
    chat.has_rendered = chat.has_rendered or later["has_rendered"]
    lost = later["lost"]
    chat.lost.add_all(LostTurns(**{**lost, "roles": Counter(lost["roles"])}))
    chat.lost_texts.add_all(LostTexts(**later["lost_texts"]))
    chat.trained_headers.add_all(Examples(**later["trained_headers"]))
    chat.endings.left_out.add_all(Examples(**later["left_out"]))
    chat.endings.doubtful.add_all(Examples(**later["doubtful"]))
    chat.endings.open += later["open"]
