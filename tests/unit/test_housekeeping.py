from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import RowsRemoved, StoreError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision import housekeeping
from llama_stack_provider_trl.jobs.supervision.housekeeping import remove_unused_rows
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.system.files import Blob, put_rows, touched
from tests.fakes import FakeLauncher, job_spec

DAY = 86400.0
WEEK = 7 * DAY


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    return tmp_path / "datasets"


def aged(path: Path, seconds: float) -> Path:
    """As if it had been untouched for so long."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def old_rows(datasets: Path, text: str) -> Blob:
    blob = put_rows(datasets, [{"text": text}])
    aged(blob.path, WEEK + DAY)
    return blob


def ref(blob: Blob) -> DatasetRef:
    return DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)


def test_rows_go_once_no_job_and_no_dataset_refers_to_them_and_their_time_is_over(datasets: Path, store: Store) -> None:
    trained, validated, registered, unused = (old_rows(datasets, text) for text in ("a", "b", "c", "d"))
    young = put_rows(datasets, [{"text": "e"}])
    store.add_job(job_spec("a", dataset=ref(trained), validation=ref(validated)), "digest")
    (datasets / "registry").mkdir()
    (datasets / "registry" / "x.json").write_text(f'{{"sha256": "{registered.sha256}"}}')
    verdict = datasets / f"{unused.sha256}.sft-any.json"
    verdict.write_text("{}")
    assert remove_unused_rows(datasets, store, None) == []
    assert remove_unused_rows(datasets, store, WEEK) == [unused.sha256]
    assert not verdict.exists()
    kept = {blob.path for blob in (trained, validated, registered, young)}
    assert {path for path in datasets.iterdir() if path.is_file()} == kept


def test_a_dataset_that_is_deleted_while_rows_are_removed_keeps_no_others(
    datasets: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused, read_text = old_rows(datasets, "a"), Path.read_text
    (datasets / "registry").mkdir()
    (datasets / "registry" / "x.json").write_text("{}")

    def read_late(path: Path, **arguments: Any) -> str:
        path.unlink(missing_ok=True)
        return read_text(path, **arguments)

    monkeypatch.setattr(Path, "read_text", read_late)
    assert remove_unused_rows(datasets, store, WEEK) == [unused.sha256]


def test_deleting_a_job_frees_its_rows(datasets: Path, store: Store) -> None:
    blob = old_rows(datasets, "a")
    store.add_job(job_spec("a", dataset=ref(blob)), "digest")
    assert remove_unused_rows(datasets, store, WEEK) == []
    store.transition("a", 0, JobState.scheduled, JobState.cancelled)
    store.delete("a")
    assert remove_unused_rows(datasets, store, WEEK) == [blob.sha256]


def test_rows_that_are_stored_again_start_a_new_retention(datasets: Path, store: Store) -> None:
    requested, uploaded = old_rows(datasets, "a"), old_rows(datasets, "b")
    assert touched(requested.path)
    assert put_rows(datasets, [{"text": "b"}]) == uploaded
    assert remove_unused_rows(datasets, store, WEEK) == []


def test_rows_that_are_touched_while_they_are_taken_are_put_back(
    datasets: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = old_rows(datasets, "a")
    registered = housekeeping._registered

    def slow(directory: Path) -> set[str]:
        found = registered(directory)
        assert touched(blob.path)
        return found

    monkeypatch.setattr(housekeeping, "_registered", slow)
    assert remove_unused_rows(datasets, store, WEEK) == []
    assert blob.path.read_text() == '{"text":"a"}\n'


def test_a_job_whose_rows_are_gone_is_not_stored(datasets: Path, store: Store) -> None:
    blob = old_rows(datasets, "a")
    assert remove_unused_rows(datasets, store, WEEK) == [blob.sha256]
    with pytest.raises(RowsRemoved, match="was removed while job"):
        store.add_job(job_spec("a", dataset=ref(blob)), "digest", (), [blob.path])
    assert store.names() == []


def test_no_job_is_added_while_rows_are_taken(datasets: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._BUSY_SECONDS", 0.0)
    other = Store(store.path)
    blob = put_rows(datasets, [{"text": "a"}])
    with store.no_new_jobs() as referred, pytest.raises(StoreError, match="locked"):
        other.add_job(job_spec("a", dataset=ref(blob)), "digest", (), [blob.path])
    assert referred == set()
    other.close()


def test_the_rest_of_a_broken_upload_is_removed_after_a_day(datasets: Path, store: Store) -> None:
    datasets.mkdir()
    abandoned = datasets / ".rows-abandoned"
    abandoned.write_text("{")
    broken, upload = datasets / ".incoming-broken", datasets / ".incoming-slow"
    for directory in (broken, upload):
        directory.mkdir()
        (directory / "rows").write_text("{")
        aged(directory, 2 * DAY)
    aged(broken / "rows", 2 * DAY)
    aged(abandoned, 2 * DAY)
    fresh = datasets / ".rows-fresh"
    fresh.write_text("{")
    remove_unused_rows(datasets, store, None)
    assert {path.name for path in datasets.iterdir()} == {upload.name, fresh.name}


def test_a_supervisor_cleans_at_its_start_and_then_once_in_a_while(
    tmp_path: Path, datasets: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(store, FakeLauncher(), ["cpu"], tmp_path, blob_retention=WEEK)
    first = old_rows(datasets, "a")
    supervisor.tick()
    assert not first.path.exists()
    second = old_rows(datasets, "b")
    supervisor.tick()
    assert second.path.exists()
    monkeypatch.setattr(supervisor, "_last_clean", time.monotonic() - housekeeping.INTERVAL - 1)
    supervisor.tick()
    assert not second.path.exists()


def test_rows_that_cannot_be_removed_cost_no_pass(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> list[str]:
        raise PermissionError("Permission denied")

    monkeypatch.setattr("llama_stack_provider_trl.jobs.supervision.supervisor.remove_unused_rows", refuse)
    Supervisor(store, FakeLauncher(), ["cpu"], tmp_path).tick()
    assert "unused rows cannot be removed: Permission denied" in caplog.text
