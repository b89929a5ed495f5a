"""Reads answers of jobs beside each other: what each of them has answered to the same row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from llama_stack_provider_trl.system.texts import parse_json

from .checkpoints import Opener

MOST_BYTES = 8 << 20
"""Bytes of all files that are read for a page."""
_LONGEST = 1 << 20
"""Bytes of a line that is read."""
type Wanted = Literal["all", "failed", "differ"]


class RowAnswer(NamedTuple):
    """What a job has answered to a row."""

    text: str
    tokens: int
    complete: bool
    passed: Mapping[str, bool]
    scores: Mapping[str, float | None]
    """Of judges and graders; None: unreadable, or none was given."""

    @property
    def fails(self) -> bool:
        return not all(self.passed.values())


class AnsweredRow(NamedTuple):
    row: int
    sample: int
    """Number of the answer to this row, from 0."""
    prompt: list[Mapping[str, Any]]
    answers: list[RowAnswer | None]
    """One per job; None: it has none to this row."""


class AnsweredRows(NamedTuple):
    rows: list[AnsweredRow]
    has_more: bool
    is_cut: bool
    """Whether the files have more than was read for this page."""


def read_rows(files: Sequence[tuple[Opener, int] | None], first: int, count: int, wanted: Wanted) -> AnsweredRows:
    """A part of the rows that some jobs have answered, in their order.

    Args:
        files: of each job, what opens its answers, and their bytes in whole lines; None: it has none.
        first: rows of those that are wanted to leave out.
        wanted: all; those where an answer fails a check; or those where some job passes a check that another one
            fails, or, without checks, has another text.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is no answer.
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
                return AnsweredRows(found, has_more=True, is_cut=False)
            found.append(row)
    is_cut = is_cut or any(one is not None and one.is_cut for one in sources)
    return AnsweredRows(found, has_more=False, is_cut=is_cut)


class _Answers:
    """The answers of a file, with a look at the next one."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._left = file, size
        self.is_cut = False
        """Whether a line was longer than what is read of one: nothing behind it is."""
        self.next = self._read()

    def take(self) -> dict[str, Any]:
        assert self.next is not None
        taken, self.next = self.next, self._read()
        return taken

    def _read(self) -> dict[str, Any] | None:
        line = self._file.readline(min(self._left, _LONGEST))
        self._left -= len(line)
        if not line.endswith(b"\n"):  # the end of what is read
            self.is_cut = len(line) == _LONGEST
            return None
        found = parse_json(line)
        if not isinstance(found, dict) or not {"row", "sample", "prompt", "text"} <= found.keys():
            raise ValueError("a line of the answers is no answer")
        return found


def _beside(sources: Sequence[_Answers | None]) -> Iterator[AnsweredRow]:
    """Rows in their order, each with the answers of all jobs that have it."""
    while waiting := [one.next for one in sources if one is not None and one.next is not None]:
        row, sample = min((one["row"], one["sample"]) for one in waiting)
        prompt: list[Mapping[str, Any]] = []
        answers: list[RowAnswer | None] = []
        for source in sources:
            if source is None or source.next is None or (source.next["row"], source.next["sample"]) != (row, sample):
                answers.append(None)
                continue
            line = source.take()
            prompt = prompt or line["prompt"]
            answers.append(_answered(line))
        yield AnsweredRow(row, sample, prompt, answers)


def _answered(line: Mapping[str, Any]) -> RowAnswer:
    scores = {name: one.get("score") for name, one in (line.get("judged") or {}).items()}
    scores |= {name: one.get("reward") for name, one in (line.get("graded") or {}).items()}
    return RowAnswer(line["text"], line["tokens"], line["complete"], line.get("passed") or {}, scores)


def _is_wanted(row: AnsweredRow, wanted: Wanted) -> bool:
    answers = [one for one in row.answers if one is not None]
    if wanted == "failed":
        return any(one.fails for one in answers)
    if wanted == "differ":
        if any(one.passed for one in answers):
            return len({tuple(sorted(one.passed.items())) for one in answers}) > 1
        return len({one.text for one in answers}) > 1
    return True
