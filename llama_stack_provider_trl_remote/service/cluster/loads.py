"""The load of each machine: the last one in memory, and means of each minute in the job database for a day."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.store.monitoring.loads import NodeLoads
from llama_stack_provider_trl.jobs.store.store import Store

from ...wire import MOST_DEVICES, DeviceLoad, Load

log = logging.getLogger(__name__)
_MINUTE = 60


_OF_MACHINE = tuple(name for name in Load.model_fields if name != "devices")
_OF_DEVICE = tuple(name for name in DeviceLoad.model_fields if name != "name")


@dataclass
class _Sum:
    """The values of one field, added up."""

    total: float = 0.0
    count: int = 0
    is_whole: bool = True

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.is_whole = self.is_whole and isinstance(value, int)

    @property
    def mean(self) -> float:
        """A whole number for whole numbers."""
        average = self.total / self.count
        return round(average) if self.is_whole else round(average, 1)


class MeanLoad:
    """The mean of the loads that were added, at least one: sums, so that a minute takes as much memory whatever the
    number of its polls. Of a GPU's values, of those that are known; of more than MOST_DEVICES GPUs, of the first."""

    def __init__(self) -> None:
        self._machine = {name: _Sum() for name in _OF_MACHINE}
        self._devices: dict[str, dict[str, _Sum]] = {}

    def add(self, load: Load) -> None:
        for name in _OF_MACHINE:
            self._machine[name].add(getattr(load, name))
        for device in load.devices:
            sums = self._devices.get(device.name)
            if sums is None:
                if len(self._devices) == MOST_DEVICES:
                    continue
                sums = self._devices[device.name] = {name: _Sum() for name in _OF_DEVICE}
            for name in _OF_DEVICE:
                if (value := getattr(device, name)) is not None:
                    sums[name].add(value)

    @property
    def mean(self) -> Load:
        devices = [
            {"name": name, **{field: found.mean for field, found in sums.items() if found.count}}
            for name, sums in self._devices.items()
        ]
        return Load.model_validate({**{name: found.mean for name, found in self._machine.items()}, "devices": devices})


class Loads:
    """Records the loads of machines. Safe to share between threads."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._stored = NodeLoads(store.database)
        self._clock = clock
        self._lock = threading.Lock()
        self._minutes: dict[str, tuple[int, MeanLoad]] = {}
        """Node -> the minute (seconds since the epoch) that it is in, and the mean of that minute so far."""
        self._last: dict[str, tuple[float, Load]] = {}

    def note(self, node: str, load: Load) -> None:
        """Record a load that was measured just now. The first one of a minute stores the mean of the minute before."""
        now = self._clock()
        minute = int(now) // _MINUTE * _MINUTE
        with self._lock:
            before, over = self._minutes.get(node, (minute, MeanLoad()))
            current = over if before == minute else MeanLoad()
            current.add(load)
            self._minutes[node] = (minute, current)
            self._last[node] = (now, load)
        if before != minute:
            try:
                self._stored.add(node, before, over.mean.model_dump_json(exclude_none=True))
            except StoreError as error:  # a full disk: a gap in a curve, which must not fail the call
                log.warning("the load of node %s is not stored: %s", node, error)

    def last(self, node: str) -> tuple[float, Load] | None:
        """The last load of a machine, with its age in seconds; None: none since this process was started."""
        found = self._last.get(node)
        return None if found is None else (max(0.0, self._clock() - found[0]), found[1])

    def of(self, node: str, since: float) -> Sequence[tuple[int, Load]]:
        """The means of each minute that began at `since` or later, with its begin (seconds since the epoch); the last
        one is of a minute that may not be over. Minutes without a report are missing."""
        found = [(minute, Load.model_validate_json(text)) for minute, text in self._stored.of(node, since)]
        with self._lock:
            minute, current = self._minutes.get(node, (0, None))
            if current is not None and minute >= since:
                found.append((minute, current.mean))
        return found

    def forget(self, node: str) -> None:
        """Drop what is known of a machine that was removed."""
        with self._lock:
            self._minutes.pop(node, None)
            self._last.pop(node, None)
