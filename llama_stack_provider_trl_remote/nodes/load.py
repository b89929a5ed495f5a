"""Measures the load of this machine: CPU, memory, disk, and its GPUs by the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import psutil

from llama_stack_provider_trl.launch.gpus import uuids_of
from llama_stack_provider_trl.system.files import free_bytes
from llama_stack_provider_trl.system.process import available_memory, machine_memory

from ..wire import DeviceLoad, Load

log = logging.getLogger(__name__)
_KEPT_SECONDS = 1.0
"""Calls within this time get the same answer."""
_DRIVER_SECONDS = 0.5
"""Seconds to wait for the driver; a slower answer counts at the next call."""


class LoadMeter:
    """Measures a machine. Safe to share between threads; never waits long.

    Args:
        devices: those whose load is measured: GPUs by their UUIDs, other devices have none of their own.
    """

    def __init__(
        self,
        devices: Iterable[str],
        directory: Path,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices, self._directory, self._environ, self._clock = list(devices), directory, environ, clock
        self._lock = Lock()
        self._cpu = cpu_seconds()
        self._kept: tuple[float, Load | None] = (float("-inf"), None)
        self._gpus: tuple[DeviceLoad, ...] = ()
        self._query: Thread | None = None
        self._uuids: dict[str, str] | None = None
        self._is_open = False

    def read(self) -> Load | None:
        """The load now, of the CPU on average since the call before; None: it cannot be measured."""
        with self._lock:
            at, load = self._kept
            if self._clock() - at >= _KEPT_SECONDS:
                try:
                    load = self._measured()
                except (OSError, psutil.Error) as error:
                    if at == float("-inf") or self._kept[1] is not None:
                        log.warning("the load of this machine cannot be measured: %s", error)
                    load = None
                self._kept = (self._clock(), load)
            return load

    def _measured(self) -> Load:
        (busy, total), (busy_before, total_before) = (now := cpu_seconds()), self._cpu
        self._cpu = now
        share = (busy - busy_before) / (total - total_before) if total > total_before else 0.0
        return Load(
            cpu_percent=round(100 * min(1.0, max(0.0, share)), 1),
            memory_used_bytes=max(0, machine_memory() - available_memory()),
            disk_free_bytes=free_bytes(self._directory),
            devices=self._of_gpus(),
        )

    def _of_gpus(self) -> tuple[DeviceLoad, ...]:
        """The last answer of the driver. A call into one that hangs never returns, so it is made in a thread."""
        if not any(device.startswith("cuda") for device in self._devices):
            return ()
        if self._query is not None and self._query.is_alive():
            return ()  # what it answered before is old
        self._query = Thread(target=self._ask, name="trl-load", daemon=True)
        self._query.start()
        self._query.join(_DRIVER_SECONDS)
        return () if self._query.is_alive() else self._gpus

    def _ask(self) -> None:
        self._gpus = ()
        try:
            import pynvml
        except ImportError:
            return
        with suppress(pynvml.NVMLError, OSError):  # `gpus` has logged why
            if not self._is_open:
                # Kept open: without a persistent driver each opening takes a second.
                pynvml.nvmlInit()
                self._uuids, self._is_open = uuids_of(self._devices, self._environ), True
            self._gpus = tuple(_of_gpu(pynvml, device, uuid) for device, uuid in (self._uuids or {}).items())


def _of_gpu(pynvml: Any, device: str, uuid: str) -> DeviceLoad:
    """What the driver reports of a GPU. Of a MIG slice it knows only the memory."""
    found: dict[str, float] = {}

    def note(name: str, read: Callable[[Any], float]) -> None:
        with suppress(pynvml.NVMLError):  # not supported by this model
            found[name] = read(handle)

    with suppress(pynvml.NVMLError):  # it is lost
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        note("utilization_percent", lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        note("memory_used_bytes", lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used))
        note("power_watts", lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
    return DeviceLoad.model_validate({"name": device, **found})


def cpu_seconds() -> tuple[float, float]:
    """Seconds that all cores together were busy, and in all. Time of guests is part of `user`."""
    times = psutil.cpu_times()._asdict()
    total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
    return total - times["idle"] - times.get("iowait", 0.0), total
