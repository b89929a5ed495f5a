"""Event streams and downloads: so many at a time of one caller, whichever route makes them."""

from __future__ import annotations

import ast
import asyncio
import http.client
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from llama_stack_provider_trl_remote.service.security.access import CALLER, Caller
from llama_stack_provider_trl_remote.service.security.auth import Authenticator, Gate
from llama_stack_provider_trl_remote.service.security.streams import CountedStream, add_streams
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.stack import poll
from tests.security.guarded import TOKENS, Guarded, guarded_service
from tests.tiny import REPOSITORY

SERVICE = REPOSITORY / "llama_stack_provider_trl_remote"
HOME = SERVICE / "service" / "security" / "streams.py"
MOST = 3
STREAMS = {
    "of a job": "/v1/post-training/jobs/waiting/events",
    "of several jobs": "/v1/post-training/events?job=waiting",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("streams"), max_streams=MOST) as service:
        yield service


@contextmanager
def opened(service: Guarded, path: str, role: str) -> Iterator[http.client.HTTPResponse]:
    headers = {"Authorization": f"Bearer {TOKENS[role]}", "Accept": "text/event-stream"}
    with closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)) as connection:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as answer:
            yield answer


@pytest.mark.contract
@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", STREAMS.values(), ids=STREAMS)
def test_a_token_has_so_many_streams_and_no_other_token_waits_for_it(service: Guarded, path: str) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(opened(service, path, "submit")) for _ in range(MOST)]
        assert [stream.status for stream in streams] == [200] * MOST
        for refused_path in STREAMS.values():
            with opened(service, refused_path, "submit") as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
                text = refused.read().decode()
            assert f"has {MOST} event streams and downloads open" in text
            assert "max_streams" in text
        with opened(service, path, "admin") as another:
            assert another.status == 200
        for role in ("submit", "admin"):
            headers = {"Authorization": f"Bearer {TOKENS[role]}"}
            assert requests.get(f"{service.url}/v1/nodes", headers=headers, timeout=10).status_code == 200

    def opens() -> bool:
        with opened(service, path, "submit") as again:
            return again.status == 200

    poll(opens, "the streams that were closed count no more", timeout=10)


async def answered(app: Any, address: str, token: str, state: Any, messages: list[dict[str, Any]]) -> None:
    """Call an application behind the gate, as one of three tokens or nodes at an address."""

    body = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {
        **{"type": "http", "method": "GET", "path": "/", "query_string": b"", "app": SimpleNamespace(state=state)},
        **{"headers": [(b"host", b"localhost"), (b"authorization", b"Bearer " + token.encode())]},
        "client": (address, 1),
    }
    callers = {name: Caller("submit", name, presented=True) for name in ("a", "b", "c")}
    callers |= {name: Caller("node", f"node:{name}", node=name, presented=True) for name in ("n1", "n2", "n3")}
    known = Authenticator(callers.get)
    await Gate(app, ServiceSettings.model_validate({}), known)(scope, receive, send)


def statuses(calls: list[tuple[str, str]], most: int) -> list[int]:
    """Of streams that stay open, one after the other: (address, token)."""
    state = SimpleNamespace()
    add_streams(state, most)

    async def run() -> list[int]:
        rest = asyncio.Event()

        async def parts() -> Any:
            yield b"event"
            await rest.wait()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await CountedStream(parts())(scope, receive, send)

        found: list[list[dict[str, Any]]] = [[] for _ in calls]
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            for (address, token), messages in zip(calls, found, strict=True):
                tasks.create_task(answered(app, address, token, state, messages))
                while not messages:
                    await asyncio.sleep(0)
            rest.set()
        return [int(messages[0]["status"]) for messages in found]

    return asyncio.run(run())


def test_an_address_has_so_many_streams_of_all_its_tokens() -> None:
    assert statuses([("192.0.2.1", "a"), ("192.0.2.1", "b"), ("192.0.2.1", "c")], 2) == [200, 200, 429]
    assert statuses([("2001:db8::1", "a"), ("2001:db8::2", "b"), ("2001:db8::3", "c")], 2) == [200, 200, 429]
    assert statuses([("192.0.2.1", "a"), ("192.0.2.2", "a"), ("192.0.2.3", "a")], 2) == [200, 200, 429]
    assert statuses([("192.0.2.1", "a"), ("192.0.2.2", "b"), ("192.0.2.3", "c")], 1) == [200, 200, 200]


def test_nodes_of_one_address_share_no_limit() -> None:
    assert statuses([("192.0.2.1", "n1"), ("192.0.2.1", "n2"), ("192.0.2.1", "n3")], 1) == [200, 200, 200]
    assert statuses([("192.0.2.1", "n1"), ("192.0.2.1", "n1")], 1) == [200, 429]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_callers_behind_a_proxy_of_this_machine_share_no_limit(address: str) -> None:
    assert statuses([(address, "a"), (address, "b"), (address, "c")], 1) == [200, 200, 200]


def test_an_answer_in_parts_that_does_not_count_is_not_sent() -> None:
    from starlette.responses import StreamingResponse

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def parts() -> Any:
            yield b"part"

        assert scope[CALLER].name == "a"
        await StreamingResponse(parts())(scope, receive, send)

    with pytest.raises((RuntimeError, ExceptionGroup)) as error:
        asyncio.run(answered(app, "192.0.2.1", "a", SimpleNamespace(), []))
    assert "an answer in parts counts for its caller" in repr(error.getrepr())


def test_no_other_module_answers_in_parts() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in SERVICE.rglob("*.py")
        if path != HOME
        for name in names(path)
        if name in ("StreamingResponse", "FileResponse", "EventSourceResponse")
    ]
    assert found == [], "send a CountedStream or a CountedFile of security.streams"


def names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
