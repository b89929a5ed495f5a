"""Connections that do nothing cost nothing: others are answered, and a training beside them comes to its end."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
import ssl
import subprocess
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import requests

from llama_stack_provider_trl.system.process import tasks_below
from llama_stack_provider_trl_remote.service.http.acceptor import (
    default_connections,
    raise_descriptor_limit,
)
from llama_stack_provider_trl_remote.service.http.connections import Deadlines
from llama_stack_provider_trl_remote.service.security import auth
from llama_stack_provider_trl_remote.service.security.access import BODY, CALLER, Caller, Refused
from llama_stack_provider_trl_remote.service.security.auth import Authenticator, Gate
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import poll
from tests.security.peers import Peer

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]


DESCRIPTORS = 1024
"""What a process may open under the default limit."""


class SmallService(TrainingService):
    """A service that may open only so many files."""

    is_forked = False

    def spawn(self, *arguments: Any, **environ: str) -> subprocess.Popen[bytes]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

        with patch.object(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=limit)):
            return super().spawn(*arguments, **environ)


@contextmanager
def connections(service: TrainingService, number: int, send: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(number):
            one = stack.enter_context(socket.socket())
            one.settimeout(5)
            one.connect(("127.0.0.1", service.port))
            if send:
                one.sendall(send)
            found.append(one)
        yield found


def answers(service: TrainingService) -> bool:
    """Whether a new connection is served."""
    return requests.get(f"{service.url}/v1/health", timeout=60).ok


def is_closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    raise_descriptor_limit()  # of the test: it is the peer of every connection
    with running(SmallService(tmp_path_factory.mktemp("connections"))) as found:
        yield found


def test_a_job_trains_to_its_end_beside_more_silent_connections_than_there_are_descriptors(
    service: TrainingService,
) -> None:
    with connections(service, 1100):
        assert answers(service)
        _, sha256 = service.put_blob(QUESTIONS)
        service.post("/post-training/supervised-fine-tune", sft("beside", "rows", dataset_digests={"rows": sha256}))
        assert service.wait_state("beside", "completed", "failed", timeout=200)["status"] == "completed"
        assert answers(service)
    assert psutil.Process(service.pid).num_fds() < 1024


def test_children_of_the_service_have_none_of_its_sockets(service: TrainingService) -> None:
    _, sha256 = service.put_blob(QUESTIONS)
    with connections(service, 20):
        body = sft("looked-at", "rows", dataset_digests={"rows": sha256})
        body["training_config"]["n_epochs"] = 1000
        service.post("/post-training/supervised-fine-tune", body)
        service.wait_state("looked-at", "in_progress", timeout=200)
        processes = [one for found in tasks_below(service.data_dir).values() for one in found]
        assert processes
        ours = {os.readlink(path) for path in Path(f"/proc/{service.pid}/fd").iterdir() if path.exists()}
        sockets = {link for link in ours if link.startswith("socket:")}
        for process in processes:
            held = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.exists()}
            assert not held & sockets
    service.post("/post-training/jobs/looked-at/cancel")
    service.wait_state("looked-at", "cancelled")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """A service with few connections."""
    with running(TrainingService(tmp_path_factory.mktemp("few"), max_connections=8)) as found:
        yield found


def test_at_the_cap_the_oldest_idle_connection_makes_room(few: TrainingService) -> None:
    with connections(few, 20) as found:
        assert answers(few)
        poll(lambda: sum(map(is_closed, found)) >= 12, "the oldest are closed", timeout=5)
        assert is_closed(found[0])


def test_a_connection_with_a_request_under_way_keeps_its_place(few: TrainingService) -> None:
    body = b'{"job_uuid": "nothing-of-that-name"}'
    head = (
        b"POST /v1/post-training/job/cancel HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with connections(few, 1, head + body[:5]) as (busy,), connections(few, 30):
        assert answers(few)
        busy.sendall(body[5:])
        assert busy.recv(1 << 16).startswith(b"HTTP/1.1 404 ")


# Deadlines, with an acceptor of this process


def with_peer(test: Callable[[Peer], Awaitable[None]], app: Any, **options: Any) -> None:
    async def run() -> None:
        peer = Peer(app, **options)
        try:
            async with asyncio.timeout(20):
                await test(peer)
        finally:
            await peer.close()

    with patch("llama_stack_provider_trl_remote.service.http.acceptor._SWEEP", 0.05):
        asyncio.run(run())


async def reads_the_body(scope: Any, receive: Any, send: Any) -> None:
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


async def answers_without_end(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        if (await asyncio.wait_for(asyncio.shield(asyncio.sleep(0)), 1)) is not None:
            return


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", GET[:10], GET[:-2], POST, POST + b"x", GET + GET[:10]],
    ids=["nothing", "half a line", "half a head", "no body", "half a body", "half a head after a request"],
)
def test_a_missing_body_is_not_awaited(sent: bytes) -> None:
    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(sent)
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\nG")
        assert answers.count(b"HTTP/1.1 408 Request Timeout\r\n") == bool(sent)
        writer.close()

    with_peer(test, reads_the_body)


def posted(token: bytes) -> bytes:
    """A request whose body does not come."""
    return POST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer " + token + b"\r\n\r\nx")


def gated(app: Any) -> Gate:
    known = Authenticator({"known": Caller("submit", "ci", presented=True)}.get)
    return Gate(app, ServiceSettings.model_validate({}), known)


@pytest.mark.parametrize("token", [b"unknown", b"known"])
def test_at_the_cap_a_connection_whose_request_was_refused_makes_room(
    token: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_DRAIN_SECONDS", 1000.0)
    monkeypatch.setattr(auth, "_UNKNOWN_DRAIN_SECONDS", 1000.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope[BODY].set_limit(10_000, "")
        if scope["method"] == "POST":
            scope[CALLER].require_known()
            raise Refused(403, "no")
        await reads_the_body(scope, receive, send)

    async def test(peer: Peer) -> None:
        refused = [await peer.connect(posted(token)) for _ in range(4)]
        await asyncio.sleep(0.3)
        reader, writer = await peer.connect(GET)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        reading = [asyncio.ensure_future(waiting.read()) for waiting, _ in refused]
        ended, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result()[:12] for task in ended} == {b"HTTP/1.1 503"}, "a refused one has made room"
        for _, one in [*refused, (reader, writer)]:
            one.close()

    with_peer(test, gated(app), most=4, deadlines=Deadlines())


@pytest.mark.parametrize(("token", "seconds"), [(b"unknown", "_UNKNOWN_DRAIN_SECONDS"), (b"known", "_DRAIN_SECONDS")])
def test_a_refused_body_is_dropped_for_longer_where_its_sender_is_known(
    token: bytes, seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert auth._UNKNOWN_DRAIN_SECONDS < auth._DRAIN_SECONDS
    for name in ("_UNKNOWN_DRAIN_SECONDS", "_DRAIN_SECONDS"):
        monkeypatch.setattr(auth, name, 0.2 if name == seconds else 1000.0)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        scope[CALLER].require_known()
        raise Refused(403, "no")

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(posted(token))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 40")
        writer.close()

    with_peer(test, gated(refuse), deadlines=Deadlines())


@pytest.mark.parametrize("refused", [False, True])
def test_a_request_leaves_no_reference_cycle(refused: bool) -> None:
    """Cycles wait for the garbage collector, which runs too rarely for hundreds of connections."""
    bodies = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(weakref.ref(scope[BODY]))
        if refused:
            raise Refused(403, "no")
        await reads_the_body(scope, receive, send)

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(GET)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        while peer.acceptor.count:
            await asyncio.sleep(0.01)
        assert [body() for body in bodies] == [None]

    gc.collect()
    gc.disable()
    try:
        with_peer(test, gated(app), deadlines=Deadlines())
    finally:
        gc.enable()


@pytest.mark.parametrize("begun", [False, True])
def test_a_damaged_body_ends_its_connection_without_a_traceback(begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def answers_late(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        while not receive.__self__.transport.is_closing():  # from then on it is a step of the loop until it is closed
            await asyncio.sleep(0)
        if not begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"late"})

    async def test(peer: Peer) -> None:
        head = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await peer.connect(head)
        await asyncio.sleep(0.1)
        writer.write(b"not a chunk\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200" if begun else b"HTTP/1.1 400"), answer
        assert b"late" not in answer
        writer.close()

    with_peer(test, answers_late)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"], caplog.text


def test_a_body_damaged_after_the_answer_ends_its_connection_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answers_at_once(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"soon"})

    async def test(peer: Peer) -> None:
        head = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await peer.connect(head)
        answer = await reader.readuntil(b"soon")
        writer.write(b"not a chunk\r\n")
        assert answer.startswith(b"HTTP/1.1 401")
        assert not await reader.read()
        writer.close()

    with_peer(test, answers_at_once)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"], caplog.text


def test_a_body_that_comes_slowly_is_received() -> None:
    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(POST)
        for _ in range(10):
            await asyncio.sleep(0.1)
            writer.write(b"x" * 100)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    slowly = Deadlines(head=0.3, body=0.3, unknown_body=0.3, rate=500)
    with_peer(test, reads_the_body, deadlines=slowly)


def test_a_body_that_is_not_read_yet_is_waited_for() -> None:
    async def reads_late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.0)
        await reads_the_body(scope, receive, send)

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(POST.replace(b"1000", b"1000000") + b"x" * 1_000_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    with_peer(test, reads_late)


def test_a_body_is_held_in_small_pieces() -> None:
    """asyncio reads 256 KiB at once."""
    pieces, waiting = list[int](), list[int]()

    async def reads_in_pieces(scope: Any, receive: Any, send: Any) -> None:
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            pieces.append(len(message["body"]))
            await asyncio.sleep(0.01)  # meanwhile the next one comes
            waiting.append(len(receive.__self__.body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(POST.replace(b"1000", b"1000000") + b"x" * 1_000_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    with_peer(test, reads_in_pieces)
    assert sum(pieces) == 1_000_000
    assert max(pieces) <= 64 << 10
    assert 0 < max(waiting) <= 64 << 10


def test_a_request_has_nothing_of_the_one_before_it_on_its_connection() -> None:
    """asyncio's `resume_reading` keeps the context of its caller for what comes later."""
    of_request: ContextVar[int] = ContextVar("of_request", default=0)
    seen = list[int]()

    async def names_itself(scope: Any, receive: Any, send: Any) -> None:
        seen.append(of_request.get())
        of_request.set(1)
        await asyncio.sleep(0.05)  # a piece of the body comes, and waits
        await reads_the_body(scope, receive, send)

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(POST + b"x" * 100)
        for _ in range(3):
            for _ in range(9):
                await asyncio.sleep(0.02)
                writer.write(b"x" * 100)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(POST + b"x" * 100)
        writer.close()

    with_peer(test, names_itself)
    assert seen[:3] == [0, 0, 0]


def test_a_client_that_leaves_behind_its_body_is_noticed() -> None:
    noticed = asyncio.Event()

    async def answers_late(scope: Any, receive: Any, send: Any) -> None:
        assert not (await receive())["more_body"]
        while not receive.__self__.disconnected:
            await asyncio.sleep(0.01)
        noticed.set()

    async def test(peer: Peer) -> None:
        _, writer = await peer.connect(POST)
        await asyncio.sleep(0.05)
        writer.write(b"x" * 1000)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await noticed.wait()

    with_peer(test, answers_late)


def test_a_reader_that_does_not_read_is_disconnected() -> None:
    async def test(peer: Peer) -> None:
        one = socket.create_connection(peer.listener.getsockname())
        with one:
            one.sendall(GET)
            while peer.acceptor.count == 0:
                await asyncio.sleep(0.01)
            while peer.acceptor.count:
                await asyncio.sleep(0.01)

    with_peer(test, answers_without_end)


def test_a_reader_that_takes_a_few_bytes_now_and_then_is_disconnected() -> None:
    async def test(peer: Peer) -> None:
        with socket.create_connection(peer.listener.getsockname()) as one:
            one.sendall(GET)
            one.setblocking(False)  # the peer sends in the same loop
            while peer.acceptor.count == 0:
                await asyncio.sleep(0.01)
            while peer.acceptor.count:
                assert await asyncio.get_running_loop().sock_recv(one, 50)
                await asyncio.sleep(0.05)

    with_peer(test, answers_without_end)


def test_answers_that_wait_for_their_readers_have_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    size, most = 8 << 20, 16 << 20
    monkeypatch.setattr("llama_stack_provider_trl_remote.service.http.acceptor._MOST_UNSENT", most)

    async def answers_much(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    async def test(peer: Peer) -> None:
        with ExitStack() as stack:
            for _ in range(30):
                one = stack.enter_context(socket.create_connection(peer.listener.getsockname()))
                one.sendall(GET)
                await asyncio.sleep(0)
            while len(peer.acceptor._open) == 30:
                await asyncio.sleep(0.01)
            reader, writer = await peer.connect(GET)
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(size)
            waiting = [connection.transport for connection in peer.acceptor._open if connection.transport is not None]
            assert sum(transport.get_write_buffer_size() for transport in waiting) <= most
            writer.close()

    with_peer(test, answers_much, deadlines=Deadlines())


def test_an_answer_that_is_read_slowly_comes_to_its_end() -> None:
    """Longer than a connection stays open without a request, and than it may take to close."""
    size = 16 << 20

    async def answers_much(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(GET)
        await reader.readuntil(b"\r\n\r\n")
        count = 0
        while count < size:
            piece = await reader.read(1 << 16)
            assert piece, f"{count} of {size} bytes came"
            count += len(piece)
            await asyncio.sleep(0.01)
        writer.close()

    # The kernel takes bytes of a slow reader in lumps of megabytes: more than 0.3 s lie between two of them.
    with_peer(test, answers_much, deadlines=Deadlines(head=0.3, body=0.3, unknown_body=0.3, reader=10.0, close=0.3))


def test_a_stream_without_anything_to_send_stays() -> None:
    async def waits_between_events(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2):
            await send({"type": "http.response.body", "body": b"event", "more_body": True})
            await asyncio.sleep(1.0)
        await send({"type": "http.response.body"})

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(GET)
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).count(b"event") == 2
        writer.close()

    with_peer(test, waits_between_events)


def test_bytes_that_came_early_are_no_patience_for_later() -> None:
    """A body that came fast at first may not rest for as long as its size would take."""

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect(POST.replace(b"1000", b"1000000") + b"x" * 500_000)
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
        writer.close()

    with_peer(test, reads_the_body)


@pytest.mark.parametrize("at", ["accepted", "made", "answered", "being answered"])
def test_a_closed_acceptor_keeps_no_connection_open(at: str) -> None:
    """A stream's client that reconnected while the service stopped held it up for the time of an idle connection."""
    may_answer = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await reads_the_body(scope, receive, send)

    async def test(peer: Peer) -> None:
        if at == "answered":
            may_answer.set()
        if at == "accepted":
            peer.acceptor._place = lambda connection: peer.acceptor.close()  # type: ignore[method-assign]
        reader, writer = await peer.connect(b"" if at in ("accepted", "made") else GET)
        if at == "answered":
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        elif at != "accepted":
            while not any(one.transport and (one.cycle or at == "made") for one in peer.acceptor._open):
                await asyncio.sleep(0.01)
        peer.acceptor.close()
        may_answer.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 200" if at == "being answered" else b"")
        while peer.acceptor.count:
            await asyncio.sleep(0.01)
        writer.close()

    never = Deadlines(head=60, body=60, unknown_body=60, reader=60, close=60)
    with_peer(test, waits, deadlines=never, keep_alive=60)


def test_a_connection_that_is_broken_and_not_closed_yet_keeps_no_acceptor_from_closing() -> None:
    """Its answer is whole and not read, and what came after that is not HTTP: h11 cannot close such a connection."""

    async def answers_at_once(scope: Any, receive: Any, send: Any) -> None:
        body = b"x" * (64 << 20)
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async def test(peer: Peer) -> None:
        _, writer = await peer.connect(POST.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked"))
        while not (peer.acceptor._open and (one := next(iter(peer.acceptor._open))).cycle and one.is_idle):
            await asyncio.sleep(0.01)
        writer.write(b"ZZZ bad\r\n")
        while not one.transport.is_closing():
            await asyncio.sleep(0.01)
        for connection in (one, *peer.acceptor._open):
            connection.shutdown()
        peer.acceptor.close()
        writer.transport.abort()

    with_peer(test, answers_at_once, deadlines=Deadlines(head=60, body=60, unknown_body=60, reader=60, close=60))


def test_a_missing_tls_handshake_is_not_awaited() -> None:
    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect()
        assert await reader.read() == b""
        writer.close()
        assert peer.acceptor.count == 0

    with_peer(test, reads_the_body, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def test_a_lack_of_descriptors_stops_accepting_for_a_while_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def test(peer: Peer) -> None:
        class Lacking:
            def accept(self) -> Any:
                raise OSError(errno.EMFILE, "Too many open files")

            def __getattr__(self, name: str) -> Any:
                return getattr(peer.listener, name)

        peer.acceptor._listener = Lacking()  # type: ignore[assignment]
        reader, writer = await peer.connect(GET)
        await asyncio.sleep(0.5)
        peer.acceptor._listener = peer.listener
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()

    with_peer(test, reads_the_body)
    assert caplog.text.count("Too many open files") == 1


def test_a_pollers_connection_outlives_its_pauses(service: TrainingService) -> None:
    # A client that reuses a connection in the moment in which its end is on the way gets a reset.
    with connections(service, 1, b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n") as (one,):
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come alone
            answer += one.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")
        one.settimeout(6)
        with pytest.raises(TimeoutError):
            one.recv(1)


def test_an_accepted_connection_sends_without_delay() -> None:
    async def test(peer: Peer) -> None:
        _, writer = await peer.connect(GET)
        while not peer.acceptor._open:
            await asyncio.sleep(0.01)
        (connection,) = peer.acceptor._open
        while connection.transport is None:
            await asyncio.sleep(0.01)
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()

    with_peer(test, reads_the_body)


@pytest.mark.parametrize(("descriptors", "connections"), [(64, 24), (1024, 576), (4096, 2880), (65_536, 4096)])
def test_connections_leave_descriptors_for_everything_else(descriptors: int, connections: int) -> None:
    assert default_connections(descriptors) == connections
