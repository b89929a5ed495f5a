"""The request of a job, kept for its clones."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.store import reader
from llama_stack_provider_trl.jobs.store.reader import LONGEST_REQUEST, SentRequest, keep_request, read_request
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.service.http.bodies import PreferenceOptimizeBody
from llama_stack_provider_trl_remote.service.jobs import submissions
from llama_stack_provider_trl_remote.service.jobs.submissions import Submissions
from tests.fakes import job_spec

MOST_BODY = 1 << 20
"""Bytes of the body of a call (`security.access.USERS_JOB`)."""


@pytest.mark.parametrize("letter", ["a", '"', "é", "你", "😊"])
def test_the_largest_request_of_a_call_is_kept_whole(store: Store, letter: str) -> None:
    store.add_job(job_spec("a"), "digest")
    count = (MOST_BODY - 100) // max(len(letter.encode()), len(json.dumps(letter, ensure_ascii=False).encode()) - 2)
    sent = SentRequest("supervised-fine-tune", {"provider_options": {"system_prompt": letter * count}})
    assert len(json.dumps(sent.body, ensure_ascii=False).encode()) > MOST_BODY - 200
    assert len(json.dumps(sent.body)) <= LONGEST_REQUEST
    keep_request(store, "a", sent)
    assert read_request(store, "a") == sent


def test_a_longer_one_is_not_kept_and_one_of_a_job_that_is_gone_neither(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_job(job_spec("a"), "digest")
    monkeypatch.setattr(reader, "LONGEST_REQUEST", 20)
    for name, body in (("a", {"text": "x" * 20}), ("b", {"n": 1})):
        keep_request(store, name, SentRequest("merge", body))
        assert read_request(store, name) is None
    keep_request(store, "a", SentRequest("merge", {"n": 1}))
    assert read_request(store, "a") == SentRequest("merge", {"n": 1})


REQUESTS_OF_OTHER_BUILDS = """
CREATE TABLE requests (job_uuid TEXT PRIMARY KEY REFERENCES jobs (job_uuid), call TEXT NOT NULL, body {} NOT NULL)
STRICT, WITHOUT ROWID;
INSERT INTO requests VALUES ('old', 'merge', CAST('{{}}' AS {}));
"""


@pytest.mark.parametrize("kind", ["TEXT", "BLOB"])
@pytest.mark.parametrize("was_here_before", [False, True])
def test_a_database_of_another_build_keeps_requests_and_deletes_jobs(
    tmp_path: Path, kind: str, was_here_before: bool
) -> None:
    path = tmp_path / "jobs.db"
    store = Store(path)
    store.add_job(job_spec("old"), "digest")
    store.request_cancel("old")
    store.close()
    with closing(sqlite3.connect(path)) as other, other:
        other.executescript("DROP TABLE IF EXISTS requests")
        if not was_here_before:
            other.executescript("DROP TABLE IF EXISTS kept_requests")
        other.executescript(REQUESTS_OF_OTHER_BUILDS.format(kind, kind))
    store = Store(path)
    assert read_request(store, "old") is None
    store.add_job(job_spec("new"), "digest")
    sent = SentRequest("merge", {"n": 1})
    keep_request(store, "new", sent)
    assert read_request(store, "new") == sent
    assert store.delete("old").job_uuid == "old"
    store.close()


def test_a_request_that_cannot_be_kept_is_no_failure_of_its_stored_job(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.IntegrityError("cannot store BLOB value in TEXT column requests.body")

    monkeypatch.setattr(submissions, "keep_request", fail)
    store.add_job(job_spec("a"), "digest")
    none: Any = None
    made = Submissions(none, none, store, none, none, none, none, none)
    monkeypatch.setattr(made, "_space", type("Counts", (), {"note_job": lambda *_: None})())
    made._note_job("a", PreferenceOptimizeBody.model_construct(job_uuid="a"))
    assert "job a: its request is not kept, so it cannot be cloned: cannot store BLOB value" in caplog.text
