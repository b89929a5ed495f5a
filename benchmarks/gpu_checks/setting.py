"""What a check is given: where it writes, and the device that it measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
REPOSITORY = BENCHMARKS.parent


@dataclass(frozen=True)
class Setting:
    folder: Path
    """This check's own directory, empty at its start."""
    models: Path
    """Directory of models that checks share."""
    is_dry_run: bool
    """Tiny models on the CPU: the program is checked, and nothing is measured."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry_run else "cuda"

    def gpus(self, count: int) -> tuple[str, ...]:
        """The first GPUs, as tasks name them; none in a dry run."""
        return () if self.is_dry_run else tuple(f"cuda:{number}" for number in range(count))

    @property
    def dtype(self) -> str:
        """CPUs without bf16 instructions would take ten times as long."""
        return "fp32" if self.is_dry_run else "bf16"
