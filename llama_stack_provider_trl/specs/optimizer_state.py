"""The bytes of an optimizer's state, by the shape of a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .job import OptimizerName

BLOCK = 256
"""Weights whose 8-bit moments share a scale, all in one row, so that a scale belongs to one rank however rows are
sharded."""
_SMALLEST = 4096
"""Weights: smaller tensors keep moments in fp32, which take little."""
_IN_8_BITS = 2 * (1 + 4 / BLOCK)
"""Bytes per weight: two codes, and a part of two scales in fp32."""


def has_8_bit_moments(shape: Sequence[int]) -> bool:
    """Whether adamw_8bit holds the moments of such a weight in 8 bits, rather than in fp32."""
    row = math.prod(shape[1:])
    return len(shape) > 1 and row % BLOCK == 0 and shape[0] * row >= _SMALLEST


def moment_bytes(optimizer: OptimizerName, weights: int, in_8_bits: int) -> int:
    """Bytes of an optimizer's state.

    Args:
        weights: elements of all trained weights.
        in_8_bits: of those, elements of weights for which `has_8_bit_moments`.
    """
    if optimizer == "sgd":
        return 0
    if optimizer == "adamw_8bit":
        return 8 * (weights - in_8_bits) + int(_IN_8_BITS * in_8_bits)
    return 8 * weights


def elements_in_8_bits(shapes: Iterable[Sequence[int]]) -> int:
    """Of all weights with these shapes: the elements of those for which `has_8_bit_moments`."""
    return sum(math.prod(shape) for shape in shapes if has_8_bit_moments(shape))
