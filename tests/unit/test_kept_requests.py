"""The request of a job, kept for its clones."""

from __future__ import annotations

import json

import pytest

from llama_stack_provider_trl.jobs.store import reader
from llama_stack_provider_trl.jobs.store.reader import LONGEST_REQUEST, SentRequest, keep_request, read_request
from llama_stack_provider_trl.jobs.store.store import Store
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
