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


def choose(queued: Iterable[Queued], running: Iterable[str], devices: Sequence[str]) -> dict[str, str]:
    """Give free devices to jobs, one job per device.

    Args:
        running: devices of the jobs that have one.
        devices: what the node has, such as ("cpu",) or ("cuda:0", "cuda:1").

    Returns:
        job_uuid -> concrete device, in the order in which the jobs should start. A job that finds no device does not
        hold up a younger one that wants another device.
    """
    taken = set(running)
    chosen: dict[str, str] = {}
    for job in sorted(queued, key=lambda job: (-job.priority, job.age)):
        free = [device for device in suitable(job.device, devices) if device not in taken]
        if free:
            chosen[job.job_uuid] = free[0]
            taken.add(free[0])
    return chosen


def suitable(wanted: str, devices: Sequence[str]) -> list[str]:
    """The node's devices that serve a request, best first.

    `auto` means the kind of the node's first device: a job never slides from a GPU to the CPU because the GPU is busy.
    `cuda` means any of the node's cuda devices.
    """
    kind = _kind(devices[0]) if wanted == "auto" else wanted
    return [device for device in devices if device == kind or _kind(device) == kind]


def why_waiting(wanted: str, holders: dict[str, str], devices: Sequence[str]) -> str:
    """What a job that found no device waits for, for its status.

    Args:
        holders: device -> job_uuid of the job that has it.
    """
    fitting = suitable(wanted, devices)
    if not fitting:
        return f"waiting for device {wanted}, which this node does not have: it has {', '.join(devices)}"
    held = ", ".join(f"{device} (held by job {holders[device]})" for device in fitting if device in holders)
    return f"waiting for device {held}" if held else ""


def _kind(device: str) -> str:
    return device.partition(":")[0]
