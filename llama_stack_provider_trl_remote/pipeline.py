"""Several jobs of one file, which the service queues together (docs/how-to/chains.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .client import PIPELINE, ServiceClient

KEYS = ("jobs", "teacher_student")
"""Each of them makes a file a pipeline."""


@dataclass(frozen=True)
class Placed:
    """A job of a pipeline on the service."""

    name: str
    job_uuid: str
    is_new: bool
    """Whether it was submitted; else it was there."""
    state: str
    """As it was then."""
    evaluation: str | None = None
    """The job that evaluates its result (the provider option `evaluate`), if it is there."""


def is_pipeline(body: Mapping[str, Any]) -> bool:
    return any(key in body for key in KEYS)


async def place(client: ServiceClient, pipeline: Mapping[str, Any]) -> list[Placed]:
    """Submit the jobs of a pipeline that the service does not have, all or none of them.

    Raises:
        ServiceRefusal: names the job and the field.
    """
    return [Placed(**placed) for placed in (await client.submit(PIPELINE, dict(pipeline)))["data"]]
