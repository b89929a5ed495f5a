"""Another program in the place of the service: nothing that it sends takes a client's or an agent's memory or disk."""

from __future__ import annotations

import ast
import asyncio
import gzip
import hashlib
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl_remote import answer_lines as lines_module
from llama_stack_provider_trl_remote import client, pull
from llama_stack_provider_trl_remote.answer_lines import answer_lines
from llama_stack_provider_trl_remote.client import MOST_EVENT, ServiceClient
from llama_stack_provider_trl_remote.nodes.calls import NodeClient, Pace
from llama_stack_provider_trl_remote.pull import OtherBytes, fetch
from llama_stack_provider_trl_remote.wire import Poll
from tests.tiny import REPOSITORY

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PIECE = bytes(1 << 18)
MIB = 1 << 20


async def endless(request: web.Request) -> web.StreamResponse:
    """An answer without an end; the connection is closed by the client."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(PIECE)


def document(text: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=text, content_type="application/json")

    return handler


def meet[Value](handler: Handler, play: Callable[[str], Awaitable[Value]]) -> Value:
    """What a client gets from such a service."""

    async def both() -> Value:
        app = web.Application()
        app.router.add_get("/v1/health", document(b'{"version": "0"}'))
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with asyncio.timeout(60):
                return await play(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(both())


def agent_of(url: str) -> NodeClient:
    return NodeClient(url, "token", "a", Pace(None, lambda: 0.0))


POLL = Poll(boot_id="1")
HUGE = {
    "many values": b"[" + b"{}," * 6_000_000 + b"0]",
    "many levels": b"[" * 100_000 + b"]" * 100_000,
    "a long list of numbers": b"[" + b"1," * 5_000_000 + b"1]",
}


@pytest.mark.parametrize("handler", [endless, *map(document, HUGE.values())], ids=["endless", *HUGE])
@pytest.mark.parametrize("who", ["user", "agent"])
def test_an_answer_that_no_service_sends_is_an_error_of_little_memory(handler: Handler, who: str) -> None:
    async def play(url: str) -> int:
        service = agent_of(url) if who == "agent" else ServiceClient(url, pauses=())
        call = service.poll(POLL) if isinstance(service, NodeClient) else service.get("/v1/nodes")
        tracemalloc.start()
        try:
            with pytest.raises(ServiceUnreachable, match=r"which no service does|has not answered"):
                await call
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert meet(handler, play) < 3 * ServiceClient.most_answer


def test_an_agent_receives_less_than_a_user() -> None:
    assert NodeClient.most_answer < ServiceClient.most_answer


def test_an_error_of_a_service_is_short() -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return web.json_response({"detail": "x" * 500_000}, status=400)

    async def play(url: str) -> str:
        with pytest.raises(ServiceRefusal) as caught:
            await ServiceClient(url, pauses=()).get("/v1/nodes")
        return str(caught.value)

    assert len(meet(refuses, play)) < 10_000


def test_a_packed_answer_is_not_unpacked() -> None:
    content = gzip.compress(bytes(100 * MIB), 1)

    async def packed(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=content, headers=headers)

    async def play(url: str) -> int:
        tracemalloc.start()
        try:
            with pytest.raises(ServiceUnreachable, match="where JSON was expected"):
                await ServiceClient(url, pauses=()).get("/v1/nodes")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert meet(packed, play) < 20 * MIB


def test_an_event_without_an_end_ends_the_stream() -> None:
    async def play(url: str) -> None:
        with pytest.raises(ServiceUnreachable, match=f"an event of more than {MOST_EVENT // MIB} MiB"):
            await anext(ServiceClient(url, pauses=()).stream("/v1/events"))

    meet(endless, play)


@pytest.mark.parametrize("size", [1000, None], ids=["listed", "not listed"])
def test_a_file_has_no_more_bytes_than_the_service_has_listed(
    tmp_path: Path, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_MOST_OF_UNKNOWN_SIZE", MIB)
    most = MIB if size is None else size
    listed = {"path": "model.safetensors", "size": size, "sha256": "0" * 64}

    async def play(url: str) -> None:
        with pytest.raises(OtherBytes, match=f"sends more than the {most} bytes"):
            await fetch(ServiceClient(url, pauses=()), "/v1/file", tmp_path / "file", listed)

    meet(endless, play)
    assert (tmp_path / "file").stat().st_size <= most


def test_a_file_of_the_listed_size_arrives(tmp_path: Path) -> None:
    content = bytes(MIB)
    listed = {"path": "file", "size": MIB, "sha256": hashlib.sha256(content).hexdigest()}

    async def play(url: str) -> None:
        await fetch(ServiceClient(url, pauses=()), "/v1/file", tmp_path / "file", listed)

    meet(document(content), play)
    assert (tmp_path / "file").read_bytes() == content


def test_an_answer_to_a_prompt_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_MOST_LINE", MIB)
    monkeypatch.setattr(lines_module, "_PAUSES", ())

    async def play(url: str) -> None:
        with pytest.raises(ServiceUnreachable, match="an answer to a prompt of more than 1 MiB"):
            await anext(answer_lines(ServiceClient(url, pauses=()), "job"))

    meet(endless, play)


def test_what_a_service_sends_becomes_values_in_one_function_only() -> None:
    """json.loads, or a read of a whole answer, elsewhere in a client would have no limit."""
    local = {
        "request_files.py": "files of the user",
        "row_files.py": "files of the user",
        "nodes/identity.py": "a program of this machine, and the agent's own file",
        "nodes/localize.py": "an order that was parsed, and events of a training here",
        "nodes/models.py": "the agent's own file",
        "nodes/outbox.py": "events of a training here",
        "nodes/task.py": "the agent's own file",
        "nodes/uploader.py": "a manifest here",
        "nodes/ollama.py": "1 MiB at most, of this machine",
    }
    package = REPOSITORY / "llama_stack_provider_trl_remote"
    modules = [*package.glob("*.py"), *package.glob("nodes/*.py"), *package.glob("plots/*.py")]
    found = set()
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="json"), attr="loads" | "load")):
                    found.add(str(module.relative_to(package)))
                case ast.Call(func=ast.Attribute(attr="model_validate_json" | "json")):
                    found.add(str(module.relative_to(package)))
                case ast.Call(func=ast.Attribute(value=ast.Name(id="response" | "answer"), attr="read" | "text")):
                    found.add(str(module.relative_to(package)))
    assert found - local.keys() == {"client.py"}
    source = Path(client.__file__).read_text()
    assert source.count("json.loads(") == 2  # `parsed`, and the message of an error of 1 MiB
