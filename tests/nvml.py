"""Stands in for the module `pynvml`, by which `launch.gpus` queries the driver: a machine with GPUs, or with none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from llama_stack_provider_trl.launch import gpus


class NVMLError(Exception):
    """Any failure of the driver."""


class NVMLError_LibraryNotFound(NVMLError):
    """There is no driver."""


class FakeNvml:
    """The functions of pynvml that `launch.gpus` calls.

    Args:
        found: UUID, bytes (None: not supported) and model of each GPU.
        failure: raised by `nvmlInit`.

    Attributes:
        opened: how often the driver was opened.
        closed: how often it was closed.
    """

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound

    def __init__(self, *found: tuple[str, int | None, str], failure: Exception | None = None) -> None:
        self.found, self.failure = found, failure
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

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.found[handle][0]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.found[handle][2]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        memory = self.found[handle][1]
        if memory is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=memory)


def install(
    monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int | None, str], failure: Exception | None = None
) -> FakeNvml:
    """Give this process these GPUs for the length of a test."""
    fake = FakeNvml(*found, failure=failure)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpus, "_known", ())
    monkeypatch.setattr(gpus, "_query", None)
    return fake
