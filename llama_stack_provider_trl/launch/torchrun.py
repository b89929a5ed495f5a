"""TaskSpec -> command line and environment of its training process. Pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ..files import RunDir
from ..process import RUN_DIR_MARK, TASK_MARK, child_environment
from .base import TaskSpec

TRAINER = "llama_stack_provider_trl.recipes.train"


def training_argv(task: TaskSpec) -> list[str]:
    """One process is started directly: torchrun would add 1.0-1.7 s and a process that has nothing to do."""
    return [task.python or sys.executable, "-m", TRAINER, str(RunDir(task.run_dir).spec)]


def training_environment(task: TaskSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The allow-listed part of `environ`, the task's own variables, and the marks by which its processes are found."""
    marks = task_marks(task)
    return child_environment(environ, {"PYTHONUNBUFFERED": "1", **task.env, **marks})


def task_marks(task: TaskSpec) -> dict[str, str]:
    return {TASK_MARK: task.task_id, RUN_DIR_MARK: str(task.run_dir)}
