"""The files of a model: which are damaged, the dtype of its weights, and whether their index names files elsewhere.

An index maps weights to files, and transformers joins those names to the model's directory without a check: a name
with `..`, or an absolute one, reads a file elsewhere, whose content the exported model would then hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.model_source import ModelSource
from ...system.model_damage import ADAPTER_FILES, SLOW_TOKENIZER_FILES, TOKENIZER_FILES, damage_of

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INTEGERS = {"I64", "I32", "I16", "I8", "BOOL"}
"""Of buffers, such as position ids. U8 is not among them: packed weights have it."""
_WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
"""In the order in which transformers looks for them: it loads the first one that is there."""


def stored_dtype(
    model: str, revision: str | None, expected: torch.dtype | None = None, *, fetch: bool = False
) -> torch.dtype | None:
    """The dtype of a model's weights in its safetensors files; None where they have several, or another kind of file.

    Args:
        expected: what is returned where files of weights are not here.
        fetch: download them first, as loading does.

    Raises:
        JobFailure: as `check_weights_index`.
    """
    check_weights_index(model, revision)
    if _named_in_config(model, revision):
        return None
    found = partial(_found, model, revision=revision, local_only=not fetch)
    if found(SAFE_WEIGHTS_NAME):
        names = {SAFE_WEIGHTS_NAME}
    elif index := found(SAFE_WEIGHTS_INDEX_NAME):
        names = _names(model, index)
    else:
        others = (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
        return None if any(_found(model, name, revision, local_only=True) for name in others) else expected
    return _common_dtype([found(str(name)) for name in sorted(names)], expected)


def _common_dtype(files: list[Path | None], expected: torch.dtype | None) -> torch.dtype | None:
    found: set[str] = set()
    for path in files:
        if path is None:
            return expected
        try:
            with safe_open(path, framework="pt") as file:
                found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no iterator
        except (OSError, SafetensorError):
            return None  # loading reports the damage
    floats = found - _INTEGERS
    return _FLOATS.get(floats.pop()) if len(floats) == 1 else None


def check_files(source: ModelSource, names: Iterable[str]) -> None:
    """Return if those of a model's files that are on this machine look whole.

    Raises:
        JobFailure: invalid_model, with the file, what it is, and what to do.
    """
    for name in names:
        found = _found(source.location, name, source.revision, local_only=True)
        if found is not None:
            _refuse_damage(f"model {source.model!r}", name, found)


def check_tokenizer_files(source: ModelSource) -> None:
    """As `check_files`, of those that its tokenizer is read from."""
    fast = _found(source.location, TOKENIZER_FILES[0], source.revision, local_only=True)
    check_files(source, TOKENIZER_FILES if fast else (*TOKENIZER_FILES, *SLOW_TOKENIZER_FILES))


def check_adapter_files(directory: Path) -> None:
    """As `check_files`, of an adapter."""
    for name in ADAPTER_FILES:
        if (directory / name).is_file():
            _refuse_damage(f"adapter {str(directory)!r}", name, directory / name)


def whole_weights(source: ModelSource) -> list[Path]:
    """The safetensors files on this machine that a model's weights are loaded from, which look whole.

    Raises:
        JobFailure: invalid_model, as `check_files` and `check_weights_index`; a directory lacks a file that its index
            names.
    """
    model, revision = source.location, source.revision
    found = partial(_found, model, revision=revision, local_only=True)
    if _named_in_config(model, revision, local_only=True):
        return []
    used = next((name for name in _WEIGHTS if found(name)), None)
    if used is None:
        return []
    check_files(source, [used])
    if used in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        return [path for path in [found(SAFE_WEIGHTS_NAME)] if path is not None]
    check_weights_index(model, revision, local_only=True)
    index = found(used)
    assert index is not None
    names = sorted(str(name) for name in _names(model, index))
    paths = [path for name in names if (path := found(name)) is not None]
    if len(paths) < len(names) and Path(model).is_dir():
        missing = next(name for name in names if found(name) is None)
        raise JobFailure(
            Reason.invalid_model,
            f"model {source.model!r}: {missing[:200]} is missing, which {used} names as one of {len(names)} files of "
            "weights: download it, or name a complete model.",
        )
    check_files(source, names)
    return paths if used == SAFE_WEIGHTS_INDEX_NAME else []


def _refuse_damage(what: str, name: str, path: Path) -> None:
    try:
        status = path.stat()
        damage = _damage(name, path, status.st_size, status.st_mtime_ns)
    except OSError:
        return  # loading reports it
    if damage is not None:
        raise JobFailure(Reason.invalid_model, f"{what}: {name} {damage}.")


@lru_cache(maxsize=1024)
def _damage(name: str, path: Path, size: int, mtime_ns: int) -> str | None:
    """Of a file with this size and time. Models are read several times by a job."""
    with path.open("rb") as file:
        return damage_of(name, file)


def check_weights_index(model: str, revision: str | None = None, *, local_only: bool = False) -> None:
    """Return if a model has no index of weights, or one that names files below its directory only.

    Args:
        model: a directory or a model id; of an id the index comes from where its weights come from.
        local_only: download none.

    Raises:
        JobFailure: invalid_model, with the index and the name.
    """
    found = partial(_found, model, revision=revision, local_only=local_only)
    for index in filter(None, map(found, sorted(_index_names(model, revision, local_only)))):
        for name in _names(model, index):
            path = PurePosixPath(str(name).replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise JobFailure(
                    Reason.invalid_model,
                    f"model {model!r}: {index.name} names {str(name)[:200]!r} as a file of weights, which is outside "
                    "the model's directory. Expected a file beside the index: write it again with save_pretrained.",
                )


def _index_names(model: str, revision: str | None, local_only: bool) -> set[str]:
    """The default names, and the one in the configuration."""
    usual = {SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME}
    named = _named_in_config(model, revision, local_only=local_only)
    return {*usual, named} if isinstance(named, str) and named.endswith(".index.json") else usual


def _named_in_config(model: str, revision: str | None, *, local_only: bool = False) -> Any:
    """The file of weights, or the index, that the configuration names; None: it names none."""
    config = _found(model, CONFIG_NAME, revision, local_only=local_only)
    try:
        return json.loads(config.read_text()).get("transformers_weights") if config else None
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # loading reports the error


def _found(model: str, name: str, revision: str | None, *, local_only: bool = False) -> Path | None:
    """A file of the model; None where it is missing or unreachable, which loading reports."""
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False, **where)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _names(model: str, index: Path) -> set[Any]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{index.name} is no index of weights ({type(error).__name__}: {error})"
        raise JobFailure(Reason.invalid_model, f"model {model!r}: {problem}. Write it with save_pretrained.") from error
