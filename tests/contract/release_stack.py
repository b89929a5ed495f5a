"""A server of any Llama Stack release with the shipped run files, and its calls where that release has them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests import forked
from tests.contract.service import TrainingService
from tests.contract.stack import Json, LlamaStack
from tests.fake_trainer import fake_trainer
from tests.releases import python_of
from tests.tiny import REPOSITORY


@dataclass(frozen=True)
class Surface:
    """Where a release has which call, and what it lets through. See docs/reference/compatibility.md."""

    jobs: str = "/v1alpha"
    datasets: str = "/v1beta"
    job_in_path: bool = False
    """`jobs/ID/status` in place of `job/status?job_uuid=ID`."""
    lenient: bool = True
    """The provider's own annotations are the schema: the promised payload is taken as it stands."""
    unknown_job: int = 404
    taken_job: int = 409
    unreachable: int = 502
    """The service does not answer."""
    broken: int = 503
    """The data directory cannot be written."""
    client: str = "alpha"
    """What of the SDK has `post_training`; the same for `datasets`."""
    client_datasets: str = "beta"
    module: bool = True
    """`module:` is read; otherwise the provider is found by `external_providers_dir`."""


SURFACES = {
    "0.2.14": Surface(
        "/v1",
        "/v1",
        unknown_job=400,
        taken_job=400,
        unreachable=504,
        broken=504,
        client="",
        client_datasets="",
        module=False,
    ),
    "0.2.23": Surface("/v1", "/v1", broken=502, client="", client_datasets=""),
    "0.3.5": Surface("/v1", "/v1", client_datasets=""),
    "0.4.7": Surface(),
    "0.6.1": Surface(job_in_path=True, lenient=False),
}


class ReleaseStack(LlamaStack):
    """With run.yaml, or run_fsdp.yaml where a service is given."""

    service: TrainingService | None = None
    warm_start = False

    def __init__(self, root: Path, release: str, service: TrainingService | None = None) -> None:
        super().__init__(root)
        self.called = f"Llama Stack {release}"
        self.release, self.surface = release, SURFACES[release]
        self.python = python_of(release)
        self.imports = forked.LLAMA_STACK if self.surface.module else ()
        if service is None:
            self.environ = {"TRL_TRAIN_PYTHON": str(fake_trainer(root))}
        else:
            self.service, self.data_dir = service, service.data_dir
            self.environ = {"TRL_SERVICE_URL": service.url, "TRL_SERVICE_DATA_DIR": str(root / "data")}
            self._config.write_text((REPOSITORY / "run_fsdp.yaml").read_text())
        if not self.surface.module:
            config = yaml.safe_load(self._config.read_text())
            self._config.write_text(
                yaml.safe_dump({**config, "external_providers_dir": str(REPOSITORY / "providers.d")})
            )

    def command(self) -> list[str]:
        return [str(self.python.with_name("llama")), "stack", "run", str(self._config)]

    def launch(self) -> None:
        with pytest.MonkeyPatch.context() as environ:
            for name, value in self.environ.items():
                environ.setenv(name, value)
            # The environments are installed uncompiled: every start takes 6 s more where the first one leaves nothing.
            environ.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            super().launch()

    def get(self, path: str, *, prefix: str | None = None, **params: Any) -> requests.Response:
        place, params = self._place(path, params)
        return super().get(place, prefix=prefix or self._prefix(path), **params)

    def post(self, path: str, body: Any, *, prefix: str | None = None, options: Any = None) -> requests.Response:
        place, body = self._place(path, body)
        return super().post(place, body, prefix=prefix or self._prefix(path), options=options)

    def _prefix(self, path: str) -> str:
        kinds = {"/post-training": self.surface.jobs, "/datasets": self.surface.datasets}
        return next((prefix for start, prefix in kinds.items() if path.startswith(start)), "/v1")

    def _place(self, path: str, fields: Json) -> tuple[str, Json]:
        """A call about one job, as this release has it."""
        if not (self.surface.job_in_path and path.startswith("/post-training/job/")):
            return path, fields
        return f"/post-training/jobs/{fields['job_uuid']}/{path.rpartition('/')[2]}", {}


def sentence(answer: requests.Response, status_code: int = 400) -> str:
    """The message of an answer that must be a refusal, in whatever shape the release gives it."""
    assert answer.status_code == status_code, (answer.status_code, answer.text)
    message = answer.json()
    message = message.get("error", message)
    message = message.get("message", message.get("detail", message))
    return message if isinstance(message, str) else json.dumps(message)


def full_dpo(body: Json) -> Json:
    """The promised payload with all that a release demands which has its own schema."""
    training = body["training_config"]
    rate = training["learning_rate"]
    return {
        "job_uuid": body["job_uuid"],
        "finetuned_model": body["model"],
        "algorithm_config": {"beta": 0.2, "loss_type": "hinge"},
        "training_config": {
            **{name: value for name, value in training.items() if name != "learning_rate"},
            "data_config": {**training["data_config"], "data_format": "instruct"},
            "optimizer_config": {"optimizer_type": "adamw", "lr": rate, "weight_decay": 0.0, "num_warmup_steps": 0},
        },
        "hyperparam_search_config": {},
        "logger_config": {},
    }
