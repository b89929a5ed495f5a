"""Snapshots in a cache of the hub, made here."""

from __future__ import annotations

import os
from pathlib import Path

from tests.orders import write

COMMIT = "c" * 40


def snapshot(root: Path, files: dict[str, bytes], commit: str = COMMIT, model: str = "org/tiny") -> Path:
    """A model in a hub's cache: its files are links to blobs. Returns the cache."""
    repository = root / "hub" / f"models--{model.replace('/', '--')}"
    write(repository / "refs" / "main", commit.encode())
    for number, (name, data) in enumerate(files.items()):
        write(repository / "blobs" / f"{commit[0]}{number}", data)
        link = repository / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / f"{commit[0]}{number}", link.parent))
    return root / "hub"
