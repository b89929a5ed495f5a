"""Tokens that were created through the API: checked in memory, changed together with the database.

One process serves a data directory, so no other process changes them: a revoked token is refused by the next check.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.store.tokens import UNLIMITED, Role, TokenLimits, TokenRecord, Tokens, digest

from ..http.errors import Conflict, NotFound
from ..settings import RESERVED, ServiceSettings
from .access import Caller
from .limits import Bucket

log = logging.getLogger(__name__)
_MOST = 10_000
"""Created tokens; each is in memory."""
_USED_SECONDS = 60.0
"""Seconds between writes of a token's last use: a write per request would cost more than the request."""


@dataclass
class _Known:
    record: TokenRecord
    caller: Caller
    written_at: float
    """Time at which its last use was last written."""


class CreatedTokens:
    """Authenticates with the created tokens, and creates and revokes them."""

    def __init__(self, tokens: Tokens, settings: ServiceSettings, clock: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._configured = {entry.name: entry for entry in settings.configured_tokens}
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._changing = threading.Lock()
        """Held while the database and the memory change together: requests run `create` and `revoke` in threads."""
        self._writes: set[asyncio.Future[None]] = set()
        for record in tokens.all():
            self._remember(record)

    def __call__(self, token: str) -> Caller | None:
        # Looked up by its sha256: the time depends on the digest, which discloses nothing about any known token.
        known = self._known.get(digest(token))
        if known is None or not self._is_current(known.record):
            return None
        self._note_use(known)
        return known.caller

    def digests(self) -> Iterable[str]:
        return tuple(self._known)

    def by_digest(self, sha256: str) -> Caller | None:
        known = self._known.get(sha256)
        return known.caller if known is not None and self._is_current(known.record) else None

    def all(self) -> Sequence[TokenRecord]:
        """All tokens, oldest first; an expired one is listed until it is revoked."""
        return sorted((known.record for known in self._known.values()), key=lambda record: record.created_at)

    def create(
        self, name: str, role: Role, created_by: str, expires_in: float | None = None, limits: TokenLimits = UNLIMITED
    ) -> tuple[str, TokenRecord]:
        """Create a token. Returns it, which cannot be read again, and its record. Raises Conflict: the name is taken or
        reserved, or there are as many tokens as may be."""
        if name in self._configured or RESERVED.fullmatch(name):
            raise Conflict(f"the name {name!r} belongs to a token of the service's configuration: choose another")
        if len(self._known) >= _MOST:
            raise Conflict(f"there are {_MOST} tokens, as many as may be: revoke some (DELETE /v1/tokens/NAME)")
        with self._changing:
            token = self._tokens.create(name, role, created_by, expires_in, limits)
            if token is None:
                raise Conflict(f"there is a token {name!r} already: revoke it first, or choose another name")
            record = next(record for record in self._tokens.all() if record.name == name)
            self._remember(record)
        log.info("token %s (role %s) was created by %s", name, role, created_by)
        return token, record

    def revoke(self, name: str) -> None:
        """Refuse a token from now on. Raises Conflict: it is configured; NotFound."""
        if configured := self._configured.get(name):
            raise Conflict(
                f"the token {name!r} is configured ({configured.setting}): remove it there, and start the service again"
            )
        with self._changing:
            if not self._tokens.revoke(name):
                raise NotFound(f"there is no token {name!r} here: GET /v1/tokens lists them")
            self._known = {key: known for key, known in self._known.items() if known.record.name != name}
        log.info("token %s was revoked", name)

    def _remember(self, record: TokenRecord) -> None:
        rate = record.limits.requests_per_second
        caller = Caller(
            record.role,
            record.name,
            presented=True,
            limits=record.limits,
            bucket=None if rate is None else Bucket(rate),
            check=lambda: record.sha256 in self._known and self._is_current(record),
        )
        self._known = {**self._known, record.sha256: _Known(record, caller, record.last_used_at or 0.0)}

    def _is_current(self, record: TokenRecord) -> bool:
        return record.expires_at is None or self._clock() < record.expires_at

    def _note_use(self, known: _Known) -> None:
        now = self._clock()
        known.record = replace(known.record, last_used_at=now)
        if now - known.written_at < _USED_SECONDS:
            return
        known.written_at = now
        write = asyncio.get_running_loop().run_in_executor(None, self._write_use, known.record.name, now)
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)

    def _write_use(self, name: str, now: float) -> None:
        try:
            self._tokens.record_use(name, now)
        except StoreError as error:
            log.warning("the last use of token %s is not recorded: %s", name, error)
