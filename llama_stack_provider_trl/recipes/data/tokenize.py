"""Turns examples into token ids and labels, before truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...specs.rows import LabelledExample, PreferenceExample, PromptExample, SftExample
from .chat import Chat, answer_spans, call_tokenizer
from .packing import IGNORED

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
        texts = [self.chat.render(example.messages or (), row) for row, example in rows.items()]
        return [(ids, ids) for ids in self.chat.tokenize(texts)]

    def _answers(self, rows: dict[int, SftExample]) -> list[Encoded]:
        prompts, texts = [], []
        for row, example in rows.items():
            messages = example.messages or []
            texts.append(self.chat.render(messages, row))
            prompts.append(self.chat.render(messages[: example.prompt_turns], row, add_generation_prompt=True))
        encoded = []
        for prompt, ids in zip(self.chat.tokenize(prompts), self.chat.tokenize(texts), strict=True):
            start = self.chat.prompt_length(prompt, ids)
            encoded.append((ids, [IGNORED] * start + ids[start:]))
        return encoded

    def _dialogs(self, rows: dict[int, SftExample]) -> list[Encoded]:
        texts = [self.chat.render(example.messages or (), row) for row, example in rows.items()]
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
    chosen = chat.tokenize([chat.render(pair.prompt + pair.chosen, row) for row, pair in chunk])
    prompts = chat.tokenize([chat.render(pair.prompt, row, add_generation_prompt=True) for row, pair in chunk])
    rejected = chat.tokenize([chat.render(pair.prompt + pair.rejected, row) for row, pair in chunk])
    for prompt, one, other in zip(prompts, chosen, rejected, strict=True):
        length = chat.prompt_length(prompt, one, other)
        yield prompt[:length], one[length:], other[length:]


def encode_labelled(
    chat: Chat, chunk: Sequence[tuple[int, LabelledExample]]
) -> Iterator[tuple[list[int], list[int], bool]]:
    """Prompt and completion ids of each row, not yet cut, and its label."""
    texts = chat.tokenize([chat.render(example.prompt + example.completion, row) for row, example in chunk])
    prompts = chat.tokenize([chat.render(example.prompt, row, add_generation_prompt=True) for row, example in chunk])
    for prompt, ids, (_, example) in zip(prompts, texts, chunk, strict=True):
        length = chat.prompt_length(prompt, ids)
        yield prompt[:length], ids[length:], example.label


def encode_chats(chat: Chat, chunk: Sequence[tuple[int, PromptExample]]) -> Iterator[tuple[int, list[int]]]:
    """Number and ids of each prompt, with the header of its answer."""
    texts = [chat.render(prompt.messages, row, add_generation_prompt=True) for row, prompt in chunk]
    return zip((row for row, _ in chunk), chat.tokenize(texts), strict=True)


def _is_dialog(example: SftExample) -> bool:
    return example.messages is not None and example.prompt_turns is None
