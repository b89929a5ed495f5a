"""The probe of a subnet against servers on loopback: what is neither a service nor Ollama, and what is hostile."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.nodes.discovery.probe import OLLAMA_PORT, SERVICE_PORT, Probed, probe
from llama_stack_provider_trl_remote.nodes.discovery.sightings import MOST_MODELS

pytestmark = pytest.mark.contract
Answer = Callable[[str], bytes | None]
"""Path -> everything that the server sends; None: nothing, and the connection stays open."""
NETWORK = f"127.88.{os.getpid() % 250}"


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def tags(*names: object) -> bytes:
    return http(json.dumps({"models": [{"name": name} for name in names]}).encode())


@asynccontextmanager
async def serving(address: str, port: int, answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            sent = answer(head.split()[1].decode())
            if sent is None:
                await reader.read()
            else:
                writer.write(sent)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(one, address, port, ssl=tls):
        yield


def probed(*servers: tuple[str, int, Answer], tls: ssl.SSLContext | None = None, seconds: float = 10) -> Probed:
    async def run() -> Probed:
        async with AsyncExitStack() as stack:
            for address, port, answer in servers:
                await stack.enter_async_context(serving(address, port, answer, tls))
            return await probe([address for address, _, _ in servers], seconds)

    return asyncio.run(run())


def test_a_service_and_an_ollama_host_are_found() -> None:
    health = http(b'{"status": "OK", "version": "0.1.0", "supervising": true}')
    found = probed(
        (f"{NETWORK}.1", SERVICE_PORT, lambda path: health if path == "/health" else None),
        (f"{NETWORK}.2", OLLAMA_PORT, lambda path: tags("a:1b", "a:1b", "b") if "tags" in path else http(b"[]")),
    )
    service, ollama = sorted(found.sightings, key=lambda one: one.port)
    assert (service.kind, service.version, service.url(service.addresses[0])) == (
        "service",
        "0.1.0",
        f"http://{NETWORK}.1:8322",
    )
    assert (ollama.models, ollama.version) == (("a:1b", "b"), "")
    assert found.left == 0


def test_a_service_with_tls_is_found_though_its_certificate_is_unknown(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=head", "-days", "2"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    health = http(b'{"status": "OK", "version": "0.1.0", "supervising": false}')
    (service,) = probed((f"{NETWORK}.3", SERVICE_PORT, lambda path: health), tls=tls).sightings
    assert service.url(service.addresses[0]) == f"https://{NETWORK}.3:8322"


HOSTILE: dict[str, Answer] = {
    "another program": lambda path: b"SSH-2.0-OpenSSH_9.2\r\n",
    "a page": lambda path: http(b"<html>"),
    "other JSON": lambda path: http(b'{"models": {"name": "a"}, "status": "OK"}'),
    "an error": lambda path: http(b"{}", "500 No"),
    "a redirect": lambda path: http(b"", "302 Found", f"Location: http://{NETWORK}.200:11434/api/tags"),
    "nesting": lambda path: http(b"[" * 200_000),
    "a long answer": lambda path: http(b'{"models": [' + b'{"name": "x"},' * 200_000 + b"{}]}"),
    "a long head": lambda path: b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    "compressed": lambda path: http(b"\x1f\x8b" + b"\0" * 100, "200 OK", "Content-Encoding: gzip"),
    "no answer": lambda path: None,
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("port", [SERVICE_PORT, OLLAMA_PORT])
def test_what_is_neither_is_left_out(what: str, port: int) -> None:
    number = 10 + list(HOSTILE).index(what)
    assert probed((f"{NETWORK}.{number}", port, HOSTILE[what])) == Probed((), 0)


def test_names_of_models_are_bounded_lines_of_printable_text() -> None:
    names = ["\x1b[2Jevil\n", "y" * 10_000, 7, None, *map(str, range(500))]
    (ollama,) = probed((f"{NETWORK}.30", OLLAMA_PORT, lambda path: tags(*names))).sightings
    assert len(ollama.models) == MOST_MODELS
    assert ollama.models[0] == "[2Jevil"
    assert all(len(name) <= 100 and name.isprintable() for name in ollama.models)


def test_a_probe_ends_in_time_and_reports_what_was_left() -> None:
    """Of addresses that answer nothing each takes longer than the whole probe may."""
    assert probed((f"{NETWORK}.40", SERVICE_PORT, lambda path: None), seconds=0.3) == Probed((), 1)
