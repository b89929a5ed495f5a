"""The jobs of a pipeline in one request: all are queued, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from tests.contract.in_process import InProcess, Json, job, pipeline
from tests.contract.in_process import here as here


def test_all_jobs_are_queued_once_with_what_they_name(tmp_path: Path) -> None:
    here = InProcess(tmp_path, batch_size=2)
    here.add_rows()
    placed = {row["name"]: row for row in here.run(pipeline())}
    assert all(row["is_new"] and row["state"] == "scheduled" for row in placed.values())
    names = {name: row["job_uuid"] for name, row in placed.items()}
    store = here.service.store
    assert store.get(names["next"]).spec.after == (names["tune"],)
    assert set(store.get(names["average"]).spec.after) == {names["tune"], names["next"]}
    assert store.get(names["learn"]).spec.data.dataset.of_job == names["ask"]
    assert placed["tune"]["evaluation"] == f"{names['tune']}-evaluation"
    before = sorted(store.names())
    trials = {f"{names['searched']}-trial-1", f"{names['searched']}-trial-2"}
    assert set(before) == {*names.values(), *trials, f"{names['tune']}-evaluation"}
    again = here.run(pipeline())
    assert [row["job_uuid"] for row in again] == [row["job_uuid"] for row in placed.values()]
    assert not [row for row in again if row["is_new"]]
    assert sorted(store.names()) == before
    here.service.close()


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("next", {"training_config": {"data_config": {}}}, "jobs.next.training_config.n_epochs is not"),
        ("next", {"training_config": {"n_epochs": 1, "wrong": 1}}, "jobs.next.training_config.wrong=1"),
        ("next", {"model": "job:tune/checkpoint-x"}, "jobs.next.model="),
        ("next", {"kind": "sleep"}, "jobs.next.kind='sleep'"),
        ("next", {"provider_options": {"retries": -1}}, "jobs.next.provider_options.retries"),
        ("next", {"job_uuid": "mine"}, "jobs.next.job_uuid='mine'"),
        ("tune", {"algorithm_config": {"type": "LoRA"}}, "jobs.next."),  # an adapter needs a choice
    ],
)
def test_none_is_queued_where_one_cannot_be_honoured(here: InProcess, name: str, changes: Json, sentence: str) -> None:
    jobs = {"tune": job(), "next": job(model="job:tune")}
    jobs[name] |= changes
    assert sentence.partition(" is not")[0] in here.refused({"jobs": jobs})


def test_none_is_queued_where_the_limit_of_a_token_has_no_place_for_all(tmp_path: Path) -> None:
    token = "t" * 32
    tokens = [{"token": token, "name": "few", "role": "submit", "max_queued_jobs": 1}]
    here = InProcess(tmp_path, tokens=tokens)
    here.add_rows(token)
    assert "max_queued_jobs" in here.refused({"jobs": {"one": job(), "two": job(model="job:one")}}, 429, token)
    assert [row["is_new"] for row in here.run({"jobs": {"one": job()}}, token)] == [True]
    here.service.close()


def test_a_service_that_ends_within_the_request_has_queued_nothing_and_a_repetition_queues_all(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {"jobs": {"one": job(), "two": job(model="job:one")}}
    add = Store._add

    class Killed(BaseException):
        pass

    def killed(self: Store, execute: Any, new: Any, *more: Any) -> bool:
        if new.spec.job_uuid.startswith("two"):
            raise Killed
        return add(self, execute, new, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_add", killed)
        with pytest.raises(Killed):
            here.post("/v1/post-training/pipelines", jobs)
    assert here.service.store.names() == []
    assert [row["is_new"] for row in here.run(jobs)] == [True, True]
