"""Waiting for what a launcher or a process does, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from llama_stack_provider_trl.launch.base import Launcher, Observation, TaskSpec, TaskState


def until[T](probe: Callable[[], T | None], seconds: float = 10.0) -> T:
    """The first true value that `probe` returns."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := probe():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def reaches(launcher: Launcher, task: TaskSpec, state: TaskState, seconds: float = 10.0) -> Observation:
    """What the launcher sees of a task once it is in this state."""
    return until(lambda: seen if (seen := launcher.poll(task)).state is state else None, seconds)
