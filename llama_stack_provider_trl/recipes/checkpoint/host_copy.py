"""A copy of tensors in CPU memory, which is written to disk while training changes the tensors themselves.

torch's own stager (`torch.distributed.checkpoint.staging`) forgets how to copy after its first copy in torch 2.11, and
pins memory tensor by tensor. Here all tensors lie in one block, which is pinned once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch.distributed.tensor import DTensor

from ..model.fsdp import local

type Files = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by the names of files and their names there."""
_ALIGNMENT = 64
"""Bytes; every dtype's elements lie on their boundaries."""


class HostCopy:
    """One copy at a time: the next one is written over it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block: torch.Tensor | None = None
        self._is_pinned = False

    @torch.no_grad()
    def take(self, files: Files) -> dict[str, dict[str, torch.Tensor]]:
        """The same tensors with copied values, of sharded ones this rank's rows. Their values last until the next call.
        Raises RuntimeError: there is not as much memory."""
        size = sum(_space(local(tensor)) for tensors in files.values() for tensor in tensors.values())
        block, start = self._reserve(size), 0
        copied: dict[str, dict[str, torch.Tensor]] = {}
        for file, tensors in files.items():
            copied[file] = {}
            for name, tensor in tensors.items():
                rows = local(tensor)
                place = block[start : start + rows.numel() * rows.element_size()].view(rows.dtype).view(rows.shape)
                place.copy_(rows, non_blocking=self._is_pinned)
                copied[file][name] = _with_rows(tensor, place)
                start += _space(rows)
        if self._is_pinned:
            torch.cuda.synchronize(self._device)
        return copied

    def close(self) -> None:
        """Free the memory; what `take` gave has no values any more."""
        if self._block is not None and self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
        self._block, self._is_pinned = None, False

    def _reserve(self, size: int) -> torch.Tensor:
        if self._block is None or self._block.numel() != size:
            self.close()
            self._block = torch.empty(size, dtype=torch.uint8)
            if self._device.type == "cuda" and size:
                # torch's pinned allocations are rounded up to a power of two, up to twice the memory. Where it cannot
                # be pinned (locked memory is limited), copies are slower and as right.
                found = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), size, 0)
                self._is_pinned = int(found) == 0
                if not self._is_pinned:
                    _forget_error(self._device)
        return self._block


def _forget_error(device: torch.device) -> None:
    """Take the error of a call that torch does not check itself: its next kernel would raise it."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _space(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT


def _with_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`rows` as this rank's part of a tensor that is sharded as `tensor` is; `DTensor.from_local` would move them to
    the GPU."""
    return DTensor(rows, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else rows
