"""Waiting jobs as the placement sees them: what each demands of its nodes, and its place in the queue."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from ...requests.options import PRIORITIES
from ...specs.job import JobSpec, ResourcesSpec


class Demand(BaseModel):
    """What a job demands of its nodes, and what it prefers, as the queue stores it."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    resources: ResourcesSpec = ResourcesSpec()
    model: str | None = None
    """Model that must be in a node's local cache; None: none."""
    prefers: str | None = None
    """Model that other nodes would have to fetch: of the nodes that would do, those with it come first."""
    home: bool = False
    """Whether the job runs on the service's own machine only."""

    @classmethod
    def of(cls, spec: JobSpec) -> Demand:
        if spec.resources is None:
            return cls(home=True)
        name = "model" if spec.resources.model_present else "prefers"
        return cls.model_validate({"resources": spec.resources, name: spec.source.model})

    def text(self) -> str:
        """As `demand` reads it; what most jobs ask for is the empty string."""
        return "" if self.home else self.model_dump_json(exclude_defaults=True)


@cache
def demand(text: str) -> Demand:
    return Demand.model_validate_json(text) if text else Demand(home=True)


CRITICAL = PRIORITIES["critical"]
AGING = 3600.0
"""Seconds of waiting after which a job counts as one of the next higher priority, up to the highest."""


class Queued(NamedTuple):
    """A waiting job."""

    job_uuid: str
    device: str
    """As requested: auto, cpu, cuda, cuda:N or mps."""
    age: int
    """Number in the order of arrival: the lower, the older."""
    priority: int = 0
    """As requested: the higher, the sooner."""
    detail: str = ""
    """The reason for waiting, as in its status."""
    ranks: int = 1
    """Processes that train together, over all nodes, and devices that their vLLM has for itself."""
    scheduled_at: float = 0.0
    """Seconds since the epoch from which it waits for devices: submission, or the end of its wait for other jobs, or
    before a retry."""
    demand: str = ""
    """`Demand.text`."""
    tried: bool = False
    """Whether it has had an attempt: it may continue with fewer nodes than requested."""
    failed_on: str = ""
    """Places, with commas, of its attempts that could not be launched: other places come first."""

    def claim(self, now: float) -> tuple[int, int]:
        """Sorts jobs in the order in which they get devices: by priority, which grows while they wait (`AGING`), then
        by age.

        Args:
            now: seconds since the epoch.
        """
        waited = now - self.scheduled_at
        if waited < AGING:  # as most jobs: thousands of claims are sorted at a pass
            return -self.priority, self.age
        grown = self.priority + int(waited // AGING)
        return -max(self.priority, min(CRITICAL, grown)), self.age
