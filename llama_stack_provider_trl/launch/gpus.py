"""The NVIDIA GPUs of this machine or container, from the driver (NVML). Numbers differ between programs that see
different GPUs; a UUID does not.

A GPU in MIG mode is not a device itself: each of its slices is one, with a UUID of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, NamedTuple

PCI_ORDER = "PCI_BUS_ID"
"""The value of CUDA_DEVICE_ORDER with which CUDA numbers GPUs as the driver does."""
NO_GANG = "a CUDA process sees one MIG slice, and NCCL does not connect slices, so several ranks cannot train on them"
_TIMEOUT = 10.0
"""Seconds for the driver to list its GPUs: milliseconds as a rule, seconds where it has to be loaded first."""
_NONE = "the NVIDIA driver lists no GPUs, so they have no UUIDs and no sizes here"
_MIG_ENABLED = 1
"""NVML_DEVICE_MIG_ENABLE."""
_known: tuple[Gpu, ...] = ()
"""The last answer that had any. GPUs do not change their names."""
_query: Thread | None = None
_deadline = 0.0
"""The last call of the driver, and until when it is waited for."""
_starting = Lock()
log = logging.getLogger(__name__)


class Gpu(NamedTuple):
    """One GPU, or one MIG slice of a GPU, as the driver names it."""

    number: str
    """Of a slice: that of the GPU and its own, such as 0:1."""
    uuid: str
    memory_bytes: int | None
    """None: it shares the machine's memory."""
    model: str
    parent: str = ""
    """UUID of the GPU that it is a slice of; empty: it is a whole GPU."""


def gpus() -> tuple[Gpu, ...]:
    """Every GPU or slice of the machine in the driver's order, whatever CUDA_VISIBLE_DEVICES is; none where there is no
    driver, or it fails, or it does not answer within `_TIMEOUT`. A later call has what it answers after that.

    In a container these are the container's, and slices that are created later are found by the next process.
    """
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


def is_slice(device: str, environ: Mapping[str, str]) -> bool:
    """Whether `cuda:N` is a MIG slice."""
    gpu = gpu_of(device, environ)
    return bool(gpu.parent) if gpu else visible_entry(device, environ).startswith("MIG-")


def slices_of(devices: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Those of the devices that are MIG slices."""
    return [device for device in devices if device.startswith("cuda") and is_slice(device, environ)]


def uuids_of(devices: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Device -> UUID of its GPU or slice, where that is known."""
    found = {device: gpu_of(device, environ) for device in devices if device.startswith("cuda")}
    return {device: gpu.uuid for device, gpu in found.items() if gpu is not None}


def visible_entry(device: str, environ: Mapping[str, str]) -> str:
    """What `cuda:N` is in CUDA_VISIBLE_DEVICES: a number or a UUID. N counts the entries of `visible_entries`."""
    index = device.partition(":")[2]
    entries = visible_entries(environ)
    return entries[int(index)] if index and int(index) < len(entries) else index


def visible_entries(environ: Mapping[str, str]) -> list[str]:
    """An entry for CUDA_VISIBLE_DEVICES for each device that a training may use: those of the variable, else those that
    the driver lists here.

    As in CUDA, the first entry that names no device ends the list. A GPU in MIG mode stands for its slices.
    """
    listed, given = gpus(), environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        numbers = [gpu.number for gpu in listed]
        # CUDA counts the GPUs that it can open, and the first slice only.
        in_order = numbers == list(map(str, range(len(numbers))))
        return numbers if in_order else [gpu.uuid for gpu in listed]
    found: list[str] = []
    for entry in (part.strip() for part in given.split(",")):
        slices = [gpu.uuid for gpu in listed if gpu.parent and _is_parent(entry, gpu)]
        if entry in ("", "-1") or (listed and not slices and _is_unknown(entry, listed)):
            break
        found += slices or [entry]
    return found


def _is_unknown(entry: str, listed: tuple[Gpu, ...]) -> bool:
    """Whether CUDA finds no device by this entry. CUDA numbers those that it can open."""
    if entry.isdigit():
        numbers = {gpu.number.partition(":")[0] for gpu in listed}
        return entry not in numbers and int(entry) >= len(numbers)
    return not entry.startswith("MIG-GPU-") and _behind(entry) is None  # by GPU and instances: an earlier driver's


def _is_parent(entry: str, gpu: Gpu) -> bool:
    return entry == gpu.number.partition(":")[0] or (entry.startswith("GPU-") and gpu.parent.startswith(entry))


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
            return tuple(gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _devices(pynvml, index))
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        pass  # no driver
    except (pynvml.NVMLError, OSError) as error:
        log.warning("%s: %s", _NONE, error)
    return ()


def _devices(pynvml: Any, index: int) -> list[Gpu]:
    """A GPU, or its slices in MIG mode. Empty: the driver counts it, and this process may not open it (control groups),
    or it is lost."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        whole = _described(pynvml, handle, str(index))
        return list(_slices(pynvml, handle, whole)) if _is_sliced(pynvml, handle) else [whole]
    except pynvml.NVMLError as error:
        log.warning("GPU %d is left out: %s", index, error)
        return []


def _is_sliced(pynvml: Any, handle: Any) -> bool:
    with suppress(pynvml.NVMLError):  # not supported by most models
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == _MIG_ENABLED)
    return False


def _slices(pynvml: Any, handle: Any, whole: Gpu) -> Iterator[Gpu]:
    """The slices of a GPU in MIG mode that this process may open. Slots without a slice are left out."""
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError):
            slice_ = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            yield _described(pynvml, slice_, f"{whole.number}:{slot}", whole.uuid)


def _described(pynvml: Any, handle: Any, number: str, parent: str = "") -> Gpu:
    """Raises NVMLError."""
    uuid, model = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    memory = None
    with suppress(pynvml.NVMLError):  # not supported where it shares the machine's memory, such as on GB10
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(number, uuid, memory, model, parent)
