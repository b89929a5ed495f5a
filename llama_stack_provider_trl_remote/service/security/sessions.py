"""Sessions of browsers: what a login issues in place of its token.

A cookie holds a random id. The file in the data directory holds the id's sha256 and a proof, made of the id and the
token's digest: neither discloses a token, and a session ends when its token does. The file outlives the service, so a
page that is open during a restart continues.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from llama_stack_provider_trl.system.data_dir import read_own
from llama_stack_provider_trl.system.files import atomic_write_json

from .access import Caller

log = logging.getLogger(__name__)
LIFETIME = 12 * 3600.0
"""Seconds from a login to the next one."""
_MOST, _MOST_OF_TOKEN = 1000, 100
"""Sessions at a time, and those of a token; one more ends the oldest of all, or of that token: it cannot end those of
others. A token's from before a restart do not count until they are used."""


class KnownTokens(Protocol):
    """Tokens that the service knows, by their digests (`jobs.store.tokens.digest`)."""

    def digests(self) -> Iterable[str]: ...

    def by_digest(self, sha256: str) -> Caller | None:
        """The caller of a token that is valid now; None: there is no such token."""


@dataclass
class _Session:
    proof: str
    expires_at: float
    digest: str | None = None
    """Of its token; None: not found out since the file was read."""


class Sessions:
    """Opens, finds and closes sessions. Safe to share between threads.

    The file is read when a session or a form is first needed. One that cannot be read counts as empty: every browser
    logs in again.

    Args:
        known: the tokens whose callers may have sessions.
    """

    def __init__(self, path: Path, known: Iterable[KnownTokens] = (), clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._known = tuple(known)
        self._clock = clock
        self._lock = threading.Lock()
        """Never held during a write: event loops wait for it, and a disk may hang."""
        self._writing = threading.Lock()
        self._key: bytes | None = None
        self._sessions: dict[str, _Session] = {}
        name = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:8]
        self.cookie = f"trl_session_{name}"
        """Name of the cookie. Cookies of one host are shared between its ports: each service has a name of its own."""

    def open(self, digest: str) -> str:
        """Open a session for the token with this digest. Returns its id, the value of the cookie. Raises OSError: the
        file cannot be written."""
        session_id = secrets.token_urlsafe(32)
        with self._lock:
            self._read()
            now = self._clock()
            kept = {key: session for key, session in self._sessions.items() if now < session.expires_at}
            for most in (_MOST_OF_TOKEN, _MOST):
                counted = [key for key in kept if most == _MOST or kept[key].digest == digest]
                for key in sorted(counted, key=lambda key: kept[key].expires_at)[: max(0, len(counted) + 1 - most)]:
                    del kept[key]
            self._sessions = {**kept, _hash(session_id): _Session(_proof(session_id, digest), now + LIFETIME, digest)}
        self._write()
        return session_id

    def close(self, session_id: str) -> None:
        """End a session. Raises OSError: the file cannot be written; the session has ended all the same."""
        with self._lock:
            self._read()
            was_open = self._sessions.pop(_hash(session_id), None) is not None
        if was_open:
            self._write()

    def caller(self, session_id: str) -> Caller | None:
        """The caller of a session; None: there is no such session, or its token is no longer valid."""
        found = self._caller(session_id)
        if found is None:
            return None
        return replace(found, session=session_id, check=lambda: self._caller(session_id) is not None)

    def form_token(self, session_id: str) -> str:
        """The token that forms of a session's pages carry; an empty id: where no login is needed."""
        with self._lock:
            self._read()
            assert self._key is not None
            return hmac.new(self._key, session_id.encode(), "sha256").hexdigest()

    def _caller(self, session_id: str) -> Caller | None:
        with self._lock:
            self._read()
            session = self._sessions.get(_hash(session_id))
        if session is None or self._clock() >= session.expires_at:
            return None
        if session.digest is None:
            session.digest = self._digest_of(session, session_id)
        digest = session.digest or ""
        return next((caller for known in self._known if (caller := known.by_digest(digest)) is not None), None)

    def _digest_of(self, session: _Session, session_id: str) -> str:
        """The digest of a session's token, which the file does not hold; empty: its token was removed."""
        digests = (digest for known in self._known for digest in known.digests())
        return next((one for one in digests if hmac.compare_digest(_proof(session_id, one), session.proof)), "")

    def _read(self) -> None:
        if self._key is not None:
            return
        try:
            found = read_own(self._path, _parsed)
        except OSError as error:
            log.warning("%s cannot be read (%s): every browser has to log in again", self._path, error)
            found = None
        if found is not None:
            self._key, self._sessions = found
            return
        self._key, self._sessions = secrets.token_bytes(32), {}
        threading.Thread(target=self._try_to_write, name="trl-sessions", daemon=True).start()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("%s cannot be written (%s): a restart ends every session", self._path, error)

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                assert self._key is not None
                sessions = {key: [session.proof, session.expires_at] for key, session in self._sessions.items()}
                contents = {"key": self._key.hex(), "sessions": sessions}
            atomic_write_json(self._path, contents)


def cookie_header(name: str, session_id: str, *, secure: bool) -> str:
    """The Set-Cookie header of a session; an empty id: the header that removes it."""
    lifetime = int(LIFETIME) if session_id else 0
    attributes = ["Path=/", f"Max-Age={lifetime}", "HttpOnly", "SameSite=Strict", *(["Secure"] if secure else [])]
    return "; ".join([f"{name}={session_id}", *attributes])


def _parsed(data: bytes) -> tuple[bytes, dict[str, _Session]]:
    found = json.loads(data)
    key = bytes.fromhex(found["key"])
    if len(key) < 32:
        raise ValueError("its key has less than 32 bytes")
    return key, {name: _session(value) for name, value in found["sessions"].items()}


def _session(value: Any) -> _Session:
    proof, expires_at = value
    return _Session(str(proof), float(expires_at))


def _hash(session_id: str) -> str:
    return hashlib.sha256(session_id.encode("utf-8", "surrogateescape")).hexdigest()


def _proof(session_id: str, digest: str) -> str:
    return hmac.new(session_id.encode("utf-8", "surrogateescape"), digest.encode(), "sha256").hexdigest()


def cookies_of(header: str) -> Mapping[str, str]:
    """The cookies of a Cookie header; of a name that is given twice, the first one."""
    found: dict[str, str] = {}
    for part in header.split(";"):
        name, _, value = part.partition("=")
        found.setdefault(name.strip(), value.strip())
    return found
