"""A Llama Stack with the shipped run_fsdp.yaml, and the training service that it calls with the same file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.service import TrainingService, running
from tests.contract.stack import LlamaStack, serving
from tests.tiny import REPOSITORY

TOKEN = "contract-s3cret"


class ShippedService(TrainingService):
    """The service as it is shipped, on the CPU, with a token."""

    def configure(self, **settings: Any) -> None:
        shipped = (REPOSITORY / "run_fsdp.yaml").read_text()
        # A GPU beside other people's jobs is no place for tests of an API.
        assert shipped.count("device: auto\n") == 1
        self.config.write_text(shipped.replace("device: auto\n", "device: cpu\n"))
        self.session.headers["Authorization"] = f"Bearer {TOKEN}"

    def spawn(self, *arguments: Any, **environ: str) -> subprocess.Popen[bytes]:
        return super().spawn(*arguments, **{**environ, "TRL_SERVICE_TOKEN": TOKEN})


class RemoteStack(LlamaStack):
    """The Llama Stack of a test, whose trainings are the service's."""

    warm_start = False

    def __init__(self, root: Path, service: TrainingService) -> None:
        super().__init__(root)
        self.service = service
        self.data_dir = service.data_dir  # where the processes of its jobs are looked for
        self._config = service.config

    def launch(self) -> None:
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("TRL_SERVICE_URL", self.service.url)
            environ.setenv("TRL_SERVICE_TOKEN", TOKEN)
            environ.setenv("TRL_SERVICE_DATA_DIR", str(self.root / "data"))
            super().launch()


@contextmanager
def running_remote_stack(root: Path) -> Iterator[RemoteStack]:
    """Both servers for a test module; fails it where a process outlives its job or a server does not end properly."""
    for name in ("service", "stack"):
        (root / name).mkdir()
    with running(ShippedService(root / "service")) as service, serving(RemoteStack(root / "stack", service)) as stack:
        yield stack
