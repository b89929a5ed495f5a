"""Stores the node's credential in its data directory, so that a later agent there is the same node."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from llama_stack_provider_trl.system.files import atomic_write_json

log = logging.getLogger(__name__)
FILE = "credential.json"


class CredentialFile:
    """The file of the credential, with mode 0600.

    Args:
        service, node: issuer and holder of the secret. A secret of another service or name is not used, so that it
            never reaches another service.
    """

    def __init__(self, data_dir: Path, service: str, node: str) -> None:
        self._path = data_dir / FILE
        self._owner = {"service": service, "node": node}

    def read(self) -> str | None:
        """Read the credential. None: it is missing or cannot be read."""
        try:
            found = json.loads(self._path.read_text())
            credential = found.pop("credential")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): the node joins with its token", self._path, type(error).__name__)
            return None
        return str(credential) if found == self._owner else None

    def write(self, credential: str) -> None:
        """Write the credential. Raises OSError: nothing was written."""
        atomic_write_json(self._path, {**self._owner, "credential": credential}, mode=0o600)
