"""Turns examples into token ids and labels, before truncation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...errors import InvalidRows, JobFailure
from ...specs.events import Reason
from ...specs.images import count_images
from ...specs.job import ReasoningUse, TrainOn
from ...specs.rows import LabelledExample, Message, PreferenceExample, PromptExample, SftExample, is_plain
from ...system.texts import counted
from .chat import Chat, TokenIndex
from .forms import END_THINK, split_thought, without_thought
from .images import check_images
from .spans import answer_spans, begins_with_space, split_groups, split_rows
from .tables import IGNORED
from .tokenizer_calls import call_tokenizer
from .turns import TrainedText, trained_numbers, trained_texts, whole_text

Encoded = tuple[list[int], list[int]]
"""Token ids and labels of one sequence, not yet cut."""
EncodedPair = tuple[list[int], list[int], list[int]]
"""Prompt, chosen and rejected ids of one pair, not yet cut."""


class SftEncoder:
    """Encodes numbered examples, a chunk at a time.

    Args:
        reasoning: whether thoughts are trained, and seen, or left out of the rows.
    """

    def __init__(self, chat: Chat, train_on: TrainOn = "assistant", reasoning: ReasoningUse = "keep") -> None:
        self.chat, self.train_on, self.reasoning = chat, train_on, reasoning

    def encode(self, chunk: Sequence[tuple[int, SftExample]]) -> list[list[Encoded]]:
        """The sequences of each example: one, or one for each answer."""
        if self.reasoning == "drop":
            kept = [(row, without_thoughts(example)) for row, example in chunk]
            for (_, before), (_, after) in zip(chunk, kept, strict=True):
                self.chat.only_thoughts += _untrained(after) - _untrained(before)
            chunk = kept
        for row, example in chunk:
            self.chat.count_controls(example.messages or (), row)
        with_images = {row for row, example in chunk if has_images(self.chat, example, example.messages or (), row)}
        encoded: dict[int, list[Encoded]] = {}
        for kind, encode in self._kinds():
            rows = {row: example for row, example in chunk if row not in encoded and kind(example)}
            encoded |= zip(rows, encode(rows) if rows else (), strict=True)
        for row in with_images:
            encoded[row] = [(ids, self._without_placeholders(ids, labels)) for ids, labels in encoded[row]]
        return [encoded[row] for row, _ in chunk]

    def _without_placeholders(self, ids: list[int], labels: list[int]) -> list[int]:
        """Labels without those of the tokens that features of images take the place of."""
        assert self.chat.images is not None
        never = self.chat.images.token_ids
        return [IGNORED if token in never else label for token, label in zip(ids, labels, strict=True)]

    def _kinds(
        self,
    ) -> list[tuple[Callable[[SftExample], bool], Callable[[dict[int, SftExample]], Iterable[list[Encoded]]]]]:
        """The first kind that an example is of encodes it."""
        return [
            (lambda example: example.messages is None, lambda rows: _alone(self._texts(rows))),
            (lambda _: self.train_on == "all", lambda rows: _alone(self._whole_chats(rows))),
            (self._is_by_turns, self._turns),
            (lambda example: example.prompt_turns is not None, lambda rows: _alone(self._answers(rows))),
            (lambda _: True, lambda rows: _alone(self._dialogs(rows))),
        ]

    def _is_by_turns(self, example: SftExample) -> bool:
        messages = example.messages or []
        forms = self.chat.forms
        if self.train_on != "assistant" or not is_plain(messages) or forms.begins_thought or forms.closes_thought:
            return True
        if example.prompt_turns is not None and any(
            turn["role"] != "assistant" for turn in messages[example.prompt_turns :]
        ):
            return True  # results of tools between the answers
        # What an answer thought is left out by many templates once other turns follow.
        return any(END_THINK in turn["content"] and split_thought(turn)[0] is not None for turn in messages[:-1])

    def _turns(self, rows: dict[int, SftExample]) -> Iterator[list[Encoded]]:
        texts = [self._trained_texts(row, example) for row, example in rows.items()]
        flat = [one for found in texts for one in found]
        indexed = iter(self.chat.tokenize_with_index([one.text for one in flat]))
        prefixes = iter(self.chat.tokenize([one.text[:begin] for one in flat for begin in one.begins]))
        for found in texts:
            yield [
                sequence
                for one in found
                for sequence in self._encoded(one, *next(indexed), [next(prefixes) for _ in one.begins])
            ]

    def _encoded(
        self, one: TrainedText, ids: list[int], index: TokenIndex, prefixes: list[list[int]]
    ) -> Iterator[Encoded]:
        """One sequence; where a token of it spans the border before an answer, which none does at inference, one for
        each answer, with the tokens of both sides."""
        if any(ids[: len(before)] != before for before in prefixes):
            parts = [one.text[begin:end] for begin, (_, end) in zip(one.begins, one.spans, strict=True)]
            answers = self.chat.tokenize_with_index(parts)
            if not any(begins_with_space(self.chat, part, own) for part, (own, _) in zip(parts, answers, strict=True)):
                for before, (own, place), begin, (start, _) in zip(
                    prefixes, answers, one.begins, one.spans, strict=True
                ):
                    untrained = len(before) + place(start - begin, False)
                    yield before + own, [IGNORED] * untrained + (before + own)[untrained:]
                return
        labels = [IGNORED] * len(ids)
        for start, end in one.spans:
            trained = slice(index(start, False), index(end, True))
            labels[trained] = ids[trained]
        yield ids, labels

    def _trained_texts(self, row: int, example: SftExample) -> list[TrainedText]:
        messages, first = example.messages or [], example.prompt_turns or 0
        turns = list(trained_numbers(messages, first))
        if self.train_on in ("last_turn", "final_answer"):
            turns = turns[-1:]
        if not turns:  # counted as dropped: it has no loss
            return [TrainedText(self.chat.written(messages, row), [], [])]
        return trained_texts(self.chat, messages, turns, row, without_thoughts=self.train_on == "final_answer")

    def _texts(self, rows: dict[int, SftExample]) -> list[Encoded]:
        eos = self.chat.tokenizer.eos_token_id
        sequences = call_tokenizer(self.chat.tokenizer, [example.text or "" for example in rows.values()])["input_ids"]
        ended = [ids if eos is None or ids[-1:] == [eos] else [*ids, eos] for ids in sequences]
        return [(ids, ids) for ids in ended]

    def _whole_chats(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts = []
        for row, example in rows.items():
            messages = example.messages or []
            if self.chat.forms.begins_thought and messages[-1]["role"] == "assistant":
                texts.append(whole_text(self.chat, messages, row))
            else:
                text = self.chat.render_counted(messages, row)
                texts.append(text + self._stop(messages))
        return [(ids, ids) for ids in self.chat.tokenize(texts)]

    def _rendered(self, rows: dict[int, SftExample]) -> list[str]:
        texts = []
        for row, example in rows.items():
            texts.append(self.chat.render_counted(example.messages or (), row))
        return texts

    def _stop(self, messages: Sequence[Message]) -> str:
        """What the model writes behind the last answer of a conversation, if that is its last turn."""
        return self.chat.endings.stop_of(messages[-1]) if messages[-1]["role"] == "assistant" else ""

    def _answers(self, rows: dict[int, SftExample]) -> list[Encoded]:
        conversations = [(example.messages or [], example.prompt_turns) for example in rows.values()]
        prompts = [messages[:turns] for messages, turns in conversations]
        answers = [[messages[turns:]] for messages, turns in conversations]
        return [
            (prompt + answer, [IGNORED] * len(prompt) + answer)
            for prompt, (answer,) in split_rows(self.chat, prompts, answers, [*rows])
        ]

    def _dialogs(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts, encoded = self._rendered(rows), []
        stopped = [
            text + self._stop(example.messages or []) for text, example in zip(texts, rows.values(), strict=True)
        ]
        indexed = self.chat.tokenize_with_index(stopped)
        for example, text, whole, (ids, index) in zip(rows.values(), texts, stopped, indexed, strict=True):
            labels, stop = [IGNORED] * len(ids), self.chat.endings.stop_of({"role": "assistant", "content": ""})
            for start, end, exact in answer_spans(self.chat, example.messages or [], text):
                stops = bool(stop) and whole.startswith(stop, end)
                trained = slice(index(start, False), index(end + len(stop) * stops, exact or stops))
                labels[trained] = ids[trained]
            encoded.append((ids, labels))
        return encoded


def has_images(
    chat: Chat,
    example: SftExample | PreferenceExample,
    messages: Sequence[Message],
    row: int,
    where: str = "messages",
) -> bool:
    """Whether a conversation of an example has images. Raises JobFailure: invalid_model, the job reads none;
    InvalidRows: one of them cannot be read or decoded."""
    if example.unread_image and chat.images is not None:
        raise InvalidRows(example.unread_image)
    if not (count := count_images(messages)):
        return False
    if chat.images is None:
        raise JobFailure(
            Reason.invalid_model,
            f"row {row} has {counted(count, 'image')}, which only a vision-language model with a processor reads: the "
            f"model {chat.tokenizer.name_or_path!r} is none, or the job does not train. Name such a model, or leave "
            "the images out of the rows",
        )
    check_images(messages, row, where)
    return True


def encode_pairs(chat: Chat, chunk: Sequence[tuple[int, PreferenceExample]]) -> Iterator[list[EncodedPair]]:
    """The pairs of each row, in the order of its `pairs`. Raises JobFailure, InvalidRows: as `has_images`;
    invalid_dataset, a text has a token of images."""
    for row, example in chunk:
        chat.count_controls(itertools.chain(example.prompt, *example.answers), row)
    with_images = {row for row, example in chunk if has_images(chat, example, example.prompt, row, "prompt")}
    rows = [(row, example) for row, example in chunk if example.pairs]
    prompts, answers = [example.prompt for _, example in rows], [example.answers for _, example in rows]
    split = split_groups(chat, prompts, answers, [row for row, _ in rows], [example.pairs for _, example in rows])
    for number, example in chunk:
        found = [(prompt, chosen, rejected) for prompt, (chosen, rejected) in (next(split) if example.pairs else ())]
        for (_, chosen, rejected), pair in zip(found, example.written_out(), strict=True):
            # Pairs that are equal in their rows have their own warning.
            chat.equal_answers += chosen == rejected and pair.chosen != pair.rejected
        if chat.images is not None:
            for parts in found:
                for ids in parts[1:] if number in with_images else parts:
                    chat.images.refuse_stray(ids, number)
        yield found


def encode_labelled(
    chat: Chat, chunk: Sequence[tuple[int, LabelledExample]]
) -> Iterator[tuple[list[int], list[int], bool]]:
    """Prompt and completion ids of each row, not yet cut, and its label."""
    for row, example in chunk:
        chat.count_controls(itertools.chain(example.prompt, example.completion), row)
    prompts, answers = [example.prompt for _, example in chunk], [(example.completion,) for _, example in chunk]
    split = split_rows(chat, prompts, answers, [row for row, _ in chunk])
    for (prompt, (answer,)), (_, example) in zip(split, chunk, strict=True):
        yield prompt, answer, example.label


def encode_chats(chat: Chat, chunk: Sequence[tuple[int, PromptExample]]) -> Iterator[tuple[int, list[int]]]:
    texts = [chat.render_counted(prompt.messages, row, add_generation_prompt=True) for row, prompt in chunk]
    return zip((row for row, _ in chunk), chat.tokenize(texts), strict=True)


def _alone(encoded: list[Encoded]) -> list[list[Encoded]]:
    return [[one] for one in encoded]


def without_thoughts(example: SftExample) -> SftExample:
    """The row without what its answers think. One that is only a thought has weight 0: nothing is left to train."""
    if example.messages is None:
        return example
    messages = []
    for message in example.messages:
        kept = without_thought(message)
        if kept is not message and not kept["content"].strip() and not kept.get("tool_calls"):
            kept["weight"] = 0
        messages.append(kept)
    return replace(example, messages=messages)


def _untrained(example: SftExample) -> int:
    return sum(message.get("weight") == 0 for message in example.messages or ())
