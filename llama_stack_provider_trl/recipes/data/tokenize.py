"""Turns examples into token ids and labels, before truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...specs.rows import LabelledExample, PreferenceExample, PromptExample, SftExample
from .chat import Chat, call_tokenizer
from .packing import IGNORED
from .spans import answer_spans, split_rows

Encoded = tuple[list[int], list[int]]
"""Token ids and labels of one sequence, not yet cut."""


class SftEncoder:
    """Encodes numbered examples, a chunk at a time."""

    def __init__(self, chat: Chat, train_on_input: bool) -> None:
        self.chat, self.train_on_input = chat, train_on_input

    def encode(self, chunk: Sequence[tuple[int, SftExample]]) -> list[Encoded]:
        encoded: dict[int, Encoded] = {}
        for kind, encode in self._kinds():
            rows = {row: example for row, example in chunk if kind(example)}
            encoded |= zip(rows, encode(rows) if rows else (), strict=True)
        return [encoded[row] for row, _ in chunk]

    def _kinds(self) -> list[tuple[Callable[[SftExample], bool], Callable[[dict[int, SftExample]], list[Encoded]]]]:
        return [
            (lambda example: example.messages is None, self._texts),
            (lambda example: example.messages is not None and self.train_on_input, self._whole_chats),
            (lambda example: example.prompt_turns is not None and not self.train_on_input, self._answers),
            (lambda example: _is_dialog(example) and not self.train_on_input, self._dialogs),
        ]

    def _texts(self, rows: dict[int, SftExample]) -> list[Encoded]:
        eos = self.chat.tokenizer.eos_token_id
        sequences = call_tokenizer(self.chat.tokenizer, [example.text or "" for example in rows.values()])["input_ids"]
        ended = [ids if eos is None or ids[-1:] == [eos] else [*ids, eos] for ids in sequences]
        return [(ids, ids) for ids in ended]

    def _whole_chats(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts = self._rendered(rows)
        return [(ids, ids) for ids in self.chat.tokenize(texts)]

    def _rendered(self, rows: dict[int, SftExample]) -> list[str]:
        texts = []
        for row, example in rows.items():
            texts.append(self.chat.render_counted(example.messages or (), row))
        return texts

    def _answers(self, rows: dict[int, SftExample]) -> list[Encoded]:
        conversations = [(example.messages or [], example.prompt_turns) for example in rows.values()]
        prompts = [messages[:turns] for messages, turns in conversations]
        answers = [[messages[turns:]] for messages, turns in conversations]
        return [
            (prompt + answer, [IGNORED] * len(prompt) + answer)
            for prompt, (answer,) in split_rows(self.chat, prompts, answers, [*rows])
        ]

    def _dialogs(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts = self._rendered(rows)
        encoded = []
        for example, text, (ids, index) in zip(rows.values(), texts, self.chat.tokenize_with_index(texts), strict=True):
            labels = [IGNORED] * len(ids)
            for start, end, exact in answer_spans(self.chat, example.messages or [], text):
                trained = slice(index(start, False), index(end, exact))
                labels[trained] = ids[trained]
            encoded.append((ids, labels))
        return encoded


def encode_pairs(
    chat: Chat, chunk: Sequence[tuple[int, PreferenceExample]]
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected ids of each pair, not yet cut."""
    prompts, answers = [pair.prompt for _, pair in chunk], [(pair.chosen, pair.rejected) for _, pair in chunk]
    split = split_rows(chat, prompts, answers, [row for row, _ in chunk])
    for (prompt, (chosen, rejected)), (_, pair) in zip(split, chunk, strict=True):
        # Pairs that are equal in their rows have their own warning.
        chat.equal_answers += chosen == rejected and pair.chosen != pair.rejected
        yield prompt, chosen, rejected


def encode_labelled(
    chat: Chat, chunk: Sequence[tuple[int, LabelledExample]]
) -> Iterator[tuple[list[int], list[int], bool]]:
    """Prompt and completion ids of each row, not yet cut, and its label."""
    prompts, answers = [example.prompt for _, example in chunk], [(example.completion,) for _, example in chunk]
    split = split_rows(chat, prompts, answers, [row for row, _ in chunk])
    for (prompt, (answer,)), (_, example) in zip(split, chunk, strict=True):
        yield prompt, answer, example.label


def encode_chats(chat: Chat, chunk: Sequence[tuple[int, PromptExample]]) -> Iterator[tuple[int, list[int]]]:
    """Number and ids of each prompt, with the header of its answer."""
    texts = [chat.render_counted(prompt.messages, row, add_generation_prompt=True) for row, prompt in chunk]
    return zip((row for row, _ in chunk), chat.tokenize(texts), strict=True)


def _is_dialog(example: SftExample) -> bool:
    return example.messages is not None and example.prompt_turns is None
