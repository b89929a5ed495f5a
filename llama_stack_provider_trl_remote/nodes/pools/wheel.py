"""The wheel of this very installation: what a node over SSH is given to run.

It holds the modules that this process itself imports, with the metadata of the installed distribution. So it is made
alike from a wheel's install and from an editable one, needs no build backend and no network, and the same files give
the same bytes: its digest is the version that nodes are compared by.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

from ..identity import NodeError

DISTRIBUTION = "llama_stack_provider_trl"
_PACKAGES = ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")
_METADATA = ("METADATA", "entry_points.txt", "top_level.txt")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time of a zip file's entry: the content alone decides about the digest."""
_MOST_BYTES = 64 << 20


class Wheel(NamedTuple):
    name: str
    """Name of its file."""
    content: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def wheel_of_this_installation() -> Wheel:
    """Make the wheel. Raises NodeError: the distribution is not installed, so that its metadata are missing."""
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise NodeError(
            f"{DISTRIBUTION} is not installed here (its files are on the path without metadata): install it, or name "
            "its wheel with --wheel"
        ) from error
    information = f"{DISTRIBUTION}-{found.version}.dist-info"
    texts = {f"{information}/{name}": text.encode() for name in _METADATA if (text := found.read_text(name))}
    if not found.read_text("METADATA"):
        # In a checkout that was built once, the metadata found first are those of setuptools, under another name.
        texts[f"{information}/METADATA"] = (found.read_text("PKG-INFO") or "").encode()
    texts[f"{information}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: trl-remote\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    return Wheel(f"{DISTRIBUTION}-{found.version}-py3-none-any.whl", _zipped({**_modules(), **texts}, information))


def read_wheel(path: Path) -> Wheel:
    """Read a wheel of this distribution. Raises NodeError: the file cannot be read, or is none."""
    advice = f"name a wheel of {DISTRIBUTION} (pip wheel --no-deps .), or leave out --wheel"
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise NodeError(f"{path} has more than {_MOST_BYTES >> 20} MiB: {advice}")
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            named = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    except OSError as error:
        raise NodeError(f"{path} cannot be read ({error.strerror}): {advice}") from error
    except zipfile.BadZipFile as error:
        raise NodeError(f"{path} is not a wheel ({error}): {advice}") from error
    if path.suffix != ".whl" or not any(name.startswith(f"{DISTRIBUTION}-") for name in named):
        raise NodeError(f"{path} is not a wheel of {DISTRIBUTION}: {advice}")
    return Wheel(path.name, content)


def _modules() -> dict[str, bytes]:
    """Path in the wheel -> content, of each file of the packages."""
    files = {}
    for package in _PACKAGES:
        root = Path(str(import_module(package).__file__)).parent
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if (
                path.is_file()
                and path.suffix not in (".pyc", ".pyo")
                and not any(p.startswith(".") for p in inside.parts)
            ):
                files[f"{package}/{inside.as_posix()}"] = path.read_bytes()
    return files


def _zipped(files: dict[str, bytes], information: str) -> bytes:
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    record = f"{information}/RECORD"
    files = {**files, record: ("\n".join([*lines, f"{record},,"]) + "\n").encode()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return written.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
