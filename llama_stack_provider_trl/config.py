"""Settings of the job engine, and those of the inline provider: the `config` block of its entry in run.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from .requests.settings import JobSettings
from .specs.exact import AbsolutePath

DEFAULT_DATA_DIR = "~/.llama/trl"


class EngineSettings(JobSettings):
    """Settings of the job engine, which both providers have: those of jobs, and those of the machine."""

    model_roots: tuple[AbsolutePath, ...] = ()
    """Directories below which `model` may be a path, besides checkpoints of earlier jobs; none: any path (the service:
    any on loopback, else no path)."""
    device: str = "auto"
    """auto (every NVIDIA GPU, else mps, else cpu), cpu, mps, cuda (every GPU, one job on each) or cuda:N."""
    train_python: AbsolutePath | None = None
    """Interpreter that trains, and converts the service's datasets; null: this process's own. Checked at start."""
    hang_timeout: float = Field(1800.0, gt=0)
    """Seconds without any progress after which a training is ended as `hung`. A step is progress; before the first
    one, and while a checkpoint is written or read, so are CPU time and bytes."""

    preempt: bool = False
    """Whether a critical job that finds no free devices has jobs of lower priorities save and wait."""

    isolation: Literal["auto", "off", "required"] = "auto"
    """Keep trainings, and readers of datasets, apart from this process, its files and other jobs, by Linux namespaces.
    auto: where the machine allows it, else with a warning; required: refuse to start where it does not."""
    max_training_memory_gb: float | None = Field(None, gt=0)
    """GiB that the processes of a training may take together; more ends it as `out_of_memory`. null: no limit."""
    max_training_processes: int | None = Field(4096, gt=0)
    """Processes that a training may have; more ends it. null: no limit."""

    warm_start: bool = True
    """Keep a process that has imported torch and trl (0.5 GiB), and fork trainings on the CPU and preflights from it:
    the first step comes 4 s earlier. A training that needs another import starts cold."""

    blob_retention: float | None = Field(604800.0, ge=3600)
    """Seconds (7 days) for which rows that no job and no registered dataset refers to are kept; null: forever."""

    @field_validator("train_python", mode="before")
    @classmethod
    def _own_when_empty(cls, value: Any) -> Any:
        return None if value == "" else value


class TrlConfig(EngineSettings):
    """Every setting of `inline::trl`; unknown keys are refused when Llama Stack starts."""

    data_dir: AbsolutePath = Path(DEFAULT_DATA_DIR)

    @classmethod
    def sample_run_config(cls, __distro_dir__: str = "", **kwargs: Any) -> dict[str, Any]:
        """What `llama stack build` writes into a generated run.yaml."""
        return {
            "data_dir": "${env.TRL_OUTPUT_DIR:=~/.llama/trl}",
            "device": "auto",
            "train_python": "${env.TRL_TRAIN_PYTHON:=}",
        }
