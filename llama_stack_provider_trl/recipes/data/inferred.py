"""Compares what is trained with what inference renders, token by token, for each trained turn.

Inference has the tokens that the tokenizer's own `apply_chat_template` makes of the messages before a turn, with the
row's tools and the header of an answer. Messages are given in the form that the template takes (`forms`), as those who
serve a model have to do. A turn is equal where its training has these tokens, and the loss begins behind
them. Which turn a sequence trains is not asked of the code that has made it (`turns`, `spans`): known are only the ids,
which of them carry loss, and the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jinja2 import TemplateError

from ...specs.images import images_in
from ...specs.job import TrainOn
from ...specs.rows import Message, SftExample
from .chat import Chat
from .forms import without_thought
from .marks import common_prefix
from .tables import IGNORED
from .templates import rendered, rendered_ids
from .token_texts import TokenTexts
from .tokenize import Encoded
from .tokenizer_calls import call_tokenizer, decoded
from .turns import trained_numbers

_SHOWN_TOKENS = 8
"""Tokens of a difference whose text is shown, from the first one that differs on."""
_SHOWN_TEXT = 60
"""Characters of it."""


class ComparedTurn(NamedTuple):
    turn: int
    """Its number in the row's conversation; of answers that a job generates, that of the answer."""
    part: str
    """sequence, chosen, rejected, completion or prompt."""
    sequence: int
    """Which of the sequences of its row trains it."""
    difference: str = ""
    """The first token that differs, with both texts; empty: all are equal."""
    is_unasked: bool = False
    """No question is before it, and inference has no prompt for it: a greeting of the assistant's."""


class _Run(NamedTuple):
    sequence: int
    begin: int
    end: int


@dataclass
class Inference:
    """Compares turns with what inference renders for one chat template.

    Args:
        chat: with which the rows were encoded: its tokenizer has its template, and is asked again here.
        most_tokens: compared turns are counted in `left_out` instead, once inference has rendered as many.
    """

    chat: Chat
    most_tokens: int | None = None
    tokens: int = 0
    """Of what inference has rendered so far."""
    left_out: int = 0
    """Turns that were not compared."""

    def of_sequences(self, example: SftExample, sequences: Sequence[Encoded], train_on: TrainOn) -> list[ComparedTurn]:
        """The trained turns of a row, each in the sequence that trains it.

        Args:
            example: the row as it was encoded: without its thoughts, where the job drops them.
        """
        messages = example.messages
        if messages is None:
            return []  # plain text: inference renders no turns
        turns = list(trained_numbers(messages, example.prompt_turns or 0))
        if train_on in ("last_turn", "final_answer"):
            turns = turns[-1:]
        before = self._all_before(messages, turns)
        if before is None:
            return []
        found: dict[int, ComparedTurn] = {}
        runs = [run for number, (_, labels) in enumerate(sequences) for run in _runs(number, labels)]
        free = [] if train_on == "all" else list(runs)  # then no loss begins with a turn
        for turn, ids in before.items():
            for run in free:
                if _is_behind(sequences[run.sequence][0], run.begin, ids, train_on == "final_answer"):
                    free.remove(run)
                    found[turn] = self._with_text(messages, turn, sequences[run.sequence][0][run.begin : run.end], run)
                    break
        for turn, ids in before.items():
            # Of two answers, one behind the other, the header of the second one may carry loss, too.
            if turn not in found and (train_on == "all" or turn - 1 in before):
                within = next((run for run in runs if _is_within(sequences, run, ids)), None)
                if within is not None:
                    found[turn] = ComparedTurn(turn, "sequence", within.sequence)
        left = iter(free)
        for turn, ids in before.items():
            if turn not in found:
                found[turn] = self._different(turn, ids, next(left, None), sequences)
        extra = [self._extra(turns, run, sequences) for run in left]
        for turn, one in found.items():
            is_asked = before[turn] is not None or any(message["role"] == "user" for message in messages[:turn])
            if one.difference and not is_asked:
                found[turn] = one._replace(is_unasked=True)
        return [*(found[turn] for turn in turns), *extra]

    def of_answer(
        self, part: str, prompt: Sequence[Message], answer: Sequence[Message], ids: tuple[list[int], list[int]]
    ) -> list[ComparedTurn]:
        """The answer of a pair, or a labelled one: one turn, equal where all its turns are.

        Args:
            ids: those of the prompt and of the answer, before the cut.
        """
        talk, first = [*prompt, *answer], len(prompt)
        turns = [turn for turn in range(first, len(talk)) if talk[turn]["role"] == "assistant"]
        before = self._all_before(talk, turns, 1)
        if before is None:
            return []
        whole = ids[0] + ids[1]
        for turn, inferred in before.items():
            begin = len(ids[0]) if turn == first else len(inferred or ())
            if difference := self._difference(whole, begin, inferred):
                return [ComparedTurn(turn, part, 0, difference)]
        run = _Run(0, len(ids[0]), len(whole))
        return [self._with_text(talk, first, ids[1], run)._replace(part=part)]

    def of_prompt(self, messages: Sequence[Message], ids: list[int]) -> list[ComparedTurn]:
        before = self._all_before(messages, [len(messages)])
        if before is None:
            return []
        return [
            ComparedTurn(turn, "prompt", 0, self._difference(ids, len(ids), inferred))
            for turn, inferred in before.items()
        ]

    def _all_before(
        self, messages: Sequence[Message], turns: Sequence[int], count: int | None = None
    ) -> dict[int, list[int] | None] | None:
        """What inference has before each turn (None: the template refuses that); None: that would be too much.

        Args:
            count: as what the turns are counted, where they are not compared; None: each as one.
        """
        found: dict[int, list[int] | None] = {}
        for turn in turns:
            if self.most_tokens is not None and self.tokens > self.most_tokens:
                self.left_out += len(turns) if count is None else count
                return None
            found[turn] = self.before(messages[:turn])
            self.tokens += len(found[turn] or ())
        return found

    def before(self, messages: Sequence[Message]) -> list[int] | None:
        """The ids that inference has before the answer to these messages; None: the template refuses them. Raises
        JobFailure: invalid_model, the template takes more than the limits allow."""
        if not messages:
            return None
        turns, tools = self.chat.as_taken(messages)
        images = [image for _, image in images_in(messages)]
        try:
            if self.chat.images is not None:
                return self.chat.images.inferred(turns, images, add_generation_prompt=True, **tools)
            return rendered_ids(self.chat.tokenizer, turns, add_generation_prompt=True, **tools)
        except (TemplateError, TypeError, ValueError):
            return None

    def _different(
        self,
        turn: int,
        before: list[int] | None,
        run: _Run | None,
        sequences: Sequence[Encoded],
    ) -> ComparedTurn:
        if run is None:
            # Of a conversation that is trained whole, the sequence has what is before the turn, too.
            closest = max(
                range(len(sequences)), key=lambda number: common_prefix(sequences[number][0], before or []), default=0
            )
            ids = sequences[closest][0] if sequences else []
            at = common_prefix(ids, before or [])
            if before is None or at < len(before):
                return ComparedTurn(turn, "sequence", closest, self._difference(ids, len(before or ()), before))
            return ComparedTurn(turn, "sequence", closest, "no token of it carries loss")
        difference = self._difference(sequences[run.sequence][0], run.begin, before)
        return ComparedTurn(turn, "sequence", run.sequence, difference)

    def _extra(self, turns: Sequence[int], run: _Run, sequences: Sequence[Encoded]) -> ComparedTurn:
        text = self._shown(sequences[run.sequence][0], run.begin)
        found = f"from token {run.begin} on {text} carries loss, and belongs to no trained turn"
        return ComparedTurn(turns[-1] if turns else 0, "sequence", run.sequence, found)

    def _difference(self, ids: list[int], begin: int, before: list[int] | None) -> str:
        """Where what is trained differs from what inference has.

        Args:
            begin: the first token of the turn that carries loss.
        """
        if before is None:
            return "the chat template renders nothing for the messages before it, so inference has no such turn"
        at = common_prefix(ids[:begin], before)
        if at == begin == len(before):
            return ""
        if at == begin and ids[at : at + 1] == before[at : at + 1]:
            return f"the loss begins at token {at}, {self._shown(ids, at)}, which inference renders before the answer"
        loss = ", with loss" if at == begin else ", without loss" if at == len(before) else ""
        inferred = self._shown(before, at) if at < len(before) else "the answer begins there"
        return f"token {at} is {self._shown(ids, at)}{loss}, and at inference {inferred}"

    def _with_text(self, messages: Sequence[Message], turn: int, trained: list[int], run: _Run) -> ComparedTurn:
        """The turn, if its own text is among the trained tokens, as far as the template writes it as it is."""
        content = without_thought(messages[turn])["content"].strip()
        difference = ""
        if content and not self._has(trained, content):
            turns, tools = self.chat.as_taken(messages[: turn + 1])
            if content in rendered(self.chat.tokenizer, turns, **tools):
                difference = f"its text {_cut(content)} is not among the tokens that carry loss"
        return ComparedTurn(turn, "sequence", run.sequence, difference)

    def _has(self, ids: Sequence[int], text: str) -> bool:
        """Whether a text is among tokens, as it is or as the tokenizer reads it: some change letters."""
        decoded = self._decoded(ids)
        if text in decoded:
            return True
        (own,) = call_tokenizer(self.chat.tokenizer, [text], add_special_tokens=False)["input_ids"]
        return self._decoded(own).strip() in decoded

    def _shown(self, ids: Sequence[int], at: int) -> str:
        """A token with its id, and the text that begins with it."""
        if at >= len(ids):
            return "its end"
        one, text = (_cut("".join(self._texts.of(ids[at : at + count]))) for count in (1, _SHOWN_TOKENS))
        return f"{one} (id {ids[at]}{f' of {text}' if text != one else ''})"

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.chat.tokenizer)

    def _decoded(self, ids: Sequence[int]) -> str:
        return decoded(self.chat.tokenizer, ids, clean_up_tokenization_spaces=False)


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_TEXT else f"{text[: _SHOWN_TEXT - 1]}…")


def _runs(sequence: int, labels: Sequence[int]) -> Iterator[_Run]:
    begin = None
    for at, label in enumerate([*labels, IGNORED]):
        if label != IGNORED and begin is None:
            begin = at
        elif label == IGNORED and begin is not None:
            yield _Run(sequence, begin, at)
            begin = None


def _is_behind(ids: list[int], begin: int, before: list[int] | None, thought_between: bool) -> bool:
    """Whether the loss begins behind what inference has; `thought_between`: or behind what the turn thinks."""
    if before is None or ids[: len(before)] != before:
        return False
    return begin == len(before) or (thought_between and begin > len(before))


def _is_within(sequences: Sequence[Encoded], run: _Run, before: list[int] | None) -> bool:
    """Whether a part of the run, but not its first token, begins behind what inference has."""
    if before is None or not run.begin < len(before) < run.end:
        return False
    return sequences[run.sequence][0][: len(before)] == before
