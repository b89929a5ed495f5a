"""The service's paths and this node's: of a spec on its way here, and of events on their way back. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.files import RunDir, resolve_under

from ..wire import TaskOrder

_PATHS = {"checkpoint": "path", "checkpoint_damaged": "path", "prepared": "resumed_from"}
"""Type of an event -> its field that holds the path of a checkpoint."""
BORROWED = "borrowed"
"""Where, in a job's directory, checkpoints of other jobs are that it goes on from."""


@dataclass(frozen=True)
class Places:
    """Where the files of one task are: on the service, and here.

    Args:
        data_dir: the node's own.
        shared: the service's checkpoint directory is seen here too, and is used as it is.
    """

    order: TaskOrder
    data_dir: Path
    shared: bool = False

    @property
    def home(self) -> Path:
        """Everything of the job."""
        return resolve_under(self.data_dir / "jobs", self.order.job_uuid, "job_uuid")

    @property
    def run_dir(self) -> Path:
        return self.home / "attempts" / str(self.order.attempt)

    @property
    def files(self) -> RunDir:
        return RunDir(self.run_dir)

    @property
    def checkpoint_dir(self) -> Path:
        return self.theirs if self.shared else self.home / "checkpoints"

    @property
    def theirs(self) -> Path:
        """The job's checkpoint directory as the service calls it."""
        return Path(self.order.spec["job"]["checkpoint_dir"])

    def rows(self, sha256: str) -> Path:
        """Where a dataset is."""
        return self.data_dir / "datasets" / f"{sha256}.jsonl"

    def here(self, path: str) -> Path:
        """The node's place for a checkpoint that the service has at `path`."""
        given = Path(path)
        if given.is_relative_to(self.theirs):
            return self.checkpoint_dir / given.relative_to(self.theirs)
        return self.home / BORROWED / given.name

    def there(self, path: str) -> str:
        """The service's place for a checkpoint that the node has at `path`; as it is where it has none."""
        given = Path(path)
        if given.is_relative_to(self.checkpoint_dir):
            return str(self.theirs / given.relative_to(self.checkpoint_dir))
        if given.is_relative_to(self.home / BORROWED):
            named = [other for other in self.resumed_from() if Path(other).name == given.name]
            return named[0] if named else path
        return path

    def resumed_from(self) -> list[str]:
        """The service's paths of the checkpoints that the attempt may go on from, the best first."""
        spec = self.order.spec
        return [path for path in (spec.get("resume_from"), *spec.get("fall_back_to", ())) if path]

    def datasets(self) -> list[dict[str, Any]]:
        """What names the rows of the job: `path`, `sha256`. None where it was cancelled before anybody heard of it: its
        order has no spec."""
        job = self.order.spec.get("job", {})
        return [job[name] for name in ("dataset", "validation") if job.get(name)]

    def spec(self, resume: list[str] | None = None) -> dict[str, Any]:
        """The AttemptSpec with this node's paths.

        Args:
            resume: those of `resumed_from` that are here; None: all.
        """
        spec: dict[str, Any] = json.loads(json.dumps(self.order.spec))
        job = spec["job"]
        spec["run_dir"] = str(self.run_dir)
        spec["turn"] = self.order.shared_mark if self.shared else None
        job["checkpoint_dir"] = str(self.checkpoint_dir)
        for rows in (job[name] for name in ("dataset", "validation") if job.get(name)):
            rows["path"] = str(self.rows(rows["sha256"]))
        candidates = [str(self.here(path)) for path in (self.resumed_from() if resume is None else resume)]
        spec["resume_from"], spec["fall_back_to"] = next(iter(candidates), None), candidates[1:]
        if (job.get("resume_from") or {}).get("path"):
            job["resume_from"]["path"] = str(self.here(job["resume_from"]["path"]))
        reference = (job.get("dpo") or {}).get("reference") or {}
        if reference.get("cache"):
            reference["cache"] = str(self.data_dir / "reference")
        return spec

    def event(self, line: bytes) -> bytes:
        """A line of the event file with the service's paths; one without paths stays as it is, byte for byte."""
        event = json.loads(line)
        field = _PATHS.get(event.get("type"))
        if field is None or not event.get(field):
            return line
        return json.dumps({**event, field: self.there(event[field])}, ensure_ascii=False).encode() + b"\n"
