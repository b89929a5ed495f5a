"""Reads run_fsdp.yaml like Llama Stack: one provider's `config` block, with `${env.NAME:=default}` filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llama_stack_provider_trl.system.bounded_yaml import UniqueKeys
from llama_stack_provider_trl.system.texts import decoded

PROVIDER_TYPE = "remote::trl_remote"
_VARIABLE = re.compile(r"\$\{env\.([A-Z0-9_]+)(?::([=+])([^}]*))?\}")


def provider_block(path: Path, environ: Mapping[str, str], provider_type: str = PROVIDER_TYPE) -> dict[str, Any]:
    """The `config` of the one provider of this type in a run file.

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
        if _mapping(entry).get("provider_type") == provider_type
    ]
    if len(found) != 1:
        raise ValueError(
            f"{path} has {len(found)} providers of type {provider_type}, expected one under providers.post_training"
        )
    block = found[0].get("config") or {}
    if not isinstance(block, dict):
        raise ValueError(f"{path}: the config of {provider_type} is {block!r}, expected keys and values")
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
