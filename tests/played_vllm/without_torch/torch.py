"""Takes the place of torch in a process of the vLLM that is played: what `recipes.model.vllm_child` calls to read
weights, whose bytes alone decide the answers. torch itself takes 1.3 s of CPU time to import."""

from __future__ import annotations

import math
import mmap
from typing import NamedTuple


class DType(NamedTuple):
    """A type of numbers."""

    size: int


uint8, bfloat16, float16, float32 = DType(1), DType(2), DType(2), DType(4)


class Tensor:
    """Numbers of one type: their bytes, which nothing computes with."""

    def __init__(self, data: memoryview, dtype: DType) -> None:
        self._data, self._dtype = data, dtype

    def view(self, dtype: DType) -> Tensor:
        """The same bytes as numbers of another type."""
        assert len(self._data) % dtype.size == 0
        return Tensor(self._data, dtype)

    def reshape(self, shape: list[int]) -> Tensor:
        """The same numbers, of which there must be as many as the shape has."""
        assert math.prod(shape) * self._dtype.size == len(self._data)
        return self

    def clone(self) -> Tensor:
        """A copy."""
        return Tensor(memoryview(bytes(self._data)), self._dtype)

    contiguous = numpy = clone

    def tobytes(self) -> bytes:
        """The bytes, as an array of numpy has them."""
        return bytes(self._data)


def frombuffer(buffer: mmap.mmap, *, dtype: DType, offset: int, count: int) -> Tensor:
    """Numbers that share the memory of a buffer."""
    assert 0 <= offset <= offset + count * dtype.size <= len(buffer)
    return Tensor(memoryview(buffer)[offset : offset + count * dtype.size], dtype)
