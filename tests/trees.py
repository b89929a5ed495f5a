"""Services that run another commit of this repository, driven by HTTP alone: its modules may have other names."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.contract.service import TrainingService
from tests.contract.stack import ENDED, Json, poll
from tests.ports import free_port
from tests.tiny import REPOSITORY

PACKAGES = ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")


@contextmanager
def worktree(commit: str, path: Path | None = None) -> Iterator[Path]:
    """A git worktree of a commit, removed at the end.

    Args:
        path: where to make it; None: a new temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix="trl-tree-") as scratch:
        path = path or Path(scratch) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path))


class TreeService(TrainingService):
    """The training service of a tree.

    Args:
        tree: its packages are imported by the service and by its trainings.
    """

    forks = False

    def __init__(self, root: Path, tree: Path, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.tree = tree

    def launch(self) -> None:
        self.check_packages()
        # The address is not read from the log: what a service of another commit logs may be worded differently.
        self.port = self.port or free_port()
        self.process = self.spawn(self.port, self.data_dir, self.log, PYTHONPATH=str(self.tree))

    def wait_until_it_answers(self) -> None:
        poll(self._healthy, "the service answers /v1/health", timeout=60)

    def check_packages(self) -> None:
        """Fail where an interpreter with this PYTHONPATH imports our packages from another directory."""
        program = f"import {', '.join(PACKAGES)}\nfor m in ({', '.join(PACKAGES)}): print(m.__file__)"
        environ = {**os.environ, "PYTHONPATH": str(self.tree)}
        command = [self.python, "-c", program]
        done = subprocess.run(command, cwd=self.root, env=environ, capture_output=True, text=True, check=True)
        expected = [str(self.tree / package / "__init__.py") for package in PACKAGES]
        if done.stdout.split() != expected:
            raise RuntimeError(f"imported {done.stdout.split()}, expected {expected}")

    def finished(self, job_uuid: str, timeout: float) -> Json:
        """The status of a job once it has ended, however it ended. Its processes must import this tree's packages."""
        paths: set[str] = set()

        def ended() -> Json | None:
            paths.update(_python_path(process) for process in self.processes(job_uuid))
            status = self.status(job_uuid)
            return status if status["status"] in ENDED else None

        status = poll(ended, f"job {job_uuid} ends", timeout)
        if paths - {""} != {str(self.tree)}:
            raise RuntimeError(f"processes of job {job_uuid} had PYTHONPATH {paths}, expected {self.tree}")
        assert status is not None
        return status


def _python_path(process: psutil.Process) -> str:
    """PYTHONPATH of a process; empty where it has ended."""
    try:
        return process.environ().get("PYTHONPATH", "not set")
    except psutil.Error:
        return ""


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(REPOSITORY), *arguments], check=True)
