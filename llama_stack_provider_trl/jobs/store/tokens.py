"""Tokens that admins create while the service runs: records beside the jobs, in the same database.

The database holds the sha256 of a token and never the token. A slow hash would add nothing: a token is 256 random bits,
so it cannot be guessed, and every request would pay for it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from .store import Store

Role = Literal["metrics", "read", "submit", "node", "admin"]
"""metrics: reads `GET /metrics` and nothing else. read: sees what submit sees, and changes nothing."""
PREFIX = "trl_"
"""Prefix of every created token, by which scanners for leaked secrets recognize it."""
_BYTES = 32


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a token's caller; None: no limit."""

    max_queued_jobs: int | None = None
    """Jobs of this token that may wait at once, paused ones included."""
    requests_per_second: float | None = None
    """On average; bursts of twice as many are allowed."""
    priorities: tuple[str, ...] | None = None
    """Priorities that its jobs may have."""


UNLIMITED = TokenLimits()


@dataclass(frozen=True)
class TokenRecord:
    """A created token. Times are seconds since the epoch."""

    name: str
    sha256: str
    role: Role
    created_at: float
    created_by: str
    expires_at: float | None
    last_used_at: float | None
    limits: TokenLimits


class Tokens:
    """The created tokens of a job database. Every method may raise StoreError."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def create(
        self, name: str, role: Role, created_by: str, expires_in: float | None = None, limits: TokenLimits = UNLIMITED
    ) -> str | None:
        """Create a token. Returns it, which cannot be read again; None: the name is taken."""
        token = PREFIX + secrets.token_urlsafe(_BYTES)
        now = self._clock()
        row = {
            **{"name": name, "sha256": digest(token), "role": role, "created_by": created_by, "now": now},
            "expires_at": None if expires_in is None else now + expires_in,
            "limits": json.dumps(asdict(limits)),
        }
        with self._store.database.transaction() as execute:
            return token if execute("insert_token", row).rowcount == 1 else None

    def all(self) -> Sequence[TokenRecord]:
        """All tokens, oldest first."""
        return [_record(row) for row in self._store.database.select("select_tokens", {})]

    def record_use(self, name: str, time: float) -> None:
        """Record when a token was last used."""
        with self._store.database.transaction() as execute:
            execute("note_token_used", {"name": name, "time": time})

    def revoke(self, name: str) -> bool:
        """Delete a token. Returns whether there was one of this name."""
        with self._store.database.transaction() as execute:
            return execute("delete_token", {"name": name}).rowcount == 1


def digest(token: str) -> str:
    """What the database holds of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _record(row: sqlite3.Row) -> TokenRecord:
    limits = json.loads(row["limits"])
    if limits["priorities"] is not None:
        limits["priorities"] = tuple(limits["priorities"])
    return TokenRecord(**{**dict(row), "limits": TokenLimits(**limits)})
