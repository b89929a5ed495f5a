"""Machines of a Kubernetes cluster: a Job for each order is created, its pods are observed, and it is deleted.

A Job is named by the id of its order, so the same order is one Job however often it is requested. Agents call the
service, and jobs reach each other at the addresses of pods: no Service is needed. See `pods` for the Job, `kubectl` and
`cluster_api` for the ways to the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .base import Given, PoolOrder, PoolUnavailable, Seen
from .pods import REQUEST, PodShape, job

_ENDED = frozenset({"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet"})
_LONGEST = 500

Object = Mapping[str, Any]


class ClusterApi(Protocol):
    """A namespace of a Kubernetes cluster. Raises PoolUnavailable: it does not answer, or not with what was requested;
    repeated later."""

    def create_job(self, manifest: Object) -> None:
        """Create a Job; one of its name that exists stays as it is. Raises PoolRefusal: it would be refused again."""

    def delete_job(self, name: str) -> None:
        """Delete a Job, which stays until its pods have ended. Nothing happens where there is none."""

    def jobs_and_pods(self, selector: str) -> list[dict[str, Any]]:
        """Jobs and pods whose labels a selector has."""

    def events(self, selector: str) -> list[dict[str, Any]]:
        """Events whose fields a selector has."""


class KubernetesPool:
    """A namespace of a Kubernetes cluster."""

    def __init__(self, shape: PodShape, service_url: str, labels: Mapping[str, str], api: ClusterApi) -> None:
        self._shape, self._service_url, self._labels, self._api = shape, service_url, labels, api

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        return f"trl-{request_id}"

    def request(self, order: PoolOrder) -> None:
        self._api.create_job(job(order, self._shape, self._service_url, self._labels))

    def observe(self, order: PoolOrder) -> Seen:
        listed = self._api.jobs_and_pods(f"{REQUEST}={order.request_id}")
        pods = sorted((one for one in listed if one["kind"] == "Pod"), key=_name)
        jobs = [one for one in listed if one["kind"] == "Job"]
        return self._seen(order, jobs[0], pods) if jobs else _without_job(order, pods)

    def release(self, order: PoolOrder) -> None:
        self._api.delete_job(order.handle)  # its pods get SIGTERM

    def _seen(self, order: PoolOrder, found: Object, pods: Sequence[Object]) -> Seen:
        name = f"Kubernetes Job {order.handle}"
        if found["metadata"].get("deletionTimestamp"):
            return Seen(Given.pending, f"{name} ends{_where(pods)}")
        conditions = found.get("status", {}).get("conditions") or ()
        ended = [one for one in conditions if one["type"] in _ENDED and one["status"] == "True"]
        if ended:
            why = next(filter(None, map(_failure, pods)), "") or str(ended[0].get("message") or ended[0]["type"])
            active = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
            if active:
                return Seen(Given.pending, f"{name} ends{_where(active)}: {why}"[:_LONGEST])
            return Seen(Given.nothing, f"{name}: {why}"[:_LONGEST])
        phases = [_phase(pod) for pod in pods]
        running, left = phases.count("Running"), phases.count("Succeeded")
        if running and running + left >= len(order.names):
            return Seen(Given.all, name)
        given = Given.some if running else Given.pending
        return Seen(given, f"{name} waits: {self._why_pending(order, pods)}"[:_LONGEST])

    def _why_pending(self, order: PoolOrder, pods: Sequence[Object]) -> str:
        """Why a Job does not have every pod, or pods do not run."""
        wanted = len(order.names)
        if len(pods) < wanted:
            event = self._last_warning(order.handle)
            return event or f"it has {len(pods)} of {wanted} pods"
        waiting = [pod for pod in pods if _phase(pod) not in ("Running", "Succeeded")]
        for pod in waiting:
            if why := _why_waiting(pod):
                return why
        for pod in waiting[:1]:
            if event := self._last_warning(_name(pod)):
                return event
        return f"{len(waiting)} of {wanted} pods start"

    def _last_warning(self, name: str) -> str:
        """The last warning of Kubernetes' events about an object; empty: there is none, or it cannot be read."""
        try:
            events = self._api.events(f"involvedObject.name={name},type=Warning")
        except PoolUnavailable:  # events are a role of their own
            return ""
        found = max(events, key=_when, default=None)
        return "" if found is None else f"{found.get('reason')}: {_line(found.get('message'))}"


def _without_job(order: PoolOrder, pods: Sequence[Object]) -> Seen:
    if pods:
        return Seen(Given.pending, f"Kubernetes Job {order.handle} is gone, and ends{_where(pods)}")
    return Seen(Given.nothing)


def _where(pods: Sequence[Object]) -> str:
    """Such as ` trl-abc-0-x2v4f (gpu-7)`: a machine that is lost keeps its pods until Kubernetes removes it."""
    return "".join(f" {_name(pod)} ({pod.get('spec', {}).get('nodeName') or 'on no machine'})" for pod in pods[:3])


def _why_waiting(pod: Object) -> str:
    """Why a pod does not run, from its own status."""
    status = pod.get("status", {})
    for one in status.get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return f"{one.get('reason')}: {_line(one.get('message'))}"
    for one in status.get("containerStatuses") or ():
        waiting = one.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {_line(waiting.get('message'))}"
    return ""


def _failure(pod: Object) -> str:
    """Why a pod has failed; empty: it has not."""
    if _phase(pod) != "Failed":
        return ""
    status = pod.get("status", {})
    for one in status.get("containerStatuses") or ():
        if ended := one.get("state", {}).get("terminated"):
            lines = str(ended.get("message") or "").strip().splitlines()
            last = f": {lines[-1].strip()}" if lines else ""
            return f"{_name(pod)}: {ended.get('reason') or 'Error'} (exit status {ended.get('exitCode')}){last}"
    return f"{_name(pod)}: {status.get('reason') or 'Failed'}: {_line(status.get('message'))}"


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase"))


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _line(text: object) -> str:
    return " ".join(str(text or "no reason is given").split())
