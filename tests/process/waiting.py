"""Waiting for what a launcher or a process does, with a deadline that a loaded machine keeps, too."""

from __future__ import annotations

import time
from collections.abc import Callable

from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState


def until[T](probe: Callable[[], T | None], seconds: float = 60.0) -> T:
    """The first true value that `probe` returns."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def reaches(launcher: Launcher, task: TaskSpec, state: TaskState, seconds: float = 60.0) -> Observation:
    """What the launcher sees of a task once it is in this state."""
    return until(lambda: seen if (seen := launcher.poll(task)).state is state else None, seconds)
