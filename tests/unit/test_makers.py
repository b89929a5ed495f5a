"""Names of datasets that jobs are to make: one job each, and nothing else meanwhile."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.datasets import no_new_maker
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.work import ROWS, GenerateSpec
from llama_stack_provider_trl.system.files import sha256_of
from llama_stack_provider_trl_remote.service.datasets.blobs import Blobs
from llama_stack_provider_trl_remote.service.datasets.registry import DatasetRegistry
from llama_stack_provider_trl_remote.service.http.dataset_bodies import RegisterDataset
from llama_stack_provider_trl_remote.service.http.errors import Conflict
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fakes import job_spec


def generating(name: str, dataset_id: str, tmp_path: Path) -> JobSpec:
    work = GenerateSpec(
        output_dataset_id=dataset_id, max_new_tokens=8, temperature=1.0, top_p=1.0, seed=1, samples_per_prompt=1
    )
    return job_spec(name, checkpoint_dir=tmp_path / name, work=work)


@pytest.fixture
def registry(tmp_path: Path, store: Store) -> DatasetRegistry:
    settings = ServiceSettings.model_validate({"data_dir": tmp_path / "data", "device": "cpu"})
    blobs = Blobs(settings)
    blobs.prepare()
    registry = DatasetRegistry(settings, blobs, maker=partial(no_new_maker, store.database))
    registry.prepare()
    return registry


def register(registry: DatasetRegistry, name: str) -> Any:
    rows = [{"prompt": "a", "completion": "b"}]
    body = {"dataset_id": name, "purpose": "post-training/messages", "source": {"type": "rows", "rows": rows}}
    return asyncio.run(registry.register(RegisterDataset.model_validate(body)))


def test_a_name_is_promised_by_one_job_until_that_has_ended(store: Store, tmp_path: Path) -> None:
    assert store.add_job(generating("a", "answers", tmp_path), "digest")
    assert not store.add_job(generating("a", "answers", tmp_path), "digest")  # the same POST again
    with pytest.raises(InvalidRequest, match=r"^output\.dataset_id='answers' is not supported: job 'a' is to make a"):
        store.add_job(generating("b", "answers", tmp_path), "digest")
    assert store.names() == ["a"]
    assert store.add_job(generating("c", "others", tmp_path), "digest")
    store.request_cancel("a")
    assert store.get("a").state is JobState.cancelled
    assert store.add_job(generating("b", "answers", tmp_path), "digest")


def test_of_jobs_that_promise_a_name_at_once_one_is_stored(store: Store, tmp_path: Path) -> None:
    def add(name: str) -> bool:
        try:
            return store.add_job(generating(name, "answers", tmp_path), "digest")
        except InvalidRequest:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(add, [f"job-{number}" for number in range(8)])) == 1
    assert len(store.names()) == 1


def test_a_dataset_is_not_registered_under_a_promised_name(
    store: Store, registry: DatasetRegistry, tmp_path: Path
) -> None:
    store.add_job(generating("a", "answers", tmp_path), "digest")
    with pytest.raises(Conflict, match="job 'a' is to make a dataset of the name 'answers': choose another dataset_id"):
        register(registry, "answers")
    assert not registry.holds("answers")
    (tmp_path / "a").mkdir()
    rows = tmp_path / "a" / ROWS
    rows.write_text('{"prompt": "a"}\n')
    registry.register_made("answers", rows, reported(rows, 1), "a", "")
    assert registry.holds("answers")
    store.request_cancel("a")
    registry.delete("answers")
    assert register(registry, "answers").identifier == "answers"


def test_a_name_is_looked_up_while_a_registration_waits_for_the_database(registry: DatasetRegistry) -> None:
    with ThreadPoolExecutor(1) as pool, registry._registering:  # released first at the end
        assert not pool.submit(registry.holds, "answers").result(timeout=10)
    register(registry, "answers")
    with ThreadPoolExecutor(1) as pool, registry._registering:  # released first at the end
        assert pool.submit(registry.holds, "answers").result(timeout=10)


def reported(rows: Path, num_rows: int) -> dict[str, Any]:
    return {"sha256": sha256_of(rows), "num_rows": num_rows}


@pytest.mark.parametrize("wrong", [{"num_rows": 2}, {"num_rows": "1"}, {"sha256": "0" * 64}, {"path": "/etc/passwd"}])
def test_rows_that_are_not_those_of_the_result_are_refused(
    registry: DatasetRegistry, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """A job that comes after reads them as the result has them (`promised.with_known_rows`), which a node may send."""
    rows = tmp_path / ROWS
    rows.write_text('{"prompt": "a"}\n')
    others: list[Any] = [{**reported(rows, 1), **wrong}, None, []]
    for made in others:
        with pytest.raises(InvalidRequest, match="was changed after the job had written it"):
            registry.register_made("answers", rows, made, "a", "")
    assert not registry.holds("answers")


def test_a_job_does_not_make_a_dataset_of_more_rows_than_one_may_have(tmp_path: Path) -> None:
    rows = tmp_path / ROWS
    rows.write_text('{"prompt": "a"}\n' * 3)
    settings = ServiceSettings(data_dir=tmp_path, max_rows=2)
    registry = DatasetRegistry(settings, Blobs(settings))
    registry.prepare()
    with pytest.raises(InvalidRequest, match=rf"more than 2 rows \(max_rows\).*the rows of this job are in {rows}"):
        registry.register_made("answers", rows, reported(rows, 3), "a", "")
    assert not list(registry._blobs.directory.glob("*.jsonl"))
    assert not registry.holds("answers")


def test_rows_of_a_job_are_read_in_pieces_whatever_lines_they_have(registry: DatasetRegistry, tmp_path: Path) -> None:
    """A node may send a line without an end, and the service itself reads it."""
    rows = tmp_path / ROWS
    rows.write_bytes(b"{}\n{}\n")
    os.truncate(rows, 24 << 20)  # zeros follow
    made = reported(rows, 3)
    tracemalloc.start()
    try:
        registry.register_made("answers", rows, made, "a", "")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20
    assert registry.get("answers").metadata["num_rows"] == 3


def test_a_job_whose_name_is_taken_at_its_end_names_the_file_of_its_rows(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    register(registry, "answers")
    rows = tmp_path / ROWS
    rows.write_text('{"prompt": "a"}\n')
    with pytest.raises(JobConflict, match=f"registered with another content meanwhile; the rows .* {rows}: register"):
        registry.register_made("answers", rows, reported(rows, 1), "a", "")


def test_a_job_is_not_stored_when_its_name_was_registered_meanwhile(
    store: Store, registry: DatasetRegistry, tmp_path: Path
) -> None:
    def admit() -> None:
        if registry.holds("answers"):
            raise InvalidRequest("output.dataset_id", "answers", "a dataset of this name is registered already")

    spec = generating("a", "answers", tmp_path)
    register(registry, "answers")
    with pytest.raises(InvalidRequest, match="registered already"):
        store.add_job(spec, "digest", admit=admit)
    assert store.names() == []
    registry.delete("answers")
    assert store.add_job(spec, "digest", admit=admit)
    assert not store.add_job(spec, "digest", admit=admit)
