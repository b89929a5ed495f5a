"""Safetensors files that several ranks write and read at once, each its own rows.

FSDP2 shards along the first dimension, so a rank's part of a weight, or of an optimizer's moment of it, is one range of
bytes in the file: nothing is gathered, nothing is written twice, and transformers, peft and others read the file.
Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.uint8: "U8"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class _Layout(NamedTuple):
    header: bytes
    starts: dict[str, int]
    """Name -> its first byte in the file."""
    end: int


class Outline(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class LocalRows(NamedTuple):
    values: torch.Tensor
    first: int
    """Its first row in the whole tensor."""
    is_ours_to_write: bool


def reserve(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the header and reserve the space of the data. One rank calls it, then all ranks call `fill`. Raises
    OSError: the disk is full."""
    layout = _layout(tensors)
    with open(path, "wb") as file:
        file.write(layout.header)
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, layout.end)
        else:  # macOS: nothing is reserved, and a full disk is noticed while the file is filled
            file.truncate(layout.end)


def fill(path: Path, parts: Iterator[tuple[int, torch.Tensor]]) -> None:
    """Write parts of the file, as `parts_of` gives them, and fsync."""
    fd = os.open(path, os.O_WRONLY)
    try:
        for start, data in parts:
            pwrite(fd, data.numpy().data, start)
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path: Path, tensors: Mapping[str, Outline], values: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write a whole file, one tensor after the other, and fsync; only one tensor need be in memory. Raises OSError: the
    disk is full.

    Args:
        values: the values of each, in any order.
    """
    planned = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    starts = _layout(planned).starts
    reserve(path, planned)
    fill(path, ((starts[name], tensor.contiguous().reshape(-1).view(torch.uint8)) for name, tensor in values))


def parts_of(
    tensors: Mapping[str, torch.Tensor], writer: int | None = 0, writers: int = 1
) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts that this rank writes: offset in the file, and bytes (uint8, one dimension).

    Args:
        tensors: the same names on every rank, in CPU memory.
        writer: of tensors that all ranks hold whole, each of the `writers` writes some; None: this rank none.
    """
    layout = _layout(tensors)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        rows = rows_of(tensor)
        if rows.is_ours_to_write and (isinstance(tensor, DTensor) or number % writers == writer):
            start = layout.starts[name] + rows.first * tensor.element_size() * math.prod(tensor.shape[1:])
            yield start, rows.values.contiguous().reshape(-1).view(torch.uint8)


def outlines(path: Path) -> dict[str, Outline]:
    """Shape and dtype of every tensor of a file; no values are read. Raises KeyError: a dtype that `reserve` does not
    write; SafetensorError: it is not a safetensors file."""
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the file cannot be iterated
        return {name: Outline(torch.Size(one.get_shape()), _TORCH[one.get_dtype()]) for name, one in found.items()}


@torch.no_grad()
def read_into(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the file's values into `tensors`, of a sharded one this rank's rows; names that are missing raise KeyError,
    another shape ValueError."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name, tensor in tensors.items():
            if name not in names:
                raise KeyError(f"{path} has no {name}")
            found = file.get_slice(name)
            if list(found.get_shape()) != list(tensor.shape):
                raise ValueError(f"{name} has shape {found.get_shape()} in {path}, expected {list(tensor.shape)}")
            rows = rows_of(tensor)
            if not isinstance(tensor, DTensor):
                tensor.copy_(file.get_tensor(name))
            elif rows.values.numel():
                rows.values.copy_(found[rows.first : rows.first + rows.values.shape[0]])


@torch.no_grad()
def read_from_first(
    path: Path, tensors: Mapping[str, torch.Tensor], broadcast: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Do what `read_into` does, from a file that only rank 0 can read. A collective; one tensor at a time is whole.
    `broadcast` gives a tensor in CPU memory rank 0's values."""
    is_first = dist.get_rank() == 0
    for name, tensor in sorted(tensors.items()):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        if is_first:
            read_into(path, {name: whole})
        whole = broadcast(whole)
        rows = rows_of(tensor)
        rows.values.copy_(whole[rows.first : rows.first + rows.values.shape[0]] if rows.values.ndim else whole)


def _layout(tensors: Mapping[str, torch.Tensor]) -> _Layout:
    ordered = sorted(tensors.items())
    ends = list(accumulate((tensor.numel() * tensor.element_size() for _, tensor in ordered), initial=0))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, tensor), start, end in zip(ordered, ends, ends[1:], strict=False):
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file: values lie on their boundaries
    data = 8 + len(text)
    starts = {name: data + start for (name, _), start in zip(ordered, ends, strict=False)}
    return _Layout(len(text).to_bytes(8, "little") + text, starts, data + ends[-1])


def rows_of(tensor: torch.Tensor) -> LocalRows:
    """The rows of a tensor on this rank; all of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return LocalRows(tensor.detach(), 0, True)
    if not all(placement in (Shard(0), Replicate()) for placement in tensor.placements):
        raise AssertionError(f"a tensor with placements {tensor.placements}; FSDP2 shards along the first dimension")
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate() or ()
    is_first_copy = all(
        place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement == Replicate()
    )
    return LocalRows(tensor.detach().to_local(), offset[0] if offset else 0, is_first_copy)


def pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset of a file."""
    while data:
        written = os.pwrite(fd, data, offset)  # at most 2 GiB at a time
        data, offset = data[written:], offset + written
