"""The examples of rows, each with the tokens that are kept and trained, and its turns compared with inference.

The tokens, masks and cuts are those of `recipes.data`, which trainings use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched, islice

from ..errors import InvalidRows, JobFailure
from ..specs.images import images_in
from ..specs.job import DatasetRef, JobSpec
from ..specs.methods import METHODS
from ..specs.rows import LabelledExample, Message, PreferenceExample, PromptExample, SftExample
from .data.chat import Chat
from .data.images import Images, image_numbers
from .data.inferred import ComparedTurn, Inference
from .data.mixed import named_by_dataset
from .data.prepare import TruncationCounter, read_examples
from .data.tables import IGNORED
from .data.tokenize import SftEncoder, encode_chats, encode_labelled, encode_pairs, without_thoughts

_CHUNK = 50


@dataclass(frozen=True)
class MaskedPart:
    """A part of a row, with the positions of its tokens that are kept and trained."""

    name: str
    ids: list[int]
    kept: set[int]
    trained: set[int]


@dataclass(frozen=True)
class MaskedRow:
    """An example: a row, or one of the sequences or pairs that are made of it."""

    parts: list[MaskedPart]
    length: int
    """Tokens that count against the limit, before the cut."""
    dropped: str = ""
    """Why; empty: it is trained on."""
    messages: Sequence[Message] = ()
    """The turns of its row: of a pair those of prompt, chosen and rejected."""
    turns: Sequence[ComparedTurn] = ()
    """The trained ones, or answers, that are its own."""

    @property
    def is_cut(self) -> bool:
        """Whether a part of it is not trained."""
        return bool(self.dropped) or any(len(part.kept) < len(part.ids) for part in self.parts)


@dataclass(frozen=True)
class RowReader:
    spec: JobSpec
    chat: Chat
    taught: Chat | None
    """Of a teacher with another vocabulary."""
    counter: TruncationCounter
    inference: Inference

    def read(self, first: int, most_rows: int | None, most_tokens: int | None) -> Iterator[list[MaskedRow]]:
        """The examples of each row from `first` on, which is counted through all datasets.

        Args:
            most_rows: rows to read at most; None: all.
            most_tokens: tokens of the rows after which no further ones are read; None: all.
        """
        tokens, left = 0, most_rows
        for one in self.spec.data.mixed:
            begin, count = min(first, one.dataset.num_rows), left
            first -= begin
            if left is not None:
                left -= min(left, one.dataset.num_rows - begin)
            for chunk in self._of_dataset(one.dataset, begin, count):
                for examples in chunk:
                    tokens += sum(example.length for example in examples)
                    yield examples
                if most_tokens is not None and tokens >= most_tokens:
                    return

    def _of_dataset(self, dataset: DatasetRef, first: int, most: int | None) -> Iterator[list[list[MaskedRow]]]:
        read = enumerate(
            read_examples(
                dataset.path, self.spec.algorithm, data_format=self.spec.data.data_format, names=dataset.names
            )
        )
        try:
            for chunk in batched(islice(read, first, None if most is None else first + most), _CHUNK):
                yield [*self._of_chunk(chunk)]
        except (JobFailure, InvalidRows) as error:
            if not self.spec.data.mixed_with:
                raise
            raise named_by_dataset(error, dataset) from error

    def _of_chunk(self, chunk: Sequence[tuple[int, object]]) -> Iterator[list[MaskedRow]]:
        if METHODS[self.spec.algorithm].rows == "kto":
            yield from self._labelled(chunk)  # type: ignore[arg-type]
        elif self.spec.method.answer_tokens is not None:
            yield from self._prompts(chunk, self.spec.method.answer_tokens)  # type: ignore[arg-type]
        elif self.spec.has_pairs:
            yield from self._pairs(chunk)  # type: ignore[arg-type]
        else:
            yield from self._sequences(chunk)  # type: ignore[arg-type]

    def _sequences(self, chunk: Sequence[tuple[int, SftExample]]) -> Iterator[list[MaskedRow]]:
        data, counter = self.spec.data, self.counter
        encoded = counter.read(SftEncoder(self.chat, data.trained, data.reasoning).encode(chunk))
        for sequences, (row, example) in zip(encoded, chunk, strict=True):
            images = [image for _, image in images_in(example.messages or ())]
            seen = without_thoughts(example) if data.reasoning == "drop" else example
            turns = self.inference.of_sequences(seen, sequences, data.trained)
            yield [
                replace(
                    _sft_row(ids, labels, counter, self.chat.images, images, row),
                    messages=example.messages or (),
                    turns=[turn for turn in turns if turn.sequence == number],
                )
                for number, (ids, labels) in enumerate(sequences)
            ]

    def _pairs(self, chunk: Sequence[tuple[int, PreferenceExample]]) -> Iterator[list[MaskedRow]]:
        compare = self.inference.of_answer
        for found, (row, example) in zip(self.counter.read(encode_pairs(self.chat, chunk)), chunk, strict=True):
            images = [image for _, image in images_in(example.prompt)]
            margins: Sequence[float | None] = example.margins or [None] * len(found)
            yield [
                replace(
                    _pair(prompt, chosen, rejected, self.counter, margin, self.chat.images, images, row),
                    messages=[*pair.prompt, *pair.chosen, *pair.rejected],
                    turns=[
                        *compare("chosen", pair.prompt, pair.chosen, (prompt, chosen)),
                        *compare("rejected", pair.prompt, pair.rejected, (prompt, rejected)),
                    ],
                )
                for (prompt, chosen, rejected), pair, margin in zip(found, example.written_out(), margins, strict=True)
            ]

    def _labelled(self, chunk: Sequence[tuple[int, LabelledExample]]) -> Iterator[list[MaskedRow]]:
        labelled = self.counter.read(encode_labelled(self.chat, chunk))
        for (prompt, ids, label), (_, example) in zip(labelled, chunk, strict=True):
            turns = self.inference.of_answer("completion", example.prompt, example.completion, (prompt, ids))
            messages = [*example.prompt, *example.completion]
            yield [replace(_answer(prompt, ids, label, self.counter), messages=messages, turns=turns)]

    def _prompts(self, chunk: Sequence[tuple[int, PromptExample]], answer: int) -> Iterator[list[MaskedRow]]:
        own = [ids for _, ids in encode_chats(self.chat, chunk)]
        theirs = [ids for _, ids in encode_chats(self.taught, chunk)] if self.taught else own
        both = self.counter.read(zip(own, theirs, strict=True))
        for ids, (_, example) in zip(both, chunk, strict=True):
            turns = self.inference.of_prompt(example.messages, ids[0])
            yield [replace(_prompt(*ids, answer, self.counter), messages=example.messages, turns=turns)]


def _sft_row(
    ids: list[int], labels: list[int], counter: TruncationCounter, images: Images | None, own: list[bytes], row: int
) -> MaskedRow:
    never_cut = images.token_ids if images is not None and own else frozenset[int]()
    cut = counter.images_cut
    if counter.cut_row(ids, labels, never_cut, image_numbers(own)) is None:
        why = f"within max_seq_length={counter.limit} tokens nothing is left to train on"
        if counter.images_cut > cut:
            why = f"max_seq_length={counter.limit} would cut off a part of its images"
        if len(labels) - 1 - labels[1:].count(IGNORED) <= 0:
            why = "the loss covers none of its tokens"
        return MaskedRow([MaskedPart("sequence", ids, set(), set())], len(ids), why)
    if images is not None:
        counter.count_images(images, ids, own, row)
    kept = counter.cut([*range(len(ids))], ids, counter.limit)
    # Nothing predicts the first token.
    trained = {position for position in kept[1:] if labels[position] != IGNORED}
    return MaskedRow([MaskedPart("sequence", ids, {*kept}, trained)], len(ids))


def _prompt(ids: list[int], theirs: list[int], answer: int, counter: TruncationCounter) -> MaskedRow:
    """A prompt, also as a teacher reads it: the longer one decides whether it is dropped."""
    longest = max(ids, theirs, key=len)
    if counter.keeps(longest if ids and theirs else [], answer):
        return MaskedRow([MaskedPart("prompt", ids, {*range(len(ids))}, set())], len(longest))
    why = f"within max_seq_length={counter.limit} tokens it leaves fewer than the {answer} of an answer"
    return MaskedRow([MaskedPart("prompt", ids, set(), set())], len(longest), why)


def _pair(
    prompt: list[int],
    chosen: list[int],
    rejected: list[int],
    counter: TruncationCounter,
    margin: float | None,
    images: Images | None,
    own: list[bytes],
    row: int,
) -> MaskedRow:
    length = len(prompt) + max(len(chosen), len(rejected))
    cut = counter.images_cut
    never_cut = images.token_ids if images and own else frozenset[int]()
    beside = [*(() if margin is None else [margin]), *image_numbers(own)]
    found = counter.cut_pair(prompt, chosen, rejected, never_cut, beside)
    if found is None:
        parts = [("prompt", prompt), ("chosen", chosen), ("rejected", rejected)]
        why = f"within max_seq_length={counter.limit} tokens the prompt leaves none for an answer"
        if not chosen or not rejected:
            why = "an answer has no token"
        if counter.images_cut > cut:
            why = f"max_seq_length={counter.limit} would cut off a part of its images"
        return MaskedRow([MaskedPart(name, ids, set(), set()) for name, ids in parts], length, why)
    if images is not None:
        counter.count_images(images, found[0], own, row)
    kept = [{*counter.cut([*range(len(prompt))], prompt, len(found[0]))}, *({*range(len(one))} for one in found[1:])]
    return MaskedRow(
        [
            MaskedPart("prompt", prompt, kept[0], set()),
            MaskedPart("chosen", chosen, kept[1], kept[1]),
            MaskedPart("rejected", rejected, kept[2], kept[2]),
        ],
        length,
    )


def _answer(prompt: list[int], answer: list[int], label: bool, counter: TruncationCounter) -> MaskedRow:
    length = len(prompt) + len(answer)
    found = counter.cut_answer(prompt, answer, label)
    if found is None:
        why = f"within max_seq_length={counter.limit} tokens the prompt leaves none for the answer"
        if not answer:
            why = "the answer has no token"
        parts = [("prompt", prompt), ("completion", answer)]
        return MaskedRow([MaskedPart(name, ids, set(), set()) for name, ids in parts], length, why)
    kept, trained = {*counter.cut([*range(len(prompt))], prompt, len(found[0]))}, {*range(len(found[1]))}
    parts_kept = [MaskedPart("prompt", prompt, kept, set()), MaskedPart("completion", answer, trained, trained)]
    return MaskedRow(parts_kept, length)
