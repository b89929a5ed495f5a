"""Checks, before weights are loaded, that a model's index names only files below the model's directory.

An index maps weights to files, and transformers joins those names to the directory without a check: a name
with `..`, or an absolute one, reads a file elsewhere, whose content the exported model would then hold.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file

from ...errors import JobFailure
from ...specs.events import Reason


def check_weights_index(model: str, revision: str | None = None) -> None:
    """Return if a model has no index of weights, or one that names files below its directory only.

    Args:
        model: a directory or a model id; of an id the index comes from where its weights come from.

    Raises:
        JobFailure: invalid_model, with the index and the name.
    """
    for index in filter(None, (_found(model, name, revision) for name in sorted(_index_names(model, revision)))):
        for name in _names(model, index):
            path = PurePosixPath(str(name).replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise JobFailure(
                    Reason.invalid_model,
                    f"model {model!r}: {index.name} names {str(name)[:200]!r} as a file of weights, which is outside "
                    "the model's directory. Expected a file beside the index: write it again with save_pretrained.",
                )


def _index_names(model: str, revision: str | None) -> set[str]:
    """The default names, and the one in the configuration."""
    usual = {SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME}
    config = _found(model, CONFIG_NAME, revision)
    try:
        named = json.loads(config.read_text()).get("transformers_weights") if config else None
    except (ValueError, AttributeError):
        return usual  # loading reports the error
    return {*usual, named} if isinstance(named, str) and named.endswith(".index.json") else usual


def _found(model: str, name: str, revision: str | None) -> Path | None:
    """A file of the model; None where it is missing or unreachable, which loading reports."""
    try:
        found = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _names(model: str, index: Path) -> set[Any]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{index.name} is no index of weights ({type(error).__name__}: {error})"
        raise JobFailure(Reason.invalid_model, f"model {model!r}: {problem}. Write it with save_pretrained.") from error
