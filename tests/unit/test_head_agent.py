"""The service's own machine as a node: where others find it, how its agent finds the service, and what it does where it
cannot take part."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import ServiceRefusal
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION
from llama_stack_provider_trl.launch.runner import Limits
from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.start import NodeSettings
from llama_stack_provider_trl_remote.service import head_agent
from llama_stack_provider_trl_remote.service.head_agent import address_for_ranks
from llama_stack_provider_trl_remote.service.own_calls import own_url, trusting
from llama_stack_provider_trl_remote.service.settings import ServiceSettings

pytestmark = pytest.mark.timeout(30)


def settings(host: str = "0.0.0.0", master_addr: str = "", **more: Any) -> ServiceSettings:
    more = {"insecure": True, "api_token": "secret", **more}
    return ServiceSettings(host=host, torch_run_config={"master_addr": master_addr}, **more)


class Routes:
    """The socket module of a machine that knows the way to these only: family -> address that packets leave from."""

    def __init__(self, **routes: str) -> None:
        self.routes = routes

    AF_INET, AF_INET6, SOCK_DGRAM = socket.AF_INET, socket.AF_INET6, socket.SOCK_DGRAM

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> Routes:
        self.family = family.name
        return self

    def __enter__(self) -> Routes:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, target: tuple[str, int]) -> None:
        if self.family not in self.routes:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.routes[self.family], 9


@pytest.mark.parametrize(
    ("host", "master_addr", "routes", "expected"),
    [
        ("10.0.0.1", "10.9.0.1", {}, "10.9.0.1"),  # the network that the ranks are to use
        ("10.0.0.1", "", {}, "10.0.0.1"),
        ("10.0.0.1", "127.0.0.1", {}, "10.0.0.1"),
        ("::", "[fd00::1]", {}, "fd00::1"),
        ("0.0.0.0", "0.0.0.0", {"AF_INET": "10.0.0.7"}, "10.0.0.7"),
        ("head.example", "127.0.0.1", {"AF_INET": "10.0.0.7", "AF_INET6": "fd00::7"}, "10.0.0.7"),
        ("::", "", {"AF_INET6": "fd00::7"}, "fd00::7"),
    ],
)
def test_ranks_on_other_machines_find_this_one(
    monkeypatch: pytest.MonkeyPatch, host: str, master_addr: str, routes: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(head_agent, "socket", Routes(**routes))
    assert address_for_ranks(settings(host, master_addr)) == expected


def test_a_machine_without_a_network_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_agent, "socket", Routes())
    with pytest.raises(OSError, match=r"set torch_run_config\.master_addr"):
        address_for_ranks(settings())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:8322"),
        ("::", "http://[::1]:8322"),
        ("[::]", "http://[::1]:8322"),
        ("[fd00::1]", "http://[fd00::1]:8322"),
        ("10.0.0.1", "http://10.0.0.1:8322"),
        ("head.example", "http://head.example:8322"),
    ],
)
def test_its_agent_calls_the_address_that_the_service_listens_on(host: str, expected: str) -> None:
    assert own_url(settings(host), 8322) == expected


def certificate(root: Path, name: str) -> tuple[Path, Path]:
    """A certificate of an authority that is not installed here, for a name that is not used here."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=root, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-subj", f"/CN={name} CA", "-keyout", f"{name}.ca.key", "-out", f"{name}.ca.pem")
    openssl("req", *new, "-subj", f"/CN={name}.example", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    ca = ("-CA", f"{name}.ca.pem", "-CAkey", f"{name}.ca.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", f"{name}.csr", *ca, "-out", f"{name}.pem")
    return root / f"{name}.pem", root / f"{name}.key"


def test_its_agent_trusts_the_service_s_own_certificate_and_no_other(tmp_path: Path) -> None:
    ours, key = certificate(tmp_path, "head")
    theirs, _ = certificate(tmp_path, "other")
    assert own_url(settings(tls_cert=ours, tls_key=key), 8322) == "https://127.0.0.1:8322"

    async def call(trusted: Path) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(ours, key)

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(trusted))
            assert await reader.read() == b""
            writer.close()

    asyncio.run(call(ours))
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(call(theirs))


def test_a_machine_that_cannot_take_part_reports_it_once_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, refused = OSError(28, "No space left on device"), ServiceRefusal("http://head", 409, "taken")
    monkeypatch.setenv("TRL_NODE_OLLAMA", "off")
    troubles: list[Exception] = [full, full, refused, NodeError("no such address")]
    made: list[NodeSettings] = []
    configured = settings(master_addr="10.0.0.1", data_dir=tmp_path)
    names = {"node_token": "t", "node_name": "head", "devices": ["cpu"], "warm": None}
    service: Any = SimpleNamespace(settings=configured, isolation=NO_ISOLATION, limits=Limits(), **names)

    async def run() -> None:
        takes_part = asyncio.Event()

        class PlayedAgent:
            async def run(self) -> None:
                if troubles:
                    raise troubles.pop(0)
                takes_part.set()
                await asyncio.Event().wait()

        def make_agent(settings: NodeSettings) -> PlayedAgent:
            made.append(settings)
            return PlayedAgent()

        monkeypatch.setattr(head_agent, "make_agent", make_agent)
        monkeypatch.setattr(head_agent, "RETRY", 0.0)
        node = asyncio.create_task(head_agent.run_head_agent(service, 8322))
        await takes_part.wait()
        node.cancel()
        with pytest.raises(asyncio.CancelledError):
            await node

    asyncio.run(run())
    assert [settings.address for settings in made] == ["10.0.0.1"] * 5
    assert {settings.ollama for settings in made} == {False}
    assert [caplog.text.count(message) for message in ("No space left", "taken", "no such address")] == [1, 1, 1]
