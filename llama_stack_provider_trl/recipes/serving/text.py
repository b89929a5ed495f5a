"""The text of an answer while its tokens come: what of it can be sent, and where a stop text ends it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..data.pieces import BYTE_OF_CHARACTER
from ..data.tokenizer_calls import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""Ends a decoded text whose last character lacks bytes."""

_CONTEXT = 8
"""Tokens before an answer with which it is decoded: more than a character has bytes."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token for one byte, as SentencePiece has 256 of them."""


class AnswerText:
    """The text of one answer. All parts together are the text that decoding all tokens at once gives, up to the first
    stop text.

    Args:
        before: tokens that the answer continues: its text is what it adds to theirs. SentencePiece writes a space as a
            part of the next word, and drops that of the first one. Empty: the answer is a text of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], before: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._before = [*before[-_CONTEXT:]]
        self._begin = len(self._written(self._before))
        self._tokens: list[int] = []
        self._sent = 0
        self.is_stopped = False
        """Whether a stop text was found: nothing follows."""

    def add(self, token: int) -> str:
        """The text that can be sent after one more token; empty where it may still become another one."""
        self._tokens.append(token)
        text = self._decoded()
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return self._from_sent(text, min(found))
        end = len(text.rstrip(_INCOMPLETE)) if text.endswith(_INCOMPLETE) else len(text)
        return self._from_sent(text, end - _begun(text[:end], self._stops))

    def rest(self) -> str:
        text = self._decoded()
        return "" if self.is_stopped else self._from_sent(text, len(text))

    def last(self) -> list[int]:
        """The last tokens of the answer and of what it continues, before the next one."""
        return [*self._before, *self._tokens[-_CONTEXT:]][-_CONTEXT:]

    def _decoded(self) -> str:
        return self._written([*self._before, *self._tokens])[self._begin :]

    def _written(self, tokens: list[int]) -> str:
        return decoded(self._tokenizer, tokens, skip_special_tokens=True)

    def _from_sent(self, text: str, end: int) -> str:
        begin = self._sent
        self._sent = max(begin, end)
        return text[begin:end]


def written_token(
    tokenizer: PreTrainedTokenizerBase, token: int, before: Sequence[int] = ()
) -> tuple[str, bytes | None]:
    """The text of a token, and its bytes; None: they are not known.

    Args:
        before: tokens that it follows: those of SentencePiece lose the space before a word where it is the first one.

    A token that holds a part of a character is written as OpenAI's API writes it, `bytes:\\xe4\\xbd`: no two of these
    have the same text.
    """
    text = decoded(tokenizer, [token])
    if _INCOMPLETE not in text:
        text = _behind(tokenizer, token, before) or text
        return text, text.encode()
    piece = tokenizer.convert_ids_to_tokens(token)
    assert isinstance(piece, str)
    if _INCOMPLETE in piece:  # the character itself
        return text, text.encode()
    if found := _BYTE.fullmatch(piece):
        content = bytes([int(found[1], 16)])
    elif piece and BYTE_OF_CHARACTER.keys() >= {*piece}:
        content = bytes(BYTE_OF_CHARACTER[letter] for letter in piece)
    else:
        return text, None
    try:
        return content.decode(), content  # U+FFFD, of bytes
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


def _behind(tokenizer: PreTrainedTokenizerBase, token: int, before: Sequence[int]) -> str:
    """What a token adds to the text of the one before it; empty: it is the first one, or changes that text."""
    known, text = decoded(tokenizer, before[-1:]), decoded(tokenizer, [*before[-1:], token])
    return text[len(known) :] if text.startswith(known) else ""


def _begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that are the longest beginning of a stop text."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        ending = text[-size:]
        if any(stop.startswith(ending) for stop in stops):
            return size
    return 0
