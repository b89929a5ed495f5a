"""Machines of a Ray cluster, through its Jobs REST API. Nothing here imports ray.

An order is a Ray job, whose submission id has the id of the order: the same order is one job however often it is
requested. See `ray_bundles` for what it runs.
https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

from __future__ import annotations

import http.client
import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import IO, Any, NamedTuple

from .base import AgentStart, Given, PoolOrder, PoolRefusal, PoolUnavailable, Seen
from .ray_bundles import STARTED

_TIMEOUT = 30.0
_MODULE = "llama_stack_provider_trl_remote.nodes.pools.ray_bundles"
_MOST_BYTES = 4 << 20
_NOT_FOUND = 404
_LAST = 20


class RayAnswer(NamedTuple):
    """An answer of Ray's dashboard."""

    status: int
    text: str


Send = Callable[[str, str, Mapping[str, Any] | None], RayAnswer]
"""Sends a method to a path, with a body. Raises PoolUnavailable: there is no answer."""


class RayPool:
    """A Ray cluster.

    Args:
        address: of its dashboard.
        python: an interpreter on its nodes that has ray and this package.
        bundle: resources of each machine, such as {"CPU": 8, "GPU": 8}.
    """

    def __init__(self, address: str, agent: AgentStart, python: str, bundle: Mapping[str, float], send: Send) -> None:
        self._address, self._agent, self._python, self._bundle = address, agent, python, bundle
        self._send = send

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        return f"trl-{request_id}"

    def request(self, order: PoolOrder) -> None:
        if self._job(order) is not None:
            return
        agent = self._agent
        order_text = json.dumps(
            {
                "names": list(order.names),
                "bundle": dict(self._bundle),
                "service_url": agent.service_url,
                "token_file": agent.token_file,
                "data_dir": agent.data_dir,
                "labels": dict(agent.labels),
            }
        )
        entrypoint = f"{shlex.quote(self._python)} -m {_MODULE} {shlex.quote(order_text)}"
        body = {"entrypoint": entrypoint, "submission_id": order.handle, "metadata": {"request": order.request_id}}
        self._call("POST", "/api/jobs/", body)

    def observe(self, order: PoolOrder) -> Seen:
        job = self._job(order)
        if job is None:
            return Seen(Given.nothing)
        status = str(job.get("status"))
        lines = self._lines(order)
        if status == "PENDING":
            return Seen(Given.pending, f"Ray job {order.handle} is PENDING: {job.get('message') or 'it has not begun'}")
        if status == "RUNNING":
            if STARTED in lines:
                return Seen(Given.all, f"Ray job {order.handle}")
            return Seen(Given.pending, lines[-1] if lines else f"Ray job {order.handle} starts")
        last = lines[-1] if lines else " ".join(str(job.get("message") or "").split())[:500]
        return Seen(Given.nothing, f"Ray job {order.handle}: {status}" + (f": {last}" if last else ""))

    def release(self, order: PoolOrder) -> None:
        job = self._job(order)
        if job is not None and job.get("status") in ("PENDING", "RUNNING"):
            self._call("POST", f"/api/jobs/{order.handle}/stop")

    def _job(self, order: PoolOrder) -> dict[str, Any] | None:
        return self._call("GET", f"/api/jobs/{order.handle}", missing=True)

    def _lines(self, order: PoolOrder) -> list[str]:
        """The lines of our own in the job's output; none where Ray cannot read it: the node that has it may be gone."""
        try:
            text = str((self._call("GET", f"/api/jobs/{order.handle}/logs", missing=True) or {}).get("logs") or "")
        except (PoolUnavailable, PoolRefusal):
            return []
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        own = [line.removeprefix("trl: ") for line in lines if line.startswith("trl: ")]
        return own or lines[-1:][:_LAST]

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, missing: bool = False
    ) -> dict[str, Any] | None:
        """The answer; None: `missing` and there is no such job."""
        answer = self._send(method, path, body)
        if missing and answer.status == _NOT_FOUND:
            return None
        where = f"Ray at {self._address}"
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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def sender(address: str, token_file: Path | None) -> Send:
    """Sends to the dashboard at an address; see `Send`.

    Args:
        token_file: with the token of the cluster (RAY_AUTH_MODE=token); read for each call.
    """
    opener = urllib.request.build_opener(_NoRedirects())

    def send(method: str, path: str, body: Mapping[str, Any] | None) -> RayAnswer:
        headers = {"Content-Type": "application/json"}
        if token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
            except OSError as error:
                raise PoolUnavailable(f"auth_token_file {token_file} cannot be read: {error.strerror}") from error
        data = None if body is None and method == "GET" else json.dumps(body or {}).encode()
        try:
            request = urllib.request.Request(f"{address}{path}", data, headers, method=method)
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return RayAnswer(answer.status, answer.read(_MOST_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return RayAnswer(error.code, error.read(_MOST_BYTES).decode(errors="replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise PoolUnavailable(f"Ray at {address} cannot be reached ({text})") from error

    return send
