"""The cache of Hugging Face's hub on this machine: which models and datasets it has, and where their files are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_YES = ("1", "ON", "YES", "TRUE")


class CachedCommit(NamedTuple):
    repository: Path
    """Its directory in the cache: links of a snapshot lead to other files in it."""
    commit: str

    @property
    def inside(self) -> str:
        return f"snapshots/{self.commit}"

    @property
    def directory(self) -> Path:
        return self.repository / self.inside


def hub_cache(environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("HF_HOME") or Path(environ.get("HOME", "~"), ".cache", "huggingface")).expanduser()
    return Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def cached_models(environ: Mapping[str, str]) -> list[str]:
    try:
        found = [path for path in hub_cache(environ).glob("models--*") if any(path.glob("snapshots/*/*"))]
    except OSError:
        return []
    return sorted(path.name.removeprefix("models--").replace("--", "/") for path in found)


def find_snapshot(
    environ: Mapping[str, str], name: str, revision: str | None, kind: Literal["models", "datasets"] = "models"
) -> CachedCommit | None:
    """The snapshot that an id stands for in the cache; None: there is none.

    Args:
        revision: branch, tag or commit; None: the default branch.
    """
    revision = revision or "main"
    is_name = _ID.fullmatch(name) and _REVISION.fullmatch(revision) and ".." not in (*Path(revision).parts, name)
    if not is_name:
        return None
    repository = hub_cache(environ) / f"{kind}--{name.replace('/', '--')}"
    commit = revision
    try:
        if not _COMMIT.fullmatch(revision):
            commit = (repository / "refs" / revision).read_text().strip()
        found = CachedCommit(repository, commit)
        return found if _COMMIT.fullmatch(commit) and found.directory.is_dir() else None
    except (OSError, UnicodeDecodeError):
        return None


def repository_of(directory: Path) -> Path | None:
    """The repository whose snapshot a directory is, in any cache; None: it is none."""
    snapshots, repository = directory.parent, directory.parent.parent
    is_snapshot = _COMMIT.fullmatch(directory.name) and snapshots.name == "snapshots"
    return repository if is_snapshot and repository.name.startswith("models--") else None


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether files that the cache lacks are not requested from the hub."""
    return any(environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_endpoint(environ: Mapping[str, str]) -> str:
    """The hub's address, with a password that it may have."""
    return (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_shown(environ: Mapping[str, str]) -> str:
    """The hub's address without a password."""
    parts = urlsplit(hub_endpoint(environ))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
