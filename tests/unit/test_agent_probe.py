"""Whether nodes reach each other, on loopback."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator

import pytest

from llama_stack_provider_trl_remote.nodes.probe import ProbeListener, Unreachable, listen, probe
from llama_stack_provider_trl_remote.wire import Peer, TaskOrder
from tests.orders import order


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def asks(*ports: int) -> TaskOrder:
    peers = tuple(Peer(node=f"n{number}", address="127.0.0.1", port=port) for number, port in enumerate(ports))
    return order(peers=peers, ports=(29500, 100))


async def visited(word: str, asking: TaskOrder | None = None) -> None:
    probe_listener = ProbeListener(listen("127.0.0.1", (0, 1)), word)
    await probe_listener.open()
    try:
        await probe("here", asking or asks(probe_listener.port, probe_listener.port), limit=5)
    finally:
        await probe_listener.close()


def test_nodes_that_answer_are_reached() -> None:
    asyncio.run(visited("job-1"))


def test_another_program_at_the_port_is_no_peer() -> None:
    with pytest.raises(Unreachable, match="another program listens"):
        asyncio.run(visited("job-2"))


def test_the_pair_and_the_ports_to_open_are_named(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    expected = (
        rf"node here cannot reach node n0 at 127.0.0.1 port {port} \(.*\): open TCP ports 29500-29599 and, for gloo "
        "and NCCL, the ephemeral range between the nodes"
    )
    with pytest.raises(Unreachable) as caught:
        asyncio.run(probe("here", asks(port)))
    assert re.fullmatch(expected, str(caught.value))
    # It accepts the connection and never answers, as a firewall that drops does after the handshake.
    with pytest.raises(Unreachable, match=r"no answer within 0\.05 s"):
        asyncio.run(probe("here", asks(taken), limit=0.05))


def test_every_peer_has_to_answer(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def run() -> None:
        probe_listener = ProbeListener(listen("127.0.0.1", (0, 1)), "job-1")
        await probe_listener.open()
        try:
            await probe("here", asks(probe_listener.port, port), limit=5)
        finally:
            await probe_listener.close()

    with pytest.raises(Unreachable, match="node here cannot reach node n1"):
        asyncio.run(run())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_node_with_an_ipv6_address_listens_there() -> None:
    with listen("::1", (0, 1)) as listener:
        assert listener.family is socket.AF_INET6


def test_a_listener_that_was_never_opened_frees_its_port_too() -> None:
    probe_listener = ProbeListener(listen("127.0.0.1", (0, 1)), "job-1")
    asyncio.run(probe_listener.close())
    with socket.create_server(("127.0.0.1", probe_listener.port)):
        pass


def test_a_closed_listener_leaves_its_port_to_the_ranks() -> None:
    async def run() -> int:
        probe_listener = ProbeListener(listen("127.0.0.1", (0, 1)), "job-1")
        await probe_listener.open()
        await probe("here", asks(probe_listener.port), limit=5)
        await probe_listener.close()
        with socket.create_server(("127.0.0.1", probe_listener.port)):
            return probe_listener.port

    assert asyncio.run(run()) > 0


def test_the_first_free_port_of_the_range_is_taken(taken: int) -> None:
    with pytest.raises(OSError, match=f"every port from {taken} to {taken} is in use at 127.0.0.1"):
        listen("127.0.0.1", (taken, 1))
    with pytest.raises(OSError, match="every port"):
        listen("127.0.0.1", (taken + 1, 1), {taken + 1})
    with pytest.raises(OSError, match="TRL_NODE_ADDRESS must be an address of this machine"):
        listen("192.0.2.77", (taken, 1))
