"""Weights & Biases, offline: the directory of a run, for `wandb sync`, once the job has ended.

wandb writes in a process of its own, without a report of what is on disk until the run is finished. So each try writes
a whole run beside the place for runs, and renames it when it is complete; what a killed try left is removed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..jobs.states import JobState
from ..system.files import fsync_tree
from .points import Step
from .tracker import Target

_STAGED = ".staged-"


class Wandb:
    """Writes below `directory`, a directory per project. Imports wandb.

    Raises:
        ImportError: wandb is not installed.
    """

    at_end = True

    def __init__(self, directory: Path) -> None:
        import wandb

        self._wandb, self._directory = wandb, directory

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """See `Tracker.write`. Raises OSError, wandb.Error."""
        name = f"offline-run-{target.scheduled_at:%Y%m%d_%H%M%S}-{target.key}"
        project = self._directory / target.project
        project.mkdir(parents=True, exist_ok=True)
        for left in project.glob(f"{_STAGED}{target.key}-*"):
            shutil.rmtree(left, ignore_errors=True)
        if not (project / name).exists():  # else a repeated write: its points are those of a job that has ended
            # Of a name that no try had: the process of a killed one may still write.
            staged = Path(tempfile.mkdtemp(prefix=f"{_STAGED}{target.key}-", dir=project))
            written = self._write_run(staged, target, steps)
            fsync_tree(written)
            written.rename(project / name)
            shutil.rmtree(staged, ignore_errors=True)
        return {"run": name}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        """See `Tracker.finish`: the run is finished already."""

    def _write_run(self, staged: Path, target: Target, steps: Iterable[Step]) -> Path:
        """The directory of a finished run."""
        settings = self._wandb.Settings(
            **{"mode": "offline", "silent": True, "console": "off", "root_dir": str(staged)},
            **{"disable_git": True, "disable_code": True, "save_code": False},
            **{
                "x_disable_stats": True,
                "x_disable_meta": True,
                "x_disable_machine_info": True,
                "disable_job_creation": True,
            },
        )
        run = self._wandb.init(
            **{"project": target.project, "name": target.run, "id": target.key, "dir": str(staged)},
            **{"config": dict(target.config), "settings": settings, "reinit": "create_new"},
        )
        try:
            for step in steps:
                run.log({**step.values, "time": step.time}, step=step.step)
            written = Path(run.settings.sync_dir)
        finally:
            run.finish(exit_code=0)
        return written
