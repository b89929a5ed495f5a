"""Stands in for the module `pynvml`, by which `launch.gpus` queries the driver: a machine with GPUs, or with none."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from llama_stack_provider_trl.launch import gpus

Described = tuple[str, int | None, str]
"""UUID, bytes and model of a GPU or a slice."""


class NVMLError(Exception):
    """Any failure of the driver."""


class NVMLError_LibraryNotFound(NVMLError):
    """There is no driver."""


class FakeNvml:
    """The functions of pynvml that `launch.gpus` calls.

    Args:
        found: UUID, bytes (None: not supported) and model of each GPU.
        failure: raised by `nvmlInit`.
        slices: number of a GPU in MIG mode -> its slices by slot, as in `found`; None: an empty slot.

    Attributes:
        opened: how often the driver was opened.
        closed: how often it was closed.
    """

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound

    def __init__(
        self, *found: Described, failure: Exception | None = None, slices: Mapping[int, Sequence[Described | None]] = {}
    ) -> None:
        self.found, self.failure, self.slices = found, failure, slices
        self.opened = self.closed = 0

    def nvmlInit(self) -> None:
        if self.failure:
            raise self.failure
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.found)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if not self.slices:
            raise NVMLError("Not Supported")
        return [int(handle in self.slices)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return len(self.slices[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, slot: int) -> tuple[int, int]:
        if self.slices[handle][slot] is None:
            raise NVMLError("Not Found")
        return handle, slot

    def nvmlDeviceGetUUID(self, handle: int | tuple[int, int]) -> str:
        return self._described(handle)[0]

    def nvmlDeviceGetName(self, handle: int | tuple[int, int]) -> str:
        return self._described(handle)[2]

    def _described(self, handle: int | tuple[int, int]) -> Described:
        if isinstance(handle, int):
            return self.found[handle]
        described = self.slices[handle[0]][handle[1]]
        assert described is not None
        return described

    def nvmlDeviceGetMemoryInfo(self, handle: int | tuple[int, int]) -> SimpleNamespace:
        memory = self._described(handle)[1]
        if memory is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=memory, used=memory // 2)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int | tuple[int, int]:
        slices = {(gpu, slot): found for gpu, all_ in self.slices.items() for slot, found in enumerate(all_) if found}
        known = {**dict(enumerate(self.found)), **slices}
        for handle, described in known.items():
            if described[0] == uuid:
                return handle
        raise NVMLError("Not Found")

    def nvmlDeviceGetUtilizationRates(self, handle: int | tuple[int, int]) -> SimpleNamespace:
        if not isinstance(handle, int):
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: int | tuple[int, int]) -> int:
        if not isinstance(handle, int):
            raise NVMLError("Not Supported")
        return 250_500  # mW


def install(
    monkeypatch: pytest.MonkeyPatch,
    *found: Described,
    failure: Exception | None = None,
    slices: Mapping[int, Sequence[Described | None]] = {},
) -> FakeNvml:
    """Give this process these GPUs for the length of a test."""
    fake = FakeNvml(*found, failure=failure, slices=slices)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpus, "_known", ())
    monkeypatch.setattr(gpus, "_query", None)
    return fake
