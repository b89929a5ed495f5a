"""Trainings in isolation, with what lies around them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.launch import isolation as isolating
from llama_stack_provider_trl.launch.base import TaskSpec, TaskState
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.specs.job import AttemptSpec
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from tests.fakes import job_spec
from tests.isolated import isolation
from tests.process.waiting import reaches

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Site:
    """A data directory with two jobs, and a process that stands for the service."""

    root: Path
    service: int

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def config(self) -> Path:
        return self.root / "run_fsdp.yaml"

    def task(self, trainer: str, name: str = "mine", **spec: Any) -> TaskSpec:
        """A task whose interpreter is a script, below the data directory as an environment there would be."""
        run_dir = self.data / "jobs" / name / "attempts" / "1"
        run_dir.mkdir(parents=True)
        program = self.data / f"trainer-{name}"
        program.write_text(trainer)
        program.chmod(0o755)
        job = job_spec(name, **{"checkpoint_dir": self.data / "checkpoints" / name, **spec})
        attempt = AttemptSpec(job=job, attempt=1, run_dir=run_dir)
        RunDir(run_dir).spec.write_text(attempt.model_dump_json())
        places = {
            "data": str(self.data),
            "service": self.service,
            "config": str(self.config),
            "code": isolating.__file__,
            "locks": os.environ["TRL_LOCK_DIR"],
        }
        (run_dir / "places.json").write_text(json.dumps(places))
        return TaskSpec(f"{name}-1", run_dir, ("cpu",), python=str(program))

    def launcher(self, **more: Any) -> LocalLauncher:
        isolated = replace(isolation(self.data), files=(self.config,))
        return LocalLauncher(**{"isolation": isolated, **more})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    environ = {"TRL_SERVICE_TOKEN": "secret"}
    service = subprocess.Popen(["/bin/sleep", "600"], env=environ)
    site = Site(tmp_path, service.pid)
    for path in ("jobs/other/attempts/1", "checkpoints/other", "datasets"):
        (site.data / path).mkdir(parents=True)
    (site.data / "jobs/other/attempts/1/spec.json").write_text("{}")
    (site.data / "jobs.sqlite3").write_text("jobs")
    (site.data / "datasets/other.jsonl").write_text("{}")
    (site.data / "datasets/mine.jsonl").write_text('{"prompt": "rows"}')
    site.config.write_text("api_token: secret")
    yield site
    process.terminate(lambda: process.marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)
    service.kill()
    service.wait()


def ran(launcher: LocalLauncher, task: TaskSpec) -> None:
    launcher.start(task)
    seen = reaches(launcher, task, TaskState.exited, 30)
    assert seen.exit_code == 0, (seen, RunDir(task.run_dir).log.read_text())
