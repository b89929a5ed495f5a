"""Weights & Biases: the directory of a run once the job has ended, and its upload where a server is configured.

wandb writes in a process of its own, without a report of what is on disk until the run is finished. So each try writes
a whole run beside the place for runs, and renames it when it is complete; what a killed try left is removed.

`wandb sync` uploads it. Each line of the history is sent with its number, by which a server replaces it when it is sent
again: an upload that failed or was killed is begun again from its first line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import TrlError
from ..jobs.decisions.states import JobState
from ..system.files import fsync_tree
from .points import Step
from .tracker import Target

_STAGED = ".staged-"
_SYNCED, _SYNC_STATE = ".synced", ".syncstate"
"""Behind the name of a run's file: what `wandb sync` writes at its end, and about its progress."""
_UPLOADED = "uploaded"
"""In the directory of a run: our mark. wandb ends with 0, and sets its own, also where a server refused the history."""
_KEY = "WANDB_API_KEY"
_LONGEST_UPLOAD = 3600.0
"""Seconds; with a server that accepts connections and answers nothing an upload ends by itself after 2 minutes."""
_RETRIES = {
    f"WANDB_X_{kind}_{name}": value
    for kind in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")
    for name, value in (("RETRY_MAX", "3"), ("RETRY_WAIT_MIN_SECONDS", "1"), ("RETRY_WAIT_MAX_SECONDS", "5"))
}
"""The exporter itself tries again; wandb would for days."""


class UploadFailed(TrlError, OSError):
    """Raised when a server of Weights & Biases has not received a whole run."""


class Uploads:
    """Uploads directories of runs with `wandb sync`, in a process of its own. Raises UploadFailed: there is no API key.

    Args:
        uri: of the server; None: that of Weights & Biases.
        entity: the user or team that has the runs; None: the default one of the API key.
        environ: has the API key; None: that of this process.
    """

    def __init__(self, uri: str | None, entity: str | None, environ: Mapping[str, str] | None = None) -> None:
        self._uri, self._entity = uri, entity
        self._environ = dict(os.environ if environ is None else environ)
        if not self._environ.get(_KEY):
            raise UploadFailed(f"{_KEY} is not set: set it in the environment of the service, and start that again")

    def upload(self, run: Path, run_id: str, directory: Path) -> None:
        """Upload a run, unless the server has it. Raises UploadFailed.

        Args:
            directory: an empty one, for what wandb logs.
        """
        uploaded = run / _UPLOADED
        if uploaded.exists():
            return
        synced, progress = (run / f"run-{run_id}.wandb{end}" for end in (_SYNCED, _SYNC_STATE))
        for left in (synced, progress):
            left.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "wandb", "sync", *(["--entity", self._entity] if self._entity else [])]
        (directory / "wandb").mkdir()  # else it logs to /tmp
        places = dict.fromkeys(("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"), str(directory))
        server = {"WANDB_BASE_URL": self._uri} if self._uri else {}
        try:
            done = subprocess.run(
                [*command, str(run)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environ | _RETRIES | places | server,
                timeout=_LONGEST_UPLOAD,
            )
        except subprocess.TimeoutExpired:
            raise UploadFailed(f"wandb sync was still at it after {_LONGEST_UPLOAD:g} seconds") from None
        output = done.stdout.decode(errors="replace")
        errors = errors_of(output)
        if errors or not synced.exists():
            last = output.strip().rpartition("\n")[2] or "no output"
            raise UploadFailed(f"wandb sync: {' '.join(errors) or last}")
        uploaded.touch()


def errors_of(output: str) -> list[str]:
    """The errors that `wandb sync` prints."""
    lines = [re.sub(r"^wandb:\s*", "", line).strip() for line in output.splitlines() if line.strip()]
    errors = [re.sub(r"^(ERROR|Error:)\s*", "", line) for line in lines if re.match(r"ERROR|Error:", line)]
    return [line for line in errors if not line.startswith("Find detailed error logs")]  # removed with their directory


class Wandb:
    """Writes below `directory`, a directory per project. Imports wandb. Raises ImportError: wandb is not installed."""

    at_end = True

    def __init__(self, directory: Path, uploads: Uploads | None = None) -> None:
        import wandb

        self._wandb, self._directory, self._uploads = wandb, directory, uploads

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """See `Tracker.write`. Raises OSError, wandb.Error, UploadFailed."""
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
        if self._uploads is not None:
            with tempfile.TemporaryDirectory(prefix=f"{_STAGED}{target.key}-", dir=project) as scratch:
                self._uploads.upload(project / name, target.key, Path(scratch))
        return {"run": name}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        """See `Tracker.finish`: the run is finished, and uploaded, already."""

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
