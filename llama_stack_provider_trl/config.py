"""Configuration of the inline provider: the `config` block of its entry in run.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from .documented import Documented
from .requests.options import Priority

DEFAULT_DATA_DIR = "~/.llama/trl"


def _trusted(entry: str) -> str:
    path, _, revision = entry.partition("@")
    if entry.startswith(("/", "~")) or (re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and revision):
        return entry
    raise ValueError(f"{entry!r} is neither an absolute directory nor ORG/NAME@REVISION (which keeps the code fixed)")


TrustedModel = Annotated[str, AfterValidator(_trusted)]


class TrlConfig(Documented):
    """Every knob of `inline::trl`; unknown keys are refused when Llama Stack starts."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    data_dir: Path = Path(DEFAULT_DATA_DIR)
    """Everything the provider writes: job database, datasets, run directories, checkpoints."""
    device: str = "auto"
    """auto, cpu, mps, cuda (every GPU of this machine, one job on each) or cuda:N."""
    max_seq_length: int = Field(1024, gt=1)
    """Tokens per sequence where a job does not say."""
    checkpoint_roots: list[Path] = Field(default_factory=list)
    """Directories besides `data_dir` that an absolute `checkpoint_dir` may point into."""
    model_roots: list[Path] = Field(default_factory=list)
    """Directories below which `model` may be a path, besides checkpoints of earlier jobs; none: any path."""
    train_python: Path | None = None
    """Interpreter that trains; unset: Llama Stack's own. Checked when Llama Stack starts."""
    trust_remote_code: list[TrustedModel] = Field(default_factory=list)
    """Models whose own code may run: directories, or ORG/NAME@REVISION. Other models that need it are refused."""

    save_steps: int | None = Field(None, gt=0)
    """Optimizer steps between checkpoints where a job does not say; unset: at the end of every epoch and every 30
    minutes."""
    keep_last: int | None = Field(None, gt=0)
    """Step checkpoints to keep where a job does not say; unset: all."""
    retries: int = Field(3, ge=0)
    """How often a job that does not say is tried again after a failure that another try can mend."""
    oom_retry: bool = True
    """Whether a job that ran out of memory and does not say is tried once more with half the batch size and twice the
    accumulation: the same steps, in less memory."""
    max_duration: float | None = Field(None, gt=0)
    """Seconds that a job may train where it does not say; unset: no limit."""
    priority: Priority = "normal"
    """Priority of a job that does not say."""
    hang_timeout: float = Field(1800.0, gt=0)
    """Seconds without any progress after which a training is ended as `hung`. A step is progress; before the first
    one, and while a checkpoint is written or read, so are CPU time and bytes."""
    min_free_disk_mb: int = Field(512, ge=0)
    """MiB that a job's checkpoints must leave free on their disk: it fails, or waits for its next try, before that."""

    isolation: Literal["auto", "off", "required"] = "auto"
    """Keep trainings apart from this process, its files and other jobs, by Linux namespaces. auto: where the machine
    allows it, else with a warning; required: refuse to start where it does not."""
    max_training_memory_gb: float | None = Field(None, gt=0)
    """GiB that the processes of a training may take together; more ends it as `out_of_memory`. Unset: no limit."""
    max_training_processes: int | None = Field(4096, gt=0)
    """Processes that a training may have; more ends it. none: no limit."""

    blob_retention: float | None = Field(604800.0, ge=3600)
    """Seconds for which rows that no job refers to any more are kept; none: for ever."""

    @field_validator("data_dir", "checkpoint_roots", "model_roots", "train_python", mode="after")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        if value is None:
            return None
        paths = value if isinstance(value, list) else [value]
        absolute = [path.expanduser().absolute() for path in paths]
        return absolute if isinstance(value, list) else absolute[0]

    @field_validator("data_dir", mode="before")
    @classmethod
    def _default_when_empty(cls, value: Any) -> Any:
        return DEFAULT_DATA_DIR if value in (None, "") else value

    @field_validator("train_python", mode="before")
    @classmethod
    def _own_when_empty(cls, value: Any) -> Any:
        return value or None

    @classmethod
    def sample_run_config(cls, __distro_dir__: str = "", **kwargs: Any) -> dict[str, Any]:
        """What `llama stack build` writes into a generated run.yaml."""
        return {
            "data_dir": "${env.TRL_OUTPUT_DIR:=~/.llama/trl}",
            "device": "auto",
            "train_python": "${env.TRL_TRAIN_PYTHON:=}",
        }
