"""Finds the devices on which this machine can train, without importing torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import InvalidRequest
from .gpus import gpus, visible_entries

CORE = "cpu:"
"""Begin of the name of a core of the CPU that a job has reserved."""
_NVIDIA_GPUS, _DEVICE_NODES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
_MINOR = re.compile(r"^Device Minor:\s+(\d+)", re.MULTILINE)


def usable_devices(configured: str) -> list[str]:
    """The devices that jobs may be placed on, for a `device` setting.

    `auto` means every GPU, else Apple's mps, else the CPU. The training process checks again with torch. Raises
    InvalidRequest: the setting is not the name of a device, or names one that does not exist.
    """
    if configured == "cpu" or (configured == "mps" and _has_mps()):
        return [configured]
    names = [f"cuda:{index}" for index in range(count_gpus())]
    if configured == "auto":
        return names or (["mps"] if _has_mps() else ["cpu"])
    if configured == "cuda" and names:
        return names
    if configured in names:
        return [configured]
    found = ", ".join([*names, *(["mps"] if _has_mps() else []), "cpu"])
    raise InvalidRequest("device", configured, f"this machine has {found}; `auto` takes the best of them")


def count_gpus() -> int:
    """NVIDIA GPUs, and MIG slices, that a training process can use: those of CUDA_VISIBLE_DEVICES, else of the driver's
    list."""
    if "CUDA_VISIBLE_DEVICES" in os.environ or gpus():
        return len(visible_entries(os.environ))
    # The library of the driver is not there, or does not answer.
    return len([gpu for gpu in _NVIDIA_GPUS.iterdir() if _has_node(gpu)]) if _NVIDIA_GPUS.is_dir() else 0


def core_numbers(devices: Sequence[str]) -> tuple[int, ...]:
    """The numbers that the system gives to the reserved cores among devices: `cpu:N` is the Nth core, from 0, that this
    process may use. Raises OSError: there are fewer."""
    wanted = [int(device.removeprefix(CORE)) for device in devices if device.startswith(CORE)]
    usable = _usable_cores() if wanted else []
    if wanted and max(wanted) >= len(usable):
        raise OSError(f"core {max(wanted)} was reserved, and this process may use {len(usable)} cores")
    return tuple(usable[number] for number in wanted)


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _has_node(gpu: Path) -> bool:
    """Whether a GPU of the driver's /proc directory, which lists the host's in every container, can be opened here."""
    try:
        minor = _MINOR.search((gpu / "information").read_text())
    except OSError:
        minor = None
    return (_DEVICE_NODES / f"nvidia{minor[1]}").exists() if minor else _DEVICE_NODES.joinpath("nvidiactl").exists()


def _has_mps() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"
