"""Rate limits: token buckets, for the requests of a caller and for failed authentications of an address."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from ..http.connections import network_of

Clock = Callable[[], float]
FAILURES_PER_SECOND = 20.0
"""Tokens that one address may try. A 256-bit token is safe at any rate, a short configured one is not."""
_ADDRESSES = 4096
"""Addresses whose failures are counted, and pairs of address and token that are known to be good."""


class Bucket:
    """Allows `rate` per second on average, and `burst` at once."""

    def __init__(self, rate: float, burst: float | None = None, clock: Clock = time.monotonic) -> None:
        self.rate = rate
        self._burst = max(1.0, 2 * rate if burst is None else burst)
        self._clock = clock
        self._level = self._burst
        self._filled_at = clock()

    def take(self) -> float:
        """Take one token of the bucket. Returns 0, or the seconds until one is free; nothing is taken then."""
        missing = self.missing()
        if not missing:
            self._level -= 1
        return missing

    def missing(self) -> float:
        """The result of `take`, without taking a token."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now
        return 0.0 if self._level >= 1 - 1e-9 else (1 - self._level) / self.rate


class Failures:
    """Counts failed authentications by source address.

    An address over its rate may use only tokens that were accepted from it before. Guessing stops, and other clients at
    the address continue."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def may_try(self, address: str, token: str) -> bool:
        """Whether a token of this address may be compared at all."""
        if not self._buckets:
            return True
        bucket = self._buckets.get(network_of(address))
        return bucket is None or not bucket.missing() or _pair(address, token) in self._accepted

    def note(self, address: str, token: str, accepted: bool) -> None:
        """Record the result of a comparison."""
        if accepted:
            # Good tokens are recorded before any failure, and are looked up only after one.
            _remember(self._accepted, _pair(address, token), None)
            return
        bucket = self._buckets.get(network_of(address)) or Bucket(
            FAILURES_PER_SECOND, FAILURES_PER_SECOND, clock=self._clock
        )
        bucket.take()
        _remember(self._buckets, network_of(address), bucket)


def _remember[Key, Value](kept: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _ADDRESSES:
        kept.popitem(last=False)


def _pair(address: str, token: str) -> bytes:
    return hashlib.sha256(f"{address}\0{token}".encode("utf-8", "surrogatepass")).digest()
