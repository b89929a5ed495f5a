"""The interface between the exporter and a tracker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ..errors import TrlError
from ..jobs.decisions.states import JobState
from .points import Step


class CopyLost(TrlError, RuntimeError):
    """Raised when a tracker no longer has what it accepted. The copy is begun again."""


@dataclass(frozen=True)
class Target:
    """Where the points of a job go in a tracker."""

    job_uuid: str
    project: str
    run: str
    key: str
    """Random: names the job's copies, and no other job's, in any data directory."""
    generation: int
    """Number of this copy. Copies with lower numbers are to be removed."""
    scheduled_at: datetime
    config: Mapping[str, str | int | float | bool]
    """What the job trains, for trackers that show it."""

    @property
    def name(self) -> str:
        """Names this copy."""
        return f"{self.key}-{self.generation}"


class Tracker(Protocol):
    """Writes the points of jobs to one kind of tracker. A process may be killed at any instant of any call.

    Nothing is kept between two calls but in the tracker and in `position`. A call that is repeated with the same
    position, since its result was lost, leaves each point in the tracker once.
    """

    at_end: bool
    """Whether `write` gets all steps at once when the job has ended, and nothing before."""

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """Write steps; return the position behind them once the tracker holds them durably.

        Args:
            position: the result of the last call that was recorded; {}: nothing was.

        Raises:
            CopyLost: the tracker lacks what the position names.
            Exception: any other failure; the same steps are sent again later.
        """

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        """Report the end of the job. May be repeated."""
