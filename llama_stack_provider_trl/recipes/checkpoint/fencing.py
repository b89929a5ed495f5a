"""Fencing tokens: only the current attempt of a job writes into the job's checkpoint directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import AttemptSpec


@dataclass(frozen=True)
class FencingToken:
    """An attempt's right to write into its job's checkpoint directory.

    On a disk that several machines see, an attempt whose machine was cut off continues to train after another attempt
    has received its job. The token file on that disk names the attempt that may write.

    Args:
        path: the token file, `AttemptSpec.turn`; None: no other attempt can write there.
    """

    task_id: str = ""
    path: Path | None = None

    @classmethod
    def of(cls, attempt: AttemptSpec) -> FencingToken:
        return cls(attempt.task_id, attempt.turn)

    def private_name(self, name: str) -> str:
        """A name for incomplete files that no other attempt uses (`system.files.remove_leftovers` recognizes it)."""
        return name if self.path is None else f"{name}.{self.task_id.rpartition('-')[2]}.tmp"

    def check(self) -> None:
        """Return if this attempt may write. Raises JobFailure: node_lost, where the token names another attempt."""
        if self.path is None:
            return
        try:
            holder = self.path.read_text().strip()
        except FileNotFoundError:
            holder = ""
        if holder != self.task_id:
            raise JobFailure(
                Reason.node_lost,
                f"the service has abandoned this attempt, {self.task_id}, and {holder or 'another one'} may write "
                f"into {self.path.parent} by now: nothing more is written there",
            )
