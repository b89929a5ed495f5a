"""Credentials of nodes: issued by a join, stored as a hash, valid for one node until replaced or the node is
removed."""

from __future__ import annotations

import hashlib
import logging
import secrets

from llama_stack_provider_trl.errors import StoreError, shortage_behind
from llama_stack_provider_trl.jobs.store.store import Store

from ..security.access import Caller, Refused, Removed

log = logging.getLogger(__name__)


class NodeCredentials:
    """Find the node of a credential. Reads the job store every time: a removed node is refused at its next call. Raises
    Removed: the node was removed; Refused: 503 or 507, the store cannot be read."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, token: str) -> Caller | None:
        sha256 = hash_of(token)
        try:
            found = self._store.nodes.credential(sha256)
        except StoreError as error:
            log.error("a credential cannot be checked: %s", error)
            shortage = shortage_behind(error)
            text = shortage.described("a credential cannot be checked")
            raise Refused(shortage.status, text, shortage.headers) from error
        if found is None:
            return None
        if found.revoked:
            raise Removed(found.node, removed(found.node))
        return Caller.of_node(found.node, "" if found.used else sha256)


def new_credential() -> tuple[str, str]:
    """A new credential, and its hash."""
    credential = secrets.token_urlsafe(32)
    return credential, hash_of(credential)


def hash_of(credential: str) -> str:
    # No salt and no slow hash: 256 random bits cannot be guessed.
    return hashlib.sha256(credential.encode()).hexdigest()


def removed(node: str) -> str:
    return f"node {node!r} was removed (trl-remote nodes remove): start its agent again to have it back"
