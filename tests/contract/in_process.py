"""A service in this process, without its supervisor."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.security.in_process_calls import Answer, answer_of

Json = dict[str, Any]


class InProcess:
    """A service without its supervisor, behind its routes."""

    def __init__(self, root: Path, **settings: Any) -> None:
        os.chmod(root, 0o700)
        fixed = {"data_dir": root, "device": "cpu", "isolation": "off", "warm_start": False}
        self.service = Service(ServiceSettings.model_validate({**fixed, **settings}))
        self.service.blobs.prepare()
        self.service.datasets.prepare()
        self.app = make_app(self.service)

    def post(self, path: str, body: Json, token: str = "") -> Answer:
        return asyncio.run(answer_of(self.app, "POST", path, json.dumps(body).encode(), token=token))

    def run(self, pipeline: Json, token: str = "") -> list[Json]:
        answer = self.post("/v1/post-training/pipelines", pipeline, token)
        assert answer.status == 200, answer.text
        return list(json.loads(answer.text)["data"])

    def refused(self, pipeline: Json, status: int = 400, token: str = "") -> str:
        answer = self.post("/v1/post-training/pipelines", pipeline, token)
        assert answer.status == status, answer.text
        assert self.service.store.names() == []
        return str(json.loads(answer.text)["detail"])

    def add_rows(self, token: str = "") -> None:
        rows = {"purpose": "post-training/messages", "source": {"type": "rows", "rows": QUESTIONS}}
        answer = self.post("/v1/datasets", {"dataset_id": "questions", **rows}, token)
        assert answer.status == 200, answer.text


def job(**changes: Any) -> Json:
    return {name: value for name, value in sft("", "questions", **changes).items() if name != "job_uuid"}


def pipeline() -> Json:
    search = {"method": "grid", "parameters": {"training_config.optimizer_config.lr": [1e-3, 1e-4]}}
    model = job()["model"]
    searched = job(hyperparam_search_config=search, provider_options={"after": ["next"]})
    training = searched["training_config"]
    training["data_config"] = {**training["data_config"], "validation_dataset_id": "questions"}
    return {
        "jobs": {
            "next": job(model="job:tune"),
            "tune": job(provider_options={"evaluate": {"dataset_id": "questions"}}),
            "ask": {"kind": "generate", "model": "job:next", "dataset_id": "questions"},
            "learn": {**job(), "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "job:ask"}}},
            "average": {"kind": "merge", "models": [{"model": "job:tune"}, {"model": "job:next"}]},
            "measure": {
                "kind": "evaluate",
                "models": [{"model": model}, {"model": "job:tune"}],
                "dataset_id": "questions",
            },
            "searched": searched,
        }
    }


@pytest.fixture
def here(tmp_path: Path) -> Iterator[InProcess]:
    """With the rows `questions`."""
    made = InProcess(tmp_path)
    made.add_rows()
    yield made
    made.service.close()
