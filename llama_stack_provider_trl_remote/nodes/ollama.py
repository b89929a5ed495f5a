"""Names of the models of this machine's Ollama. They are shown and never trained: Ollama has quantized GGUF files."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

from ..wire import MOST_OLLAMA_MODELS
from .discovery.sightings import cleaned

HOST, PORT = "127.0.0.1", 11434
_SECONDS = 2.0
_MOST_BYTES = 1 << 20
"""Of the answer; a model has about 400."""
_PIECE = 1 << 14


def ollama_models(port: int = PORT, clock: Callable[[], float] = time.monotonic) -> tuple[str, ...]:
    """Names of the models, sorted; empty where no Ollama answers as expected, within 2 seconds."""
    deadline = clock() + _SECONDS
    connection = http.client.HTTPConnection(HOST, port, timeout=_SECONDS / 2)
    try:
        connection.request("GET", "/api/tags", headers={"Accept": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return ()
        data = bytearray()
        while piece := answer.read1(_PIECE):
            data += piece
            if len(data) > _MOST_BYTES or clock() > deadline:
                return ()
        return _names(json.loads(data))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return ()
    finally:
        connection.close()


def _names(tags: Any) -> tuple[str, ...]:
    models = tags.get("models") if isinstance(tags, dict) else None
    if not isinstance(models, list):
        return ()
    found = {cleaned(model.get("name")) for model in models if isinstance(model, dict)} - {""}
    return tuple(sorted(found)[:MOST_OLLAMA_MODELS])
