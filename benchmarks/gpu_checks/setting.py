"""What a check is given: where it writes, and the device that it measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
REPOSITORY = BENCHMARKS.parent
GLOO = "gloo"


@dataclass(frozen=True)
class Setting:
    folder: Path
    """This check's own directory, empty at its start."""
    models: Path
    """Directory of models that checks share."""
    is_dry_run: bool
    """Tiny models on the CPU: the program is checked, and nothing is measured."""
    nccl: str = ""
    """The library by which two ranks share one GPU, or `gloo`: without NCCL. Empty: each has its own."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry_run else "cuda"

    def gpus(self, count: int) -> tuple[str, ...]:
        """The first GPUs, as tasks name them; none in a dry run."""
        count = 1 if self.nccl else count
        return () if self.is_dry_run else tuple(f"cuda:{number}" for number in range(count))

    @property
    def variables(self) -> dict[str, str]:
        """Of the training processes."""
        if self.is_dry_run:
            return {"OMP_NUM_THREADS": "1"}
        if not self.nccl:
            return {}
        if self.nccl == GLOO:
            return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TRL_CUDA_BACKEND": GLOO}
        # NVLink SHARP takes a GPU for each rank, and two ranks need room for the kernels of both.
        sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
        return {"LD_PRELOAD": self.nccl, **sharing}

    @property
    def dtype(self) -> str:
        """CPUs without bf16 instructions would take ten times as long."""
        return "fp32" if self.is_dry_run else "bf16"
