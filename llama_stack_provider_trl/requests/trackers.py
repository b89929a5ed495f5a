"""Experiment trackers: those that the configuration offers, and those that a request chooses with `logger_config`.

The configuration decides where a tracker is: its directory, URI and account. A request chooses among the configured
ones, and gives names. Credentials are in neither: the exporter reads them from the environment of its service.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator

from ..documented import Documented
from ..errors import InvalidRequest
from ..specs.exact import AbsolutePath, ExactValues
from ..system.data_dir import is_aside

TrackerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Of projects and runs: they name directories."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
"""Tracker -> modules that its extra, of the same name, installs."""
_OPTIONS = ("project", "run")
_RESERVED_BY_TRACKIO = re.compile(r"registry-.*|.+_(system|configs|traces|\w*artifact\w*)", re.IGNORECASE)

Project = Annotated[str, Field(pattern=NAME_PATTERN)]


class _TrackerBlock(Documented, ExactValues):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, defer_build=True
    )

    project: Project = "llama-stack-trl"
    """Project (MLflow: experiment) of jobs that name none."""


class TensorBoardSettings(_TrackerBlock):
    """Event files of TensorBoard."""

    directory: AbsolutePath | None = None
    """Directory with a directory per project, and in it one per run; null: `trackers/tensorboard` in the data
    directory."""


class MlflowSettings(_TrackerBlock):
    """Runs of MLflow."""

    uri: str | None = None
    """`http(s)://HOST` of a tracking server whose store is a database, or `sqlite:////PATH`; null:
    `trackers/mlflow.sqlite3` in the data directory."""

    @field_validator("uri")
    @classmethod
    def _supported(cls, value: str | None) -> str | None:
        expected = "http(s)://HOST of a tracking server, or sqlite:////PATH with an absolute path"
        accounts = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN,"
        return _address(value, r"https?://[^/]+|sqlite:////[^/]", expected, accounts)


class WandbSettings(_TrackerBlock):
    """Runs of Weights & Biases, written offline, and uploaded where `mode` is online."""

    directory: AbsolutePath | None = None
    """Directory with a directory per project, and in it one per run, for `wandb sync`; null: `trackers/wandb` in the
    data directory."""
    mode: Literal["offline", "online"] = "offline"
    """`online`: a run is also uploaded once its job has ended, with `WANDB_API_KEY` of the environment."""
    entity: Project | None = None
    """Online: the user or team that has the runs; null: the default one of the API key."""
    uri: str | None = None
    """Online: `http(s)://HOST` of a server of your own; null: that of Weights & Biases."""

    @field_validator("uri")
    @classmethod
    def _supported(cls, value: str | None) -> str | None:
        return _address(value, r"https?://[^/]+", "http(s)://HOST of a server of Weights & Biases", "WANDB_API_KEY")

    @model_validator(mode="after")
    def _used(self) -> WandbSettings:
        for name in ("entity", "uri"):
            if self.mode == "offline" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} has no effect where runs are written offline: set mode: online, or leave it out"
                )
        return self


def _address(uri: str | None, form: str, expected: str, variables: str) -> str | None:
    """A URI without a slash at its end. Raises ValueError: it has credentials, or another form."""
    if uri is None:
        return None
    parts = urlsplit(uri)
    if parts.username or parts.password or parts.query:
        raise ValueError(f"credentials do not belong into the URI: set {variables} in the environment")
    if not re.match(form, uri):
        raise ValueError(f"expected {expected}")
    return uri.rstrip("/")


class TrackioSettings(_TrackerBlock):
    """Runs of trackio, in its local databases."""

    directory: AbsolutePath | None = None
    """trackio's directory (`TRACKIO_DIR`); null: `trackers/trackio` in the data directory."""


class TrackerSettings(Documented):
    """The trackers that jobs may use; one that is null may not be used."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, defer_build=True
    )

    default: tuple[TrackerName, ...] = ()
    """Trackers of jobs that do not mention them."""
    tensorboard: TensorBoardSettings | None = None
    """Event files of TensorBoard."""
    mlflow: MlflowSettings | None = None
    """Runs of MLflow."""

    wandb: WandbSettings | None = None
    """Runs of Weights & Biases, written offline, and uploaded where `mode` is online."""
    trackio: TrackioSettings | None = None
    """Runs of trackio, in its local databases."""

    @model_validator(mode="after")
    def _defaults_are_configured(self) -> TrackerSettings:
        for name in self.default:
            if name not in self.configured:
                raise ValueError(f"default names {name}, which has no block of its own: add `{name}: {{}}`")
        return self

    @property
    def configured(self) -> tuple[TrackerName, ...]:
        """The trackers that a request may choose."""
        fields = type(self).model_fields
        return tuple(name for name in PACKAGES if name in fields and getattr(self, name) is not None)  # type: ignore[misc]


class TrackerChoice(NamedTuple):
    """One tracker of a job."""

    tracker: str
    project: str
    run: str


def resolve_trackers(
    given: dict[str, Any] | None, settings: TrackerSettings, job_uuid: str
) -> tuple[TrackerChoice, ...]:
    """The trackers of a job: those that `logger_config` chooses, and the defaults that it does not switch off. Raises
    InvalidRequest: a tracker that is not configured or not installed, an option or a name that there is not.

    Args:
        given: tracker -> true, false, or {"project": ..., "run": ...}; null is true.
    """
    wanted: dict[str, Any] = dict.fromkeys(settings.default, True)
    for name, value in (given or {}).items():
        if name not in settings.configured:
            offered = ", ".join(settings.configured) or "none"
            hint = f"the trackers that are configured here are: {offered} (`trackers` in the provider's configuration)"
            raise InvalidRequest("logger_config", given, f"{name!r} is no tracker of this provider; {hint}")
        wanted[name] = True if value is None else value
    return tuple(_choice(name, wanted[name], settings, job_uuid) for name in wanted if wanted[name] is not False)


def _choice(name: str, value: Any, settings: TrackerSettings, job_uuid: str) -> TrackerChoice:
    field = f"logger_config.{name}"
    options = {} if value is True else value
    if not isinstance(options, dict):
        raise InvalidRequest(field, value, f"send true, false, or an object with the options {', '.join(_OPTIONS)}")
    for option, text in options.items():
        if option not in _OPTIONS:
            hint = f"there is no such option; the options are: {', '.join(_OPTIONS)}"
            raise InvalidRequest(f"{field}.{option}", text, f"{hint}. Where a tracker is, the configuration decides")
        if not isinstance(text, str) or not re.fullmatch(NAME_PATTERN, text) or is_aside(text):
            hint = (
                "use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit, and not a name of "
                "what was set aside (old.stale-1)"
            )
            raise InvalidRequest(f"{field}.{option}", text, hint)
    if missing := [module for module in PACKAGES[name] if find_spec(module) is None]:
        hint = f"{missing[0]} is not installed beside this provider: pip install 'llama_stack_provider_trl[{name}]'"
        raise InvalidRequest(field, value, hint)
    project: str = options.get("project", getattr(settings, name).project)
    if name == "trackio" and _RESERVED_BY_TRACKIO.fullmatch(project):
        hint = "trackio reserves names that begin with `registry-` or end with a name of its tables: choose another"
        raise InvalidRequest(f"{field}.project", project, hint)
    return TrackerChoice(name, project, options.get("run", job_uuid))
