"""File systems that a test mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests import required


def tmpfs(path: Path, options: str) -> AbstractContextManager[Path]:
    """An empty file system in memory at `path`, with options such as `size=6m,ro`."""
    return mounted(path, "-t", "tmpfs", "-o", options, "tmpfs")


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """A file system of its own at `path`."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        required.lacking("needs root and mount(8)")
    path.mkdir(parents=True, exist_ok=True)
    mount = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if mount.returncode != 0:
        required.lacking(f"nothing can be mounted here: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
