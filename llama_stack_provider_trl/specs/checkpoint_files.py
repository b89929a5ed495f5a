"""The files that a checkpoint may hold when it is sent to another machine: data only, nothing that runs on load.

A pickle executes its writer's code while it is read: a node could run code on the service's machine, and the service
on a node's. So checkpoints hold safetensors, JSON and text, and a transfer refuses every other name before it requests
a byte.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path

from ..errors import InvalidRequest

_DATA = re.compile(
    # Weights, configurations, indexes, states; vocabularies and merges; sentencepiece and tiktoken models; templates.
    r"[^/]+\.(safetensors|gguf|json|txt|md|jinja|model|spm|tiktoken|vocab|codes|tokenizer)"
    r"|optimizer/(state\.json|(state|outer|worker-\d{1,4})\.safetensors)"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|LICENSE|NOTICE|Modelfile"
)
_CODE = re.compile(r"[^/]+\.py")

_DIRECTORIES = {
    "step": re.compile(r"checkpoint-\d{1,12}"),
    "final": re.compile("final"),
    "merged": re.compile("merged"),
}


def is_checkpoint_name(name: str, kind: str | None = None) -> bool:
    """Whether a checkpoint's directory may have this name.

    Args:
        kind: step, final or merged; None: any of them.
    """
    patterns = _DIRECTORIES.values() if kind is None else [_DIRECTORIES[kind]]
    return any(pattern.fullmatch(name) for pattern in patterns)


def misplaced(path: Path, kind: str, directory: Path) -> str | None:
    """Why `path` cannot be a checkpoint of the job whose checkpoint directory is `directory`; None: it can.

    A training chooses the paths that its events name, and checkpoints are served and deleted by those paths.
    """
    if path.parent != directory or ".." in path.parts:  # as text: a symbolic link may lead elsewhere the next time
        return f"a checkpoint of this job lies in {directory}"
    if not is_checkpoint_name(path.name, kind):
        return f"a checkpoint of the kind {kind} has another name"
    if not is_directory(path, or_absent=True):
        return "it is not a directory: symbolic links and files are not accepted"
    return None


def is_directory(path: Path, *, or_absent: bool = False) -> bool:
    """Whether `path` is a directory itself, and not a symbolic link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return or_absent


def is_data_name(name: str) -> bool:
    """Whether a file of this name, a path in its checkpoint, is data: nothing runs when it is read."""
    return bool(_DATA.fullmatch(name)) and not name.startswith(".")


def check_names(names: Iterable[str], field: str, *, code: bool = False) -> None:
    """Return if a checkpoint may hold files of these names. Raises InvalidRequest: names the first file that is
    refused.

    Args:
        field: where the names stand, for the error.
        code: accept Python files at the top, which models with code of their own have. Nothing here runs them.
    """
    for name in names:
        if not (is_data_name(name) or (code and _CODE.fullmatch(name))):
            raise InvalidRequest(field, name, _hint(name))


def _hint(name: str) -> str:
    if _CODE.fullmatch(name):
        return (
            "it is code, and a checkpoint holds code only where the job's model is named in trust_remote_code of the "
            "service's configuration."
        )
    return (
        "a checkpoint holds safetensors, JSON, text, tokenizer models and chat templates; other formats can run code "
        "when they are read."
    )
