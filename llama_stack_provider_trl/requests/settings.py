"""What the resolution of a request takes from the provider's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..specs.job import (
    ShardingSpec,
)
from .bodies import (
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
)

Request = SupervisedFineTuneRequest | PreferenceOptimizeRequest


@dataclass(frozen=True)
class Settings:
    """What `resolve` takes from the provider's configuration."""

    data_dir: Path
    devices: tuple[str, ...]
    max_seq_length: int = 1024
    checkpoint_roots: tuple[Path, ...] = ()
    model_roots: tuple[Path, ...] | None = None
    """Directories below which a model may be named by its path, besides our own checkpoints; None: anywhere."""
    save_steps: int | None = None
    keep_last: int | None = None
    retries: int = 0
    oom_retry: bool = False
    max_duration: float | None = None
    priority: str = "normal"
    min_free_bytes: int = 0
    ranks: int = 1
    """Processes per job where a job does not say; 1: nothing here can train with several."""
    max_ranks: int = 1
    """The most that a job may ask for, per node."""
    nodes: int = 1
    """Machines per job where a job does not say."""
    max_nodes: int = 1
    """The most that a job may ask for; 1: nothing here can train on other machines."""
    sharding: ShardingSpec | None = None
    """How several ranks hold a model; None: this provider trains in one process only."""
    gradient_checkpointing: bool = False
    """Where a job does not say."""
    checkpoint_every: int = 1
    """Of how many blocks one is recomputed, where a job does not say."""
    trust_remote_code: tuple[str, ...] = ()
    """Models whose own code may run: directories, and model ids with their revision as ORG/NAME@REVISION."""
