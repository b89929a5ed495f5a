"""The text of each token for people: characters, where a vocabulary has letters that stand for bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from .pieces import Pieces, pieces_of
from .tokenizer_calls import call_tokenizer, decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"
"""Decoders write it for bytes that are no character."""
_LONGEST_TEXT = 24
"""Characters of a token: long ones are runs of spaces."""


@dataclass
class TokenTexts:
    tokenizer: PreTrainedTokenizerBase
    special: set[int] = field(default_factory=set)
    _known: dict[int, str | None] = field(default_factory=dict)
    _is_undecoded: bool = False

    def __post_init__(self) -> None:
        self.special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        # Without a decoder, `decode` gives the vocabulary's own letters for bytes.
        self._is_undecoded = self.tokenizer.is_fast and self.tokenizer.backend_tokenizer.decoder is None

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. A character is in the token where it begins: one that has only further bytes of it
        is empty. Bytes that are of no character are written as `<0xE4>`, as in a row that was cut within one.
        """
        texts: list[str] = []
        for is_part, run in groupby(ids, key=lambda token: self._whole(token) is None):
            tokens = [*run]
            texts += self._of_parts(tokens) if is_part else [self._known[token] or "" for token in tokens]
        return [_shortened(text) for text in texts]

    def _of_parts(self, ids: Sequence[int]) -> list[str]:
        """The texts of a run of tokens that are no characters by themselves."""
        written = [self._bytes_of(token) for token in ids]
        if any(piece is None for piece in written):  # the tokenizer has the only reading of them
            text = self._decoded(ids)
            if _BROKEN not in text:
                return [text, *[""] * (len(ids) - 1)]
            return [str(self.tokenizer.convert_ids_to_tokens(one)) for one in ids]
        owner = [number for number, piece in enumerate(written) for _ in piece or b""]
        texts, at = [""] * len(ids), 0
        for character in b"".join(filter(None, written)).decode("utf-8", "surrogateescape"):
            is_broken = "\udc80" <= character <= "\udcff"
            texts[owner[at]] += f"<0x{ord(character) - 0xDC00:02X}>" if is_broken else character
            at += 1 if is_broken else len(character.encode())
        return texts

    def _bytes_of(self, token: int) -> bytes | None:
        written = () if self._pieces is None else self._pieces.written
        return written[token] if token < len(written) else None

    @cached_property
    def _pieces(self) -> Pieces | None:
        """Read where it is needed: that takes a second with a large vocabulary."""
        return pieces_of(self.tokenizer)

    def _whole(self, token: int) -> str | None:
        """The text of a token; None: it is a part of a character, or the tokenizer itself does not decode bytes."""
        if token not in self._known:
            text, written = self._decoded([token]), str(self.tokenizer.convert_ids_to_tokens(token))
            if written.startswith("▁") and not self._is_undecoded:
                text = self._behind_another(token, text)
            is_part = _BROKEN in text or (self._is_undecoded and self._bytes_of(token) is not None)
            self._known[token] = None if is_part else text or written
        return self._known[token]

    def _behind_another(self, token: int, alone: str) -> str:
        """The text of a token where it is not the first one: SentencePiece drops a space at the beginning."""
        before, both = self._decoded(self._another), self._decoded([*self._another, token])
        return both[len(before) :] if self._another and both.startswith(before) else alone

    @cached_property
    def _another(self) -> list[int]:
        """A letter, or what the tokenizer has for it."""
        return [*call_tokenizer(self.tokenizer, ["a"], add_special_tokens=False)["input_ids"][0][-1:]]

    def _decoded(self, ids: Sequence[int]) -> str:
        return decoded(self.tokenizer, ids, clean_up_tokenization_spaces=False)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
