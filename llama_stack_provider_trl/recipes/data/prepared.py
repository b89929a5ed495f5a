"""The tokenized rows of one job: mapped from the cache where it keeps one, else in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from ...errors import JobFailure
from ...specs.events import EventWriter, Reason, Tokenizing, Warned
from ...specs.job import DatasetRef, JobSpec
from ...specs.methods import METHODS
from .cache import Add, CachedRows, NotCached, Shards, TokenCache
from .chat import DEFAULT_TEMPLATE_WARNING, ensure_chat_template, refuse_lost_turns
from .duplicates import ExampleDigests
from .embedded import check_embedded
from .keys import RowKeys
from .lengths import list_lengths
from .packing import pack, packed_tables
from .prepare import DataReport, Tokenization, tokenize
from .shards import ShardedRows, shards_of
from .tables import COLUMNS, IMAGE_COLUMNS, IMAGES, MARGIN_COLUMNS, PACKED_COLUMNS, TAUGHT_COLUMNS, in_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INTERVAL = 2.0
"""Seconds between two events while rows are tokenized."""
_MOST_DIGITS = 16
_BYTES_PER_BYTE = 2
"""Bytes on disk for one of the rows: a token has four bytes of text, and two numbers of four bytes each."""


@dataclass(frozen=True)
class PreparedRows:
    dataset: Dataset
    """Packed where the job packs them."""
    report: DataReport
    digests: ExampleDigests
    """Of all examples, also where the dataset has only the first ones."""
    source: str = "not kept"
    """cache: they were there. computed: they are there now. not kept: they are in this process's memory only."""


class Preparation:
    """Prepares the datasets of a job.

    Args:
        writer: gets the progress, warnings, and heartbeats while another process tokenizes the same rows.
        datasets: all that will be prepared, for the progress.
        embeddings: of the model that reads the rows; None: any number.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: PreTrainedTokenizerBase,
        writer: EventWriter,
        *datasets: DatasetRef | None,
        clock: Callable[[], float] = time.monotonic,
        teacher: PreTrainedTokenizerBase | None = None,
        embeddings: int | None = None,
    ) -> None:
        self._spec, self._tokenizer, self._writer = spec, tokenizer, writer
        self._teacher, self._embeddings = teacher, embeddings
        self._lacked_template = not tokenizer.chat_template
        self._progress = _Progress(writer, sum(rows.num_rows for rows in datasets if rows), clock)
        self._cache: TokenCache | None = None
        self._keys: RowKeys | None = None
        if spec.data.token_cache:
            self._cache = TokenCache(spec.data.token_cache, spec.lifecycle.min_free_bytes, self._wait)
            self._keys = RowKeys(spec, tokenizer, teacher)

    def rows(self, dataset: DatasetRef, first: int | None = None) -> PreparedRows:
        """Tokenize a dataset, and pack its rows where the job does. Raises JobFailure: as `tokenize_sft` and
        `tokenize_dpo` do; invalid_dataset, a chat template leaves out turns, and the job's `dropped_turns` is refuse;
        invalid_model, the model has no embedding for a token.

        Args:
            first: rows that are used; the report is about all.
        """
        prepared = self._cached(dataset, first) or self._in_memory(dataset, first)
        where = f"dataset {dataset.dataset_id!r}: "
        refuse_lost_turns(self._spec.data.dropped_turns, prepared.report.lost_turns, where)
        self._progress.end(dataset.num_rows)
        if self._spec.data.has_images and self._spec.ranks > 1:
            self._refuse_rows_without_images(prepared.dataset, dataset)
        if self._embeddings is not None:
            name = f"row {prepared.report.largest_id_row} of the dataset {dataset.dataset_id!r}"
            check_embedded([prepared.report.largest_id], self._embeddings, self._tokenizer, name)
        return prepared

    def _refuse_rows_without_images(self, rows: Dataset, dataset: DatasetRef) -> None:
        """Ranks that share a model compute its vision part together, so each batch needs an image."""
        unit = "pair" if self._spec.has_pairs else "sequence"
        lacking = int((list_lengths(rows, IMAGES) == 0).sum())
        if lacking:
            raise JobFailure(
                Reason.invalid_dataset,
                f"dataset {dataset.dataset_id!r}: {lacking} of {len(rows)} {unit}s have no image, and on "
                f"{self._spec.ranks} ranks each needs one. Train on one rank, or give them a job of their own.",
            )

    def _cached(self, dataset: DatasetRef, first: int | None) -> PreparedRows | None:
        """The rows in the cache; None: it does not hold them."""
        key = self._keys.of(dataset) if self._keys else None
        if not self._cache or not self._keys or not key:
            return None
        try:
            if self._spec.data.packed:
                write = partial(self._write_packed, self._cache, key, dataset, first)
                entry = self._cache.get(self._keys.packed(key, first), PACKED_COLUMNS, write)
                rows = entry.rows
            else:
                entry = self._tokens(self._cache, key, dataset)
                rows = _first(entry.rows, first)
        except NotCached as reason:
            message = f"tokenized rows are not kept on disk, and each process has them in memory ({reason})"
            self._writer.write(Warned(message=message))
            return None
        digests = ExampleDigests.read(entry.notes["digests"])
        return PreparedRows(rows, self._report(entry.notes), digests, "cache" if entry.was_found else "computed")

    def _tokens(self, cache: TokenCache, key: str, dataset: DatasetRef) -> CachedRows:
        columns = COLUMNS[METHODS[self._spec.algorithm].rows] if self._teacher is None else TAUGHT_COLUMNS
        if dataset.names is not None and dataset.names.margins:
            columns = MARGIN_COLUMNS
        if self._spec.data.has_images:
            columns = IMAGE_COLUMNS[METHODS[self._spec.algorithm].rows]
        if (count := shards_of(dataset)) == 1:
            return cache.get(key, columns, partial(self._write_tokens, cache, dataset))
        rows = ShardedRows(self._spec, dataset, self._tokenizer, self._teacher, cache.directory, key, columns)
        return cache.get_sharded(key, columns, count, partial(self._write_shards, cache, rows))

    def _write_tokens(self, cache: TokenCache, dataset: DatasetRef, add: Add) -> dict[str, Any]:
        cache.check_space(_BYTES_PER_BYTE * dataset.path.stat().st_size)
        tokenization = tokenize(self._spec, dataset, self._tokenizer, self._teacher)
        for table in tokenization.tables:
            add(table, str(tokenization.rows))
            self._progress.show(tokenization.rows)
        return _notes(tokenization)

    def _write_shards(self, cache: TokenCache, rows: ShardedRows, shards: Shards) -> dict[str, Any]:
        there = sum(shard["bytes"] for shard in shards.whole().values())
        cache.check_space(max(0, _BYTES_PER_BYTE * rows.dataset.path.stat().st_size - there))
        return _notes(rows.complete(shards, self._progress.show))

    def _write_packed(
        self, cache: TokenCache, key: str, dataset: DatasetRef, first: int | None, add: Add
    ) -> dict[str, Any]:
        entry = self._tokens(cache, key, dataset)
        for table in packed_tables(_first(entry.rows, first), self._spec.data.max_seq_length):
            add(table)
        return entry.notes

    def _report(self, notes: dict[str, Any]) -> DataReport:
        """The report of `_notes`. A tokenizer without a template is given one, as when the rows were tokenized."""
        report = DataReport(**notes["report"])
        if not notes["has_rendered"]:
            return report
        ensure_chat_template(self._tokenizer)
        lacked, self._lacked_template = self._lacked_template, False
        return replace(report, warnings=[*([DEFAULT_TEMPLATE_WARNING] if lacked else []), *report.warnings])

    def _in_memory(self, dataset: DatasetRef, first: int | None) -> PreparedRows:
        tokenization = tokenize(self._spec, dataset, self._tokenizer, self._teacher)
        tables = []
        for table in tokenization.tables:
            tables.append(table)
            self._progress.show(tokenization.rows)
        report = self._report(_notes(tokenization))
        rows = _first(in_memory(tables), first)
        packed = pack(rows, self._spec.data.max_seq_length) if self._spec.data.packed else rows
        return PreparedRows(packed, report, tokenization.counter.digests)

    def _wait(self, note: str) -> None:
        """While another process tokenizes the same rows: `note` is the number of those that it has done."""
        self._writer.heartbeat()
        if note.isdecimal() and len(note) < _MOST_DIGITS:
            self._progress.show(int(note))


class _Progress:
    """Reports how many rows are tokenized, at most every `_INTERVAL`."""

    def __init__(self, writer: EventWriter, total: int, clock: Callable[[], float]) -> None:
        self._writer, self._total, self._clock = writer, total, clock
        self._done = 0
        """Rows of the datasets that are prepared."""
        self._written_at = clock()
        self._has_written = False

    def show(self, rows: int) -> None:
        """Report, if it is due, the progress in one more dataset."""
        if self._clock() - self._written_at >= _INTERVAL:
            self._write(self._done + rows)

    def end(self, rows: int) -> None:
        self._done += rows
        if self._has_written and self._done >= self._total:
            self._write(self._done)

    def _write(self, rows: int) -> None:
        self._writer.write(Tokenizing(rows=min(rows, self._total), total_rows=self._total))
        self._written_at, self._has_written = self._clock(), True


def _notes(tokenization: Tokenization) -> dict[str, Any]:
    """What the cache keeps of a tokenization beside its rows. Whether the tokenizer was given a template is not a
    property of the rows: the first dataset of a job alone has that warning."""
    report = asdict(tokenization.report())
    report["warnings"] = [warning for warning in report["warnings"] if warning != DEFAULT_TEMPLATE_WARNING]
    digests = tokenization.counter.digests.stored()
    return {"report": report, "has_rendered": tokenization.chat.has_rendered, "digests": digests}


def _first(rows: Dataset, count: int | None) -> Dataset:
    return rows if count is None else rows.select(range(min(len(rows), count)))
