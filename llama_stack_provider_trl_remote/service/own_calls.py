"""Proves that this service receives its nodes' calls: it sends one to its own port, over a new connection, as an agent.

The silence of a node counts only while such calls are answered (`cluster.presence`). They meet what a node's call
meets: the limit of connections, the event loop, the check of the token, the threads of the job store.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import StoreError

from .cluster.presence import GAP, Presence
from .context import Service
from .settings import ServiceSettings

log = logging.getLogger(__name__)
INTERVAL = 1.0
"""Seconds between two calls."""
PATIENCE = 120.0
"""Seconds after which silence counts without proofs, where no call was ever answered: the address may be at fault."""


async def prove_own_calls(service: Service, url: str, tls: ssl.SSLContext | None) -> None:
    """Send calls until cancelled, while other machines are nodes.

    Args:
        tls: trusts its certificate; None: it has none.
    """
    request = _request(service, url)

    async def call() -> str:
        return await _why_unanswered(url, tls, request)

    def has_nodes() -> bool:
        return any(record.name != service.node_name for record in service.store.nodes.all())

    await _Proofs(service.presence, call, has_nodes).run()


class _Proofs:
    """Notes a proof for each call that is answered.

    Args:
        call: sends one; returns why there is no answer, empty: there is one.
        has_nodes: whether there is a node other than this machine.
    """

    def __init__(
        self,
        presence: Presence,
        call: Callable[[], Awaitable[str]],
        has_nodes: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._presence, self._call, self._has_nodes = presence, call, has_nodes
        self._clock, self._sleep = clock, sleep
        self._began: float | None = None
        """Time of the first call."""
        self._answered_at = clock()
        self._was_answered = self._is_troubled = self._has_given_up = False

    async def run(self) -> None:
        self._presence.require_proofs()
        while True:
            try:
                if await asyncio.to_thread(self._has_nodes):
                    self.note(await self._call())
                else:
                    self._presence.note_proof()
            except StoreError as error:
                self.note(str(error))
            await self._sleep(INTERVAL)

    def note(self, why_not: str) -> None:
        """Record the result of a call."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        if not why_not:
            if self._is_troubled or self._has_given_up:
                log.info("this service answers its own calls again: the nodes' silence counts from now on")
            self._was_answered, self._answered_at = True, now
            self._is_troubled = self._has_given_up = False
            self._presence.note_proof()
        elif not self._was_answered and not self._has_given_up and now - self._began > PATIENCE:
            self._has_given_up = True
            self._presence.require_no_proofs()
            log.error(
                "this service has never reached itself (%s): the silence of nodes counts without that proof; check "
                "TRL_SERVICE_HOST and its certificate",
                why_not,
            )
        elif not self._is_troubled and not self._has_given_up and now - self._answered_at > GAP:
            self._is_troubled = True
            log.warning(
                "this service does not answer its own calls (%s): no node counts as lost until it does, and their "
                "trainings continue",
                why_not,
            )


async def _why_unanswered(url: str, tls: ssl.SSLContext | None, request: bytes) -> str:
    """Why a call gets no answer; empty: it gets one."""
    address = urlsplit(url)
    try:
        async with asyncio.timeout(GAP):
            reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=tls)
            try:
                writer.write(request)
                status = (await reader.readline()).split()[1:2]
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer within {GAP:g} s"
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    # Expected is 404 or 409: no agent polls like that. Whatever refuses it has read it, but for a shortage or a fault.
    if not status or not status[0].isdigit():
        return "the connection was closed without an answer"
    number = int(status[0])
    return f"status {number}" if number >= 500 or number in (408, 429) else ""


def _request(service: Service, url: str) -> bytes:
    """A poll of this machine's agent before it has joined, which changes nothing."""
    body = json.dumps({"boot_id": "none: the service calls itself"}).encode()
    head = (
        f"POST /v1/nodes/{service.node_name}/poll HTTP/1.1\r\n"
        f"Host: {urlsplit(url).netloc}\r\n"
        f"Authorization: Bearer {service.node_token}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def own_url(settings: ServiceSettings, port: int) -> str:
    """The address at which this machine calls its own service."""
    host = settings.host.strip("[]")
    try:
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = "::1" if address.version == 6 else "127.0.0.1"
    except ValueError:
        pass
    return f"{'http' if settings.tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def trusting(certificate: Path) -> ssl.SSLContext:
    """A TLS context that trusts exactly our own certificate, with any names."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
