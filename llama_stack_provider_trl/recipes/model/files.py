"""The files of a model: which are damaged, the dtype of its weights, and whether their index names files elsewhere.

An index maps weights to files, and transformers joins those names to the model's directory without a check: a name
with `..`, or an absolute one, reads a file elsewhere, whose content the exported model would then hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

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
from ...system.model_damage import (
    ADAPTER_FILES,
    EMBEDDED_ADAPTER,
    FAST_TOKENIZER,
    INDEX_ENDING,
    NO_WEIGHTS,
    TOKENIZER_CONFIG,
    WEIGHTS,
    damage_of,
    files_in_index,
    missing_from_index,
    tokenizer_files,
)

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
PROCESSOR_TEMPLATE = "chat_template.json"
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INTEGERS = {"I64", "I32", "I16", "I8", "BOOL"}
"""Of buffers, such as position ids. U8 is not among them: packed weights have it."""


class WeightFiles(NamedTuple):
    paths: list[Path]
    is_complete: bool
    """None has to be downloaded."""
    unused_index: str = ""
    """Name of an index that lies beside the only file of weights, which is loaded without it."""


def stored_dtype(
    model: str, revision: str | None, expected: torch.dtype | None = None, *, fetch: bool = False
) -> torch.dtype | None:
    """The dtype of a model's weights in its safetensors files; None where they have several, or another kind of file.
    Raises JobFailure: as `check_weights_index`.

    Args:
        expected: what is returned where files of weights are not here.
        fetch: download them first, as loading does.
    """
    check_weights_index(model, revision)
    if _named_in_config(model, revision):
        return None
    found = partial(_found, model, revision=revision, local_only=not fetch)
    if found(SAFE_WEIGHTS_NAME):
        names = [SAFE_WEIGHTS_NAME]
    elif index := found(SAFE_WEIGHTS_INDEX_NAME):
        names = _names(model, index)
    else:
        others = (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
        return None if any(_found(model, name, revision, local_only=True) for name in others) else expected
    return _common_dtype([found(name) for name in names], expected)


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
    """Return if those of a model's files that are on this machine look whole. Raises JobFailure: invalid_model, with
    the file, what it is, and what to do."""
    for name in names:
        found = _found(source.location, name, source.revision, local_only=True)
        if found is not None:
            _refuse_damage(f"model {source.model!r}", name, found)


def check_tokenizer_files(source: ModelSource) -> None:
    """As `check_files`, of those that its tokenizer is read from."""
    found = partial(_found, source.location, revision=source.revision, local_only=True)
    configuration = found(TOKENIZER_CONFIG)
    try:
        content = configuration.read_bytes() if configuration else None
    except OSError:
        content = None  # loading reports it
    check_files(source, tokenizer_files(content, is_fast=found(FAST_TOKENIZER) is not None))


def has_tokenizer_files(directory: Path) -> bool:
    """Whether a tokenizer lies in a directory, such as beside an adapter that was trained with it."""
    return any((directory / name).is_file() for name in (FAST_TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model"))


def check_adapter_files(directory: Path) -> None:
    for name in ADAPTER_FILES:
        if (directory / name).is_file():
            _refuse_damage(f"adapter {str(directory)!r}", name, directory / name)


def whole_weights(source: ModelSource) -> WeightFiles:
    """The files on this machine that a model's weights are loaded from, which look whole. Raises JobFailure:
    invalid_model, as `check_files` and `check_weights_index`; a directory has no weights, lacks a file that its index
    or configuration names, or has an adapter, too."""
    model, revision = source.location, source.revision
    found = partial(_found, model, revision=revision, local_only=True)
    used = next((name for name in WEIGHTS if found(name)), None)
    if (named := _named_in_config(model, revision, local_only=True)) is not None:
        if not str(named).endswith((".safetensors", f".safetensors{INDEX_ENDING}")):
            problem = (
                f"config.json has transformers_weights {str(named)[:200]!r}, expected a safetensors file or its index"
            )
            raise JobFailure(Reason.invalid_model, f"model {source.model!r}: {problem}: remove it, or name that.")
        used = named if found(named) else None
    if Path(model).is_dir():
        if found(ADAPTER_FILES[0]):
            raise JobFailure(Reason.invalid_model, f"model {source.model!r}: {EMBEDDED_ADAPTER}.")
        if used is None:
            problem = NO_WEIGHTS if named is None else f"{named[:200]} is missing, which config.json names: download it"
            raise JobFailure(Reason.invalid_model, f"model {source.model!r}: {problem}.")
    if used is None:
        return WeightFiles([], False)
    check_files(source, [used])
    if not used.endswith(INDEX_ENDING):
        index = f"{used}{INDEX_ENDING}"
        return WeightFiles(list(filter(None, [found(used)])), True, index if found(index) else "")
    check_weights_index(model, revision, local_only=True)
    path = found(used)
    assert path is not None
    names = _names(model, path)
    paths = [path for name in names if (path := found(name)) is not None]
    if len(paths) < len(names) and Path(model).is_dir():
        missing = next(name for name in names if found(name) is None)
        raise JobFailure(
            Reason.invalid_model, f"model {source.model!r}: {missing[:200]} {missing_from_index(used, names)}."
        )
    check_files(source, names)
    return WeightFiles(paths, len(paths) == len(names))


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
    """Return if a model has no index of weights, or one that names files below its directory only. Raises JobFailure:
    invalid_model, with the index and the name.

    Args:
        model: a directory or a model id; of an id the index comes from where its weights come from.
        local_only: download none.
    """
    found = partial(_found, model, revision=revision, local_only=local_only)
    for index in filter(None, map(found, sorted(_index_names(model, revision, local_only)))):
        for name in _names(model, index):
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise JobFailure(
                    Reason.invalid_model,
                    f"model {model!r}: {index.name} names {name[:200]!r} as a file of weights, which is outside "
                    "the model's directory. Expected a file beside the index: write it again with save_pretrained.",
                )


def _index_names(model: str, revision: str | None, local_only: bool) -> set[str]:
    """The one in the configuration; else the default names, where no single file is loaded without them."""
    named = _named_in_config(model, revision, local_only=local_only)
    if named is not None:
        return {named} if isinstance(named, str) and named.endswith(INDEX_ENDING) else set()
    used = next((name for name in WEIGHTS if _found(model, name, revision, local_only=True)), INDEX_ENDING)
    return {name for name in WEIGHTS if name.endswith(INDEX_ENDING)} if used.endswith(INDEX_ENDING) else set()


def _named_in_config(model: str, revision: str | None, *, local_only: bool = False) -> Any:
    """The file of weights, or the index, that the configuration names; None: it names none."""
    config = _found(model, CONFIG_NAME, revision, local_only=local_only)
    try:
        return json.loads(config.read_text()).get("transformers_weights") if config else None
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # loading reports the error


def template_of_processor(source: ModelSource) -> str | None:
    """The chat template that older processors have in a file of their own; None: there is none, or it is damaged."""
    if (found := _found(source.location, PROCESSOR_TEMPLATE, source.revision)) is None:
        return None
    try:
        template = json.loads(found.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return template if isinstance(template, str) else None


def copy_processor(source: ModelSource, directory: Path) -> None:
    """Copy the files by which a model's processor reads images to an export; of a model without one there are none.
    Raises OSError: the disk is full, or a file cannot be read."""
    for name in PROCESSOR_FILES:
        if (found := _found(source.location, name, source.revision, local_only=True)) is not None:
            shutil.copyfile(found, directory / name)


def _found(model: str, name: str, revision: str | None, *, local_only: bool = False) -> Path | None:
    """A file of the model; None where it is missing or unreachable, which loading reports."""
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_only}
    try:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False, **where)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _names(model: str, index: Path) -> list[str]:
    try:
        return files_in_index(index.read_bytes())
    except (OSError, ValueError) as error:
        problem = f"{index.name} is no index of weights ({error})"
        raise JobFailure(Reason.invalid_model, f"model {model!r}: {problem}. Write it with save_pretrained.") from error
