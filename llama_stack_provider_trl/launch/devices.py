"""Which devices this machine can train on, found without importing torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from ..errors import InvalidRequest

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def usable_devices(configured: str) -> list[str]:
    """The devices that jobs may be placed on, for a `device` setting.

    `auto` means every GPU, else Apple's mps, else the CPU. The training process checks again with torch.

    Raises:
        InvalidRequest: the setting is no device name, or names a device that is not there.
    """
    if configured == "cpu" or (configured == "mps" and _has_mps()):
        return [configured]
    gpus = [f"cuda:{index}" for index in range(count_gpus())]
    if configured == "auto":
        return gpus or (["mps"] if _has_mps() else ["cpu"])
    if configured == "cuda" and gpus:
        return gpus
    if configured in gpus:
        return [configured]
    found = ", ".join([*gpus, *(["mps"] if _has_mps() else []), "cpu"])
    raise InvalidRequest("device", configured, f"this machine has {found}; `auto` takes the best of them")


def count_gpus() -> int:
    """NVIDIA GPUs that a training process would see: CUDA_VISIBLE_DEVICES, else the driver's list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if _NVIDIA_GPUS.is_dir():
        return len(list(_NVIDIA_GPUS.iterdir()))
    return _count_with_nvidia_smi()


def _count_with_nvidia_smi() -> int:
    # Containers often have the tool and the device nodes but not the driver's /proc directory.
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", listing.stdout, flags=re.MULTILINE))


def _has_mps() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"
