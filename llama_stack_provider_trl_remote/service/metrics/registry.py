"""The metrics of a running service: those from the store, those of its process, and the latency of HTTP calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_stack_provider_trl.jobs.store.store import Store

from ..cluster.membership import Cluster
from ..security.access import ROUTE
from .latencies import Latencies

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_KEPT_SECONDS = 1.0
"""Scrapes within this time get the same answer: the cost does not grow with the number of scrapers."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class Metrics:
    """What `GET /metrics` answers. Safe to share between threads."""

    def __init__(self, store: Store, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._cluster, self._clock = store, cluster, clock
        self.latencies = Latencies()
        self._registry: CollectorRegistry | None = None
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, bytes]] = {}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that an Accept header prefers, and its content type. Raises StoreError."""
        # Here: it imports servers and clients of HTTP, and most services are never scraped.
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        with self._lock:
            if self._registry is None:
                from .collector import registry_of

                self._registry = registry_of(self._store, self._cluster, self.latencies)
            at, text = self._kept.get(content_type, (float("-inf"), b""))
            if self._clock() - at >= _KEPT_SECONDS:
                text = encode(self._registry)
                # One per format, of which there are few: an unknown version in the header gets a known one.
                self._kept = {content_type: (self._clock(), text)}
        return text, content_type


class Latency:
    """ASGI middleware that measures how long each call waits for its answer.

    Calls that no route was found for have the route `none`; the class of the status is `2xx` to `5xx`.
    """

    def __init__(self, app: ASGIApp, latencies: Latencies) -> None:
        self.app = app
        self._latencies = latencies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began = time.perf_counter()

        async def measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                status = f"{message['status'] // 100}xx"
                self._latencies.observe((scope.get(ROUTE, "none"), method, status), time.perf_counter() - began)
            await send(message)

        await self.app(scope, receive, measured)
