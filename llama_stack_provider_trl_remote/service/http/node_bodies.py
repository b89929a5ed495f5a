"""Answer models of `/nodes` and `/pools`."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from ...wire import Load


class LastLoad(Load):
    age_seconds: float
    """Since its report: of a node that calls 5 seconds at most."""


class NodeRow(BaseModel):
    node: str
    devices: list[str]
    jobs: dict[str, str]
    """Device, or core of the CPU that is reserved (`cpu:0`) -> the job that has it."""
    cpus: int
    memory_bytes: int
    memory_available_bytes: int | None
    """null: not known, of another machine."""
    disk_free_bytes: int
    head: bool = False
    """The service's own machine."""
    agent: bool
    """It can be one of several nodes of a job."""
    machine: str | None = None
    """Hash of the machine's id: nodes with the same one are one machine. null: not known."""
    state: str
    """open, or the reason for taking no jobs: cordoned, draining, silent since 12:00:03 UTC, in use by its owner."""
    loaned: bool = False
    """It takes jobs only while its owner's load is low."""
    address: str | None = None
    versions: dict[str, str] = {}
    labels: dict[str, str] = {}
    models: list[str] = []
    """Models that it can train: ids in its local cache, and names of those that it has fetched."""
    ollama_models: list[str] = []
    """Models of its machine's Ollama, which cannot be trained."""
    memory_of_devices: dict[str, int] = {}
    """GPU -> bytes, as far as known."""
    load: LastLoad | None = None
    """The last load that was reported; null: none since the service was started."""

    @property
    def reserved(self) -> dict[str, str]:
        """Core -> the job that has reserved it."""
        return {place: job for place, job in self.jobs.items() if place not in self.devices}


class ListNodesResponse(BaseModel):
    data: list[NodeRow]
    next: str | None = None
    """Pass it as `after` for the next page; null: this is the last one."""


class DeviceLoads(BaseModel):
    """A list per value, as long as `time`; null: not known in that minute."""

    utilization_percent: list[float | None]
    memory_used_bytes: list[int | None]
    power_watts: list[float | None]


class NodeLoadResponse(BaseModel):
    """Means of minutes. A minute without a report is missing."""

    time: list[int]
    """Begin of each minute, seconds since the epoch; the last one may not be over."""
    cpu_percent: list[float]
    memory_used_bytes: list[int]
    disk_free_bytes: list[int]
    devices: dict[str, DeviceLoads]
    """Its GPUs."""


class AllocationRow(BaseModel):
    """Nodes that were requested of a pool at once."""

    request_id: str
    nodes: list[str]
    """Names under which they join."""
    state: str
    """wanted, requested, granted, returning or ended."""
    requested_for: str
    """The job that lacked them."""
    recorded_at: datetime
    granted_at: datetime | None
    ended_at: datetime | None
    message: str
    """Why it waits, or has ended."""


class PoolRow(BaseModel):
    pool: str
    what: str
    """What each of its nodes has, such as `8 GPUs`."""
    max_nodes: int
    nodes: int
    """That were requested and not given back."""
    node_hours: float | None
    """Hours that its nodes may be used in 30 days; null: any number."""
    node_hours_used: float
    state: str
    """open, or the reason for which nothing is requested of it at the moment."""
    allocations: list[AllocationRow]
    """Those that have not ended, and the last ones that have."""


class ListPoolsResponse(BaseModel):
    data: list[PoolRow]
