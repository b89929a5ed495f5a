"""Reads answers of jobs beside each other: what each of them has answered to the same row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from ..http.samples import AnswerLine
from .checkpoints import Opener
from .rollouts import answer_of

MOST_ANSWERS = 4
"""Jobs beside each other."""
MOST_BYTES = 8 << 20
"""Bytes of all files that are read for a page."""
_LONGEST = 1 << 20
"""Bytes of a line that is read. A longer one is left out."""
type Wanted = Literal["all", "failed", "differ"]


class AnsweredRow(NamedTuple):
    row: int
    sample: int
    """Number of the answer to this row, from 0."""
    prompt: list[dict[str, Any]]
    answers: list[AnswerLine | None]
    """One per job; None: it has none to this prompt."""
    has_others: bool
    """Whether jobs have another prompt in the row of this number: they have read different rows, and have a line of
    their own."""


class AnsweredRows(NamedTuple):
    rows: list[AnsweredRow]
    has_more: bool
    is_cut: bool
    """Whether the files have more than was read for this page."""
    unreadable: int
    """Lines that are no answers, or too long, among those that were read."""


def read_rows(files: Sequence[tuple[Opener, int] | None], first: int, count: int, wanted: Wanted) -> AnsweredRows:
    """A part of the rows that some jobs have answered, in their order. Raises OSError: a file cannot be read.

    Args:
        files: of each job, what opens its answers, and their bytes in whole lines; None: it has none.
        first: rows of those that are wanted to leave out.
        wanted: all; those where an answer fails a check; or those where some job passes a check that another one
            fails, or, without checks, has another text.
    """
    most = MOST_BYTES // max(1, sum(one is not None for one in files))
    found: list[AnsweredRow] = []
    with ExitStack() as opened:
        sources = [_Answers(opened.enter_context(one[0]()), min(one[1], most)) if one else None for one in files]
        is_cut = any(one and one[1] > most for one in files)
        for row in _beside(sources):
            if not _is_wanted(row, wanted):
                continue
            if first:
                first -= 1
                continue
            if len(found) == count:
                return AnsweredRows(found, has_more=True, is_cut=False, unreadable=_unreadable(sources))
            found.append(row)
    return AnsweredRows(found, has_more=False, is_cut=is_cut, unreadable=_unreadable(sources))


class _Answers:
    """The answers of a file, with a look at the next one."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._left = file, size
        self.unreadable = 0
        self.next = self._read()

    def take(self) -> AnswerLine:
        assert self.next is not None
        taken, self.next = self.next, self._read()
        return taken

    def _read(self) -> AnswerLine | None:
        while line := self._piece():
            if line.endswith(b"\n"):
                if (found := answer_of(line)) is not None:
                    return found
                self.unreadable += 1
            elif self._left:  # it is longer than what is read of one
                while self._left and not self._piece().endswith(b"\n"):
                    pass
                self.unreadable += 1
        return None

    def _piece(self) -> bytes:
        """A line, or a part of a long one; empty: the end of what is read."""
        piece: bytes = self._file.readline(min(self._left, _LONGEST))
        # The file may be shorter than it was.
        self._left = self._left - len(piece) if piece else 0
        return piece


def _unreadable(sources: Sequence[_Answers | None]) -> int:
    return sum(one.unreadable for one in sources if one is not None)


def _beside(sources: Sequence[_Answers | None]) -> Iterator[AnsweredRow]:
    """Rows in their order, each with the answers of all jobs that have it. Jobs that have another prompt there have
    read different rows: their answers are to something else, and are not beside each other."""
    while waiting := [one.next for one in sources if one is not None and one.next is not None]:
        row, sample = min((one.row, one.sample) for one in waiting)
        lines = [
            one.take()
            if one is not None and one.next is not None and (one.next.row, one.next.sample) == (row, sample)
            else None
            for one in sources
        ]
        prompts: list[list[dict[str, Any]]] = []
        for line in lines:
            if line is not None and line.prompt not in prompts:
                prompts.append(line.prompt)
        for prompt in prompts:
            answers = [line if line is not None and line.prompt == prompt else None for line in lines]
            yield AnsweredRow(row, sample, prompt, answers, has_others=len(prompts) > 1)


def _is_wanted(row: AnsweredRow, wanted: Wanted) -> bool:
    answers = [one for one in row.answers if one is not None]
    if wanted == "failed":
        return any(not all(one.passed.values()) for one in answers)
    if wanted == "differ":
        if any(one.passed for one in answers):
            return len({tuple(sorted(one.passed.items())) for one in answers}) > 1
        return len({one.text for one in answers}) > 1
    return True
