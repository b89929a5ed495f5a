"""Refuses, at POST, an export of a model of another architecture than those that are mapped.

The job that exports checks every setting, tensor and token of its model, which may be trained first. What is certain by
the configuration of the base model is refused before that.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ...errors import InvalidRequest, JobNotFound
from ...specs.exports import MAPPED_MODEL_TYPES, ExportTarget
from ...specs.model_files import CONFIG
from ...specs.model_source import ModelSource
from ...system.model_directory import find_model
from ..store.store import Store

_KNOWN = ", ".join(MAPPED_MODEL_TYPES)
_MAPPED = f"and GGUF files are made of {_KNOWN}: export it to safetensors, or another model"
_NEEDS: dict[ExportTarget, str] = {
    "gguf": _MAPPED,
    "ollama": _MAPPED,
    "lora-gguf": _MAPPED,
    "vllm": f"and those that are known to be served by vLLM are {_KNOWN}: export it to safetensors, or another model",
}
"""What an export needs of a `model_type`; of another target: nothing."""


def refuse_unmapped(
    field: str, value: str | None, target: ExportTarget, source: ModelSource, store: Store | None
) -> None:
    """Return if an export can be made, as far as the configuration of its model is on this machine. Raises
    InvalidRequest: names the field and the architecture.

    Args:
        field: that names the model, and its value.
        source: the model, of an adapter the one below it.
        store: the jobs that may make it; None: there are none.
    """
    source, found = _configuration(source, store)
    model_type = found.get("model_type")
    if not isinstance(model_type, str) or source.trust_remote_code:
        return  # the model's own code decides what it is
    found_type = f"its model_type is {model_type[:80]!r}"
    if found.get("vision_config") is not None:
        hint = "which reads images, too: an export is compared by texts alone. Export a model that reads text alone"
        raise InvalidRequest(field, value, f"{found_type}, {hint}")
    if target in _NEEDS and model_type not in MAPPED_MODEL_TYPES:
        raise InvalidRequest(field, value, f"{found_type}, {_NEEDS[target]}")


def _configuration(source: ModelSource, store: Store | None) -> tuple[ModelSource, dict[str, Any]]:
    """The model's configuration or, of one that is not there yet, that of the model which it is made of; empty: neither
    is on this machine. And whose it is."""
    seen = set[str]()
    while True:
        found = _read(source)
        made_by = source.made_by
        if found or made_by is None or store is None or made_by.job_uuid in seen:
            return source, found
        seen.add(made_by.job_uuid)
        try:
            source = store.get(made_by.job_uuid).spec.source
        except JobNotFound:
            return source, found


def _read(source: ModelSource) -> dict[str, Any]:
    directory = find_model(os.environ, source.model, source.revision)
    if directory is None:
        return {}
    try:
        found = json.loads(directory.read(CONFIG))  # of a larger one the job finds out
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
