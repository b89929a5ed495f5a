"""Stores the node's credential in its data directory, so that a later agent there is the same node."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from llama_stack_provider_trl.system.data_dir import NodeDir, read_own
from llama_stack_provider_trl.system.files import atomic_write_json

log = logging.getLogger(__name__)


class CredentialFile:
    """The file of the credential, with mode 0600.

    Args:
        service, node: issuer and holder of the secret. A secret of another service or name is not used, so that it
            never reaches another service.
    """

    def __init__(self, data_dir: Path, service: str, node: str) -> None:
        self._path = NodeDir(data_dir).credential
        self._owner = {"service": service, "node": node}

    def read(self) -> str | None:
        """Read the credential. None: it is missing or cannot be read."""
        try:
            found = read_own(self._path, _parsed)
        except OSError as error:
            log.warning("%s cannot be read (%s): the node joins with its token", self._path, type(error).__name__)
            return None
        if found is None:
            return None
        credential = found.pop("credential")
        return credential if found == self._owner else None

    def write(self, credential: str) -> None:
        """Write the credential. Raises OSError: nothing was written."""
        atomic_write_json(self._path, {**self._owner, "credential": credential}, mode=0o600)


def _parsed(data: bytes) -> dict[str, str]:
    found = json.loads(data)
    return {**found, "credential": str(found["credential"])}
