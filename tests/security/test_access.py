"""Who may call what: one declaration on each route, enforced before any of a body is read."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.http.errors import handle_errors
from llama_stack_provider_trl_remote.service.security.access import GuardedRoute
from llama_stack_provider_trl_remote.service.security.audit import Refusal
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fakes import fake_context

TOKENS = {"admin": "a", "submit": "s", "node": "n", "": ""}


def call(method: str, path: str, role: str, body: bytes = b"", **headers: str) -> tuple[int, bool]:
    """The status of a call, and whether any of its body was read before the answer began."""
    settings = ServiceSettings.model_validate(
        {"api_token": "a", "tokens": [{"token": "s"}, {"token": "n", "role": "node"}]}
    )
    read_before_answer, statuses = False, []

    async def receive() -> Any:
        nonlocal read_before_answer
        read_before_answer = read_before_answer or not statuses
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    given = {"host": "127.0.0.1", "content-length": str(len(body)), "expect": "100-continue", **headers}
    given |= {"authorization": f"Bearer {TOKENS[role]}"} if role else {}
    scope = {
        **{"type": "http", "method": method, "path": path, "query_string": b""},
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
    }
    asyncio.run(make_app(fake_context(settings))(scope, receive, send))
    return statuses[0], read_before_answer


def test_a_route_without_a_declared_role_cannot_be_made() -> None:
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(TypeError, match="the route /open declares 0 Access dependencies, expected exactly one"):
        router.add_api_route("/open", lambda: None)


@pytest.mark.parametrize("path", ["/v1/nodes\n", "/v1/nodes\r\n", "/v1/nodes/a/poll\n", "/v1/nodes/a\0/poll"])
@pytest.mark.parametrize("role", ["submit", "node", "admin", ""])
def test_a_control_character_in_a_path_is_refused_for_every_caller(path: str, role: str) -> None:
    assert call("POST", path, role, b"{}", content_type="application/json") == (400, False)


@pytest.mark.parametrize(
    ("method", "path", "role", "status"),
    [
        ("POST", "/v1/nodes", "submit", 403),
        ("POST", "/v1/nodes/a/poll", "submit", 403),
        ("PUT", "/v1/nodes/a/tasks/t/logs/rank-0.log", "submit", 403),
        ("POST", "/v1/datasets", "node", 403),
        ("PUT", "/v1/blobs/" + "0" * 64, "node", 403),
        ("DELETE", "/v1/nodes/a", "node", 403),
        ("GET", "/v1/nodes", "node", 403),
        ("HEAD", "/v1/blobs/" + "0" * 64, "node", 403),
        # The token that joins opens a join, and no call of a node.
        ("POST", "/v1/nodes/a/poll", "node", 403),
        ("PUT", "/v1/nodes/a/tasks/t/logs/rank-0.log", "node", 403),
        ("GET", "/v1/blobs/" + "0" * 64, "node", 403),
        ("GET", "/v1/post-training/jobs/j/checkpoints", "node", 403),
        ("DELETE", "/v1/post-training/jobs/j", "submit", 403),
        ("POST", "/v1/nodes", "", 401),
        ("PATCH", "/v1/nodes", "", 401),
        ("GET", "/v1/no-such-thing", "", 401),
        ("GET", "/v1/no-such-thing", "node", 404),
        ("GET", "/openapi.json", "", 401),
        ("GET", "/openapi.json", "node", 403),
    ],
)
def test_a_role_is_refused_before_the_body_is_read(method: str, path: str, role: str, status: int) -> None:
    assert call(method, path, role, b"x" * 100, content_type="application/json") == (status, False)


def test_a_body_that_is_announced_too_large_for_its_route_is_not_read() -> None:
    json = {"content_type": "application/json"}
    assert call("POST", "/v1/post-training/job/cancel", "submit", b" " * 70_000, **json) == (413, False)
    assert call("POST", "/v1/post-training/preference-optimize", "submit", b" " * (2 << 20), **json) == (413, False)
    assert call("POST", "/v1/nodes/a/tasks/t/events", "admin", b" " * (5 << 20)) == (413, False)


@pytest.mark.parametrize("role", ["admin", ""])
def test_a_body_with_two_lengths_is_refused(role: str) -> None:
    headers = {"content_type": "application/json", "transfer_encoding": "chunked"}
    assert call("POST", "/v1/post-training/job/cancel", role, b" ", **headers) == (400, False)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/no-such-thing", 404), ("PUT", "/v1/nodes", 405)])
def test_unknown_paths_and_methods_count_as_requests_of_a_token(method: str, path: str, status: int) -> None:
    settings = ServiceSettings.model_validate({"api_token": "a", "tokens": [{"token": "s", "requests_per_second": 1}]})
    app, statuses = make_app(fake_context(settings)), []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    for _ in range(3):
        scope = {
            **{"type": "http", "method": method, "path": path, "query_string": b""},
            "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer s")],
        }
        asyncio.run(app(scope, receive, send))
    assert statuses == [status, status, 429]


def test_a_call_of_a_removed_node_is_recorded_with_its_name() -> None:
    found = SimpleNamespace(node="gone", revoked=True, used=True)
    kept: list[Refusal] = []
    context = fake_context(
        ServiceSettings.model_validate({"api_token": "a"}),
        store=SimpleNamespace(nodes=SimpleNamespace(credential=lambda sha256: found)),
        refusals=SimpleNamespace(add=kept.append),
    )

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    statuses: list[int] = []

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/nodes/gone/poll", "query_string": b"", "client": ("::1", 1)},
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer credential")],
    }
    asyncio.run(make_app(context)(scope, receive, send))
    assert statuses == [410]
    assert [(one.status, one.caller, one.node, one.address) for one in kept] == [(410, "gone", "gone", "::1")]


def test_every_call_shows_its_roles_in_the_document() -> None:
    settings = ServiceSettings.model_validate({"api_token": "a"})
    document = make_app(fake_context(settings)).openapi()
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert all("x-roles" in operation for operation in operations.values())
    assert [path for (_, path), operation in operations.items() if not operation["x-roles"]] == [
        "/v1/health",
        "/health",
    ]


@pytest.mark.parametrize("origin", ["http://[", "http://]", "http://evil.example", "null", ""])
def test_a_foreign_or_malformed_origin_is_refused(origin: str) -> None:
    assert call("GET", "/v1/health", "admin", origin=origin) == (403, False)


def test_a_client_that_disconnects_during_its_body_is_no_error_of_the_service(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    handle_errors(app)

    @app.put("/")
    async def receive_body(request: Request) -> None:
        await request.body()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert (sent[0]["status"], caplog.records) == (400, [])


def test_half_of_a_surrogate_pair_is_refused_wherever_it_first_matters() -> None:
    app = FastAPI()
    handle_errors(app)

    @app.post("/")
    async def look_up(request: Request) -> None:
        json.loads(await request.body()).encode()

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b'"a\\ud800"'}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400
    assert "half of a surrogate pair" in json.loads(sent[1]["body"])["detail"]
