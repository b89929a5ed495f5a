"""Checks by TCP that the nodes of an attempt reach each other, before torch is started.

This takes seconds, where a failing rendezvous waits for minutes."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Collection
from contextlib import suppress

from ..wire import Peer, TaskOrder

TIME = 3.0
"""Seconds that a peer has to answer."""


class Unreachable(OSError):
    """Raised when a peer does not answer; names both nodes and the ports to open."""


class ProbeListener:
    """A port at which this node answers its peers, until the ranks take it.

    Args:
        word: sent to a peer, which recognises the task by it.
    """

    def __init__(self, listener: socket.socket, word: str) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._word = word.encode() + b"\n"
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Start to answer."""
        self._server = await asyncio.start_server(self._answer, sock=self._listener)

    async def close(self) -> None:
        """Free the port."""
        if self._server is None:
            return self._listener.close()
        self._server.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), TIME)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(self._word)
            await writer.drain()
            await asyncio.wait_for(reader.read(1), TIME)  # the peer closes first, so that the port is free immediately
        writer.close()


def listen(address: str, ports: tuple[int, int], taken: Collection[int] = ()) -> socket.socket:
    """Listen at the first free port of a range, which is its first port and the number of ports. Raises OSError: all
    are in use, or the address does not belong to this machine."""
    first, count = ports
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(first, first + count):
        if port in taken:
            continue
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(
                    f"cannot listen at {address} port {port} ({error.strerror}): TRL_NODE_ADDRESS must be an "
                    "address of this machine",
                ) from error
    raise OSError(
        f"every port from {first} to {first + count - 1} is in use at {address}: end the listening programs, or choose "
        "another range (torch_run_config.master_port of the service)",
    )


async def probe(node: str, order: TaskOrder, limit: float = TIME) -> None:
    """Reach every peer of an attempt. Raises Unreachable: one does not answer, or another program listens there."""
    found = await asyncio.gather(*(_reach(node, peer, order, limit) for peer in order.peers), return_exceptions=True)
    for error in found:
        if error is not None:
            raise error


async def _reach(node: str, peer: Peer, order: TaskOrder, limit: float) -> None:
    first, count = order.ports
    where = f"node {node} cannot reach node {peer.node} at {peer.address} port {peer.port}"
    advice = f"open TCP ports {first}-{first + count - 1} and, for gloo and NCCL, the ephemeral range between the nodes"
    try:
        async with asyncio.timeout(limit):
            reader, writer = await asyncio.open_connection(peer.address, peer.port)
            try:
                word = await reader.readline()
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError as error:
        raise Unreachable(f"{where} (no answer within {limit:g} s): {advice}") from error
    except OSError as error:
        raise Unreachable(f"{where} ({error.strerror or error}): {advice}") from error
    if word.decode(errors="replace").strip() != order.task_id:
        raise Unreachable(f"{where} (another program listens there): TRL_NODE_ADDRESS of {peer.node} must be its own")
