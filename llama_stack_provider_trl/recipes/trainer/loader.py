"""Processes that prepare a rank's batches while its device computes."""

from __future__ import annotations

import sys
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from ...specs.job import JobSpec
from ...system.process import die_with_parent


def num_workers(spec: JobSpec, device: str) -> int:
    """Loader processes of each rank; 0: the rank prepares its batches itself.

    Args:
        device: cuda, mps or cpu.
    """
    if spec.data.dataloader_num_workers is not None:
        return spec.data.dataloader_num_workers
    return 2 if device == "cuda" else 0


def loader_arguments(spec: JobSpec, device: str) -> dict[str, Any]:
    workers = num_workers(spec, device)
    return {
        "dataloader_num_workers": workers,
        "dataloader_multiprocessing_context": _WorkerContext() if workers and sys.platform == "linux" else None,
        "dataloader_pin_memory": device == "cuda",
    }


class _Worker(ForkProcess):
    """Ends with its rank, even by SIGKILL. torch's workers notice that after five seconds, in which their copies of the
    rank's descriptors keep the memory of its GPU."""

    def run(self) -> None:
        parent: int = self._parent_pid  # type: ignore[attr-defined]
        die_with_parent(parent)
        super().run()


class _WorkerContext(ForkContext):
    Process = _Worker
