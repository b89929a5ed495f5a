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
    added = {"PYTHONUNBUFFERED": "1", **visible_gpus(task, environ), **task.env, **task_marks(task)}
    return child_environment(environ, added)


def visible_gpus(task: TaskSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The task's own GPUs as the only visible ones: Trainer would spread over all that it sees."""
    gpus = [_gpu(device, environ) for device in task.devices if device.startswith("cuda:")]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def lock_name(device: str, environ: Mapping[str, str]) -> str:
    """The name under which a device is locked; programs that see different GPUs still mean the same one by it."""
    return f"cuda-{_gpu(device, environ)}" if device.startswith("cuda:") else device


def _gpu(device: str, environ: Mapping[str, str]) -> str:
    """The GPU behind `cuda:N`, which counts within CUDA_VISIBLE_DEVICES as it does in torch: its number or its UUID."""
    index = device.partition(":")[2]
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return (visible[int(index)] if int(index) < len(visible) else "") or index


def task_marks(task: TaskSpec) -> dict[str, str]:
    return {TASK_MARK: task.task_id, RUN_DIR_MARK: str(task.run_dir)}
