"""An input of a role that no request has, in a method that a test makes: all that reads the inputs of jobs sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict
from llama_stack_provider_trl.jobs.inputs.bases import check_checkpoints
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.launch.isolation import spec_paths
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.job import AttemptSpec, DatasetRef, JobSpec
from llama_stack_provider_trl.specs.methods import SftSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl_remote.nodes import consent
from llama_stack_provider_trl_remote.nodes.localize import PathMap
from llama_stack_provider_trl_remote.nodes.models import models_used
from llama_stack_provider_trl_remote.service.cluster.models import ServedModels
from tests.fakes import job_spec
from tests.orders import AA, BB, order, write
from tests.unit.based_jobs import complete


class CriticSpec(SftSpec):
    """A method that reads a model and rows of its own."""

    critic: ModelSource
    drills: DatasetRef


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What the job critic-1 has made."""
    final = tmp_path / "checkpoints" / "critic-1" / "final"
    for name in ("config.json", "model.safetensors"):
        write(final / name, b"{}")
    return final


@pytest.fixture
def job(made: Path) -> JobSpec:
    critic = ModelSource(
        model=str(made), trust_remote_code=True, made_by=BaseJob(job_uuid="critic-1", checkpoint="final")
    )
    drills = DatasetRef(dataset_id="drills", path=Path(f"/service/datasets/{BB}.jsonl"), sha256=BB, num_rows=3)
    rows = DatasetRef(dataset_id="rows", path=Path(f"/service/datasets/{AA}.jsonl"), sha256=AA, num_rows=3)
    return job_spec("job", method=CriticSpec(critic=critic, drills=drills), dataset=rows, after=("critic-1",))


@pytest.fixture
def paths(job: JobSpec, tmp_path: Path) -> PathMap:
    """Those of an order for the job on a node."""
    found = PathMap(order(), tmp_path / "node")
    # The specification in an order is JSON, which a made-up method does not survive.
    found.__dict__["attempt"] = AttemptSpec(job=job, attempt=1, run_dir=Path("/service/jobs/job/attempts/1"))
    return found


def test_the_job_that_makes_it_is_waited_for_and_kept(job: JobSpec, store: Store) -> None:
    store.add_job(job_spec("critic-1"), "digest")
    store.add_job(job, "digest")
    assert [job.job_uuid for job in store.queue()] == ["critic-1"]
    complete(store, "critic-1")
    with pytest.raises(JobConflict, match="job wait for it or use its checkpoint"):
        store.delete("critic-1")


def test_a_job_does_not_start_where_it_is_damaged(job: JobSpec, made: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"job:critic-1/final.* is damaged or gone: train job 'critic-1' again"):
        check_checkpoints(job)


def test_an_isolated_training_sees_it(job: JobSpec, made: Path, tmp_path: Path) -> None:
    attempt = AttemptSpec(job=job, attempt=1, run_dir=tmp_path)
    assert {made, Path(f"/service/datasets/{BB}.jsonl")} <= set(spec_paths(attempt, ()).read)


def test_a_node_reads_its_own_copies(paths: PathMap, made: Path, tmp_path: Path) -> None:
    assert [rows.sha256 for rows in paths.datasets()] == [AA, BB]
    assert str(made) in models_used(paths)
    found = paths.spec(models={str(made): Path("/node/models/0c")}).job.method
    assert isinstance(found, CriticSpec)
    assert (found.critic.path, found.drills.path) == (Path("/node/models/0c"), paths.rows(BB))


def test_a_node_runs_no_code_of_it_without_consent(paths: PathMap, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "attempt_of", lambda _: paths.attempt)
    with pytest.raises(consent.NoConsent, match=str(made)):
        consent.check_consent(order(), (), 4)


def test_the_service_lists_its_files_for_nodes(job: JobSpec, made: Path, tmp_path: Path) -> None:
    models = ServedModels(tmp_path / "model-manifests", lambda: None, {"HF_HUB_CACHE": str(tmp_path / "hub")})
    try:
        while (found := models.of_job(job)) is None:
            pass
        assert str(made) in [files.model for files in found]
    finally:
        models.close()
