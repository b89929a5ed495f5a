"""Settings of jobs: declared once for both providers, and read by the resolution of requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..documented import Documented
from ..specs.exact import AbsolutePath, ExactValues
from ..specs.job import ShardingSpec
from ..system.data_dir import DataDir
from .bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from .choices import no_such_setting
from .options import Priority
from .trackers import TrackerSettings

Request = SupervisedFineTuneRequest | PreferenceOptimizeRequest
UNKNOWN_SETTING = "unknown_setting"
"""Type of the error for a setting that there is not."""


def _trusted(entry: str) -> str:
    path, _, revision = entry.partition("@")
    if entry.startswith(("/", "~")) or (re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and revision):
        return entry
    raise ValueError(f"{entry!r} is neither an absolute directory nor ORG/NAME@REVISION (which keeps the code fixed)")


TrustedModel = Annotated[str, AfterValidator(_trusted)]


class JobSettings(Documented, ExactValues):
    """Settings of both providers that `resolve` reads, most of them the default of a job that sets none."""

    # A process that only imports the settings of a provider, or has no pools, builds no validator of them.
    model_config = ConfigDict(extra="forbid", validate_default=True, defer_build=True)
    PAGE: ClassVar[str] = "docs/reference/configuration.md"
    """Lists the settings."""

    data_dir: AbsolutePath
    """Job database, datasets, run directories, and below `checkpoints` the results of jobs."""
    max_seq_length: int = Field(1024, gt=1)
    """Tokens per sequence where a job sets none."""
    save_steps: int | None = Field(None, gt=0)
    """Optimizer steps between checkpoints where a job sets none; null: at the end of every epoch and every 30
    minutes."""
    keep_last: int | None = Field(None, gt=0)
    """Step checkpoints to keep where a job sets none; null: all."""
    retries: int = Field(3, ge=0)
    """How often a job that sets none is tried again after a failure that another try can get past."""
    retry_backoff: float | None = Field(None, gt=0, le=600)
    """Seconds to wait before the first retry of a job; doubled with each further one, 10 minutes at most. null: 1,
    or 2 after a hang or a lost node, 10 after a failed launch or export, 30 with a full disk."""
    oom_retry: bool = True
    """Whether a job that ran out of memory, and sets nothing, is tried once more with half the batch size and twice the
    accumulation: the same steps, in less memory."""
    max_duration: float | None = Field(None, gt=0)
    """Seconds that a job may train where it sets none; null: no limit."""
    priority: Priority = "normal"
    """low, normal, high or critical, where a job sets none."""
    min_free_disk_mb: int = Field(512, ge=0)
    """MiB that checkpoints and uploads must leave free on their disk: a job fails, or waits for its next try, before
    that."""
    checkpoint_roots: tuple[AbsolutePath, ...] = ()
    """Directories besides `checkpoints` in `data_dir` that an absolute `checkpoint_dir` may point into."""
    trust_remote_code: tuple[TrustedModel, ...] = ()
    """Models whose own code may run: directories, or ORG/NAME@REVISION. Other models that need it are refused."""
    harness_roots: tuple[AbsolutePath, ...] = ()
    """Directories of task files of lm-evaluation-harness, which evaluations may name. Their code runs in the jobs."""
    python_graders: bool = False
    """Whether the source of graders of type python, which requests bring, runs: without files and network, with limits
    of time and memory. Linux on x86_64 and aarch64."""

    trackers: TrackerSettings = TrackerSettings()
    """Experiment trackers that jobs may use, and where they are."""

    @model_validator(mode="wrap")
    @classmethod
    def _name_unknown_settings(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            unknown: list[InitErrorDetails] = [
                {
                    "type": PydanticCustomError(
                        UNKNOWN_SETTING, "{problem}", {"problem": no_such_setting(one, cls, cls.PAGE)}
                    ),
                    "loc": one["loc"],
                    "input": one["input"],
                }
                for one in error.errors()
                if one["type"] == "extra_forbidden"
            ]
            if not unknown:
                raise
            raise ValidationError.from_exception_data(cls.__name__, unknown) from None

    @field_validator("data_dir", mode="before")
    @classmethod
    def _default_when_empty(cls, value: Any) -> Any:
        field = cls.model_fields["data_dir"]
        return field.default if value in (None, "") and not field.is_required() else value

    @model_validator(mode="after")
    def _no_root_among_our_own_files(self) -> Self:
        data_dir = DataDir(self.data_dir)
        for name in ("checkpoint_roots", "harness_roots", "model_roots", "dataset_roots"):
            for root in getattr(self, name, None) or ():
                if data_dir.is_ours(root.expanduser().resolve()):
                    raise ValueError(
                        f"{name}: {root} lies in data_dir ({data_dir.root}), where only {data_dir.checkpoints} may be "
                        "named: move it elsewhere, or leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _no_code_where_jobs_write(self) -> Self:
        written = [root.expanduser().resolve() for root in (self.data_dir, *self.checkpoint_roots)]
        for root in self.harness_roots:
            real = root.resolve()
            for place in written:
                if real.is_relative_to(place) or place.is_relative_to(real):
                    raise ValueError(
                        f"harness_roots: the code in {root} runs in jobs, and {place}, where jobs write, is in it or "
                        "around it: move one of them elsewhere"
                    )
        return self

    def resolving(self, devices: tuple[str, ...], **derived: Any) -> Settings:
        """These settings as `resolve` takes them, with what a provider derives from several of its own."""
        return Settings(**{name: getattr(self, name) for name in JobSettings.model_fields}, devices=devices, **derived)


class Settings(JobSettings):
    """What `resolve` takes from a provider's configuration and its machine."""

    model_config = ConfigDict(frozen=True)

    devices: tuple[str, ...]
    model_roots: tuple[Path, ...] | None = None
    """Directories below which a model may be named by its path, besides our own checkpoints; None: anywhere."""
    vllm_python: Path | None = None
    """Interpreter with vLLM, which answers for jobs that request that; None: there is none."""
    export_destinations: tuple[str, ...] = ()
    """Where exports may be uploaded: hf://OWNER, hf://OWNER/NAME, s3://BUCKET, s3://BUCKET/PATH; none: nowhere."""
    train_python: Path | None = None
    """Interpreter that trains; None: this process's own."""
    ranks: int = 1
    """Processes per job that sets none; 1: nothing here can train with several."""
    max_ranks: int = 1
    """The most processes per node that a job may request."""
    nodes: int = 1
    """Machines per job that sets none."""
    max_nodes: int = 1
    """The most machines that a job may request; 1: nothing here can train on other machines."""
    gpus_elsewhere: Callable[[], Sequence[str]] = tuple
    """Returns the pools and other machines with GPUs that a job may get, as a sentence names them."""
    sharding: ShardingSpec | None = None
    """How several ranks hold a model; None: this provider trains in one process only."""
    gradient_checkpointing: bool = False
    """Where a job sets none."""
    checkpoint_every: int = 1
    """Of how many blocks one is recomputed, where a job sets none."""
