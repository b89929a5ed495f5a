"""Configuration of the inline provider: the `config` block of its entry in run.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

DEFAULT_DATA_DIR = "~/.llama/trl"


class TrlConfig(BaseModel):
    """Every knob of `inline::trl`; unknown keys are refused when Llama Stack starts."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True)

    data_dir: Path = Path(DEFAULT_DATA_DIR)
    """Everything the provider writes: job database, datasets, run directories, checkpoints."""
    device: str = "auto"
    """auto, cpu, mps, cuda (every GPU of this machine, one job on each) or cuda:N."""
    max_seq_length: int = Field(1024, gt=1)
    """Tokens per sequence where a job does not say."""
    checkpoint_roots: list[Path] = Field(default_factory=list)
    """Directories besides `data_dir` that an absolute `checkpoint_dir` may point into."""

    @field_validator("data_dir", "checkpoint_roots", mode="after")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        paths = value if isinstance(value, list) else [value]
        absolute = [path.expanduser().absolute() for path in paths]
        return absolute if isinstance(value, list) else absolute[0]

    @field_validator("data_dir", mode="before")
    @classmethod
    def _default_when_empty(cls, value: Any) -> Any:
        return DEFAULT_DATA_DIR if value in (None, "") else value

    @classmethod
    def sample_run_config(cls, __distro_dir__: str = "", **kwargs: Any) -> dict[str, Any]:
        """What `llama stack build` writes into a generated run.yaml."""
        return {"data_dir": "${env.TRL_OUTPUT_DIR:=~/.llama/trl}", "device": "auto"}
