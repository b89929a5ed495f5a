"""Loads the settings: the `remote::trl_remote` block of run_fsdp.yaml, with TRL_SERVICE_* variables over it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_stack_provider_trl.requests.choices import problem_of
from llama_stack_provider_trl.requests.settings import UNKNOWN_SETTING

from ..config import TrlRemoteConfig
from .config_file import PROVIDER_TYPE, provider_block
from .settings import ServiceSettings, SettingsError

DEFAULT_CONFIG = "run_fsdp.yaml"
_ENVIRONMENT = {
    "TRL_SERVICE_HOST": "host",
    "TRL_SERVICE_PORT": "port",
    "TRL_SERVICE_DATA_DIR": "data_dir",
    "TRL_SERVICE_TOKEN": "api_token",
    "TRL_SERVICE_NODE_TOKEN": "node_token",
    "TRL_NODE_NAME": "node_name",
    "TRL_SERVICE_LOG_LEVEL": "log_level",
    "TRL_SERVICE_MODEL_ROOTS": "model_roots",
    "TRL_SERVICE_VLLM_PYTHON": "vllm_python",
    "TRL_SERVICE_ALLOWED_HOSTS": "allowed_hosts",
}


def load_settings(
    config: Path | None = None, environ: Mapping[str, str] | None = None, **over: Any
) -> tuple[ServiceSettings, Path | None]:
    """Load the settings from a run file, TRL_SERVICE_* variables, and `over` (a command line's options; None: not
    given). Raises SettingsError. Returns the settings and the file they came from.

    Args:
        config: the file; None: TRL_SERVICE_CONFIG, else ./run_fsdp.yaml if there is one, else none.
    """
    environ = os.environ if environ is None else environ
    path = config or _default_config(environ)
    try:
        values = {} if path is None else provider_block(path, environ)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    # Keys of the adapter only.
    for name in TrlRemoteConfig.model_fields.keys() - ServiceSettings.model_fields.keys():
        values.pop(name, None)
    values |= {name: environ[variable] for variable, name in _ENVIRONMENT.items() if environ.get(variable)}
    values |= {name: value for name, value in over.items() if value is not None}
    if "token" in values and "api_token" in values:
        del values["token"]
    try:
        return ServiceSettings.model_validate(values), path
    except ValidationError as error:
        where = _where(error, environ, over) or (f"{path}, {PROVIDER_TYPE}" if path else "settings")
        raise SettingsError(f"{where}: {_sentence(error)}") from error


def _where(error: ValidationError, environ: Mapping[str, str], over: Mapping[str, Any]) -> str | None:
    """The option or the variable that set what is wrong; None: neither did."""
    name = next(iter(error.errors(include_url=False)[0]["loc"]), None)
    if isinstance(name, str) and over.get(name) is not None:
        return f"--{name.replace('_', '-')}"
    return next((one for one, setting in _ENVIRONMENT.items() if setting == name and environ.get(one)), None)


def _default_config(environ: Mapping[str, str]) -> Path | None:
    if named := environ.get("TRL_SERVICE_CONFIG"):
        return Path(named).expanduser()
    return Path(DEFAULT_CONFIG) if Path(DEFAULT_CONFIG).is_file() else None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == UNKNOWN_SETTING:
        return f"{name} {first['msg']}"
    # Tokens must not be repeated, nor credentials in the URI of a tracker or webhook, or among the variables of a pool.
    secret = "token" in name or name.startswith(("trackers", "openai.webhook")) or name.endswith(".environment")
    secret |= name == "openai"
    found = "" if secret else f"={first['input']!r}"
    return f"{name}{found}: {problem_of(first)}"
