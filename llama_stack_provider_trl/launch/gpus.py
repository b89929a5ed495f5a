"""The NVIDIA GPUs of this machine, from the driver (NVML). Numbers differ between programs that see different GPUs; a
UUID does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

PCI_ORDER = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER with which CUDA numbers GPUs as the driver does."""
_known: tuple[Gpu, ...] = ()
"""The last answer that had any. GPUs do not change their names."""
log = logging.getLogger(__name__)


class Gpu(NamedTuple):
    """One GPU, as the driver names it."""

    number: str
    uuid: str
    memory_bytes: int | None
    """None: it shares the machine's memory."""
    model: str


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the machine in the driver's order, whatever CUDA_VISIBLE_DEVICES is; none where there is no driver
    or it fails."""
    global _known
    if not _known:
        try:
            import pynvml
        except ImportError:
            return ()
        try:
            _known = _listed(pynvml)
        except pynvml.NVMLError_LibraryNotFound:
            pass  # no driver
        except (pynvml.NVMLError, OSError) as error:
            log.warning("the NVIDIA driver lists no GPUs, so they have no UUIDs and no sizes here: %s", error)
    return _known


def gpu_name(device: str, environ: Mapping[str, str]) -> str:
    """The UUID of the GPU behind `cuda:N`; if it is not known, its entry in CUDA_VISIBLE_DEVICES, or N."""
    entry = visible_entry(device, environ)
    found = _behind(entry)
    is_number = found is not None and entry == found.number
    if found is None or (is_number and environ.get("CUDA_DEVICE_ORDER", PCI_ORDER) != PCI_ORDER):
        return entry
    return found.uuid


def gpu_of(device: str, environ: Mapping[str, str]) -> Gpu | None:
    """The GPU behind `cuda:N`; None: not known."""
    return _behind(visible_entry(device, environ))


def visible_entry(device: str, environ: Mapping[str, str]) -> str:
    """What `cuda:N` is in CUDA_VISIBLE_DEVICES, within which it counts as it does in torch: a number or a UUID."""
    index = device.partition(":")[2]
    visible = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return (visible[int(index)] if int(index) < len(visible) else "") or index


def _behind(entry: str) -> Gpu | None:
    """The GPU with this number, or the only one whose UUID begins so: CUDA takes the beginning for the whole."""
    listed = gpus()
    for gpu in listed:
        if gpu.number == entry:
            return gpu
    matching = [gpu for gpu in listed if gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _listed(pynvml: Any) -> tuple[Gpu, ...]:
    pynvml.nvmlInit()
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = None
    with suppress(pynvml.NVMLError):  # not supported where it shares the machine's memory, such as on GB10
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(str(index), pynvml.nvmlDeviceGetUUID(handle), memory, pynvml.nvmlDeviceGetName(handle))
