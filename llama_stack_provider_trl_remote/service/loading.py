"""Loads the settings: the `remote::trl_remote` block of run_fsdp.yaml, with TRL_SERVICE_* variables over it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from llama_stack_provider_trl.requests.choices import problem_of
from llama_stack_provider_trl.requests.settings import UNKNOWN_SETTING
from llama_stack_provider_trl.system.bounded_yaml import UniqueKeys
from llama_stack_provider_trl.system.texts import decoded

from ..config import TrlRemoteConfig
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


PROVIDER_TYPE = "remote::trl_remote"
_VARIABLE = re.compile(r"\$\{env\.([A-Z0-9_]+)(?::([=+])([^}]*))?\}")


def provider_block(path: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The `config` of the one provider of PROVIDER_TYPE in a run file.

    Only this block is read: other providers' variables need not be set. Raises ValueError: no such file, no YAML, a key
    twice, no such provider, or a variable without a value.
    """
    try:
        document = yaml.load(decoded(path.read_bytes()), UniqueKeys)
    except OSError as error:
        hint = "name another one with --config or TRL_SERVICE_CONFIG"
        raise ValueError(f"{path} cannot be read ({error.strerror or error}): {hint}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    found = [
        entry
        for entries in _mapping(_mapping(document).get("providers")).values()
        for entry in (entries if isinstance(entries, list) else [])
        if _mapping(entry).get("provider_type") == PROVIDER_TYPE
    ]
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} providers of type {PROVIDER_TYPE}, expected one under providers.post_training"
        )
    block = found[0].get("config") or {}
    if not isinstance(block, dict):
        raise ValueError(f"{path}: the config of {PROVIDER_TYPE} is {block!r}, expected keys and values")
    try:
        return {str(name): fill_in(value, environ) for name, value in block.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def fill_in(value: Any, environ: Mapping[str, str]) -> Any:
    """Replace `${env.NAME}`, `${env.NAME:=default}` and `${env.NAME:+value}` in every text of a YAML value.

    As in Llama Stack, a text that had any is then read as a boolean or a number if it looks like one, and as null if it
    is empty. Raises ValueError: a variable has no value and no default.
    """
    if isinstance(value, dict):
        return {name: fill_in(inner, environ) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill_in(inner, environ) for inner in value]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    return _typed(_VARIABLE.sub(lambda match: _one(match, environ), value))


def _one(match: re.Match[str], environ: Mapping[str, str]) -> str:
    name, operator, operand = match.groups()
    found = environ.get(name, "")
    if operator == "=":
        return found or operand
    if operator == "+":
        return operand if found else ""
    if not found:
        raise ValueError(f"{match[0]} has no value: set {name}, or give a default: ${{env.{name}:=default}}")
    return found


def _typed(text: str) -> Any:
    if text == "":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
