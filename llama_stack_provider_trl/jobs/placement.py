"""Which queued job gets which device. Pure: a look at the queue in, assignments out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Queued(NamedTuple):
    """A job that waits."""

    job_uuid: str
    device: str
    """As requested: auto, cpu, cuda, cuda:N or mps."""
    age: int
    """Its number in the order of arrival: the lower, the older."""
    priority: int = 0
    """The higher, the sooner; among equals the older comes first."""
    detail: str = ""
    """What its status says it waits for."""
    ranks: int = 1
    """Processes that train together."""
    scheduled_at: float = 0.0
    """Seconds since the epoch."""


Placed = dict[str, tuple[str, ...]]
PATIENCE = 600.0
"""Seconds for which younger jobs may take devices that an older one could use once there are enough of them."""


def choose(queued: Iterable[Queued], running: Iterable[str], devices: Sequence[str], now: float = 0.0) -> Placed:
    """Give free devices to jobs: on GPUs one per rank, while a CPU (or mps) is one device whatever the ranks.

    A job that finds too few devices does not hold up a younger one at first. Once it has waited for `PATIENCE` seconds
    the free devices that would serve it are kept for it, so that small jobs cannot starve a large one: from then on
    it waits no longer than the jobs that run take to end.

    Args:
        running: devices of the jobs that have some.
        devices: what the node has, such as ("cpu",) or ("cuda:0", "cuda:1").
        now: seconds since the epoch.

    Returns:
        job_uuid -> concrete devices, in the order in which the jobs should start.
    """
    taken = set(running)
    chosen: dict[str, tuple[str, ...]] = {}
    for job in sorted(queued, key=lambda job: (-job.priority, job.age)):
        fitting = suitable(job.device, devices)
        needed = devices_needed(job, devices)
        free = [device for device in fitting if device not in taken][:needed]
        if len(free) == needed:
            chosen[job.job_uuid] = tuple(free)
            taken.update(free)
        elif len(fitting) >= needed and now - job.scheduled_at > PATIENCE:
            taken.update(free)
    return chosen


def devices_needed(job: Queued, devices: Sequence[str]) -> int:
    """How many of the node's devices the job takes."""
    fitting = suitable(job.device, devices)
    return job.ranks if fitting and _kind(fitting[0]) == "cuda" else 1


def suitable(wanted: str, devices: Sequence[str]) -> list[str]:
    """The node's devices that serve a request, best first.

    `auto` means the kind of the node's first device: a job never slides from a GPU to the CPU because the GPU is busy.
    `cuda` means any of the node's cuda devices.
    """
    kind = _kind(devices[0]) if wanted == "auto" else wanted
    return [device for device in devices if device == kind or _kind(device) == kind]


def why_waiting(job: Queued, holders: dict[str, str], devices: Sequence[str]) -> str:
    """What a job that found no device waits for, for its status.

    Args:
        holders: device -> job_uuid of the job that has it.
    """
    fitting = suitable(job.device, devices)
    needed = devices_needed(job, devices)
    if not fitting:
        return f"waiting for device {job.device}, which this node does not have: it has {', '.join(devices)}"
    if len(fitting) < needed:
        return f"waiting for {needed} devices; this node has {len(fitting)} that serve: {', '.join(fitting)}"
    held = ", ".join(f"{device} (held by job {holders[device]})" for device in fitting if device in holders)
    if needed > 1:
        return f"waiting for {needed} devices; held: {held or 'none, but older jobs come first'}"
    return f"waiting for device {held}" if held else ""


def _kind(device: str) -> str:
    return device.partition(":")[0]
