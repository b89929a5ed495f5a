"""The space of the disks that the service writes to: every write asks here, before it begins and while bytes arrive.

Uses have different lines. What clients order (uploads, rows, previews) ends where `min_free_disk_mb` and the largest
checkpoint of the jobs that run or wait would not stay free, so that no client takes what a training needs. Checkpoints
end at `min_free_disk_mb`, events and logs at half of it, since these report a full disk. Small files of the service's
own ask nothing; `tests/unit/test_space.py` lists every function that writes, with its use or its reason.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.store.reader import Unfinished
from llama_stack_provider_trl.specs.work import WORKS
from llama_stack_provider_trl.system.files import disk_of, free_bytes, is_read_only
from llama_stack_provider_trl.system.model_directory import find_model

log = logging.getLogger(__name__)
PIECE = 8 << 20
"""Bytes that are reserved for an upload under way; it asks again when it has written half of them."""
_WHOLE = 64 << 20
"""Bytes up to which an announced size is reserved as a whole, where that is requested."""
_REFRESH = 5.0
"""Seconds after which the jobs are read again, at the earliest."""
_SHARE = 20
"""Reading them, with the specification of each, takes at most one of so many seconds."""
_MOST_CONFIG = 1 << 20
"""Bytes of a model's configuration that are read here: as objects it takes up to 30 times as much."""
_MODEL_SECONDS = 600.0
"""Seconds for which the size of a model counts."""
_TRAINED, _MOMENTS = 4, 8
"""Bytes of a trained weight in a step checkpoint, and of its moments."""
_OF_ADAPTER = 0.05
"""Weights of an adapter per weight of its model: LoRA of rank 64 on all linear layers has about 3 % in a 1B model."""


class Use(StrEnum):
    """What the space is for."""

    ordered = "ordered"
    """Clients order it."""
    checkpoint = "checkpoint"
    """Checkpoints and answers of jobs, from nodes."""
    report = "report"
    """Events and logs of jobs, from nodes."""


class _Need(NamedTuple):
    """The checkpoint of a job that has not ended."""

    size: int
    job_uuid: str
    device: int
    """Of the file system of its checkpoints."""


class Space:
    """Grants the space of disks. Safe to share between threads.

    Args:
        min_free: bytes that stay free (`min_free_disk_mb`).
        unfinished: reads the jobs that have not ended; may raise StoreError.
    """

    def __init__(
        self,
        min_free: int,
        unfinished: Callable[[], Sequence[Unfinished]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_free, self._unfinished, self._clock = min_free, unfinished, clock
        self._lock = threading.Lock()
        self._arriving: dict[int, int] = {}
        """File system -> bytes that uploads under way may write before they ask again."""
        self._needs: list[_Need] = []
        self._noted: set[_Need] = set()
        """Of jobs that were submitted since the jobs were read, or while they are."""
        self._noting, self._refreshing = threading.Lock(), threading.Lock()
        self._read_at, self._every = -float("inf"), _REFRESH
        self._models: dict[tuple[str, str | None], tuple[float, int]] = {}

    def require(self, use: Use, directory: Path, coming: int = 0, least: int | None = None) -> None:
        """Require space for a write. Raises OSError: ENOSPC; EROFS.

        Args:
            coming: bytes that it takes, where they are known.
            least: `min_free_bytes` of the job that it belongs to.
        """
        self._require(use, directory, coming, self._min_free if least is None else least)

    @contextmanager
    def arriving(
        self, use: Use, directory: Path, announced: int = 0, least: int | None = None, *, whole: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """Require space for bytes that arrive; yields a function that is called with the number of each part that has
        been written. Other uploads do not get what this one may write between two checks. Raises OSError: ENOSPC or
        EROFS, also from that function.

        Args:
            whole: reserve more than that from the beginning: for few bodies at a time, whose writes are not counted.
        """
        least = self._min_free if least is None else least
        unchecked = 0
        is_whole = 0 < announced <= (_WHOLE if whole else PIECE)
        reserved = announced if is_whole else PIECE
        coming = max(announced, reserved) if use is Use.ordered else announced
        device = self._require(use, directory, coming, least, reserved)

        def written(count: int) -> None:
            nonlocal unchecked
            unchecked += count
            if unchecked >= PIECE // 2 and not is_whole:
                self._require(use, directory, 0, least)  # what it may write next is among the bytes that are reserved
                unchecked = 0

        try:
            yield written
        finally:
            with self._lock:
                self._arriving[device] -= reserved

    def note_job(self, job: Unfinished) -> None:
        """Count a job that was submitted."""
        need = self._need(job)
        with self._noting:
            if not any(known[::2] == need[::2] for known in self._noted):
                self._noted.add(need)
                self._needs = sorted([*self._needs, need], reverse=True)

    def refresh(self) -> None:
        """Read what the jobs that have not ended need, unless that was done just now."""
        begin = self._clock()
        if begin - self._read_at < self._every:
            return
        with self._noting:
            self._noted.clear()
        try:
            found = self._unfinished()
        except StoreError as error:
            log.warning("the space that jobs need is not read: %s", error)
            self._read_at = self._clock()  # what asks next does not wait for the database again
            return
        needs = {self._need(job) for job in found}
        with self._noting:
            self._needs = sorted(needs | self._noted, reverse=True)
        self._read_at = self._clock()
        self._every = max(_REFRESH, _SHARE * (self._read_at - begin))

    def _refresh_aside(self) -> None:
        """Refresh in a thread, since the event loop asks for space too; the first time at once."""
        if self._read_at == -float("inf"):
            self.refresh()
        elif self._refreshing.acquire(blocking=False):

            def refresh() -> None:
                try:
                    self.refresh()
                finally:
                    self._refreshing.release()

            threading.Thread(target=refresh, name="trl-space", daemon=True).start()

    def reserve(self, directory: Path) -> tuple[int, str]:
        """Bytes of the largest checkpoint that jobs will write to the disk of a directory, and its job. One that is
        larger than the disk does not count: it can never be written."""
        if self._clock() - self._read_at > 2 * self._every:  # this process does not supervise
            self._refresh_aside()
        device, total = disk_of(directory), _total(directory) - self._min_free
        found = (need for need in self._needs if need.device == device and need.size <= total)
        return next(((need.size, need.job_uuid) for need in found), (0, ""))

    def _require(self, use: Use, directory: Path, coming: int, least: int, reserved: int = 0) -> int:
        """Require space, and reserve some; returns the file system.

        The disk is asked without the lock: one that hangs holds up those who write to it, and no others.
        """
        if is_read_only(directory):
            raise OSError(errno.EROFS, f"nothing can be written to {directory}")
        reserve, job_uuid = self.reserve(directory) if use is Use.ordered else (0, "")
        line = (least // 2 if use is Use.report else least) + reserve
        device = disk_of(directory)
        before = self._arriving.get(device, 0)
        free = free_bytes(directory)
        with self._lock:
            # An upload that has ended meanwhile may have written after the free bytes were counted.
            held = max(before, self._arriving.get(device, 0)) if use is Use.ordered else 0
            needed = coming + held + line
            if free >= needed:
                self._arriving[device] = self._arriving.get(device, 0) + reserved
                return device
        text = f"{free >> 20} MiB are free on the disk of {directory}, {needed >> 20} are needed"
        if reserve:
            text += f" ({reserve >> 20} of them stay free for the next checkpoint of job {job_uuid!r})"
        raise OSError(errno.ENOSPC, text)

    def _need(self, job: Unfinished) -> _Need:
        return _Need(self._size_of(job), job.job_uuid, disk_of(Path(job.directory)))

    def _size_of(self, job: Unfinished) -> int:
        """The approximate bytes of a job's next step checkpoint and of its exports."""
        if job.work is not None:
            kind = WORKS.get(job.work)
            copies = 0 if kind is None else kind.copies  # a damaged row may have any text
            return copies * _TRAINED * self._weights(job.model, job.revision) if copies else 0
        weights = self._weights(job.model, job.revision)
        export = _TRAINED if job.dtype == "fp32" else 2
        if not job.is_adapter:
            return weights * (_TRAINED + _MOMENTS + export)
        return int(weights * _OF_ADAPTER) * (2 * _TRAINED + _MOMENTS) + weights * export * job.merges

    def _weights(self, model: str, revision: str | None) -> int:
        """Number of weights of a model, by the size of its files; 0: it is not on this machine."""
        at, count = self._models.get((model, revision), (-float("inf"), 0))
        if self._clock() - at > _MODEL_SECONDS:
            if len(self._models) > 1000:
                self._models.clear()
            count = _count_weights(model, revision)
            self._models[model, revision] = self._clock(), count
        return count


def _count_weights(model: str, revision: str | None) -> int:
    try:
        found = find_model(os.environ, model, revision)
        if found is None:
            return 0
        size = sum((found.path / name).stat().st_size for name in found.names() if name.endswith(".safetensors"))
        with found.open("config.json") as file:
            data = file.read(_MOST_CONFIG + 1)
        config = json.loads(data) if len(data) <= _MOST_CONFIG else {}
        dtype = config.get("dtype") or config.get("torch_dtype")
        return size // (4 if dtype == "float32" else 2)
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0


def _total(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize
