"""Answers as two tokenizers read them: which spans are compared, at boundaries, ends and bytes that are no text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.data.pieces import Decoded, Pieces, decode, read_pieces
from llama_stack_provider_trl.recipes.trainer.alignment import Aligned, align

BYTE_LEVEL = {"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 0, "content": "<end>", "special": True}]}
SENTENCEPIECE = {
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "added_tokens": [{"id": 0, "content": "</s>", "special": True}],
}


def vocabulary(*texts: str, document: dict[str, Any] = BYTE_LEVEL) -> tuple[Pieces, dict[str, int]]:
    numbers = {text: number for number, text in enumerate(texts)}
    pieces = read_pieces(document, numbers, [])
    assert pieces is not None
    return pieces, numbers


def greedy(numbers: dict[str, int], *, prefix: str = "") -> Callable[[str], list[int]]:
    """A tokenizer that takes the longest token at each place; a byte-level one, or one with this prefix."""
    spellings = sorted(numbers, key=len, reverse=True)

    def encode(text: str) -> list[int]:
        if prefix:
            rest = (prefix + text).replace(" ", "\u2581")
        else:
            own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
            others = [byte for byte in range(256) if byte not in own]
            rest = "".join(
                chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in text.encode("utf-8")
            )
        found = []
        while rest:
            spelling = next(each for each in spellings if rest.startswith(each))
            found.append(numbers[spelling])
            rest = rest.removeprefix(spelling)
        return found

    return encode


def aligned(
    student: tuple[Pieces, dict[str, int]],
    teacher: tuple[Pieces, dict[str, int]],
    *texts: str,
    most: int = 100,
    has_ended: bool = False,
    end: int | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> Aligned:
    ids = [student[1][text] for text in texts]
    return align(ids, student[0], teacher[0], encode or greedy(teacher[1]), most=most, has_ended=has_ended, end=end)


STUDENT = vocabulary("<end>", "the", "Ġcat", "Ġ", "c", "at", "Ã", "¤", "s", "<x>")
TEACHER = vocabulary("<end>", "<", "x", ">", "th", "e", "Ġc", "at", "a", "t", "Ã¤", "s", "ï¿½", "Ġ", "c")


def test_a_span_ends_where_a_token_of_each_ends() -> None:
    found = aligned(STUDENT, TEACHER, "the", "Ġcat", "s")
    assert found.teacher_ids == [4, 5, 6, 7, 11]
    assert found.spans == [(0, 1, 0, 2), (1, 2, 2, 4), (2, 3, 4, 5)]
    assert found.compared == 3


def test_tokens_that_overlap_are_one_span() -> None:
    found = aligned(STUDENT, TEACHER, "the", "Ġ", "c", "at")
    assert found.spans == [(0, 1, 0, 2), (1, 3, 2, 3), (3, 4, 3, 4)]


def test_a_character_that_has_several_tokens_is_read_as_one() -> None:
    found = aligned(STUDENT, TEACHER, "Ã", "¤", "s")
    assert found.teacher_ids == [10, 11]
    assert found.spans == [(0, 2, 0, 1), (2, 3, 1, 2)]


def test_bytes_that_are_no_text_are_not_compared_and_what_follows_is() -> None:
    found = aligned(STUDENT, TEACHER, "the", "¤", "s", "Ã")
    assert found.teacher_ids == [4, 5, 12, 11, 12]  # U+FFFD for each
    assert found.spans == [(0, 1, 0, 2), (2, 3, 3, 4)]


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("end", [None, 0])
def test_the_end_is_no_text_and_is_compared_only_where_it_is_to_be(has_ended: bool, end: int | None) -> None:
    texts = ["the", "s", *(["<end>"] if has_ended else [])]
    found = aligned(STUDENT, TEACHER, *texts, has_ended=has_ended, end=end)
    both = has_ended and end is not None
    assert found.teacher_ids == [4, 5, 11, *([0] if both else [])]
    # The last token of an answer that was cut is compared as all others are.
    assert found.spans == [(0, 1, 0, 2), (1, 2, 2, 3), *([(2, 3, 3, 4)] if both else [])]


def test_an_answer_without_text_has_its_end_only() -> None:
    assert aligned(STUDENT, TEACHER, "<end>", has_ended=True, end=0) == Aligned([0], [(0, 1, 0, 1)])
    assert aligned(STUDENT, TEACHER, "<end>", has_ended=True) == Aligned([], [])
    assert aligned(STUDENT, TEACHER, "Ã") == Aligned([12], [])


def test_a_special_token_within_an_answer_is_not_read_and_the_span_around_it_not_compared() -> None:
    found = aligned(STUDENT, TEACHER, "the", "<end>", "s", "Ġ", "<end>", "c", "at")
    assert found.teacher_ids == [4, 5, 11, 6, 7]
    assert found.spans == [(0, 1, 0, 2), (2, 3, 2, 3), (6, 7, 4, 5)]


def test_an_added_token_that_is_not_special_is_read_as_its_text() -> None:
    document = {**BYTE_LEVEL, "added_tokens": [*BYTE_LEVEL["added_tokens"], {"id": 1, "content": "<x>"}]}  # type: ignore[misc]
    student = vocabulary("<end>", "<x>", "s", document=document)
    found = aligned(student, TEACHER, "<x>", "s")
    assert found.teacher_ids == [1, 2, 3, 11]
    assert found.spans == [(0, 1, 0, 3), (1, 2, 3, 4)]


def test_nothing_is_compared_beyond_the_tokens_that_the_teacher_reads() -> None:
    found = aligned(STUDENT, TEACHER, "the", "Ġcat", "s", "<end>", most=3, has_ended=True, end=0)
    assert found.teacher_ids == [4, 5, 6]
    assert found.spans == [(0, 1, 0, 2)]
    # Nor is an end for which there is no room.
    assert aligned(STUDENT, TEACHER, "s", "<end>", most=1, has_ended=True, end=0) == Aligned([11], [(0, 1, 0, 1)])


def test_nothing_is_compared_after_the_first_token_that_writes_other_text() -> None:
    lower = greedy(TEACHER[1])
    student = vocabulary("<end>", "the", "S", "s")
    found = aligned(
        student, TEACHER, "the", "S", "s", "<end>", has_ended=True, end=0, encode=lambda text: lower(text.lower())
    )
    assert found.spans == [(0, 1, 0, 2)]
    assert found.teacher_ids == [4, 5, 11, 11]


def test_a_sentencepiece_tokenizer_has_no_space_before_a_text() -> None:
    pieces = vocabulary("</s>", "\u2581the", "\u2581c", "at", "<0xC3>", "<0xA4>", "s", "\u2581", document=SENTENCEPIECE)
    as_student = aligned(pieces, TEACHER, "\u2581the", "\u2581c", "at", "<0xC3>", "<0xA4>")
    assert as_student.teacher_ids == [4, 5, 6, 7, 10]
    assert as_student.spans == [(0, 1, 0, 2), (1, 2, 2, 3), (2, 3, 3, 4), (3, 5, 4, 5)]
    as_teacher = aligned(STUDENT, pieces, "the", "Ġcat", encode=greedy(pieces[1], prefix="\u2581"))
    assert as_teacher.teacher_ids == [1, 2, 3]
    assert as_teacher.spans == [(0, 1, 0, 1), (1, 2, 1, 3)]


@pytest.mark.parametrize("text", ["\n", "\u00e4"])
def test_a_text_before_which_the_teacher_has_a_space_alone_is_compared(text: str) -> None:
    written = [f"<0x{byte:02X}>" for byte in text.encode()]
    pieces = vocabulary("</s>", "\u2581", *written, "s", document=SENTENCEPIECE)
    ids = [*range(1, 3 + len(written))]
    student = vocabulary("<end>", *("\u010a" if text == "\n" else "\u00c3\u00a4"), "s")
    found = align([*range(1, 2 + len(written)), 0], student[0], pieces[0], lambda _: ids, most=9, has_ended=True, end=0)
    expected = [(0, 1, 0, 2), *((at, at + 1, at + 1, at + 2) for at in range(1, len(written) + 2))]
    assert found == Aligned([*ids, 0], expected)


@pytest.mark.parametrize("first", ["\u0120", "\u0120the"])
def test_a_space_that_a_byte_level_teacher_puts_before_each_text_is_no_part_of_it(first: str) -> None:
    teacher = vocabulary("<end>", first, "the", "\u0120cat")
    texts = [first, "\u0120cat"] if first != "\u0120" else [first, "the", "\u0120cat"]
    ids = [teacher[1][text] for text in texts]
    found = aligned(STUDENT, teacher, "the", "\u0120cat", encode=lambda _: ids)
    assert found == Aligned(ids, [(0, 1, 0, len(ids) - 1), (1, 2, len(ids) - 1, len(ids))])
    # A space that the answer begins with is compared.
    assert aligned(STUDENT, teacher, "\u0120cat", encode=lambda _: [3]) == Aligned([3], [(0, 1, 0, 1)])


def test_a_space_alone_that_a_students_text_begins_with_is_in_the_first_span() -> None:
    pieces = vocabulary("</s>", "\u2581", "<0x0A>", "s", "<0xC3>", document=SENTENCEPIECE)
    teacher = vocabulary("<end>", "\u010a", "s")
    found = aligned(pieces, teacher, "\u2581", "<0x0A>", "s", "</s>", has_ended=True, end=0)
    assert found == Aligned([1, 2, 0], [(0, 2, 0, 1), (2, 3, 1, 2), (3, 4, 2, 3)])
    assert found.compared == 4
    assert aligned(pieces, teacher, "\u2581", "</s>", has_ended=True, end=0) == Aligned([0], [(1, 2, 0, 1)])
    assert aligned(pieces, STUDENT, "\u2581", "</s>", "s") == Aligned([8], [(2, 3, 0, 1)])


def test_added_tokens_of_a_sentencepiece_tokenizer_write_spaces() -> None:
    added = [{"id": 0, "content": "\u2581\u2581"}, {"id": 1, "content": "<x>"}]
    pieces, _ = vocabulary("\u2581\u2581", "<x>", "s", document={**SENTENCEPIECE, "added_tokens": added})
    assert pieces.written == (b"  ", b"<x>", b"s")


def test_tokens_of_both_vocabularies_write_the_same_bytes_or_are_special_ones_of_one_name() -> None:
    other, _ = vocabulary("</s>", "at", "\u2581c", "<0x73>", "s", document=SENTENCEPIECE)
    assert TEACHER[0].shared_with(other) == [(6, 2), (7, 1), (11, 3)]
    assert STUDENT[0].shared_with(TEACHER[0]) == [(0, 0), (3, 13), (4, 14), (5, 7), (8, 11)]


def test_tokens_that_are_not_known_to_write_bytes_are_not_read() -> None:
    assert read_pieces({"decoder": {"type": "WordPiece"}}, {"a": 0}, []) is None
    assert read_pieces({"decoder": None}, {"a": 0}, []) is None


@pytest.mark.parametrize(
    ("written", "begins_with_space"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}]}}, True),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}}, True),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}, False),
    ],
)
def test_a_sentencepiece_tokenizer_without_a_decoder_writes_what_it_reads(
    written: dict[str, Any], begins_with_space: bool
) -> None:
    document = {"decoder": None, "model": {"type": "BPE", "byte_fallback": True}, **written}
    pieces, _ = vocabulary("</s>", "\u2581c", "at", "<0xC3>", document={**SENTENCEPIECE, **document})
    assert pieces.written == (None, b" c", b"at", b"\xc3")
    assert pieces.of([1, 2]) == ([b"c", b"at"] if begins_with_space else [b" c", b"at"])
    assert pieces.begins_with_space is begins_with_space


def test_places_in_bytes_are_places_in_their_text() -> None:
    found = decode(b"a\xc3\xa4\xff\xfe\xf0\x9f\x98b")
    assert found.text == "a\u00e4\ufffdb"
    assert found.at == (0, 1, 2, 3, None, None, None, None, 6, 7)
    assert found.is_broken == (False, False, False, True, True, True, True, True, False)
    assert decode(b"") == Decoded("", (0,), ())
