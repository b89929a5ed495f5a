"""Bodies that are packed or nested too deeply, and headers that take long, on every route."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from llama_stack_provider_trl_remote.openai.multipart import extended_text, parameters_of
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


def test_a_long_content_type_is_refused_and_cookies_are_parsed_by_nobody_on_every_route(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(header: str) -> dict[str, str]:
        raise AssertionError(header)

    monkeypatch.setattr("starlette.requests.cookie_parser", parse)

    async def answers(length: int) -> dict[str, int]:
        return {
            f"{method} {target}": (
                await answer_of(app, method, target, body, kind.ljust(length, ";"), cookie='a="\\"')
            ).status
            for method, target, body, kind in calls(app)
            if method in ("POST", "PUT") or length == 256
        }

    assert {*asyncio.run(answers(257)).values()} == {400}
    assert not {call: status for call, status in asyncio.run(answers(256)).items() if status == 500}


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("Form-Data; name = file;filename=a b.jsonl ", {"name": "file", "filename": "a b.jsonl"}),
        ('form-data; filename="a\\b.jsonl"', {"filename": "a\\b.jsonl"}),
        ('form-data; name="file"; filename="a; b=\\"c\\".jsonl"', {"name": "file", "filename": 'a; b="c".jsonl'}),
        ('form-data; name="a"; name="b"; filename*=UTF-8\'\'%E2%82%AC', {"name": "a", "filename*": "UTF-8''%E2%82%AC"}),
        ('form-data; a="' + ";" * 4000, {"a": ""}),
    ],
)
def test_parameters_of_a_header_are_read_as_clients_write_them(header: str, found: dict[str, str]) -> None:
    assert parameters_of(header) == ("form-data", found)
    assert extended_text("UTF-8''%E2%82%AC") == extended_text("iso-8859-15''%E2%82%AC") == "€"


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
