"""The random numbers of one rank as JSON: Python's, numpy's and torch's generators, saved and restored exactly."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every generator that this process trains with; JSON values."""
    version, values, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    states = {"cpu": encoded(torch.get_rng_state())}
    if device.type == "cuda":
        states["cuda"] = encoded(torch.cuda.get_rng_state(device))
    return {
        "python": [version, list(values), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": states,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator to what `capture` returned; a GPU's only where the state has one. Raises ValueError,
    KeyError, TypeError: it is not such a state."""
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    try:
        torch.set_rng_state(_decoded(state["torch"]["cpu"]))
        if device.type == "cuda" and "cuda" in state["torch"]:
            torch.cuda.set_rng_state(_decoded(state["torch"]["cuda"]), device)
    except RuntimeError as error:  # another size
        raise ValueError(str(error)) from error


def encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
