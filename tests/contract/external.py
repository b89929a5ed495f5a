"""A release of Llama Stack, or OGX, with the shipped run file in which our own API serves one of the providers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forked
from tests.contract.service import TrainingService
from tests.contract.stack import Json, LlamaStack
from tests.fake_trainer import fake_trainer
from tests.releases import OGX, python_of
from tests.tiny import REPOSITORY

EXTERNAL = ("0.2.23", "0.3.5", "0.4.7", "0.5.4", "0.6.1", "0.7.3", OGX)
"""Releases that take external APIs."""


class ExternalStack(LlamaStack):
    """On the CPU, with trainings that are played.

    Args:
        service: whose trainings its jobs are; None: the inline provider's.
    """

    warm_start = False

    def __init__(self, root: Path, release: str, service: TrainingService | None = None) -> None:
        super().__init__(root)
        self.release, self.service = release, service
        self.called = "OGX" if release == OGX else f"Llama Stack {release}"
        self.imports = forked.OGX if release == OGX else forked.LLAMA_STACK
        self.files = root / "files"
        self.environ = {"TRL_EXTERNAL_APIS": str(REPOSITORY / "external_apis.d"), "OGX_LOG_WIDTH": "1000"}
        shipped = f"run_{'ogx' if release == OGX else 'external'}{'' if service is None else '_fsdp'}.yaml"
        config = yaml.safe_load((REPOSITORY / shipped).read_text())
        self.run_file = root / shipped
        if service is None:
            self.files.mkdir(exist_ok=True)
            self.environ["TRL_TRAIN_PYTHON"] = str(fake_trainer(root))
            (provider,) = config["providers"]["trl_post_training"]
            provider["config"] |= {"device": "cpu", "dataset_roots": [str(self.files)]}
        else:
            self.data_dir, self.files = service.data_dir, service.files
            self.environ |= {"TRL_SERVICE_URL": service.url, "TRL_SERVICE_DATA_DIR": str(root / "data")}
        self.run_file.write_text(yaml.safe_dump(config))

    @property
    def has_datasets(self) -> bool:
        """Whether datasets are ours."""
        return self.release in ("0.7.3", OGX)

    @property
    def headers(self) -> tuple[str, ...]:
        """Those for provider data that our own routes read."""
        if self.release == OGX:
            return "X-LlamaStack-Provider-Data", "X-OGX-Provider-Data"
        return ("X-LlamaStack-Provider-Data",) if self.has_datasets else ()

    def command(self) -> list[str]:
        python = python_of(self.release)
        if self.release == OGX:
            return [str(python.with_name("ogx")), "run", str(self.run_file), "--insecure"]
        return [str(python.with_name("llama")), "stack", "run", str(self.run_file)]

    def launch(self) -> None:
        with pytest.MonkeyPatch.context() as environ:
            for name, value in self.environ.items():
                environ.setenv(name, value)
            # The environments are installed uncompiled: every start takes 6 s more where the first one leaves nothing.
            environ.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            super().launch()

    def register_source(self, dataset_id: str, source: Json, **more: Any) -> str:
        body = {"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source, **more}
        prefix = "/v1beta" if self.release in ("0.4.7", "0.5.4", "0.6.1") else "/v1"
        answer = self.post("/datasets", body, prefix=prefix)
        assert answer.status_code == 200, answer.text
        return dataset_id

    def release_job(self, job_uuid: str) -> None:
        """Let a job continue whose name contains `held`."""
        (self.data_dir / "jobs" / job_uuid / "attempts" / "1" / "go").touch()
