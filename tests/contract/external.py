"""A release of Llama Stack, or OGX, with the shipped run file in which our own API serves one of the providers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import requests
import yaml

from llama_stack_provider_trl import faults
from tests import fake_trainer
from tests.contract.service import TrainingService
from tests.contract.stack import Json, LlamaStack
from tests.releases import OGX, python_of
from tests.tiny import REPOSITORY

Kind = Literal["inline", "remote"]
EXTERNAL = ("0.2.23", "0.3.5", "0.4.7", "0.5.4", "0.6.1", "0.7.3", OGX)
_RUN_FILES: dict[tuple[bool, Kind], str] = {
    (False, "inline"): "run_external.yaml",
    (False, "remote"): "run_external_fsdp.yaml",
    (True, "inline"): "run_ogx.yaml",
    (True, "remote"): "run_ogx_fsdp.yaml",
}


class ExternalStack(LlamaStack):
    """On the CPU, with trainings that are played.

    Args:
        service: whose trainings its jobs are; None: the inline provider's.
        run_file: the shipped file that it is started from; None: the one for an external API.
    """

    def __init__(
        self, root: Path, release: str, service: TrainingService | None = None, run_file: str | None = None
    ) -> None:
        super().__init__(root)
        self.release, self.service = release, service
        self.called = "OGX" if release == OGX else f"Llama Stack {release}"
        self.files = root / "files"
        self.files.mkdir(exist_ok=True)
        if service is not None:
            self.data_dir = service.data_dir  # where the processes of its jobs are looked for
        kind: Kind = "inline" if service is None else "remote"
        config = yaml.safe_load((REPOSITORY / (run_file or _RUN_FILES[release == OGX, kind])).read_text())
        ((provider,),) = (providers for api, providers in config["providers"].items() if "post_training" in api)
        if service is None:
            provider["config"] |= {"device": "cpu", "train_python": str(fake_trainer.python(root))}
            if self.has_datasets:
                provider["config"] |= {"dataset_roots": [str(self.files)]}
        self._config.write_text(yaml.safe_dump(config))

    @property
    def has_datasets(self) -> bool:
        """Whether datasets are ours."""
        return self.release in ("0.7.3", OGX)

    @property
    def datasets(self) -> str:
        """Prefix of the datasets that take every purpose."""
        return "/v1beta" if self.release in ("0.4.7", "0.5.4", "0.6.1") else "/v1"

    def launch(self) -> None:
        self.data_dir.mkdir(exist_ok=True)
        environ = {
            # The environments are installed uncompiled: without what the first start leaves, every start takes 6 s more.
            **{name: value for name, value in os.environ.items() if not name.startswith(("TRL_", "PYTHONDONTWRITE"))},
            "TRL_OUTPUT_DIR": str(self.data_dir),
            "TRL_SERVICE_DATA_DIR": str(self.root / "state"),
            "TRL_SERVICE_URL": self.service.url if self.service else "",
            "TRL_EXTERNAL_APIS": str(REPOSITORY / "external_apis.d"),
            "TRL_LOCK_DIR": str(self.root / "locks"),  # not behind whatever else trains on this machine
            "LLAMA_STACK_PORT": str(self.port),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            faults.VARIABLE: str(self.faults),
            "LLAMA_STACK_LOG_WIDTH": "1000",  # one line of the log per message
            "OGX_LOG_WIDTH": "1000",
        }
        python = python_of(self.release)
        command = ["ogx", "run", str(self._config), "--insecure"]
        if self.release != OGX:
            command = ["llama", "stack", "run", str(self._config)]
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [str(python.with_name(command[0])), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=environ,
                start_new_session=True,
            )

    def register_source(self, dataset_id: str, source: Json, **more: Any) -> str:
        body = {"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source, **more}
        answer = self.post("/datasets", body, prefix=self.datasets)
        assert answer.status_code == 200, answer.text
        return dataset_id

    def let_go(self, job_uuid: str) -> None:
        """Let a job go on whose name begins with `held`."""
        (self.data_dir / "jobs" / job_uuid / "attempts" / "1" / "go").touch()


@contextmanager
def running_external_stack(root: Path, release: str, kind: Kind) -> Iterator[ExternalStack]:
    """A server, for `remote` with its service; fails a test if one does not end properly."""
    service = None
    if kind == "remote":
        (root / "service").mkdir()
        service = TrainingService(root / "service", train_python=str(fake_trainer.python(root)))
        service.start()
    stack = ExternalStack(root, release, service)
    try:
        stack.start()
        yield stack
        assert stack.runs(), f"{stack.called} ended by itself\n{stack.log_tail()}"
        survivors = stack.end_jobs()
        assert not survivors, f"processes outlived their jobs: {survivors}"
    finally:
        try:
            if stack.runs():
                stack.stop()
        finally:
            if service is not None:
                service.stop()
                service.session.close()
            stack.kill_tasks()


def sentence(answer: requests.Response, status_code: int) -> str:
    """What an answer says that must have this status: every release has a place of its own for it."""
    assert answer.status_code == status_code, answer.text
    body = answer.json()
    return str(body["detail"] if "detail" in body else body["error"].get("detail") or body["error"]["message"])
