"""A service whose jobs nothing supervises: they stay as they were stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_stack_provider_trl.system.process import FileLock
from tests.contract.service import running
from tests.security.guarded import Guarded


@contextmanager
def unsupervised(root: Path, *jobs: Callable[[Path], object]) -> Iterator[Guarded]:
    """Each of `jobs` writes some into the data directory, before the service starts."""
    data_dir = root / "data"
    data_dir.mkdir(mode=0o700)
    supervisor = FileLock(data_dir / "supervisor.lock")
    assert supervisor.acquire("a test")
    for add in jobs:
        add(data_dir)
    try:
        with running(Guarded(root)) as service:
            yield service
    finally:
        supervisor.release()
