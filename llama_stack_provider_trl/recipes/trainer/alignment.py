"""Divides an answer into spans that end at the same byte in the tokens of a model and in those of a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..data.pieces import Pieces, decode

Span = tuple[int, int, int, int]
"""First token of the model and the one after its last one, then those of the teacher; of an answer."""


@dataclass(frozen=True)
class Aligned:
    teacher_ids: list[int]
    """The teacher's tokens of its text, and of its end where that is compared."""
    spans: list[Span]

    @property
    def compared(self) -> int:
        """The model's tokens that are in a span."""
        return sum(end - begin for begin, end, _, _ in self.spans)


def align(
    ids: Sequence[int],
    own: Pieces,
    teacher: Pieces,
    encode: Callable[[str], list[int]],
    *,
    most: int,
    has_ended: bool,
    end: int | None,
) -> Aligned:
    """Tokenize an answer for the teacher, and find the spans.

    A span has no special token of the model and no bytes that are no text. From the first token of the teacher on that
    does not write the text as it is (since its tokenizer normalizes text), or is beyond `most`, nothing is compared.

    Args:
        most: of the teacher's tokens.
        has_ended: the last of `ids` ends the answer; it is no part of the text.
        end: the teacher's token for that, which is compared; None: ends are not.
    """
    content = ids[:-1] if has_ended else ids
    pieces = own.of(content)
    decoded = decode(b"".join(pieces))
    read = encode(decoded.text)[:most]
    ends = _ends(teacher.of(read), decoded.text.encode(), teacher.begins_alone(read))
    tokens = {position: number + 1 for number, position in enumerate(ends)}
    spans = []
    first = theirs = raw = 0
    is_whole = True
    has_lone_space = own.begins_alone(content)
    for number, piece in enumerate(pieces):
        begin, raw = raw, raw + len(piece)
        if number == 0 and has_lone_space:  # a part of the first span, as that of the teacher is
            continue
        if not piece and (first == number or (has_lone_space and number == 1)):  # between two spans
            first = number + 1
            continue
        is_whole = is_whole and bool(piece) and not any(decoded.is_broken[begin:raw])
        position = decoded.at[raw]
        if not piece or position is None or position not in tokens:
            continue
        if is_whole:
            spans.append((first, number + 1, theirs, tokens[position]))
        first, theirs, is_whole = number + 1, tokens[position], True
    has_read_all = (ends[-1] if ends else 0) == len(decoded.text.encode())
    if end is not None and has_ended and has_read_all and len(read) == len(ends) < most:
        spans.append((len(content), len(ids), len(read), len(read) + 1))
        read = [*read, end]
    return Aligned(read, spans)


def _ends(pieces: Sequence[bytes], text: bytes, begins_alone: bool) -> list[int]:
    """Where each token ends in the text, as far as the tokens write it. A space before it that the tokenizer has added,
    in the first token or as one, is no part of it."""
    if pieces and pieces[0].startswith(b" ") and not text.startswith(b" "):  # a byte-level one with add_prefix_space
        pieces, begins_alone = [pieces[0][1:], *pieces[1:]], begins_alone or pieces[0] == b" "
    found, position = [0] if begins_alone else [], 0
    for piece in pieces[len(found) :]:
        if not piece or not text.startswith(piece, position):
            break
        position += len(piece)
        found.append(position)
    return found
