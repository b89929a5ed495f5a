"""What jobs have left behind: processes that still run, and checkpoint directories that were never put in place."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import psutil

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.process import ProcessId, tasks_below

STAGED = (".saving", "*.tmp", "*.old")
"""Names, in a job's checkpoint directory, of what is being written or replaced."""
GRACE = 5.0
"""Seconds: a runner reports the end of its task first and then ends itself."""


@dataclass(frozen=True)
class Census:
    """What is there at one moment; two of them can be compared."""

    running: frozenset[ProcessId]
    """Every process of the tasks of a data directory."""
    staged: frozenset[Path]

    def __bool__(self) -> bool:
        return bool(self.running or self.staged)

    def __str__(self) -> str:
        lines = [f"runs: {process.pid} {_command(process)}" for process in sorted(self.running, key=lambda p: p.pid)]
        return "\n".join([*lines, *(f"staged: {path}" for path in sorted(self.staged))]) or "nothing"


def census(data_dir: Path) -> Census:
    """What is running or staged of any job of a data directory, whatever the state of the job."""
    tasks = tasks_below(data_dir.resolve() / "jobs")
    store = Store(data_dir / DATABASE)
    try:
        homes = {job.spec.checkpoint_dir for job in store.list()}
    finally:
        store.close()
    found = (path for home in homes if home.is_dir() for path in home.iterdir())
    staged = frozenset(path for path in found if any(fnmatch(path.name, pattern) for pattern in STAGED))
    return Census(frozenset(process for processes in tasks.values() for process in processes), staged)


def assert_clean(data_dir: Path, within: float = GRACE) -> None:
    """Nothing runs and nothing is staged, now or `within` so many seconds."""
    deadline = time.monotonic() + within
    while left := census(data_dir):
        assert time.monotonic() < deadline, f"left behind below {data_dir}:\n{left}"
        time.sleep(0.05)


def _command(process: ProcessId) -> str:
    try:
        return " ".join(psutil.Process(process.pid).cmdline())
    except psutil.Error:
        return "(gone meanwhile)"
