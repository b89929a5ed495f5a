"""A status that is requested while the job changes, inside Llama Stack and of the training service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.post_training import TrlPostTraining
from llama_stack_provider_trl.specs.events import CheckpointSaved, Started
from llama_stack_provider_trl.stack.responses import PostTrainingJobStatusResponse
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fakes import job_spec

pytestmark = pytest.mark.contract
Status = tuple[Store, Callable[[], PostTrainingJobStatusResponse]]


def inline(data_dir: Path) -> Status:
    provider = TrlPostTraining(TrlConfig(data_dir=data_dir, device="cpu"), {})
    return provider.store, lambda: asyncio.run(provider.get_training_job_status("job-1"))


def remote(data_dir: Path) -> Status:
    service = Service(ServiceSettings(data_dir=data_dir, device="cpu"))
    return service.store, lambda: service.jobs.status("job-1")


@pytest.mark.parametrize("provider", [inline, remote])
def test_a_job_that_changes_while_its_status_is_read_is_as_it_was_before(
    provider: Callable[[Path], Status], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, status = provider(tmp_path)
    store.add_job(job_spec(checkpoint_dir=tmp_path / "checkpoints" / "out"), "digest")
    assert store.launch("job-1", 1, "cpu", tmp_path / "run")
    other, get = Store(store.path), store.get

    def get_and_continue(job_uuid: str) -> JobRecord:
        job = get(job_uuid)
        path = tmp_path / "checkpoints" / "out" / "checkpoint-2"
        saved = CheckpointSaved(kind="step", step=2, epoch=1, path=path, train_loss=1.0)
        other.apply_events("job-1", 1, [Started(pid=1, device="cpu", versions={}), saved], 100)  # counts once
        return job

    monkeypatch.setattr(store, "get", get_and_continue)
    before = status()
    assert (before.started_at, before.checkpoints) == (None, [])
    monkeypatch.setattr(store, "get", get)
    after = status()
    assert after.started_at
    assert [checkpoint.identifier for checkpoint in after.checkpoints] == ["tiny-tuned-checkpoint-2"]
    other.close()
    store.close()
