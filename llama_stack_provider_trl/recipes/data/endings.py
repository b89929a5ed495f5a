"""Finds where answers end in what a chat template writes.

An answer ends behind its end-of-turn token. What a template writes after that is no part of it: the header of a next
answer, the opening of the next turn, another turn, a note at the end of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ...specs.rows import Message
from .marks import CLOSE, OPEN, Marking, common_prefix, unmarked, visible
from .places import Render, find_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TURN = "\ue000\ue004\ue001"
"""Stands before the contents of the turns around an answer, which are never a part of its end."""
_MOST_ENDINGS = 1000
_LONGEST_ENDING = 1000
"""Characters of an ending that is remembered. Longer ones repeat other turns, and differ from row to row."""
_SHOWN = 80


class TurnEnd(NamedTuple):
    """What a template writes after the content of an answer."""

    length: int
    """Characters of it that belong to the answer."""
    left_out: str
    """The others."""
    doubtful: str = ""
    """What belongs to the answer because no rule decides it."""
    is_open: bool = False
    """Nothing but white space ends the answer."""


class _Following(NamedTuple):
    """What a template writes after an answer that another turn follows."""

    pieces: list[str]
    before: str
    """What it writes before the last content of the conversation."""


@dataclass
class Examples:
    count: int = 0
    first: str = ""

    def add(self, text: str) -> None:
        """Count a text that is more than white space."""
        if text.strip():
            self.count += 1
            self.first = self.first or (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")

    def add_all(self, later: Examples) -> None:
        self.count += later.count
        self.first = self.first or later.first


class Endings:
    """The ends of the answers that one chat template writes. What follows an answer is decided once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, render: Render) -> None:
        self._tokenizer, self._render = tokenizer, render
        self._known: dict[str, TurnEnd] = {}
        self._heads: dict[str, list[str]] = {}
        self.left_out, self.doubtful = Examples(), Examples()
        """What is written after the end of answers, and where no rule finds it."""
        self.open = 0
        """Number of answers so far that nothing but white space ends."""

    def of(self, messages: Sequence[Message], text: str) -> int:
        """Where the answer ends that is the last turn of a conversation."""
        if not messages or messages[-1]["role"] != "assistant":
            return len(text)
        # Few rows need marks: mostly their content is in the text, and what follows it is known.
        end = _last_written(messages[-1], text)
        if end is not None and (ending := self._known.get(text[end:])):
            self._count(ending)
            return end + ending.length
        place = find_content(self._render, messages, len(messages) - 1, text)
        if place is None:
            self.doubtful.add(self._unlike_following(messages, text))
            return len(text)
        return place.end + self.length(messages, place.marking, text, place.end)

    def length(self, messages: Sequence[Message], marking: Marking, text: str, end: int) -> int:
        """How many characters after the content of an answer, the last turn of a conversation, belong to it.

        Args:
            marking: by which its content is found.
            end: of the content in it.
        """
        tail = text[end:]
        ending = self._known.get(tail)
        if ending is None:
            ending = self._decide(messages, marking, text[:end], tail)
            if len(tail) <= _LONGEST_ENDING:
                if len(self._known) >= _MOST_ENDINGS:
                    self._known.clear()
                self._known[tail] = ending
        self._count(ending)
        return ending.length

    def shared(self, one: str, other: str) -> int:
        """How many characters two texts begin with, without parts of tokens and words."""
        pieces = self._pieces(one)
        return len("".join(pieces[: common_prefix(pieces, self._pieces(other))]))

    def asked(self, message: Message, rest: str) -> int:
        """How many characters of what follows an answer belong to it, by what ends it behind a question.

        Args:
            rest: what follows it in a conversation in which other turns are next.
        """
        talk: list[Message] = [{"role": "user", "content": _TURN}, message]
        text = self._render(talk)
        place = None if text is None else find_content(self._render, talk, 1, text)
        return 0 if text is None or place is None else self.shared(text[place.end : self.of(talk, text)], rest)

    def stop_of(self, message: Message) -> str:
        """What a model writes to end an answer that the template ends by nothing: the token that begins the next turn.

        Of GLM-4.5 that is `<|user|>`, or `<|observation|>` behind calls. Empty: the template ends it, or has none.
        """
        return self._call_stop if message.get("tool_calls") else self._stop

    @cached_property
    def _stop(self) -> str:
        talk: list[Message] = [{"role": "user", "content": _TURN}, {"role": "assistant", "content": OPEN + CLOSE}]
        last, followed = self._render(talk), self._render([*talk, {"role": "user", "content": _TURN}])
        tail, rest = ((text or "").partition(CLOSE)[2] for text in (last, followed))
        is_open = last is not None and CLOSE in last and not tail.strip() and rest.startswith(tail)
        return self._first_token(rest.removeprefix(tail)) if is_open else ""

    @cached_property
    def _call_stop(self) -> str:
        call: Message = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
        talk: list[Message] = [{"role": "user", "content": _TURN}, call]
        last = self._render(talk)
        followed = self._render([*talk, {"role": "tool", "content": _TURN, "name": "f"}])
        is_open = self._stop and last and followed and followed.startswith(last)
        return self._first_token(followed[len(last) :]) if is_open and last and followed else ""

    def _first_token(self, text: str) -> str:
        """The special token that a text begins with, and white space before it. Empty: it begins otherwise."""
        space = text[: len(text) - len(text.lstrip())]
        first = self._pattern.match(text.lstrip())
        return space + first.group() if first is not None and first.group() in self.special else ""

    def warnings(self) -> Iterator[str]:
        if self.open:
            yield (
                f"the chat template writes nothing that ends an answer after {self.open} of them: these rows teach the "
                f"model no token to stop by. Have the template write {self._tokenizer.eos_token!r} behind each answer"
            )
        if self.left_out.count:
            yield (
                f"after the end of {self.left_out.count} answers the chat template writes more, such as "
                f"{self.left_out.first!r}: that is not trained"
            )
        if self.doubtful.count:
            yield (
                f"after {self.doubtful.count} answers the chat template writes text, such as "
                f"{self.doubtful.first!r}, and where in it the answer ends is not known: all of it is trained. Have "
                f"the template write {self._tokenizer.eos_token!r} behind each answer"
            )

    def _count(self, ending: TurnEnd) -> None:
        self.left_out.add(ending.left_out)
        self.doubtful.add(ending.doubtful)
        self.open += ending.is_open and not self._stop

    def _decide(self, messages: Sequence[Message], marking: Marking, before: str, tail: str) -> TurnEnd:
        pieces = self._pieces(tail)
        following = self._following(messages, marking)
        count = self._without_rest(pieces, before) if following is None else self._shared(pieces, following, messages)
        doubtful = False
        if count is None:
            count, doubtful = len(pieces), not all(map(self._is_silent, pieces))
        elif not self.special.intersection(pieces[:count]):
            # Text alone ends the turn: then the model learns to stop by the token that ends the conversation.
            last = next((number for number, piece in enumerate(pieces) if piece in self._ends), None)
            if last is not None and not self._has_turns(messages, marking):
                count, doubtful = last + 1, not all(map(self._is_silent, pieces[:last]))
        if not "".join(pieces[count:]).strip():
            count = len(pieces)
        length = len("".join(pieces[:count]))
        return TurnEnd(length, tail[length:], tail[:length] if doubtful else "", not tail[:length].strip())

    def _shared(self, pieces: list[str], following: _Following, messages: Sequence[Message]) -> int:
        """How many pieces end the answer: those that are written, too, where a turn follows, and tokens that the
        template writes at the end of a conversation only."""
        shared = common_prefix(pieces, following.pieces)
        ends = self._ends | self._closing(pieces[shared:], following.before)
        count = shared + _run(pieces[shared:], ends)
        first = next((number for number in range(count) if pieces[number] in self._ends), None)
        if first is not None:
            return min(count, first + 1 + _run(pieces[first + 1 :], ends, with_space=True))
        opening = max(_overlap(pieces[:count], head, self.special) for head in self._openings(messages, following))
        if opening == 0 and following.pieces[shared : shared + 1] == [_TURN]:
            # Another content is next, so these pieces hold its header, too.
            first = next((number for number in range(count) if pieces[number] in self.special), None)
            return count if first is None else min(count, first + 1 + _run(pieces[first + 1 :], with_space=True))
        return count - opening

    def _without_rest(self, pieces: list[str], before: str) -> int | None:
        """As `_shared`, where the template lets no turn follow. None: not known."""
        first = next((number for number, piece in enumerate(pieces) if piece in self._ends), None)
        if first is None:
            return None
        ends = self._ends | self._closing(pieces[first + 1 :], before)
        return first + 1 + _run(pieces[first + 1 :], ends, with_space=True)

    def _closing(self, rest: list[str], before: str) -> frozenset[str]:
        """The tokens of a rest that consists of tokens alone, none of which is written before a content."""
        found = frozenset(piece for piece in rest if not piece.isspace())
        return found if found <= self.special.difference(self._pieces(before)) else frozenset()

    def _following(self, messages: Sequence[Message], marking: Marking) -> _Following | None:
        """None: the template refuses or leaves out a turn after the answer."""
        for others in (_with_marks(messages[:-1]), messages[:-1]):
            talk = marking.put_into([*others, messages[-1]], len(others))
            marked = self._render([*talk, {"role": "user", "content": _TURN}])
            bounds = None if marked is None else marking.bounds(marked)
            if marked and bounds and _TURN in marked:
                whole = unmarked(marked)
                return _Following(self._pieces(whole[bounds[1] :]), whole[: max(bounds[0], whole.rfind(_TURN))])
        return None

    def _has_turns(self, messages: Sequence[Message], marking: Marking) -> bool:
        """Whether the template writes other turns between an answer and the first token that ends one."""
        talk = marking.put_into([*_with_marks(messages[:-1]), messages[-1]], len(messages) - 1)
        marked = self._render(talk)
        bounds = None if marked is None else marking.bounds(marked)
        if marked is None or bounds is None:
            return True
        pieces = self._pieces(unmarked(marked)[bounds[1] :])
        return next((piece == _TURN for piece in pieces if piece == _TURN or piece in self._ends), False)

    def _openings(self, messages: Sequence[Message], following: _Following) -> Iterator[list[str]]:
        """What conversations begin with: in a template that writes the opening of a turn behind the one before, the
        first of them is there, too."""
        yield self._pieces(following.before.partition(_TURN)[0])
        for role in dict.fromkeys(["user", *(message["role"] for message in messages)]):
            if role not in self._heads:
                text = self._render([{"role": role, "content": _TURN}]) or ""
                head, found, _ = text.partition(_TURN)
                self._heads[role] = self._pieces(head) if found else []
            yield self._heads[role]

    def _unlike_following(self, messages: Sequence[Message], text: str) -> str:
        """What the template writes at the end of a conversation, but not where a turn follows."""
        following = self._render([*messages, {"role": "user", "content": _TURN}])
        if following is None or following.startswith(text):
            return ""
        rest = text[common_prefix(text, following) :]
        return "" if all(map(self._is_silent, self._pieces(rest))) else rest

    def _is_silent(self, piece: str) -> bool:
        return piece.isspace() or piece in self.special

    def _pieces(self, text: str) -> list[str]:
        """The special tokens, words and signs of a text: what is compared is equal whole, or differs whole."""
        return [found.group() for found in self._pattern.finditer(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        special = "|".join(map(re.escape, sorted([_TURN, *self.special], key=len, reverse=True)))
        return re.compile(rf"{special}|<[^<>\s]+>|\[[^\[\]\s]+\]|\w+|\s|(?P<sign>[^\w\s])(?P=sign)*")

    @cached_property
    def special(self) -> frozenset[str]:
        """The control tokens of the tokenizer, as texts."""
        added = self._tokenizer.added_tokens_decoder.values()
        named = self._tokenizer.all_special_tokens
        return frozenset(map(str, [*(token for token in added if token.special), *named]))

    @cached_property
    def _ends(self) -> frozenset[str]:
        """Tokens that end a turn or a text, by the tokenizer's names: eos_token, eot_token, eom_token."""
        named = self._tokenizer.special_tokens_map.items()
        return frozenset(str(token) for name, token in named if name.startswith("eo") and token)


def _with_marks(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": _TURN + message["content"]} for message in messages]


def _last_written(message: Message, text: str) -> int | None:
    """The end of a turn's content where it is last in a text; None: the template has not written it as it is."""
    written, content = visible(message), message["content"]
    at = text.rfind(written) if written else -1
    if at < 0:
        return None
    end = at + len(written)
    return end + common_prefix(content[len(content.rstrip()) :], text[end:])


def _run(pieces: list[str], ends: frozenset[str] = frozenset(), *, with_space: bool = False) -> int:
    """How many pieces are white space and ends, up to the last end; `with_space`: with the white space after it."""
    count = 0
    for number, piece in enumerate(pieces):
        if piece in ends or (with_space and piece.isspace()):
            count = number + 1
        elif not piece.isspace():
            break
    return count


def _overlap(pieces: list[str], head: list[str], special: frozenset[str]) -> int:
    """How many pieces at the end are the beginning of a head, or of what follows its first special tokens."""
    longest = 0
    for begin in range(len(head)):
        for size in range(1, min(len(pieces), len(head) - begin) + 1):
            same = pieces[-size:] == head[begin : begin + size]
            if same and any(len(piece) > 1 or piece.isalnum() for piece in pieces[-size:]):
                longest = max(longest, size)
        if head[begin] not in special and not head[begin].isspace():
            break
    return longest
