"""Reads rows for checks: the prompt of each, and what its answer is compared with."""

from __future__ import annotations

import io
import os
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import InvalidRows
from ..system.limited import Limited, LimitExceeded
from .answer_checks import AnswerCheck, reference, too_much
from .compiled_checks import SIMPLER, load_libraries, refuse_unbounded
from .job import DatasetRef, RowNames
from .row_files import read_ndjson
from .rows import Message, PromptExample, SftExample, parse_row

_LIMITS = Limited(seconds=60, memory=512 << 20)
"""For the rows of a dataset, whose patterns and schemas may all be different."""


class CheckedRow(NamedTuple):
    """A row whose answer is checked."""

    messages: list[Message]
    """Its prompt."""
    references: list[Any]
    """One per check, in their order."""


def read_checked_rows(path: Path, checks: Sequence[AnswerCheck], names: RowNames | None = None) -> Iterator[CheckedRow]:
    """The rows of a stored dataset. What checks compare with has its own names there, whatever `names` are. Raises
    InvalidRows: a row asks nothing, lacks a column or an answer that a check reads, or its value cannot be read."""
    with open(path, "rb") as file:
        yield from _checked_rows(file, checks, names)


class RowsOnDemand:
    """The rows of a stored dataset, each read when it is needed: in memory is only where each begins. Raises
    InvalidRows: as `read_checked_rows`.

    Args:
        were_read: all rows were read before, such as for their tokens: only where each begins is looked for.
    """

    def __init__(
        self, path: Path, checks: Sequence[AnswerCheck], names: RowNames | None = None, *, were_read: bool = False
    ) -> None:
        self._checks, self._given, self._names = checks, _given(checks), names
        self._file = open(path, "rb")  # noqa: SIM115 - open until this object is gone
        weakref.finalize(self, self._file.close)
        self._starts = array("q", [0])
        if were_read:
            for line in self._file:
                self._starts.append(self._starts[-1] + len(line))
            return
        for _ in _checked_rows(self._file, checks, names):
            self._starts.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def columns(self, number: int) -> dict[str, Any]:
        """A row with all its columns."""
        start = self._starts[number]
        # Without the file's position, which processes that are forked have in common.
        line = os.pread(self._file.fileno(), self._starts[number + 1] - start, start)
        (row,) = read_ndjson(io.BytesIO(line))
        return row

    def checked(self, number: int) -> CheckedRow:
        """A row whose answer is checked."""
        return _checked(self.columns(number), number, self._checks, self._given, self._names)


def _checked_rows(file: BinaryIO, checks: Sequence[AnswerCheck], names: RowNames | None) -> Iterator[CheckedRow]:
    given = _given(checks)
    for index, row in enumerate(read_ndjson(file)):
        yield _checked(row, index, checks, given, names)


def _given(checks: Sequence[AnswerCheck]) -> dict[int, Any]:
    """References that are the same for all rows, by the number of their check."""
    return {number: reference(check, check.given) for number, check in enumerate(checks) if check.given is not None}


def _checked(
    row: dict[str, Any],
    index: int,
    checks: Sequence[AnswerCheck],
    given: Mapping[int, Any],
    names: RowNames | None,
) -> CheckedRow:
    messages, answer = _question(row, index, any(check.reads_answers for check in checks), names)
    found = [
        given[number] if number in given else _reference(check, f"checks.{number}", row, index, answer)
        for number, check in enumerate(checks)
    ]
    return CheckedRow(messages, found)


def refuse_unchecked_rows(dataset: DatasetRef, checks: Sequence[AnswerCheck]) -> None:
    """Read all rows of a dataset as the job will, in a process with limits. Raises InvalidRows: as `read_checked_rows`,
    or the rows take too long, or too much memory; LimitReached: too many requests are checked."""
    try:
        texts = tuple(check.model_dump_json() for check in checks)
        _refuse_unread(dataset.path, dataset.sha256, texts, dataset.names and dataset.names.model_dump_json())
    except InvalidRows as error:
        raise InvalidRows(f"dataset {dataset.dataset_id!r}, {error}") from error


@lru_cache(maxsize=16)
def _refuse_unread(path: Path, sha256: str, texts: tuple[str, ...], named: str | None) -> None:
    """Read rows in another process. The trials of a search have the same ones. Raises InvalidRows."""
    checks = [AnswerCheck.model_validate_json(text) for text in texts]
    names = None if named is None else RowNames.model_validate_json(named)
    try:
        found = _LIMITS.call(_first_problem, path, checks, names, before=load_libraries)
    except LimitExceeded as error:
        subject, hint = "reading the rows up to this one takes", "split long rows, or use fewer rows"
        if any(check.is_compiled for check in checks):
            subject, hint = "patterns and schemas up to this row take", f"{SIMPLER}, or use fewer rows"
        raise InvalidRows(f"{subject} more than {too_much(_LIMITS)}: {hint}", row=len(error.found)) from error
    if found and found[-1] is not None:
        raise InvalidRows(found[-1])


def _first_problem(path: Path, checks: Sequence[AnswerCheck], names: RowNames | None) -> Iterator[str | None]:
    """None for each row up to the first that cannot be read, and what is wrong with that. What is compiled is tried,
    and kept, as the job keeps it."""
    kept: list[Any] = []
    try:
        for number, row in enumerate(read_checked_rows(path, checks, names)):
            compiled = [one for check, one in zip(checks, row.references, strict=True) if check.is_compiled]
            for one in compiled:
                _try_out(one, number)
            kept += compiled
            yield None
    except InvalidRows as error:
        yield str(error)


def _try_out(compiled: Any, row: int) -> None:
    try:
        refuse_unbounded(compiled)
    except ValueError as error:
        raise InvalidRows(str(error), row=row) from error


def _question(
    row: Mapping[str, Any], index: int, has_answer: bool, names: RowNames | None
) -> tuple[list[Message], str | None]:
    """The prompt of a row, and its own answer where that is read: both of the same columns."""
    if not has_answer:
        return _prompt(row, index, names), None
    example = parse_row(row, index, "sft", names=names)
    assert isinstance(example, SftExample)
    messages = example.messages or []
    if not messages or messages[-1]["role"] != "assistant":
        found = f"a last turn of role {messages[-1]['role']}" if messages else "plain text"
        raise InvalidRows(
            f"{found}, and a check expects the row's own answer, since it names no other reference", row=index
        )
    if messages[-1].get("tool_calls"):
        raise InvalidRows(
            "its own answer is a tool call, and a check expects text: name another reference, or leave such rows out",
            row=index,
        )
    turns = example.prompt_turns
    if turns is None:
        turns = len(messages) - 1
    if not any(message["role"] != "assistant" for message in messages[:turns]):
        raise InvalidRows("assistant turns only, expected a turn that asks for an answer", row=index)
    own, other = _question_of(messages[:turns]), _question_of(_prompt(row, index, names))
    if own != other and not _differ_by_system_turns(own, other):
        prompts = _shown(own, other), _shown(other, own)
        raise InvalidRows(
            f"its own answer belongs to the prompt {prompts[0]}, and another column asks {prompts[1]}: leave the "
            f"columns of one of the two out; they are {', '.join(sorted(row))[:500]}",
            row=index,
        )
    return messages[:turns], messages[-1]["content"]


def _prompt(row: Mapping[str, Any], index: int, names: RowNames | None) -> list[Message]:
    prompt = parse_row(row, index, "prompts", names=names)
    assert isinstance(prompt, PromptExample)
    return prompt.messages


def _question_of(turns: Sequence[Message]) -> list[Message]:
    """A prompt without the assistant turns at its end, which shapes of rows divide in their own ways."""
    kept = [*turns]
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    return kept


def _differ_by_system_turns(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether one of two prompts is the other one behind system turns: a column of plain text has no place for them."""
    without = [[*dropwhile(lambda turn: turn["role"] == "system", turns)] for turns in (one, other)]
    return without[0] == without[1] and (without[0] == one or without[1] == other)


def _shown(turns: Sequence[Message], others: Sequence[Message]) -> str:
    """A turn of a prompt that the other one has not; the last one where it has all."""
    different = [turn for turn in turns if turn not in others] or turns
    return repr(different[-1]["content"][:80])


def _reference(check: AnswerCheck, field: str, row: Mapping[str, Any], index: int, answer: str | None) -> Any:
    if check.reads_answers:
        return reference(check, answer)
    if check.type == "grader":
        try:
            return reference(check, row)
        except ValueError as error:
            raise InvalidRows(f"{field}.grader: {error}", row=index) from error
    if check.column is None:
        return None
    value = row.get(check.column)
    if value is None or value != value:
        raise InvalidRows(
            f"no column {check.column!r}, which {field}.column names; its columns are {', '.join(sorted(row))[:500]}",
            row=index,
        )
    try:
        return reference(check, value)
    except ValueError as error:
        raise InvalidRows(f"column {check.column} ({field}.column): {error}", row=index) from error
