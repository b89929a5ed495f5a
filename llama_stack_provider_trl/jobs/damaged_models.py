"""Refuses, at POST, a model in a directory of this machine with a file that is a pointer, a web page, empty or cut off.

Only what the first bytes, the size or a small header show: the training checks all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..system.files import open_in
from ..system.model_damage import ADAPTER_FILES, CONFIG_FILES, SMALL, TOKENIZER_FILES, WEIGHTS, damage_of


def refuse_damaged(field: str, value: str | None, fields: Mapping[str, Any]) -> None:
    """Return if the files of a job's model, and of the adapter that it begins with, look whole.

    Args:
        field: that names the model, and its value.
        fields: of the job. One that begins with the checkpoint of another job checks that when it starts.

    Raises:
        InvalidRequest: names the field and the file.
    """
    model, adapter = Path(fields["model"]), fields.get("adapter")
    if fields.get("bases") or not model.is_absolute():
        return
    for directory in (model, *([adapter.path] if adapter is not None else [])):
        for name in (*CONFIG_FILES, *TOKENIZER_FILES, WEIGHTS, *ADAPTER_FILES):
            try:
                with open_in(directory, name) as file:
                    damage = damage_of(name, file, SMALL)
            except OSError:
                continue  # the training reads it where it runs
            if damage is not None:
                raise InvalidRequest(field, value, f"{name} in that directory {damage}")
