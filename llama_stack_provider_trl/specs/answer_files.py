"""How much of a file of answers counts, which a job leaves that answers prompts."""

from __future__ import annotations

from typing import BinaryIO, NamedTuple

_PIECE = 1 << 20


class Whole(NamedTuple):
    """The part of a file of answers that has whole batches."""

    answers: int
    size: int
    """Bytes."""


NONE = Whole(0, 0)


def whole_batches(file: BinaryIO, batch: int, total: int, begin: Whole = NONE) -> Whole:
    """The whole batches of a file of answers, one per line: a process that was killed leaves a part of one.

    It is read in pieces, since whatever wrote it may have left out the ends of lines.

    Args:
        batch: answers of a batch.
        total: answers of the job; the last batch may have fewer, and what follows it does not count.
        begin: whole batches that are known already.
    """
    whole, lines = begin, begin.answers
    position = file.seek(begin.size)
    while lines < total and (piece := file.read(_PIECE)):
        at = -1
        while lines < total and (at := piece.find(b"\n", at + 1)) >= 0:
            lines += 1
            if lines % batch == 0 or lines == total:
                whole = Whole(lines, position + at + 1)
        position += len(piece)
    return whole
