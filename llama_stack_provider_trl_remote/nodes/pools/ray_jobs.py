"""A client of Ray's Jobs REST API; `ray_dashboard` sends its calls. Nothing here imports ray.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .base import PoolRefusal, PoolUnavailable

_NOT_FOUND = 404
_ACTIVE = ("PENDING", "RUNNING")
OURS = "trl: "
"""Begins the lines of our own in the output of a Ray job."""


class RayAnswer(NamedTuple):
    """An answer of Ray's dashboard."""

    status: int
    text: str


Send = Callable[[str, str, Mapping[str, Any] | None], RayAnswer]
"""Sends a method to a path, with a body. Raises PoolUnavailable: there is no answer."""


class RayJobs:
    def __init__(self, address: str, send: Send) -> None:
        self.address = address
        self._send = send

    def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """Submit a job. One of this name that exists already stays as it is. Raises PoolUnavailable, PoolRefusal."""
        body = {"entrypoint": entrypoint, "submission_id": name, "metadata": dict(metadata)}
        self._call("POST", "/api/jobs/", body)

    def get(self, name: str) -> dict[str, Any] | None:
        """What Ray knows of a job; None: it has none of this name. Raises PoolUnavailable, PoolRefusal."""
        return self._call("GET", f"/api/jobs/{name}", missing=True)

    def stop(self, name: str) -> None:
        """Stop a job that has not ended. Raises PoolUnavailable, PoolRefusal."""
        job = self.get(name)
        if job is not None and is_active(job):
            self._call("POST", f"/api/jobs/{name}/stop")

    def lines(self, name: str) -> list[str]:
        """The lines of our own in a job's output, or its last line where there are none; none where Ray cannot read it:
        the node that has it may be gone."""
        try:
            text = str((self._call("GET", f"/api/jobs/{name}/logs", missing=True) or {}).get("logs") or "")
        except (PoolUnavailable, PoolRefusal):
            return []
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        own = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
        return own or lines[-1:]

    def why_ended(self, name: str, job: Mapping[str, Any]) -> str:
        """A sentence about a job that has ended, with the last line of its output."""
        lines = self.lines(name)
        last = lines[-1] if lines else " ".join(str(job.get("message") or "").split())[:500]
        return f"Ray job {name}: {job.get('status')}" + (f": {last}" if last else "")

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing: bool = False
    ) -> dict[str, Any] | None:
        """The answer; None: `missing` and there is no such job."""
        answer = self._send(method, path, body)
        if missing and answer.status == _NOT_FOUND:
            return None
        where = f"Ray at {self.address}"
        text = " ".join(answer.text.split())[:300]
        if answer.status in (401, 403):
            raise PoolUnavailable(f"{where} refuses the token ({answer.status}): set or correct auth_token_file")
        if answer.status >= 500 or 300 <= answer.status < 400:
            if "already exists" in answer.text:
                return {}
            raise PoolUnavailable(f"{where} answered {answer.status}: {text}")
        if answer.status >= 400:
            if "already exists" in answer.text:
                return {}
            raise PoolRefusal(f"{where} answered {answer.status}: {text}")
        try:
            found = json.loads(answer.text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PoolUnavailable(f"{where} answered what is not of Ray's Jobs API: address must be its dashboard's")
        return found


def is_active(job: Mapping[str, Any]) -> bool:
    """Whether a job has not ended."""
    return job.get("status") in _ACTIVE
