"""Finds the devices on which this machine can train, without importing torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ..errors import InvalidRequest
from .gpus import gpus

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def usable_devices(configured: str) -> list[str]:
    """The devices that jobs may be placed on, for a `device` setting.

    `auto` means every GPU, else Apple's mps, else the CPU. The training process checks again with torch.

    Raises:
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
    """NVIDIA GPUs that a training process would see: those of CUDA_VISIBLE_DEVICES, else of the driver's list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if _NVIDIA_GPUS.is_dir():
        return len(list(_NVIDIA_GPUS.iterdir()))
    # Containers often have the driver's library and the device nodes but not its /proc directory.
    return len(gpus())


def _has_mps() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"
