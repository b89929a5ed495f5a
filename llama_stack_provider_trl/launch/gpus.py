"""Which GPU of the machine a `cuda:N` is. Numbers differ between programs that see different GPUs; a UUID does not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

PCI_ORDER = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER with which CUDA numbers GPUs as nvidia-smi does."""
_QUERY = ("--query-gpu=index,uuid", "--format=csv,noheader")
_known: dict[str, dict[str, str]] = {}
"""Tool -> its output. A call takes up to seconds, and GPUs do not change their names."""


def gpu_name(device: str, environ: Mapping[str, str]) -> str:
    """The UUID of the GPU behind `cuda:N`; if it is not known, its entry in CUDA_VISIBLE_DEVICES, or N."""
    entry = visible_entry(device, environ)
    uuids = _uuids(environ)
    if entry in uuids:
        return uuids[entry] if environ.get("CUDA_DEVICE_ORDER", PCI_ORDER) == PCI_ORDER else entry
    # CUDA takes the beginning of a UUID for the whole.
    whole = [uuid for uuid in uuids.values() if uuid.startswith(entry)]
    return whole[0] if len(whole) == 1 else entry


def visible_entry(device: str, environ: Mapping[str, str]) -> str:
    """What `cuda:N` is in CUDA_VISIBLE_DEVICES, within which it counts as it does in torch: a number or a UUID."""
    index = device.partition(":")[2]
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return (visible[int(index)] if int(index) < len(visible) else "") or index


def _uuids(environ: Mapping[str, str]) -> dict[str, str]:
    """Number -> UUID of every GPU that nvidia-smi lists; nothing where it cannot."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if tool is None:
        return {}
    if tool not in _known:
        try:
            listing = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        rows = (line.partition(",") for line in listing.stdout.splitlines() if "," in line)
        _known[tool] = {index.strip(): uuid.strip() for index, _, uuid in rows}
    return _known[tool]
