"""Bodies that are packed or nested too deeply, on every route: a sentence that names what is wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.security.in_process_calls import answer_of, calls

pytestmark = pytest.mark.contract
DEEP = "[" * 3000 + "]" * 3000
TOO_DEEP = "the body is nested more than 64 levels deep: flatten it"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    (tmp_path / "data").mkdir(mode=0o700)
    service = Service(ServiceSettings(data_dir=tmp_path / "data", device="cpu", isolation="off", warm_start=False))
    service.blobs.prepare()
    service.datasets.prepare()
    yield make_app(service)
    service.close()


def test_a_packed_body_is_refused_by_its_header_on_every_route(app: FastAPI) -> None:
    async def answers() -> dict[str, str]:
        with_bodies = [call for call in calls(app) if call[0] in ("POST", "PUT")]
        return {
            f"{method} {target}": (
                await answer_of(app, method, target, gzip.compress(body), kind, encoding="gzip")
            ).text
            for method, target, body, kind in with_bodies
        }

    found = asyncio.run(answers())
    sentence = "the Content-Encoding is 'gzip', expected none: send the body as it is"
    assert len(found) > 30
    assert not {call: text for call, text in found.items() if sentence not in text.replace("&#39;", "'")}


def test_an_encoding_that_changes_nothing_is_accepted(app: FastAPI) -> None:
    answer = asyncio.run(
        answer_of(app, "POST", "/v1/post-training/job/cancel", b'{"job_uuid": "a"}', encoding="identity")
    )
    assert answer.status == 404


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        '{"dataset_id": ' + "[" * 100_000,
        '{"dataset_id": "a", "purpose": "post-training/messages", "source": {"type": "rows", "rows": [{"prompt": "a", '
        f'"completion": "b", "more": {DEEP}}}]}}, "filler": "{"x" * (1 << 20)}"}}',
        '{"dataset_id": "a", "purpose": "post-training/messages", "source": {"type": "rows", "rows": [{"prompt": '
        f'"{"x" * (1 << 20)}", "completion": "b"}}]}}, "metadata": {{"a": {DEEP}}}}}',
    ],
    ids=["brackets", "in a field", "in a row of a large body", "in the rest of a large body"],
)
def test_a_body_that_is_nested_too_deeply_is_refused_as_such(app: FastAPI, body: str) -> None:
    answer = asyncio.run(answer_of(app, "POST", "/v1/datasets", body.encode()))
    assert (answer.status, json.loads(answer.text)["detail"]) == (400, TOO_DEEP)
