"""The bytes that each token of a vocabulary writes, which two tokenizers are compared by.

A tokenizer's `decode` gives text, in which a token that ends inside a character has no end. Bytes have one for every
token of a byte-level tokenizer (GPT-2, Llama 3, Qwen) and of a SentencePiece one that falls back to bytes (Llama 2,
Gemma).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_REPLACED = "\ufffd"


def _byte_of_character() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable ones stand for themselves."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


@dataclass(frozen=True)
class Pieces:
    """What the tokens of a vocabulary write, by their numbers."""

    texts: tuple[str, ...]
    """Of each token, as the vocabulary has it; empty: there is no such token."""
    written: tuple[bytes | None, ...]
    """None: a special token, or one that is not known to write bytes."""
    begins_with_space: bool = False
    """Each text begins with a space that is no part of it."""

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of a text's tokens; a token that writes none has none."""
        found = [(self.written[number] if number < len(self.written) else None) or b"" for number in ids]
        first = next((at for at, piece in enumerate(found) if piece), None)
        if self.begins_with_space and first is not None and found[first].startswith(b" "):
            found[first] = found[first][1:]
        return found

    def begins_alone(self, ids: Sequence[int]) -> bool:
        """The first token is the space that each text begins with, and nothing else, as before a line break."""
        return self.begins_with_space and self.written[ids[0]] == b" " if ids else False

    def shared_with(self, other: Pieces) -> list[tuple[int, int]]:
        """Numbers here and there of the tokens of both: those that write the same bytes, or special ones of the same
        name. Each number is in one of them at most."""
        there = _numbers(other)
        return [(number, there[key]) for key, number in _numbers(self).items() if key in there]


def _numbers(pieces: Pieces) -> dict[bytes | str, int]:
    found: dict[bytes | str, int] = {}
    for number, (text, written) in enumerate(zip(pieces.texts, pieces.written, strict=True)):
        if text:
            found.setdefault(text if written is None else written, number)
    return found


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces | None:
    """The pieces of a tokenizer; None: its tokens are not known to write bytes."""
    if not tokenizer.is_fast:
        return None
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    return read_pieces(document, tokenizer.get_vocab(), tokenizer.all_special_ids)


def read_pieces(document: dict[str, Any], vocabulary: dict[str, int], special: Sequence[int]) -> Pieces | None:
    """As `pieces_of`.

    Args:
        document: of the library tokenizers.
        vocabulary: its tokens, added ones included.
        special: numbers of special tokens, beside those that the document has as such.
    """
    decoders = list(_parts(document.get("decoder")))
    kinds = {part["type"] for part in decoders}
    strips = any(part["type"] == "Strip" and part.get("start") for part in decoders)
    if not kinds:  # it writes the same tokens, only its own `decode` gives their letters
        before = [*_parts(document.get("normalizer")), *_parts(document.get("pre_tokenizer"))]
        kinds = {part["type"] for part in before}
        if "ByteLevel" not in kinds and (document.get("model") or {}).get("byte_fallback"):
            kinds, strips = {"ByteFallback"}, any(map(_prepends_space, before))
    if "ByteLevel" in kinds:
        write = _byte_level
    elif "ByteFallback" in kinds:
        write = _byte_fallback
    else:
        return None
    size = max(vocabulary.values(), default=-1) + 1
    texts, written = [""] * size, list[bytes | None]([None] * size)
    added = {one["id"]: one for one in document.get("added_tokens") or ()}
    hidden = {number for number, one in added.items() if one.get("special")} | set(special)
    for text, number in vocabulary.items():
        texts[number] = text
        if number not in hidden:
            # Gemma's runs of spaces are added tokens: what writes bytes for others writes theirs.
            is_as_it_is = number in added and write is _byte_level
            written[number] = text.encode() if is_as_it_is else write(text)
    return Pieces(tuple(texts), tuple(written), begins_with_space=strips)


def _prepends_space(part: dict[str, Any]) -> bool:
    """Whether a normalizer or pre-tokenizer writes a space before each text."""
    if part["type"] == "Prepend":
        return part.get("prepend") == _SPACE
    return part["type"] == "Metaspace" and part.get("prepend_scheme") in ("always", "first")


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A decoder, normalizer or pre-tokenizer, and those that it is a sequence of."""
    if component is None:
        return
    yield component
    for name in ("decoders", "normalizers", "pretokenizers"):
        for part in component.get(name) or ():
            yield from _parts(part)


def _byte_level(text: str) -> bytes | None:
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in text)
    except KeyError:
        return None


def _byte_fallback(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()


@dataclass(frozen=True)
class Decoded:
    text: str
    """Each run of bytes that are no UTF-8 is one U+FFFD in it."""
    at: tuple[int | None, ...]
    """For each number of bytes that were decoded: bytes of the text, in UTF-8; None: inside such a run."""
    is_broken: tuple[bool, ...]
    """For each byte: whether it is in such a run."""


def decode(raw: bytes) -> Decoded:
    """Bytes as text, in which the bytes of both have their places."""
    parts: list[str] = []
    at: list[int | None] = [0]
    is_broken: list[bool] = []
    end = 0
    characters = raw.decode("utf-8", "surrogateescape")
    for broken, run in groupby(characters, key=lambda character: "\udc80" <= character <= "\udcff"):
        part = "".join(run)
        parts.append(_REPLACED if broken else part)
        count, begin = (len(part) if broken else len(part.encode())), end
        end += len(parts[-1].encode())
        at += [*([None] * (count - 1)), end] if broken else range(begin + 1, end + 1)
        is_broken += [broken] * count
    return Decoded("".join(parts), tuple(at), tuple(is_broken))
