"""The files of a model that are sent to another machine: data only, nothing that runs on load.

Weights are sent as safetensors: a pickle (`.bin`, `.pt`) executes its writer's code while it is read, and so does the
Python code of a model. A model that needs either is not sent at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..errors import InvalidRequest
from ..system.model_damage import ADAPTER_FILES, ADAPTER_WEIGHTS
from ..system.model_directory import ModelDirectory

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MOST_FILES = 10_000
MOST_INDEX = 16 << 20
"""Bytes of an index of weights."""
_DATA = re.compile(
    # Weights, configurations, indexes; vocabularies and merges; sentencepiece and tiktoken models; templates.
    r"[A-Za-z0-9_][\w.+=@ -]*\.(safetensors|json|txt|jinja|model|spm|tiktoken|vocab|codes|tokenizer)"
    r"|additional_chat_templates/[A-Za-z0-9_][\w.+=@ -]*\.jinja",
    re.ASCII,
)
_PICKLES = re.compile(r".+\.(bin|pt|pth|pkl|pickle|ckpt|msgpack|h5|npz)")


class NotSent(Exception):
    """Raised when a model's files are not sent to other machines; the message is the reason."""


def sent_files(found: ModelDirectory, *, has_code: bool) -> list[str]:
    """The files of a model on this machine that another machine gets to train it. Raises NotSent; OSError: one of them
    cannot be read, or is a link out of the directory.

    Args:
        has_code: the model's own code may run here.
    """
    if has_code:
        raise NotSent("it comes with Python code of its own, which no machine gets from another one")
    names = chosen_files(found.names(), lambda: _index_of(found))
    for name in names:
        found.open(name).close()
    return names


def why_not_sent(directory: Path, *, has_code: bool) -> str:
    """The reason for which no other machine gets a model's directory; empty: each gets it that trains it."""
    try:
        sent_files(ModelDirectory(directory), has_code=has_code)
    except NotSent as reason:
        return str(reason)
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    return ""


def _index_of(found: ModelDirectory) -> bytes:
    with found.open(INDEX) as file:
        data = file.read(MOST_INDEX + 1)
    if len(data) > MOST_INDEX:
        raise NotSent(f"its {INDEX} has more than {MOST_INDEX >> 20} MiB")
    return data


def chosen_files(names: Sequence[str], read_index: Callable[[], bytes]) -> list[str]:
    """Of the files in the directory of a model, or an adapter, those that another machine needs to train it. Raises
    NotSent.

    Args:
        read_index: the content of `INDEX`; called where the weights are in several files.
    """
    plain = {name for name in names if _DATA.fullmatch(name)}
    if CONFIG in plain:
        weights = _weights(plain, names, read_index)
    elif plain.issuperset(ADAPTER_FILES):
        weights = {ADAPTER_WEIGHTS}
    else:
        raise NotSent(f"it has neither {CONFIG} nor {' with '.join(ADAPTER_FILES)}")
    chosen = sorted(name for name in plain if not name.endswith(".safetensors") or name in weights)
    if len(chosen) > MOST_FILES:
        raise NotSent(f"it has {len(chosen)} files, expected at most {MOST_FILES}")
    return chosen


def _weights(plain: set[str], names: Sequence[str], read_index: Callable[[], bytes]) -> set[str]:
    if WEIGHTS in plain:
        return {WEIGHTS}
    if INDEX in plain:
        try:
            named = {str(name) for name in json.loads(read_index())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise NotSent(f"its {INDEX} is no index of weights ({type(error).__name__}: {error})"[:300]) from error
        if lacking := sorted(named - plain):
            raise NotSent(f"{lacking[0][:200]}, which its {INDEX} names, is not there or no safetensors file")
        return named
    if pickles := sorted(name for name in names if _PICKLES.fullmatch(name)):
        raise NotSent(
            f"its weights are in {pickles[0][:200]}, a format that can run code when it is read: expected safetensors, "
            "which save_pretrained writes"
        )
    raise NotSent(f"it has neither {WEIGHTS} nor {INDEX}")


def check_model_names(names: Iterable[str], field: str) -> None:
    """Return if a model that another machine sends may have files of these names. Raises InvalidRequest: names the
    first file that is refused."""
    for name in names:
        if not _DATA.fullmatch(name):
            raise InvalidRequest(
                field,
                name[:200],
                "the files of a model that a service sends are safetensors, JSON, text, tokenizer models and chat "
                "templates; other formats can run code when they are read.",
            )


def files_digest(files: Iterable[tuple[str, int, str]]) -> str:
    """The digest that identifies a model: of the path, size and sha256 of each of its files."""
    listed = sorted([path, size, sha256] for path, size, sha256 in files)
    return hashlib.sha256(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()
