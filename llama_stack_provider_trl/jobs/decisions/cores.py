"""Cores of a CPU as devices of their own: `cpu:0` to `cpu:N-1`, beside `cpu`, which is all of them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

CPU = "cpu"
_PREFIX = f"{CPU}:"


@lru_cache(1000)  # the same few machines at every pass
def core_names(count: int) -> tuple[str, ...]:
    """The cores of a CPU."""
    return tuple(f"{_PREFIX}{number}" for number in range(count))


def is_core(device: str) -> bool:
    return device.startswith(_PREFIX)


def slot_of(place: str) -> str:
    """The device slot that a place is, or is a part of: `a/cpu` of `a/cpu:3`."""
    node, slash, device = place.rpartition("/")
    return f"{node}{slash}{CPU}" if is_core(device) else place


class Held:
    """The jobs that have each place, or a part of it.

    Args:
        holders: place -> job_uuid of the job that has it.
    """

    def __init__(self, holders: Mapping[str, str]) -> None:
        self._holders = holders
        self._parts: dict[str, dict[str, int]] = {}
        for place, job_uuid in holders.items():
            if (slot := slot_of(place)) != place:
                parts = self._parts.setdefault(slot, {})
                parts[job_uuid] = parts.get(job_uuid, 0) + 1

    def of(self, place: str) -> list[str]:
        """The jobs because of which a place is not free: of a core also the one that has the whole CPU."""
        if (job_uuid := self._holders.get(place)) is not None:
            return [job_uuid]
        slot = slot_of(place)
        return list(self._parts.get(place, ())) if slot == place else self.of_whole(slot)

    def of_whole(self, slot: str) -> list[str]:
        """The job that has all of a device, if there is one."""
        return [self._holders[slot]] if slot in self._holders else []

    def cores(self, slot: str) -> Mapping[str, int]:
        """Job -> the number of cores of a CPU that it has reserved."""
        return self._parts.get(slot, {})

    def found(self, slot: str, wanted: int, cores: int) -> str:
        """What a job that waits for cores finds, such as `needs 2 of 4 cores, free: 1 (held by a)`."""
        whole, parts = self.of_whole(slot), self.cores(slot)
        free = 0 if whole else max(0, cores - sum(parts.values()))
        held = f" (held by {listed(whole or parts)})" if whole or parts else ""
        kept = ", older jobs come first" if free >= wanted else ""
        return f"needs {wanted} of {cores} cores, free: {free}{held}{kept}"

    def is_full(self, slot: str, cores: int) -> bool:
        """Whether nothing of a device is free."""
        return slot in self._holders or (slot in self._parts and sum(self._parts[slot].values()) >= cores)


def listed(jobs: Iterable[str]) -> str:
    """Names of jobs, such as `a, b and 3 more`."""
    found = list(jobs)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{', '.join(found[:5])}{more}"
