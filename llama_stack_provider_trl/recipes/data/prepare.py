"""Tokenizes examples for TRL's trainers, which prepare nothing themselves.

Three properties whose absence shows in a trained model:

- the text is what the tokenizer's chat template writes, tokenized once and without further special tokens, so there is
  no second BOS, and a sequence contains the prompt once;
- the loss covers the answers and the token that ends them, so that the model learns to stop. User,
  system and tool messages are outside of it;
- what is cut, dropped or guessed is counted and reported in the `DataReport`.

On prompt/completion rows and preference pairs, ids and labels are those of TRL 1.16 (tests/process/test_data_trl.py).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, overload

import pyarrow as pa
from datasets import Dataset, concatenate_datasets

from ...errors import InvalidRows, JobFailure
from ...specs.events import Reason
from ...specs.images import images_in
from ...specs.job import DataFormat, DatasetRef, JobSpec, ReasoningUse, RowNames, RowUse, TrainOn, TruncationSide
from ...specs.methods import METHODS
from ...specs.row_files import parse_line
from ...specs.rows import Example, LabelledExample, PreferenceExample, PromptExample, SftExample, parse_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from .chat import Chat
from .duplicates import ExampleDigests
from .images import Images, chunked, image_numbers
from .tables import (
    DPO_COLUMNS,
    IGNORED,
    IMAGE_COLUMNS,
    IMAGES,
    KTO_COLUMNS,
    MARGIN,
    MARGIN_COLUMNS,
    PROMPT_COLUMNS,
    SFT_COLUMNS,
    SOURCE,
    TAUGHT_COLUMNS,
    in_memory,
    table,
    with_source,
)
from .tokenize import SftEncoder, encode_chats, encode_labelled, encode_pairs
from .tokenizer_calls import decoded

CHUNK_ROWS = 1000
"""Rows tokenized at once: enough to amortize a call, with Python lists below 100 MB."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of a dataset, and of what its rows are trained as by outcome. `examples` = `kept` + `dropped`."""

    num_rows: int
    """Of the dataset."""
    examples: int
    """Sequences or pairs that were made of the rows: one of most rows, of some shapes several."""
    kept: int
    truncated: int
    """Kept examples that were cut to `max_seq_length`."""
    dropped: int
    """Examples whose loss would be empty: after the cut (or, rarely, by the template) no trained token is left."""
    total_tokens: int
    """Tokens of all kept sequences after the cut; a pair counts prompt + chosen and prompt + rejected."""
    trained_tokens: int
    """Tokens that the loss covers."""
    max_tokens: int
    """The longest sequence before the cut: the `max_seq_length` at which nothing is cut."""
    largest_id: int
    """Of the kept tokens: the model must have an embedding for it."""
    largest_id_row: int
    """The first row that has it."""
    images: int
    """Of the kept examples."""
    warnings: list[str]
    lost_turns: list[str]
    """Those of the warnings that are about turns, or text of answers, that a chat template does not write."""


@dataclass(frozen=True, slots=True)
class RowRange:
    first: int
    """Number of the first of them in the file."""
    count: int
    offset: int
    """Of the first one in the file, in bytes."""


class Reading(TypedDict, total=False):
    data_format: DataFormat | None
    names: RowNames | None
    rows: RowRange | None
    """Those that are read; None: all."""


@overload
def read_examples(path: Path, use: Literal["sft"], **how: Unpack[Reading]) -> Iterator[SftExample]: ...
@overload
def read_examples(path: Path, use: Literal["dpo"], **how: Unpack[Reading]) -> Iterator[PreferenceExample]: ...
@overload
def read_examples(path: Path, use: Literal["kto"], **how: Unpack[Reading]) -> Iterator[LabelledExample]: ...
@overload
def read_examples(path: Path, use: Literal["prompts"], **how: Unpack[Reading]) -> Iterator[PromptExample]: ...
@overload
def read_examples(path: Path, use: RowUse, **how: Unpack[Reading]) -> Iterator[Example]: ...
def read_examples(path: Path, use: RowUse, **how: Unpack[Reading]) -> Iterator[Example]:
    """The examples of an NDJSON file, one at a time. Raises InvalidRows: a line is not JSON, or its row fits no
    shape."""
    rows = how.get("rows")
    first, count, offset = (rows.first, rows.count, rows.offset) if rows else (0, None, 0)
    with open(path, "rb") as source:
        source.seek(offset)
        file = io.TextIOWrapper(source, encoding="utf-8")
        for index, line in enumerate(islice(file, count), first):
            try:
                row = parse_line(line)
            except json.JSONDecodeError as error:
                raise InvalidRows(f"not JSON ({error.msg} at character {error.pos})", row=index) from error
            yield parse_row(row, index, use, how.get("data_format"), how.get("names"))


@dataclass(frozen=True)
class Tokenization:
    """The rows of a dataset, which are tokenized a part at a time while `tables` is read."""

    tables: Iterator[pa.Table]
    columns: tuple[str, ...]
    chat: Chat
    unit: str
    """What an example is called in messages."""
    counter: TruncationCounter
    teacher: Chat | None = None
    """Of a teacher with another vocabulary, which reads the rows, too."""

    @property
    def rows(self) -> int:
        return self.counter.rows

    def report(self) -> DataReport:
        """The report on all rows, when they have been read. Raises JobFailure: invalid_dataset, if nothing is left to
        train on."""
        return self.counter.report(self.unit, self.chat, self.teacher)

    def collect(self) -> tuple[Dataset, DataReport]:
        tables = list(self.tables)
        report = self.report()
        return in_memory(tables), report


def tokenize(
    spec: JobSpec,
    dataset: DatasetRef,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase | None = None,
    rows: RowRange | None = None,
) -> Tokenization:
    """Tokenize a dataset of the job for its trainer.

    Args:
        rows: those that are tokenized; None: all.
    """
    data, names, first = spec.data, dataset.names, rows.first if rows else 0
    path, most, side = dataset.path, data.max_seq_length, data.truncation_side
    images = Images(spec.source, tokenizer) if data.has_images else None
    if spec.method.answer_tokens is not None:
        prompts = read_examples(path, "prompts", names=names, rows=rows)
        return tokenize_prompts(prompts, tokenizer, most, spec.method.answer_tokens, first, teacher)
    if spec.has_pairs:
        # By the method's own name: not every one on pairs reads images.
        pairs = cast(Iterator[PreferenceExample], read_examples(path, spec.algorithm, names=names, rows=rows))
        margins = names is not None and names.margins
        return tokenize_dpo(pairs, tokenizer, most, side, first, margins=margins, images=images)
    if METHODS[spec.algorithm].rows == "kto":
        return tokenize_kto(read_examples(path, "kto", names=names, rows=rows), tokenizer, most, side, first)
    examples = read_examples(path, "sft", data_format=data.data_format, names=names, rows=rows)
    return tokenize_sft(
        examples,
        tokenizer,
        most,
        data.train_on_input,
        side,
        data.train_on,
        data.reasoning,
        first,
        images=images,
    )


def tokenize_sft(
    examples: Iterable[SftExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    train_on_input: bool = False,
    side: TruncationSide = "right",
    train_on: TrainOn = "assistant",
    reasoning: ReasoningUse = "keep",
    first: int = 0,
    *,
    images: Images | None = None,
) -> Tokenization:
    """Tokenize for `SFTTrainer`, a part at a time, with `dataset_kwargs={"skip_prepare_dataset": True}`. Raises
    JobFailure: `invalid_dataset` if the template refuses a row or no row is left, `invalid_model` if a chat is to be
    rendered and the tokenizer has neither a template nor an `eos_token`. Returns tables with the columns `input_ids`
    and `labels`; after the last one, the report on their rows.

    Args:
        tokenizer: one without a chat template is given `DEFAULT_CHAT_TEMPLATE`, so that checkpoints carry it.
        train_on_input: the loss covers every token, whatever `train_on` is.
        reasoning: whether thoughts are left out of the rows.
        side: right, sequences lose their end; left, their beginning, but for a `bos_token`.
        images: reads those of the rows, which are in the column `IMAGES` then. A row whose cut would take a token of
            an image is dropped.
    """
    chat = Chat(tokenizer, images)
    encoder = SftEncoder(chat, "all" if train_on_input else train_on, reasoning)
    counter = TruncationCounter(tokenizer.eos_token_id, tokenizer.bos_token_id, max_seq_length, side)

    def rows(chunk: Sequence[tuple[int, SftExample]]) -> Iterator[tuple[Any, ...]]:
        for sequences, (row, example) in zip(counter.read(encoder.encode(chunk)), chunk, strict=True):
            own = [image for _, image in images_in(example.messages or ())] if images else []
            never_cut, beside = images.token_ids if images and own else frozenset[int](), image_numbers(own)
            for ids, labels in sequences:
                if images and not own:
                    images.refuse_stray(ids, row)
                if cut := counter.cut_row(ids, labels, never_cut, beside):
                    yield (*cut, counter.count_images(images, ids, own, row)) if images else cut

    columns = IMAGE_COLUMNS["sft"] if images else SFT_COLUMNS
    # By their bytes, too: rows with images, which are refused, would fill the memory before.
    chunks = chunked(enumerate(examples, first), CHUNK_ROWS)
    return Tokenization(_tables(chunks, rows, columns), columns, chat, "row", counter)


def tokenize_dpo(
    pairs: Iterable[PreferenceExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    side: TruncationSide = "right",
    first: int = 0,
    *,
    margins: bool = False,
    images: Images | None = None,
) -> Tokenization:
    """Tokenize for `DPOTrainer`, a part at a time, with its `_prepare_dataset` switched off.

    The prompt is the common token prefix of the rendered prompt and of both full sequences, so it is in each sequence
    once. Arguments, errors and the report are those of `tokenize_sft`, but for `side`. right: answers lose their end,
    and a pair whose prompt leaves no token for one is dropped. left: first the prompt loses its beginning, as far as
    its last token, then answers that are still too long their end.

    Returns:
        Tables with the columns `prompt_ids`, `chosen_ids` and `rejected_ids`, cut so that the prompt with either answer
        has at most `max_seq_length` tokens, in the order of rows and their pairs; after the last one, the report. With
        `margins` a further column has the margin of each pair, which the rows must have been read with; with `images`
        the column `IMAGES` has those of the prompt, of which no cut takes a token: such a pair is dropped.
    """
    chat = Chat(tokenizer, images)
    columns = IMAGE_COLUMNS["dpo"] if images else MARGIN_COLUMNS if margins else DPO_COLUMNS
    counter = TruncationCounter(tokenizer.eos_token_id, tokenizer.bos_token_id, max_seq_length, side)

    def rows(chunk: Sequence[tuple[int, PreferenceExample]]) -> Iterator[tuple[Any, ...]]:
        for found, (row, example) in zip(counter.read(encode_pairs(chat, chunk)), chunk, strict=True):
            own = [image for _, image in images_in(example.prompt)] if images else []
            never_cut = images.token_ids if images and own else frozenset[int]()
            for ids, margin in zip(found, example.margins or [0.0] * len(found), strict=True):
                if cut := counter.cut_pair(*ids, never_cut, [*([margin] if margins else ()), *image_numbers(own)]):
                    if images:
                        yield (*cut, counter.count_images(images, cut[0], own, row))
                    else:
                        yield (*cut, margin) if margins else cut

    chunks = chunked(enumerate(pairs, first), CHUNK_ROWS)
    return Tokenization(_tables(chunks, rows, columns), columns, chat, "pair", counter)


def tokenize_kto(
    rows: Iterable[LabelledExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    side: TruncationSide = "right",
    first: int = 0,
) -> Tokenization:
    """Tokenize for `KTOTrainer`, a part at a time, with its `_prepare_dataset` switched off: as `tokenize_dpo`, with
    one answer. Returns tables with the columns `prompt_ids`, `completion_ids` and `label`; after the last one, the
    report."""
    chat = Chat(tokenizer)
    counter = TruncationCounter(tokenizer.eos_token_id, tokenizer.bos_token_id, max_seq_length, side)

    def cut_rows(chunk: Sequence[tuple[int, LabelledExample]]) -> Iterator[tuple[list[int], list[int], bool]]:
        for prompt, answer, label in counter.read(encode_labelled(chat, chunk)):
            if cut := counter.cut_answer(prompt, answer, label):
                yield *cut, label

    chunks = batched(enumerate(rows, first), CHUNK_ROWS)
    return Tokenization(_tables(chunks, cut_rows, KTO_COLUMNS), KTO_COLUMNS, chat, "row", counter)


def tokenize_prompts(
    prompts: Iterable[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    answer: int,
    first: int = 0,
    teacher: PreTrainedTokenizerBase | None = None,
) -> Tokenization:
    """Tokenize prompts that are answered while a job trains, with the header of their answer, a part at a time.

    Arguments, errors and the report are those of `tokenize_sft`. Returns tables with the columns `prompt_ids` and
    `row`; after the last one, the report on their rows.

    Args:
        answer: tokens of an answer at most; a prompt that leaves fewer within `max_seq_length` is dropped.
        teacher: its own chat template writes each prompt, and it reads that, for the column `teacher_ids`. The longer
            one of both decides whether a prompt is dropped.
    """
    chat, taught = Chat(tokenizer), None if teacher is None else Chat(teacher)
    counter = TruncationCounter(tokenizer.eos_token_id, tokenizer.bos_token_id, max_seq_length)

    def rows(chunk: Sequence[tuple[int, PromptExample]]) -> Iterator[tuple[list[int], ...]]:
        if taught is None:
            for row, ids in counter.read(encode_chats(chat, chunk)):
                if counter.keeps(ids, answer):
                    yield ids, [row]
            return
        for (row, ids), (_, theirs) in counter.read(
            zip(encode_chats(chat, chunk), encode_chats(taught, chunk), strict=True)
        ):
            if counter.keeps(ids if theirs else [], answer, len(theirs)):
                yield ids, [row], theirs

    columns = PROMPT_COLUMNS if taught is None else TAUGHT_COLUMNS
    chunks = batched(enumerate(prompts, first), CHUNK_ROWS)
    return Tokenization(_tables(chunks, rows, columns), columns, chat, "prompt", counter, taught)


def _tables[Chunk](
    chunks: Iterable[Chunk], rows: Callable[[Chunk], Iterable[tuple[Any, ...]]], columns: tuple[str, ...]
) -> Iterator[pa.Table]:
    return (table(list(rows(chunk)), columns) for chunk in chunks)


def with_filler(dataset: Dataset) -> Dataset:
    """The dataset with one filler row, which has no loss, at its end. It fills up incomplete batches.

    An SFT row of which nothing is trained, or a prompt with empty answers; of prompts to answer, one without a row.
    """
    first = dataset[0]
    # Every rank computes the features of images at every step: those of a filler need all their tokens.
    shown = slice(None) if IMAGES in first else slice(2)
    ids = first["input_ids" if "labels" in first else "prompt_ids"][shown]
    row: list[Any]
    columns: tuple[str, ...]
    if "labels" in first:
        row, columns = [ids, [IGNORED] * len(ids)], SFT_COLUMNS
    elif "label" in first:
        row, columns = [ids or first["completion_ids"][:2], [], False], KTO_COLUMNS
    elif "row" in first:
        row, columns = [ids, []], PROMPT_COLUMNS
    else:
        row, columns = [ids or first["chosen_ids"][:2], [], []], DPO_COLUMNS
    further = {IMAGES: first.get(IMAGES), "teacher_ids": first.get("teacher_ids", [])[:2], MARGIN: 0.0}
    present = {name: value for name, value in further.items() if name in first}
    filler = in_memory([table([(*row, *present.values())], (*columns, *present))])
    if "seq_lengths" in first:
        from .packing import pack  # imports torch, which a process that only tokenizes does not need

        filler = pack(filler, len(ids))
    return concatenate_datasets([dataset, with_source(filler, 0) if SOURCE in first else filler])


@dataclass(slots=True)
class TruncationCounter:
    """Cuts sequences to `limit` tokens, and counts what is cut and dropped."""

    eos: int | None
    bos: int | None
    limit: int
    side: TruncationSide = "right"
    rows: int = 0
    """Rows of the dataset that were read."""
    examples: int = 0
    """Sequences or pairs that were made of them."""
    kept: int = 0
    truncated: int = 0
    untrained: int = 0
    """Dropped examples of which no token carries loss before they are cut."""
    identical: int = 0
    """Kept pairs that differ only in what was cut."""
    total_tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    largest_id: int = -1
    largest_id_row: int = 0
    images: int = 0
    """Of kept rows."""
    images_cut: int = 0
    """Rows that were dropped since the cut would take a part of an image."""
    eos_trained: bool = False
    example_end: list[int] = field(default_factory=list)
    """The last trained ids of the first sequence that was not cut."""
    digests: ExampleDigests = field(default_factory=ExampleDigests)
    """Of the kept examples."""

    def read[Row](self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, each counted before it is taken: the examples that are cut next are counted as made of it."""
        for row in rows:
            self.rows += 1
            yield row

    def cut_row(
        self,
        ids: list[int],
        labels: list[int],
        never_cut: frozenset[int] = frozenset(),
        beside: Sequence[int] = (),
    ) -> tuple[list[int], list[int]] | None:
        """The row, cut; None if it is dropped. The first label never counts: nothing predicts the first token.

        Args:
            never_cut: tokens of images, with one of which a row would lose a part of an image.
            beside: numbers by which the row differs from others with these tokens.
        """
        self._count(len(ids))
        kept_ids, kept_labels = self.cut(ids, ids, self.limit), self.cut(labels, ids, self.limit)
        if len(labels) - 1 - labels[1:].count(IGNORED) <= 0:
            self.untrained += 1
            return None
        if never_cut and sum(map(never_cut.__contains__, ids)) > sum(map(never_cut.__contains__, kept_ids)):
            self.images_cut += 1
            return None
        trained = len(kept_labels) - 1 - kept_labels[1:].count(IGNORED)
        if trained <= 0:
            return None
        self._keep(len(kept_ids), trained, len(ids) > self.limit, labels, kept_ids)
        self.digests.count(self.rows - 1, kept_ids, kept_labels, beside)
        return kept_ids, kept_labels

    def cut_pair(
        self,
        prompt: list[int],
        chosen: list[int],
        rejected: list[int],
        never_cut: frozenset[int] = frozenset(),
        beside: Sequence[float] = (),
    ) -> tuple[list[int], list[int], list[int]] | None:
        """The pair, cut; None if it is dropped because the prompt takes all `limit` tokens, or would lose a part of an
        image."""
        longest = max(len(chosen), len(rejected))
        length = len(prompt) + longest
        self._count(length)
        if self.side == "left":
            whole = sum(map(never_cut.__contains__, prompt)) if never_cut else 0
            prompt = self.cut(prompt, prompt, max(self.limit - longest, 1))
            if whole and sum(map(never_cut.__contains__, prompt)) < whole:
                self.images_cut += 1
                return None
        free = max(self.limit - len(prompt), 0)
        one, other = chosen[:free], rejected[:free]
        if not one or not other:
            return None
        self.identical += one == other and chosen != rejected
        trained = len(one) + len(other)
        self._keep(2 * len(prompt) + trained, trained, length > self.limit, chosen, prompt, one, other)
        self.digests.count(self.rows - 1, prompt, one, other, beside)
        return prompt, one, other

    def cut_answer(
        self, prompt: list[int], answer: list[int], label: bool = True
    ) -> tuple[list[int], list[int]] | None:
        """The prompt and its only answer, which may have a label, cut as a pair is; None if they are dropped."""
        length = len(prompt) + len(answer)
        self._count(length)
        if self.side == "left":
            prompt = self.cut(prompt, prompt, max(self.limit - len(answer), 1))
        kept = answer[: max(self.limit - len(prompt), 0)]
        if not kept:
            return None
        self._keep(len(prompt) + len(kept), len(kept), length > self.limit, answer, prompt, kept)
        self.digests.count(self.rows - 1, prompt, kept, [label])
        return prompt, kept

    def keeps(self, prompt: list[int], answer: int, theirs: int = 0) -> bool:
        """Whether the prompt leaves `answer` tokens for its answer: it is never cut.

        Args:
            theirs: tokens of the prompt as a teacher reads it.
        """
        length = max(len(prompt), theirs) if prompt else 0
        self._count(length + answer)
        if not prompt or length + answer > self.limit:
            return False
        self._keep(length, answer, False, [], prompt)
        self.digests.count(self.rows - 1, prompt)
        return True

    def cut(self, values: list[int], ids: list[int], limit: int) -> list[int]:
        """The `values`, one per token of `ids`, of the tokens that are kept."""
        if len(values) <= limit:
            return values
        if self.side == "right":
            return values[:limit]
        # Models need the token that they have seen at the beginning of every text.
        head = 1 if self.bos is not None and ids[0] == self.bos and limit > 1 else 0
        return values[:head] + values[len(values) - limit + head :]

    def count_images(self, images: Images, ids: list[int], own: list[bytes], row: int) -> list[bytes]:
        """The images that the tokens of a kept row or prompt stand for, counted; none where the row has none."""
        kept = images.of_sequence(ids, own, row) if own else []
        self.images += len(kept)
        return kept

    def _count(self, length: int) -> None:
        self.examples += 1
        self.longest = max(self.longest, length)

    def _keep(self, tokens: int, trained: int, cut: bool, answer: list[int], *ids: list[int]) -> None:
        largest = max(max(part, default=-1) for part in ids)
        if largest > self.largest_id:
            self.largest_id, self.largest_id_row = largest, self.rows - 1
        self.kept += 1
        self.truncated += cut
        self.total_tokens += tokens
        self.trained_tokens += trained
        if not cut:
            self.eos_trained = self.eos_trained or self.eos in answer
            self.example_end = self.example_end or [token for token in answer if token != IGNORED][-3:]

    def add(self, later: TruncationCounter) -> None:
        """Count what another counter has counted, of rows that follow these."""
        if later.largest_id > self.largest_id:
            self.largest_id, self.largest_id_row = later.largest_id, self.rows + later.largest_id_row
        self.digests.add(later.digests, self.rows)
        counted = ("rows", "examples", "kept", "truncated", "untrained", "identical", "images", "images_cut")
        for name in (*counted, "total_tokens", "trained_tokens"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.longest = max(self.longest, later.longest)
        self.eos_trained = self.eos_trained or later.eos_trained
        self.example_end = self.example_end or later.example_end

    def report(self, unit: str, chat: Chat, teacher: Chat | None = None) -> DataReport:
        """The counts, with warnings. Raises JobFailure: nothing is left to train on."""
        if not self.kept:
            raise JobFailure(Reason.invalid_dataset, self.nothing_left(unit, chat))
        return DataReport(
            num_rows=self.rows,
            examples=self.examples,
            kept=self.kept,
            truncated=self.truncated,
            dropped=self.dropped,
            total_tokens=self.total_tokens,
            trained_tokens=self.trained_tokens,
            max_tokens=self.longest,
            largest_id=self.largest_id,
            largest_id_row=self.largest_id_row,
            images=self.images,
            warnings=self.warnings(unit, chat, teacher),
            lost_turns=self.lost_turns(unit, chat, teacher),
        )

    def warnings(self, unit: str, chat: Chat, teacher: Chat | None = None) -> list[str]:
        lost, example = self.lost_turns(unit, chat, teacher), self._example(unit)
        made = [f"{self.rows} rows make {self.examples} {example}s"] if self.examples != self.rows else []
        of_chat = chat.warnings(example, self.examples)
        controls = filter(None, [chat.controls.message(self._row(unit), self.rows)])
        return [*made, *of_chat, *lost, *controls, *self._end_warnings(chat), *self._cut_warnings(example)]

    def lost_turns(self, unit: str, chat: Chat, teacher: Chat | None = None) -> list[str]:
        """Sentences on chat templates that do not write all turns, or all text of the answers."""
        row = self._row(unit)
        found = [chat.lost.message(row, self.rows), chat.lost_texts.message(row, self.rows)]
        if teacher is not None:
            found.append(teacher.lost.message(row, self.rows, "the teacher's"))
        return [message for message in found if message]

    @property
    def dropped(self) -> int:
        return self.examples - self.kept

    def _row(self, unit: str) -> str:
        """What a row is called in messages. Where each row is one example, both have the name of an example."""
        return unit if self.examples == self.rows else "row"

    def _example(self, unit: str) -> str:
        return "sequence" if self.examples != self.rows and unit == "row" else unit

    def nothing_left(self, unit: str, chat: Chat) -> str:
        if not self.rows:
            return "the dataset is empty: expected at least one row"
        if not self.examples:
            return f"the {self.rows} rows make no {unit}: expected a row of which an answer is better than another"
        unit = self._example(unit)
        if self.untrained == self.examples:
            return f"none of the {self.examples} {unit}s has a token to train on: {self._why_untrained(chat)}"
        uncut = f"; {self.untrained} have none before they are cut" if self.untrained else ""
        if self.images_cut:
            uncut += f"; of {self.images_cut} it would cut off a part of an image"
        return (
            f"none of the {self.examples} {unit}s has a token left to train on within max_seq_length={self.limit}: "
            f"raise max_seq_length (the longest {unit} has {self.longest} tokens) or shorten the prompts{uncut}"
        )

    def _why_untrained(self, chat: Chat) -> str:
        if chat.only_thoughts:
            found = f"{chat.only_thoughts} answers are only a thought, which reasoning 'drop' leaves out"
            return f"{found}: send reasoning 'keep', or rows that answer behind their thoughts"
        return "the loss covers none of them, as of answers with weight 0: give answers weight 1, or send other rows"

    def _end_warnings(self, chat: Chat) -> Iterator[str]:
        yield from chat.endings.warnings()
        if self.example_end and self.eos is not None and not self.eos_trained and not chat.endings.open:
            yield (
                f"answers end in {decoded(chat.tokenizer, self.example_end)!r}, not in the tokenizer's eos_token "
                f"{chat.tokenizer.eos_token!r}: generation stops there only if generation_config.eos_token_id lists it"
            )

    def _cut_warnings(self, unit: str) -> Iterator[str]:
        if self.truncated:
            yield (
                f"{self.truncated} of {self.examples} {unit}s were cut to max_seq_length={self.limit} tokens and lack "
                f"{'the end of the answer' if self.side == 'right' else 'their beginning'} "
                f"(the longest has {self.longest})"
            )
        if self.untrained:
            yield f"{self.untrained} of {self.examples} {unit}s were dropped: the loss covers none of their tokens"
        if self.images_cut:
            yield (
                f"{self.images_cut} of {self.examples} {unit}s were dropped: max_seq_length={self.limit} would cut "
                f"off a part of their images (the longest has {self.longest} tokens)"
            )
        if cut := self.dropped - self.untrained - self.images_cut:
            yield (
                f"{cut} of {self.examples} {unit}s were dropped: within max_seq_length={self.limit} "
                "tokens nothing is left to train on"
            )
        if self.identical:
            yield f"{self.identical} pairs differ only in what was cut: they carry no signal"
