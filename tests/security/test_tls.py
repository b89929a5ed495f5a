"""TLS of the service, and of those that call it: old versions, slow and missing handshakes, certificates of others."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import ServiceUnreachable
from llama_stack_provider_trl_remote.client import ServiceClient, Timeouts
from llama_stack_provider_trl_remote.nodes.calls import NodeClient, Pace
from llama_stack_provider_trl_remote.nodes.pools.on_host import HostProblem, check_service
from llama_stack_provider_trl_remote.service.settings import ServiceSettings, SettingsError, server_context
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.fake_service import fake_service
from tests.security.certificates import certificate
from tests.security.peers import Peer

pytestmark = pytest.mark.contract

TOKEN = "a-token-that-is-sent-to-no-other-host"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return certificate(tmp_path)


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def with_tls(files: tuple[Path, Path], test: Callable[[Peer], Awaitable[None]], most: int = 100) -> None:
    """Run a test against an acceptor with the service's TLS and short deadlines."""

    async def run() -> None:
        peer = Peer(application, most=most, tls=server_context(*files))
        try:
            await asyncio.wait_for(test(peer), 30)
        finally:
            await peer.close()

    asyncio.run(run())


def trusting(files: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files[0])


async def answered(peer: Peer, context: ssl.SSLContext) -> bytes:
    """The answer to a request with TLS."""
    address, port = peer.listener.getsockname()
    reader, writer = await asyncio.open_connection(address, port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(1 << 16), 10)
    writer.close()
    return answer


# --- The service ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1_1"])
def test_versions_that_are_broken_are_refused(files: tuple[Path, Path], version: str) -> None:
    context = trusting(files)
    with warnings.catch_warnings(action="ignore"):  # that they are deprecated
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = getattr(ssl.TLSVersion, version)
    context.set_ciphers("ALL:@SECLEVEL=0")

    async def test(peer: Peer) -> None:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await answered(peer, context)
        assert b"200" in await answered(peer, trusting(files))

    with_tls(files, test)


def test_ciphers_without_forward_secrecy_are_refused(files: tuple[Path, Path]) -> None:
    names = {cipher["name"] for cipher in server_context(*files).get_ciphers()}
    assert names
    assert all(name.startswith(("TLS_", "ECDHE-")) for name in names), names
    assert not [name for name in names if "CBC" in name or name.endswith("-SHA")]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")
def test_a_client_cannot_renegotiate(files: tuple[Path, Path]) -> None:
    async def test(peer: Peer) -> None:
        address, port = peer.listener.getsockname()
        child = await asyncio.create_subprocess_exec(
            *("openssl", "s_client", "-connect", f"{address}:{port}", "-tls1_2", "-legacy_renegotiation"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        shown = b""
        while b"Verify return code" not in shown:
            part = await child.stdout.read(1 << 16)
            assert part, shown
            shown += part
        child.stdin.write(b"R\n")
        output, _ = await asyncio.wait_for(child.communicate(), 10)
        assert b"no renegotiation" in output or b"handshake failure" in output or b"unexpected eof" in output, output
        assert b"200" in await answered(peer, trusting(files))

    with_tls(files, test)


def test_plain_http_on_the_port_is_closed_and_others_are_served(files: tuple[Path, Path]) -> None:
    async def test(peer: Peer) -> None:
        for _ in range(20):
            reader, writer = await peer.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in await asyncio.wait_for(reader.read(1 << 10), 5)
            writer.close()
        assert b"200" in await answered(peer, trusting(files))

    with_tls(files, test)


def test_a_handshake_that_comes_byte_by_byte_ends_at_its_deadline(files: tuple[Path, Path]) -> None:
    hello = b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03" + bytes(240)

    async def test(peer: Peer) -> None:
        reader, writer = await peer.connect()
        read = asyncio.ensure_future(reader.read(1))
        for byte in hello[:100]:  # of 251; the deadline has time for six
            writer.write(bytes([byte]))
            done, _ = await asyncio.wait({read}, timeout=0.05)
            if done:
                break
        assert read.done(), "the handshake still waits after 100 bytes"
        writer.close()

    with_tls(files, test)


def test_a_flood_of_handshakes_leaves_others_served(files: tuple[Path, Path]) -> None:
    """More connections that begin a handshake, and never end it, than the service takes."""

    async def test(peer: Peer) -> None:
        idle = []
        for number in range(200):
            idle.append(await peer.connect(b"\x16\x03\x01\x02\x00" if number % 2 else b""))
            if number % 40 == 39:
                assert b"200" in await answered(peer, trusting(files))
        assert b"200" in await answered(peer, trusting(files))
        for _, writer in idle:
            writer.transport.abort()

    with_tls(files, test, most=40)


def test_files_that_cannot_be_used_are_one_sentence_and_ask_no_terminal(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "other", "secret")]
    for directory in directories:
        directory.mkdir()
    one, other = certificate(directories[0]), certificate(directories[1])
    secret = certificate(directories[2], passphrase=b"word")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for cert, key in ((one[0], other[1]), secret, (text, one[1]), (one[0], text)):
        settings = ServiceSettings(data_dir=tmp_path, tls_cert=cert, tls_key=key)
        with pytest.raises(SettingsError, match=r"cannot be used .*without a passphrase"):
            settings.check_exposure()


# --- Its clients ------------------------------------------------------------------------------------------------------


class Listening:
    """A server with TLS that keeps what it was sent behind the handshake."""

    def __init__(self, files: tuple[Path, Path]) -> None:
        self.received = b""
        self._files = files

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received += await reader.read(1 << 16)
        writer.close()

    async def call(self, call: Callable[[str], Awaitable[Any]], host: str) -> str:
        """The message with which a call fails."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ServiceUnreachable) as caught:
                await call(f"https://{host}:{port}")
        return str(caught.value)


async def by_client(url: str) -> Any:
    return await ServiceClient(url, TOKEN, Timeouts(), ()).status("job")


async def by_trl_client(url: str) -> Any:
    return await asyncio.to_thread(lambda: TrlClient(url, token=TOKEN).jobs())


async def by_node(url: str) -> Any:
    return await NodeClient(url, TOKEN, "node", Pace(None, time.monotonic)).get("/v1/nodes")


CLIENTS = {"the adapter and trl-remote": by_client, "TrlClient": by_trl_client, "a node": by_node}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("host", "named", "days", "trusted", "words"),
    [
        ("127.0.0.1", "127.0.0.1", (-1, 1), False, "set SSL_CERT_FILE"),
        ("127.0.0.1", "10.1.2.3", (-1, 1), True, "name the service as its certificate does"),
        ("localhost", "head.example", (-1, 1), True, "name the service as its certificate does"),
        ("127.0.0.1", "127.0.0.1", (-9, -2), True, "a new tls_cert"),
        ("127.0.0.1", "127.0.0.1", (5, 9), True, "the clock of this machine"),
    ],
    ids=["self-signed", "another address", "another name", "expired", "not yet valid"],
)
def test_a_certificate_that_does_not_hold_is_refused_before_anything_is_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client: str,
    host: str,
    named: str,
    days: tuple[int, int],
    trusted: bool,
    words: str,
) -> None:
    files = certificate(tmp_path, named, days)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if trusted:
        # aiohttp makes its own context once, when it is imported.
        monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=files[0]))
    server = Listening(files)
    message = asyncio.run(server.call(CLIENTS[client], host))
    assert "has a certificate that is not trusted here" in message
    assert words in message
    assert server.received == b""


@contextmanager
def redirecting(target: str) -> Iterator[str]:
    """A service of an attacker that sends every call elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        ends = False

        def serve() -> None:
            while not ends:
                try:
                    accepted, _ = listener.accept()
                except TimeoutError:
                    continue
                with accepted:
                    accepted.settimeout(5)
                    accepted.recv(1 << 16)
                    head = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
                    accepted.sendall(head.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ends = True
            thread.join(10)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_redirect_is_not_followed_and_carries_no_token(client: str) -> None:
    with fake_service() as other, redirecting(f"{other.url}/v1/jobs") as url:
        with pytest.raises(ServiceUnreachable, match=r"gives 307|is something else"):
            asyncio.run(_called(CLIENTS[client], url))
        assert not other.seen


async def _called(call: Callable[[str], Awaitable[Any]], url: str) -> None:
    await call(url)


def test_a_machine_that_becomes_a_node_follows_no_redirect_either() -> None:
    with fake_service() as other, redirecting(f"{other.url}/v1/jobs") as url:
        with pytest.raises(HostProblem, match="307"):
            check_service(url, None)
        assert not other.seen


def test_a_machine_that_becomes_a_node_refuses_a_certificate_of_another_host(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    wrong = certificate(tmp_path, "head.example")

    async def test(peer: Peer) -> None:
        address, port = peer.listener.getsockname()
        with pytest.raises(HostProblem, match="not trusted there"):
            await asyncio.to_thread(check_service, f"https://{address}:{port}", wrong[0].read_text())

    with_tls(wrong, test)
