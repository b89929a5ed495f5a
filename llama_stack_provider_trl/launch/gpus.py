"""The NVIDIA GPUs of this machine, from the driver (NVML). Numbers differ between programs that see different GPUs; a
UUID does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

PCI_ORDER = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER with which CUDA numbers GPUs as the driver does."""
_TIMEOUT = 10.0
"""Seconds for the driver to list its GPUs: milliseconds as a rule, seconds where it has to be loaded first."""
_NONE = "the NVIDIA driver lists no GPUs, so they have no UUIDs and no sizes here"
_known: tuple[Gpu, ...] = ()
"""The last answer that had any. GPUs do not change their names."""
_query: Thread | None = None
"""The last call of the driver."""
log = logging.getLogger(__name__)


class Gpu(NamedTuple):
    """One GPU, as the driver names it."""

    number: str
    uuid: str
    memory_bytes: int | None
    """None: it shares the machine's memory."""
    model: str


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the machine in the driver's order, whatever CUDA_VISIBLE_DEVICES is; none where there is no driver,
    or it fails, or it does not answer within `_TIMEOUT`."""
    global _known, _query
    if _known or (_query is not None and _query.is_alive()):
        return _known
    try:
        import pynvml
    except ImportError:
        return ()
    found: list[tuple[Gpu, ...]] = []
    # A call into a driver that hangs never returns, and a thread of an executor would keep the process from ending.
    _query = Thread(target=lambda: found.append(_listed(pynvml)), name="trl-nvml", daemon=True)
    _query.start()
    _query.join(_TIMEOUT)
    if _query.is_alive():
        log.warning("%s: the driver has not answered for %g s; nvidia-smi shows whether it works", _NONE, _TIMEOUT)
    _known = found[0] if found else ()
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
    try:
        pynvml.nvmlInit()
        try:
            return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        pass  # no driver
    except (pynvml.NVMLError, OSError) as error:
        log.warning("%s: %s", _NONE, error)
    return ()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = None
    with suppress(pynvml.NVMLError):  # not supported where it shares the machine's memory, such as on GB10
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(str(index), pynvml.nvmlDeviceGetUUID(handle), memory, pynvml.nvmlDeviceGetName(handle))
