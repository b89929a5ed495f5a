"""Calls of an application in this process, without a port."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from fastapi import FastAPI

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.security.guarded import BODIES, HIDDEN, HTTP_METHODS, KNOWN, QUERIES, without_version


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


async def answer_of(
    app: FastAPI,
    method: str,
    target: str,
    body: bytes = b"",
    content_type: str = "application/json",
    token: str = "",
    encoding: str = "",
    cookie: str = "",
) -> Answer:
    """What a route answers, of a stream its beginning."""
    path, _, query = target.partition("?")
    scope = {
        **{"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode()},
        **{"scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8322)},
        "headers": [
            (b"host", b"127.0.0.1:8322"),
            (b"origin", b"http://127.0.0.1:8322"),
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
            *([(b"authorization", f"Bearer {token}".encode())] if token else []),
            *([(b"cookie", cookie.encode())] if cookie else []),
            *([(b"content-encoding", encoding.encode())] if encoding else []),
        ],
    }
    sent: list[dict[str, Any]] = []
    received, answered = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal received
        if received:
            await answered.wait()
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            answered.set()

    async with asyncio.timeout(20):
        await app(scope, receive, send)  # type: ignore[arg-type]
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(one.get("body", b"") for one in sent[1:]).decode())


def calls(app: FastAPI) -> Iterator[tuple[str, str, bytes, str]]:
    """(method, target, body, content type) of every route."""
    paths = app.openapi()["paths"].items()
    documented = [(method.upper(), path) for path, of in paths for method in of if method in HTTP_METHODS]
    for method, path in [*documented, *HIDDEN]:
        call = f"{method} {without_version(path)}"
        target = path.format(**KNOWN) + (f"?{QUERIES[call]}" if call in QUERIES else "")
        body = json.dumps(BODIES[call]).encode() if call in BODIES else {"POST": b"{}", "PUT": b"x"}.get(method, b"")
        kind = "application/json" if method == "POST" else "application/octet-stream"
        if (method, path) in HIDDEN and method == "POST":
            body, kind = b"", "application/x-www-form-urlencoded"
        yield method, target, body, kind


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    root = tmp_path_factory.mktemp("data")
    os.chmod(root, 0o700)
    service = Service(ServiceSettings(data_dir=root, device="cpu", isolation="off", warm_start=False))
    service.blobs.prepare()
    service.datasets.prepare()
    yield make_app(service)
    service.close()
