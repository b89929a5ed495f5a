"""The NVIDIA GPUs of this machine, from the driver (NVML). Numbers differ between programs that see different GPUs; a
UUID does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, NamedTuple

PCI_ORDER = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER with which CUDA numbers GPUs as the driver does."""
_TIMEOUT = 10.0
"""Seconds for the driver to list its GPUs: milliseconds as a rule, seconds where it has to be loaded first."""
_NONE = "the NVIDIA driver lists no GPUs, so they have no UUIDs and no sizes here"
_known: tuple[Gpu, ...] = ()
"""The last answer that had any. GPUs do not change their names."""
_query: Thread | None = None
_deadline = 0.0
"""The last call of the driver, and until when it is waited for."""
_starting = Lock()
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
    or it fails, or it does not answer within `_TIMEOUT`. A later call has what it answers after that."""
    global _query, _deadline
    try:
        import pynvml
    except ImportError:
        return ()
    with _starting:
        if _known:
            return _known
        if _query is None or not _query.is_alive():
            # A call into a driver that hangs never returns, and a thread of an executor would keep the process alive.
            _query = Thread(target=_remember, args=(pynvml,), name="trl-nvml", daemon=True)
            _deadline = time.monotonic() + _TIMEOUT
            _query.start()
        query, seconds = _query, _deadline - time.monotonic()
    query.join(max(0.0, seconds))
    if query.is_alive() and seconds > 0:
        log.warning("%s: the driver has not answered for %g s; nvidia-smi shows whether it works", _NONE, _TIMEOUT)
    return _known


def _remember(pynvml: Any) -> None:
    global _known
    _known = _listed(pynvml)


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
            found = (_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
            return tuple(gpu for gpu in found if gpu is not None)
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        pass  # no driver
    except (pynvml.NVMLError, OSError) as error:
        log.warning("%s: %s", _NONE, error)
    return ()


def _gpu(pynvml: Any, index: int) -> Gpu | None:
    """None: the driver counts it, and this process may not open it (control groups), or it is lost."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, model = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError as error:
        log.warning("GPU %d is left out: %s", index, error)
        return None
    memory = None
    with suppress(pynvml.NVMLError):  # not supported where it shares the machine's memory, such as on GB10
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(str(index), uuid, memory, model)
