"""Which files a checkpoint may hold when it crosses from one machine to another. Data only: nothing that runs on load.

A pickle runs what its writer wants while it is read, and `optimizer/.metadata` of earlier releases is one: a node could
run code on the service's machine, and the service on a node's. So checkpoints hold safetensors, JSON and text, and a
transfer refuses every other name before it asks for a byte. What earlier releases wrote is refused from nodes, which
write the present format, and accepted from the service: `recipes.legacy_checkpoints` reads it and runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import InvalidRequest

_DATA = re.compile(
    # Weights, configurations, indexes, states; vocabularies and merges; sentencepiece and tiktoken models; templates.
    r"[^/]+\.(safetensors|json|txt|md|jinja|model|spm|tiktoken|vocab|codes|tokenizer)"
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|LICENSE|NOTICE"
)
_CODE = re.compile(r"[^/]+\.py")
_LEGACY = re.compile(r"optimizer/(\.metadata|__\d+_\d+\.distcp)|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth")


def check_names(names: Iterable[str], field: str, *, code: bool = False, legacy: bool = False) -> None:
    """Return if a checkpoint may hold files of these names.

    Args:
        names: paths in the checkpoint.
        field: where the names stand, for the error.
        code: accept Python files at the top, which models with code of their own have. Nothing here runs them.
        legacy: accept what earlier releases wrote.

    Raises:
        InvalidRequest: names the first file that is refused.
    """
    for name in names:
        is_data = _DATA.fullmatch(name) and not name.startswith(".")
        if not (is_data or (code and _CODE.fullmatch(name)) or (legacy and _LEGACY.fullmatch(name))):
            raise InvalidRequest(field, name, _hint(name))


def _hint(name: str) -> str:
    if _CODE.fullmatch(name):
        return (
            "it is code, and a checkpoint holds code only where the job's model is named in trust_remote_code of the "
            "service's configuration."
        )
    if _LEGACY.fullmatch(name):
        return (
            "this format of earlier releases can run code when it is read: update the node to the release of the "
            "service, which writes safetensors and JSON."
        )
    return (
        "a checkpoint holds safetensors, JSON, text, tokenizer models and chat templates; other formats can run code "
        "when they are read."
    )
