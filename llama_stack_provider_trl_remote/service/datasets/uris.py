"""Checks uris of datasets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, urlsplit

from llama_stack_provider_trl.errors import InvalidRequest

from .reader import HUB

_HUB_OPTIONS = ("split", "name", "revision")


@dataclass(frozen=True)
class Readable:
    """A checked uri. A context manager: its file is closed at the end."""

    name: str
    """Its real path, whose suffix names the format; or a uri of the hub."""
    stamp: str
    """Changes with the content."""
    file: int | None = None
    """Descriptor of the file; None: it is on the hub."""

    def __enter__(self) -> Readable:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            os.close(self.file)


def split_uri(uri: str) -> SplitResult:
    """The parts of a uri. Raises InvalidRequest."""
    try:
        return urlsplit(uri)
    except ValueError as error:  # brackets that are no IPv6 address
        raise InvalidRequest("source.uri", uri, f"it is no uri ({error}): correct it") from error


def hub_name(uri: str) -> str:
    """The uri of a dataset on the hub, checked. Raises InvalidRequest."""
    parts = split_uri(uri)
    options = dict(parse_qsl(parts.query))
    name = parts.path.strip("/")
    if parts.netloc != "datasets" or not 0 < name.count("/") + 1 <= 2 or not name or set(options) - {*_HUB_OPTIONS}:
        hint = f"expected {HUB}://datasets/ORG/NAME, with any of ?{'=&'.join(_HUB_OPTIONS)}="
        raise InvalidRequest("source.uri", uri, hint)
    # The library would read files of this machine for a name that begins like a path.
    if any(part in ("", ".", "..") or part.startswith(("~", ".")) for part in name.split("/")):
        raise InvalidRequest("source.uri", uri, "expected the name of a dataset on the hub, ORG/NAME")
    return uri
