"""The exporter's process: one per data directory.

    python -m llama_stack_provider_trl.export

Its first line of input is an `ExporterConfig`. It ends with the process that started it, when its input ends; or when
nothing is left to export. It may be killed at any instant.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from functools import partial
from typing import NoReturn

from ..errors import StoreError
from ..jobs.store.store import Store
from ..system.data_dir import DataDir
from ..system.process import FileLock, hide_from_other_processes
from .follower import Follower
from .process import ExporterConfig
from .trackers import make_tracker

log = logging.getLogger("exporter")

TICK = 0.5
"""Seconds between two passes that found nothing to send."""
IDLE = 5.0
"""Seconds without anything to export after which the process ends."""
LOCK_WAIT = 60.0
"""Seconds to wait for the end of an earlier exporter."""
_STORE_WAIT = 5.0
"""Seconds after a failure of the job store."""


def main() -> int:
    """Returns the exit status: 0, nothing is left to export; 1, another exporter runs."""
    hide_from_other_processes()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = ExporterConfig.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    lock = FileLock(DataDir(config.data_dir).exporter_lock)
    if not _acquired(lock):
        log.error("%s exports from %s already", lock.holder(), config.data_dir)
        return 1
    store = Store(DataDir(config.data_dir).database)
    for name in config.trackers.configured:
        make = partial(make_tracker, name, config.trackers, config.data_dir)
        follower = Follower(store, name, make, os.environ)
        threading.Thread(target=_follow, args=[follower], name=name, daemon=True).start()
    _wait_until_idle(store, config.trackers.configured)
    return 0


def _acquired(lock: FileLock) -> bool:
    deadline = time.monotonic() + LOCK_WAIT
    while not lock.acquire(f"exporter (pid {os.getpid()})"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _end_with_input() -> NoReturn:
    sys.stdin.read()
    os._exit(0)


def _follow(follower: Follower) -> NoReturn:
    """Trackers have a thread each: one that does not answer delays no other."""
    while True:
        try:
            if not follower.advance_all():
                time.sleep(TICK)
        except StoreError as error:
            log.error("%s; the next pass tries again", error)
            time.sleep(_STORE_WAIT)
        except Exception:
            log.exception("a pass failed; the next one tries again")
            time.sleep(_STORE_WAIT)


def _wait_until_idle(store: Store, trackers: tuple[str, ...]) -> None:
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < IDLE:
        time.sleep(TICK)
        try:
            if store.exports.due(trackers, limit=1):
                idle_since = time.monotonic()
        except StoreError as error:
            log.error("%s", error)
            idle_since = time.monotonic()


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    os._exit(exit_status)  # without the threads' cleanup: there is nothing that a kill would lose
