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
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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
