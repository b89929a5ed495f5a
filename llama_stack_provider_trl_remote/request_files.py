"""Requests for jobs out of files: JSON, YAML or TOML."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.system.bounded_yaml import UniqueKeys
from llama_stack_provider_trl.system.texts import DuplicateKey, decoded, parse_json

_RECIPE = {"job", "service"}
"""Keys of a recipe (examples/recipes): the request, and the configuration of a service that it is meant for."""


class _Loader(UniqueKeys):
    """YAML 1.2's numbers and no dates: what the same text is in JSON. YAML 1.1 reads 2e-4 as a text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own form)
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":float", ":timestamp"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)


def read_request(name: str) -> dict[str, Any]:
    """Read a request for a job. Of a recipe it is the block `job`. Raises InvalidRequest: the file cannot be read, or
    holds no request; names the file and what was found.

    Args:
        name: a file, of the kind that its suffix names (.yaml, .yml, .toml; JSON otherwise); `-`: JSON from standard
            input.
    """
    shown = "standard input" if name == "-" else name
    kind, parse = _PARSERS.get(Path(name).suffix.lower(), ("JSON", parse_json))
    try:
        found = parse(decoded(sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()))
        # Dates of TOML, sets of YAML and numbers that are none: nothing that a request can carry.
        json.dumps(found, allow_nan=False)
    except OSError as error:
        hint = f"it cannot be read ({error.strerror}): name a file with the request, or - for standard input."
        raise InvalidRequest("FILE", shown, hint) from error
    except DuplicateKey as error:
        raise InvalidRequest("FILE", shown, f"{error}.") from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise InvalidRequest("FILE", shown, f"it is not {kind} ({' '.join(str(error).split())}).") from error
    body = found.get("job") if _is_recipe(found) else found
    if not isinstance(body, dict):
        raise InvalidRequest("FILE", shown, f"found a {type(body).__name__}, expected an object.")
    return body


def _is_recipe(found: Any) -> bool:
    return isinstance(found, dict) and "job" in found and found.keys() <= _RECIPE


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".yaml": ("YAML", lambda text: yaml.load(text, _Loader)),
    ".yml": ("YAML", lambda text: yaml.load(text, _Loader)),
}
"""Suffix of a file -> name of the format, and its parser."""
