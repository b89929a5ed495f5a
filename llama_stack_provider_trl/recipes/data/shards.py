"""Tokenizes a large dataset in shards, a fixed number of rows each, in several processes where the machine has room.

A shard is written by one process under a name of its own and renamed when it is whole (`cache`). Each begins with
nothing that was learned of other rows, so that the result depends neither on the number of processes nor on where a
preparation was killed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import JobFailure
from ...specs.chat_templates import UNENDED
from ...specs.events import Reason
from ...specs.job import DatasetRef, JobSpec
from ...system.cpu_timer import ENDED_BY
from ...system.process import available_memory, usable_cpus
from .cache import Add, Shards, TokenCache
from .chat import Chat, ControlTokens, LostTexts, LostTurns
from .duplicates import ExampleDigests, bits_for
from .endings import Examples
from .prepare import CHUNK_ROWS, RowRange, Tokenization, TruncationCounter, tokenize
from .shard_worker import Lost, Worker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
SHARD_ROWS = 50 * CHUNK_ROWS
"""Of each shard but the last: half a minute of work at most, of which a kill loses one for each process. Whole chunks:
the first row of a kind is the same one as without shards."""
_MOST_WORKERS = 4
_WORKER_BYTES = 512 << 20
"""Of a worker: what it imports, its tokenizer, and a record batch before it is written (measured: 220 MiB)."""
_BYTES_PER_BYTE = 60
"""Of a worker's memory for each byte of the rows that it tokenizes at once: their tokens are Python integers."""

_SUMS = (
    "expanded",
    "diverged",
    "two_prompts",
    "empty_thoughts",
    "only_thoughts",
    "unplaced_turns",
    "equal_answers",
)
"""All numbers that a `Chat` counts."""
Counts = dict[str, Any]
"""What a tokenization has counted, as JSON, so that the shards of a dataset have one report. Their order counts: of
texts and ends of answers a report has the first, and of equal largest ids the first row."""


@dataclass(frozen=True)
class ShardedRows:
    """A dataset that is tokenized in shards. Workers get it pickled."""

    spec: JobSpec
    dataset: DatasetRef
    tokenizer: PreTrainedTokenizerBase
    teacher: PreTrainedTokenizerBase | None
    directory: Path
    """Of the cache."""
    key: str
    columns: tuple[str, ...]

    def write(self, number: int, rows: RowRange, show: Callable[[int], None]) -> None:
        """Tokenize and store one shard. Raises JobFailure, InvalidRows: as `tokenize`; NotCached: the disk cannot hold
        it. `show` is called with the rows of it that are done."""
        cache = TokenCache(self.directory, self.spec.lifecycle.min_free_bytes, lambda note: None)

        def write(add: Add) -> Counts:
            tokenization = tokenize(self.spec, self.dataset, self.tokenizer, self.teacher, rows)
            tokenization.counter.digests.bits = bits_for(self.dataset.num_rows)
            for table in tokenization.tables:
                add(table)
                show(tokenization.rows)
            return counts_of(tokenization)

        cache.write_shard(self.key, number, self.columns, write)

    def complete(self, shards: Shards, show: Callable[[int], None]) -> Tokenization:
        """Tokenize the shards that are not there yet; returns the counts of all.

        Raises:
            JobFailure, InvalidRows: as `tokenize`; of several rows that cannot be read, for the first.
            NotCached: the disk cannot hold them.
        """
        ranges, whole = ranges_of(self.dataset.path), shards.whole()
        left = [number for number in range(len(ranges)) if number not in whole]
        progress = dict.fromkeys(left, 0)
        before = sum(ranges[number].count for number in whole)

        def shown(number: int, rows: int) -> None:
            progress[number] = rows
            done = before + sum(progress.values())
            shards.describe(str(done))
            show(done)

        _write_all(self, [(number, ranges[number]) for number in left], shown)
        counted = tokenize(self.spec, self.dataset, self.tokenizer, self.teacher)
        for _, entry in sorted(shards.whole().items()):
            add_counts(counted, entry["notes"])
        return counted


def shards_of(dataset: DatasetRef) -> int:
    """How many shards a dataset has; 1: it is tokenized whole."""
    return max(1, -(-dataset.num_rows // SHARD_ROWS))


def ranges_of(path: Path) -> list[RowRange]:
    """The rows of a file, cut into shards."""
    found: list[RowRange] = []
    begin = count = size = 0
    with open(path, "rb") as file:
        for line in file:
            count, size = count + 1, size + len(line)
            if count == SHARD_ROWS:
                found.append(RowRange(len(found) * SHARD_ROWS, count, begin))
                begin, count, size = begin + size, 0, 0
    if count:
        found.append(RowRange(len(found) * SHARD_ROWS, count, begin))
    return found


def workers_for(rows: ShardedRows, shards: int) -> int:
    """How many processes tokenize, from the cores and the memory that are free; 0: this one does."""
    size = rows.dataset.path.stat().st_size
    bytes_each = _WORKER_BYTES + _BYTES_PER_BYTE * CHUNK_ROWS * size // max(1, rows.dataset.num_rows)
    count = min(_MOST_WORKERS, usable_cpus(), shards, available_memory() // 2 // bytes_each)
    return count if count > 1 else 0


def _write_all(rows: ShardedRows, left: Sequence[tuple[int, RowRange]], shown: Callable[[int, int], None]) -> None:
    waiting = list(reversed(left))
    failed: dict[int, Exception] = {}
    workers = _started(rows, workers_for(rows, len(left)))

    def matters(number: int | None) -> bool:
        """Whether a shard is before all that have failed: one process would not have come to the others."""
        return number is not None and number < min(failed, default=number + 1)

    try:
        while workers and ((waiting and matters(waiting[-1][0])) or any(matters(worker.number) for worker in workers)):
            for worker in workers:
                if worker.number is None and waiting and matters(waiting[-1][0]):
                    worker.begin(*waiting.pop())
            for worker in Worker.ready([worker for worker in workers if worker.shard]):
                assert worker.shard is not None
                number, _ = shard = worker.shard
                match worker.receive():
                    case Lost(status) if status == -ENDED_BY:  # it would end the others, too
                        workers.remove(worker)
                        worker.end()
                        failed[number] = JobFailure(Reason.invalid_model, UNENDED)
                    case Lost() as lost:
                        log.warning("a process that tokenizes rows has ended (%s): others do its part", lost.status)
                        workers.remove(worker)
                        worker.end()
                        waiting.append(shard)
                        waiting.sort(reverse=True)
                    case int(done):
                        shown(number, done)
                    case Exception() as error:
                        failed[number] = error
    finally:
        for worker in workers:
            worker.end()
    for number, part in reversed(waiting):
        if matters(number):
            rows.write(number, part, partial(shown, number))
    if failed:
        raise failed[min(failed)]


def _started(rows: ShardedRows, count: int) -> list[Worker]:
    workers: list[Worker] = []
    with suppress(OSError):  # no process or memory is left: there are fewer, or none
        for _ in range(count):
            workers.append(Worker(rows))
    return workers


def counts_of(tokenization: Tokenization) -> Counts:
    """What was counted in the rows that a tokenization has read."""
    teacher, counter = tokenization.teacher, tokenization.counter
    rows = {field.name: getattr(counter, field.name) for field in fields(counter)}
    return {
        "rows": {**rows, "digests": counter.digests.stored()},
        "chat": _of_chat(tokenization.chat),
        "teacher": None if teacher is None else _of_chat(teacher),
    }


def add_counts(tokenization: Tokenization, later: Counts) -> None:
    """Count what `counts_of` has of the rows that follow those of a tokenization."""
    rows = later["rows"]
    tokenization.counter.add(TruncationCounter(**{**rows, "digests": ExampleDigests.read(rows["digests"])}))
    _add_to_chat(tokenization.chat, later["chat"])
    if tokenization.teacher is not None:
        _add_to_chat(tokenization.teacher, later["teacher"])


def _of_chat(chat: Chat) -> Counts:
    return {
        "sums": {name: getattr(chat, name) for name in _SUMS},
        "template_warning": chat.template_warning,
        "has_rendered": chat.has_rendered,
        "lost": {**vars(chat.lost), "roles": dict(chat.lost.roles)},  # of a Counter asdict makes another one
        "lost_texts": asdict(chat.lost_texts),
        "controls": asdict(chat.controls),
        "trained_headers": asdict(chat.trained_headers),
        "left_out": asdict(chat.endings.left_out),
        "doubtful": asdict(chat.endings.doubtful),
        "open": chat.endings.open,
    }


def _add_to_chat(chat: Chat, later: Counts) -> None:
    for name, count in later["sums"].items():
        setattr(chat, name, getattr(chat, name) + count)
    chat.template_warning = chat.template_warning or later["template_warning"]
    chat.has_rendered = chat.has_rendered or later["has_rendered"]
    lost = later["lost"]
    chat.lost.add_all(LostTurns(**{**lost, "roles": Counter(lost["roles"])}))
    chat.lost_texts.add_all(LostTexts(**later["lost_texts"]))
    chat.controls.add_all(ControlTokens(**later["controls"]))
    chat.trained_headers.add_all(Examples(**later["trained_headers"]))
    chat.endings.left_out.add_all(Examples(**later["left_out"]))
    chat.endings.doubtful.add_all(Examples(**later["doubtful"]))
    chat.endings.open += later["open"]
