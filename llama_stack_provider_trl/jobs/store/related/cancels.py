"""Cancels of jobs: recorded in the database, or kept beside it while that is full, read-only or locked.

Those are kept in memory, and in a file whose blocks were allocated before: it can be written where nothing else can.
The supervisor ends the processes of such a job at once, and records the cancel when the database can be written again.
A cancel that is in the file survives this process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from ....errors import DamagedRecord, JobConflict, JobNotFound, StoreError, shortage_of
from ....specs.events import Reason
from ...decisions.states import ACTIVE, TERMINAL, JobState
from ..records import JobRecord


class CancellableJobs(Protocol):
    """What of a store is used here."""

    cancels: CancelOrders

    def get(self, job_uuid: str) -> JobRecord: ...

    def transition(
        self,
        job_uuid: str,
        attempt: int,
        source: JobState,
        target: JobState,
        reason: Reason | None = None,
        message: str = "",
    ) -> bool: ...


def request_cancel(jobs: CancellableJobs, job_uuid: str, message: str) -> JobRecord:
    """See `Store.request_cancel`."""
    try:
        return _record(jobs, job_uuid, message)
    except StoreError as error:
        if shortage_of(error) is None:
            raise
        return _keep(jobs, job_uuid, message, error)


def record_kept(jobs: CancellableJobs) -> None:
    """See `Store.record_kept_cancels`."""
    for order in jobs.cancels.pending():
        try:
            with suppress(JobNotFound, JobConflict):
                if jobs.get(order.job_uuid).age == order.age:
                    _record(jobs, order.job_uuid, order.message)
        except DamagedRecord:
            continue  # logged; it holds up no other job, and its cancel stays in case it is repaired
        jobs.cancels.remove(order)


def _keep(jobs: CancellableJobs, job_uuid: str, message: str, error: StoreError) -> JobRecord:
    job = jobs.get(job_uuid)
    if job.state in TERMINAL:
        raise error
    if not jobs.cancels.add(CancelOrder(job_uuid, job.age, message)):
        raise StoreError(
            f"the cancel of job {job_uuid!r} is in memory only ({error}): its training is being ended, but the "
            "next start would begin it again; repeat the cancel when the disk can be written"
        ) from error
    return replace(job, state=JobState.cancelling if job.state in ACTIVE else JobState.cancelled)


def _record(jobs: CancellableJobs, job_uuid: str, message: str) -> JobRecord:
    while True:
        job = jobs.get(job_uuid)
        if job.state in (JobState.cancelling, JobState.cancelled):
            return job
        if job.state in TERMINAL:
            raise JobConflict(
                f"job {job_uuid!r} is {job.state} already: only a job that has not ended can be cancelled"
            )
        target = JobState.cancelling if job.state in ACTIVE else JobState.cancelled
        # Not applied if the job has changed its state in the meantime: read it again.
        jobs.transition(job_uuid, job.attempt, job.state, target, None, message)


log = logging.getLogger(__name__)
_SLOT, _SLOTS = 512, 256
"""Bytes of one order, of which names of jobs take 128 at most, and orders that the file can hold."""
_EMPTY = bytes(_SLOT)


class CancelOrder(NamedTuple):
    """The cancel of a job."""

    job_uuid: str
    age: int
    """Of the job: another one may have its name later. Its time of submission may be corrected."""
    message: str = ""


class CancelOrders:
    """The orders of one data directory. Safe to share between threads, and the file between processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._unkept: set[CancelOrder] = set()
        """Orders that could not be written to the file."""
        self._done: set[CancelOrder] = set()
        """Orders that could not be removed from the file."""

    def prepare(self) -> None:
        """Allocate the file. Without it orders are in memory only."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(file).st_size
                if size < _SLOT * _SLOTS:  # written and not only extended: a hole needs space later
                    os.pwrite(file, bytes(_SLOT * _SLOTS - size), size)
                    os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            log.warning(
                "%s cannot be allocated (%s): while the disk is full, cancels do not survive us", self._path, error
            )

    def add(self, order: CancelOrder) -> bool:
        """Keep an order. Returns whether it survives this process."""
        with self._lock:
            try:
                with self._slots() as (file, slots):
                    if order not in slots:
                        _write(file, slots.index(None), order)
            except (OSError, ValueError) as error:
                log.error("the cancel of job %s is in memory only: %s", order.job_uuid, error)
                self._unkept.add(order)
                return False
            return True

    def pending(self) -> list[CancelOrder]:
        """The orders that are not recorded, those of other processes too."""
        with self._lock:
            found = set(self._unkept)
            try:
                data = self._path.read_bytes()
                if data.count(0) < len(data):
                    found.update(order for order in _parsed(data) if order is not None)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("%s cannot be read: %s", self._path, error)
            if self._done:
                self._remove(set(self._done))
            return sorted(found - self._done)

    def remove(self, order: CancelOrder) -> None:
        """Forget an order that was recorded."""
        with self._lock:
            self._remove({order})

    def _remove(self, orders: set[CancelOrder]) -> None:
        self._unkept -= orders
        try:
            with self._slots() as (file, slots):
                for number, order in enumerate(slots):
                    if order in orders:
                        _write(file, number, None)
        except FileNotFoundError:
            pass
        except OSError:
            self._done |= orders
            return
        self._done -= orders

    @contextmanager
    def _slots(self) -> Iterator[tuple[int, list[CancelOrder | None]]]:
        """The file, locked against other processes, and what is in it."""
        file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file, _parsed(os.pread(file, _SLOT * _SLOTS, 0))
            os.fsync(file)
        finally:
            os.close(file)


def _parsed(data: bytes) -> list[CancelOrder | None]:
    return [_order(data[begin : begin + _SLOT]) for begin in range(0, len(data), _SLOT)]


def _order(slot: bytes) -> CancelOrder | None:
    if not slot.strip(b"\0"):
        return None
    try:
        job_uuid, age, message = json.loads(slot.strip(b"\0"))
        return CancelOrder(str(job_uuid), int(age), str(message))
    except (ValueError, TypeError, OverflowError):
        return None  # torn by a power cut: the caller had no answer yet


def _write(file: int, number: int, order: CancelOrder | None) -> None:
    if order is None:
        data = _EMPTY
    else:
        data = json.dumps([order.job_uuid, order.age, order.message[:100]]).encode()
        if len(data) > _SLOT:
            data = json.dumps([order.job_uuid, order.age, ""]).encode()
    os.pwrite(file, data.ljust(_SLOT, b"\0"), number * _SLOT)
