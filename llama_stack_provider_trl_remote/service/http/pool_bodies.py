"""Answer models of `/pools`."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel


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
