"""Refuses, at POST, a model in a directory of this machine that lacks weights or has a damaged file: a pointer, a web
page, empty or cut off.

Only what the first bytes, the size or a small header show: the training checks all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from ...errors import InvalidRequest
from ...requests.bases import Base
from ...requests.choices import nearest
from ...specs.model_source import ModelSource
from ...system.files import open_in
from ...system.model_damage import (
    ADAPTER_FILES,
    ADAPTER_PICKLE,
    ADAPTER_WEIGHTS,
    CONFIG_FILES,
    EMBEDDED_ADAPTER,
    FAST_TOKENIZER,
    INDEX_ENDING,
    NO_TOKENIZER,
    NO_WEIGHTS,
    SMALL,
    TOKENIZER_CONFIG,
    WEIGHTS,
    damage_of,
    files_in_index,
    has_tokenizer,
    missing_from_index,
    tensors_in,
    tokenizer_files,
)
from ...system.model_directory import ModelDirectory, find_model

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
"""Modules of most architectures, whose files have the names of the model's modules; transformers renames others."""


def refuse_damaged(field: str, value: str | None, base: Base, *, needs_tokenizer: bool = True) -> None:
    """Return if the files of a job's model, and of the adapter that it begins with, look whole. Raises InvalidRequest:
    names the field and the file.

    Args:
        field: that names the model, and its value.
        base: what it begins with. The checkpoint of another job is checked when the job starts.
        needs_tokenizer: the job reads one.
    """
    source, adapter = base.source, base.adapter
    model = Path(source.model)
    if source.made_by or (adapter and adapter.made_by) or not model.is_absolute():
        return
    tokenizer = tokenizer_files(_beginning(model, TOKENIZER_CONFIG), is_fast=_is_there(model, FAST_TOKENIZER))
    problems = [*_problems(model, (*CONFIG_FILES, *tokenizer)), *_problems_of_weights(model)]
    if needs_tokenizer and not _has_tokenizer(model):
        problems.append(NO_TOKENIZER)
    if adapter is not None:
        problems += _problems(adapter.directory, ADAPTER_FILES)
        read = (ADAPTER_WEIGHTS,) if adapter.use == "continue" else (ADAPTER_WEIGHTS, ADAPTER_PICKLE)
        if not any(_is_there(adapter.directory, name) for name in read):
            problems.append(f"the adapter's directory has no {' or '.join(read)}: name one that PEFT has saved")
    if problems:
        raise InvalidRequest(field, value, problems[0])


def refuse_unknown_modules(field: str, source: ModelSource, modules: Sequence[str]) -> None:
    """Return if a model has the modules that get adapters, as far as the names in its files show that. Raises
    InvalidRequest: names the nearest one.

    Args:
        source: the checkpoint of another job is checked when the job starts.
    """
    directory = None if source.made_by else find_model(os.environ, source.model, source.revision)
    paths = set() if directory is None else _modules(directory)
    leaves = {path.rpartition(".")[2] for path in paths}
    if not leaves >= _ATTENTION:
        return
    for name in modules:
        if not any(f".{path}".endswith(f".{name}") for path in paths):
            near = nearest(name, sorted(leaves), 0.6)
            hint = f"the files of {source.model} have no module of this name, but {', '.join(sorted(_ATTENTION))}{near}"
            raise InvalidRequest(field, name, hint)


def _modules(directory: ModelDirectory) -> set[str]:
    """The modules whose weights a model's files name; empty: they are not here, or cannot be read."""
    for name in WEIGHTS[:2]:
        try:
            with directory.open(name) as file:
                tensors = tensors_in(name, file)
        except (OSError, ValueError):
            continue
        return {tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight")}
    return set()


def _problems(directory: Path, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        try:
            with open_in(directory, name) as file:
                damage = damage_of(name, file, SMALL)
        except OSError:
            continue  # the training reads it where it runs
        if damage is not None:
            yield f"{name} in that directory {damage}"


def _problems_of_weights(model: Path) -> Iterator[str]:
    """Of the files that transformers loads the weights from."""
    if _is_there(model, ADAPTER_FILES[0]):
        yield EMBEDDED_ADAPTER
    try:
        config = json.loads(_small(model, CONFIG_FILES[0]))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(config, dict) or config.get("transformers_weights"):
        return
    used = next((name for name in WEIGHTS if _is_there(model, name)), None)
    if used is None:
        yield NO_WEIGHTS
        return
    yield from _problems(model, (used,))
    if not used.endswith(INDEX_ENDING):
        return
    try:
        names = files_in_index(_small(model, used))
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError):
            yield f"{used} in that directory is no index of weights ({error}): write it with save_pretrained"
        return
    inside = [name for name in names if _is_inside(name)]  # the training refuses others
    for name in inside:
        if not _is_there(model, name):
            yield f"{name[:200]} in that directory {missing_from_index(used, names)}"
    yield from _problems(model, tuple(inside))


def _has_tokenizer(model: Path) -> bool:
    try:
        return has_tokenizer(os.listdir(model))
    except OSError:
        return True  # the training reads it where it runs


def _beginning(directory: Path, name: str) -> bytes | None:
    """The content of a file, of a large one as much as is parsed here; None: it cannot be read."""
    try:
        with open_in(directory, name) as file:
            return file.read(SMALL)
    except OSError:
        return None


def _small(directory: Path, name: str) -> bytes:
    """The content of a file, or of its beginning. Raises OSError, also where it is too large to be parsed here."""
    with open_in(directory, name) as file:
        content = file.read(SMALL + 1)
    if len(content) > SMALL:
        raise OSError(f"{name} has more than {SMALL} bytes")
    return content


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.is_absolute() and ".." not in path.parts


def _is_there(directory: Path, name: str) -> bool:
    """Whether a directory has an entry of this name, which may be a link out of it."""
    try:
        (directory / name).lstat()
    except (OSError, ValueError):
        return False
    return True
