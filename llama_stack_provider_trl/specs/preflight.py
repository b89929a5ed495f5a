"""The specification of a preflight, which trains nothing and takes no device."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PreviewSpec(BaseModel):
    """The rows of a job's dataset that are to be shown as they are trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_row: int = Field(0, ge=0)
    rows: int = Field(10, gt=0, le=100)


class PreflightSpec(BaseModel):
    """The devices that the job would get, for a preflight, which runs on none of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda", "mps"]
    memory_bytes: int | None = Field(None, gt=0)
    """Of each device; None: this machine's memory, shared by the job's ranks."""
    machine_memory_bytes: int | None = Field(None, gt=0)
    """CPU memory of each machine with such devices; None: unknown for GPUs, else this machine's."""
    max_ranks: int = Field(1, gt=0)
    """The most that the job could ask for."""
    free_bytes: int | None = Field(None, ge=0)
    """Free on the disk of the job's checkpoints, which an isolated process does not see; None: not measured yet."""
    own_memory_bytes: int | None = Field(None, gt=0)
    """What the preflight's own process may allocate besides its libraries; None: no limit."""
    preview: PreviewSpec | None = None
    """Not None: instead of an estimate, rows as they are trained (`events.Previewed`)."""

    @property
    def too_much_memory(self) -> str:
        """The error message of a preflight that exceeded this limit."""
        return (
            f"the preflight takes more than {(self.own_memory_bytes or 0) >> 20} MiB of memory (preflight_memory_mb "
            "of the service) for the rows and the model's chat template: try it with fewer or shorter rows, and check "
            "the template"
        )
