"""The peak memory of a stretch of a process: of its GPU, or its resident memory on a CPU."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class Peak:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
        self.before = status("VmRSS")

    def measured(self) -> dict[str, Any]:
        """Bytes beyond what was allocated before.

        `context` is what the driver counts beyond torch's reserved memory: alone on the GPU, this process's context
        with the workspaces of its libraries.
        """
        if not self.on_gpu:
            return {"peak": status("VmHWM") - self.before, "allocated": 0, "reserved": 0, "context": 0}
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        reserved = torch.cuda.max_memory_reserved() - self.before
        allocated = torch.cuda.max_memory_allocated() - self.before
        return {"peak": reserved + context, "allocated": allocated, "reserved": reserved, "context": context}


def status(name: str) -> int:
    """A size of this process in /proc, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
