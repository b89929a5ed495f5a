"""Parts of the rows of a dataset, each stored as rows of its own: what a job trains on, and what it holds out."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidRequest
from ...requests.data import SHARDS
from ...specs.job import DatasetRef, JobSpec, ShardSpec
from ...system.files import Blob, put_lines

Put = Callable[[Path, Iterable[bytes]], Blob]
"""Stores rows in a directory, as `put_lines` does."""
_STAMP_NS = 10**9


class Allowance:
    """What a request may write for its jobs. This one has no limits: that of the inline provider, which has no tokens
    and counts no rows."""

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[int], None]]:
        """Require space for bytes; yields a function that is called with the number of each part before it is written.
        Raises OSError: ENOSPC, also from that function."""
        yield lambda count: None

    def add(self, rows: Blob) -> None:
        """Count rows that were stored. Raises QuotaReached."""

    def counted(self, specs: Iterable[JobSpec]) -> dict[str, int]:
        """Digest -> bytes of the rows that count for the token once these jobs are stored."""
        return {}


UNLIMITED = Allowance()


class NewRows:
    """Rows that a request stores before it is known whether a job takes them."""

    def __init__(self, allowance: Allowance = UNLIMITED) -> None:
        self._allowance = allowance
        self._stamps: dict[Path, int] = {}

    def put(self, directory: Path, lines: Iterable[bytes]) -> Blob:
        """As `put_lines`, within the allowance. Raises QuotaReached: `discard` removes them."""
        # Every use of stored rows touches them, so those that still have this time are used by nothing.
        stamp = time.time_ns() - _STAMP_NS - secrets.randbelow(_STAMP_NS)
        with self._allowance.writing(directory) as written:
            blob = put_lines(directory, _counted(lines, written), lambda rows: os.utime(rows, ns=(stamp, stamp)))
        if blob.path.stat().st_mtime_ns == stamp:
            self._stamps[blob.path] = stamp
        self._allowance.add(blob)
        return blob

    def discard(self) -> None:
        """Remove the rows, but those that something else uses by now."""
        while self._stamps:
            rows, stamp = self._stamps.popitem()
            aside = rows.with_name(f".removed-{rows.stem}")
            with suppress(FileNotFoundError):
                if rows.stat().st_mtime_ns != stamp:  # else a request that uses them would miss them for a moment
                    continue
                # Renamed first, checked again: a request may find and touch the file in between.
                os.replace(rows, aside)
                if aside.stat().st_mtime_ns == stamp:
                    aside.unlink()
                else:
                    os.replace(aside, rows)


@dataclass(frozen=True)
class PlannedParts:
    """Parts that are not stored yet: a preflight has copies of its own, which go with it."""

    dataset: DatasetRef
    """The whole one."""
    shard: ShardSpec | None
    share: float
    """Of the rows to train on; 1: none is held out."""
    seed: int

    def counted(self) -> tuple[DatasetRef, DatasetRef | None]:
        """The whole dataset with the number of rows of each part. Raises InvalidRequest: there are too few rows."""
        count = self.dataset.num_rows
        if self.shard is not None:
            refuse_more_shards(self.dataset.dataset_id, self.shard, count)
            count = len(range(self.shard.index, count, self.shard.count))
        part = self.dataset.model_copy(update={"num_rows": count})
        if self.share >= 1.0:
            return part, None
        held_out = held_out_rows(part, self.share)
        return (
            part.model_copy(update={"num_rows": count - held_out}),
            part.model_copy(update={"num_rows": held_out}),
        )

    def stored(self, directory: Path) -> tuple[DatasetRef, DatasetRef | None]:
        """What is trained on and what is held out, which are written to a directory. Raises OSError."""
        dataset, held_out = self.dataset, None
        if self.shard is not None:
            dataset = stored_shard(dataset, self.shard, _into(directory))
        if self.share < 1.0:
            dataset, held_out = split_parts(dataset, self.share, self.seed, _into(directory))
        return dataset, held_out


def with_stored_parts(spec: JobSpec, planned: Sequence[PlannedParts], directory: Path) -> JobSpec:
    """The specification with the parts of each of its datasets, which are written to a directory. Raises OSError."""
    mixed = []
    for one, parts in zip(spec.data.mixed, planned, strict=True):
        dataset, held_out = parts.stored(directory)
        rows = {"path": dataset.path, "sha256": dataset.sha256, "num_rows": dataset.num_rows}
        validation = one.validation
        if held_out is not None and validation is not None:
            held = {"path": held_out.path, "sha256": held_out.sha256, "num_rows": held_out.num_rows}
            validation = validation.model_copy(update=held)
        mixed.append(one.model_copy(update={"dataset": one.dataset.model_copy(update=rows), "validation": validation}))
    first, *others = mixed
    return spec.changed(dataset=first.dataset, validation=first.validation, mixed_with=tuple(others))


def held_out_rows(dataset: DatasetRef, share: float) -> int:
    """The number of rows that are held out: at least one, and one is trained on. Raises InvalidRequest: there is only
    one row."""
    if dataset.num_rows < 2:
        field = "training_config.data_config.train_split_percentage"
        raise InvalidRequest(field, share, f"dataset {dataset.dataset_id!r} has one row: nothing can be held out")
    return min(max(round(dataset.num_rows * (1 - share)), 1), dataset.num_rows - 1)


def split_parts(dataset: DatasetRef, share: float, seed: int, put: Put = put_lines) -> tuple[DatasetRef, DatasetRef]:
    """Split the rows of a dataset and store both parts, in their order: for training, and held out for validation.
    Raises InvalidRequest: there is only one row; OSError: the rows cannot be stored.

    Args:
        share: of the rows to train on, rounded; at least one row is held out, and one is trained on.
        seed: decides which rows are held out.
    """
    count = held_out_rows(dataset, share)
    held_out = set(random.Random(seed).sample(range(dataset.num_rows), count))

    def stored(is_validation: bool) -> DatasetRef:
        with open(dataset.path, "rb") as file:
            lines = (line for number, line in enumerate(file) if (number in held_out) is is_validation)
            blob = put(dataset.path.parent, lines)
        return dataset.model_copy(update={"path": blob.path, "sha256": blob.sha256, "num_rows": blob.num_rows})

    return stored(False), stored(True)


def _counted(lines: Iterable[bytes], written: Callable[[int], None]) -> Iterator[bytes]:
    for line in lines:
        written(len(line))
        yield line


def _into(directory: Path) -> Put:
    return lambda _, lines: put_lines(directory, lines)


def refuse_more_shards(dataset_id: str, shard: ShardSpec, rows: int) -> None:
    """Refuse parts of which some would be empty. Raises InvalidRequest."""
    if shard.count > rows:
        hint = f"dataset {dataset_id!r} has at most {rows} rows, and each part needs one: send at most {rows}"
        raise InvalidRequest(SHARDS, shard.count, hint)


def stored_shard(
    dataset: DatasetRef, shard: ShardSpec, put: Callable[[Path, Iterable[bytes]], Blob] = put_lines
) -> DatasetRef:
    """Store a part of a dataset beside it, with its rows in their order. Raises InvalidRequest: there are more parts
    than rows; OSError: the part cannot be written. `put` stores rows, as `put_lines` does."""
    refuse_more_shards(dataset.dataset_id, shard, dataset.num_rows)
    with open(dataset.path, "rb") as file:
        lines = (line for number, line in enumerate(file) if number % shard.count == shard.index)
        blob = put(dataset.path.parent, lines)
    return dataset.model_copy(update={"path": blob.path, "sha256": blob.sha256, "num_rows": blob.num_rows})
