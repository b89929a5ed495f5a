"""Machines of a Kubernetes cluster: `kubectl` creates a Job for an order, observes its pods, and deletes it.

A Job is named by the id of its order, so the same order is one Job however often it is requested. Agents call the
service, and jobs reach each other at the addresses of pods: no Service is needed. See `pods` for the Job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import commands
from .base import Given, PoolOrder, PoolRefusal, PoolUnavailable, Seen
from .commands import Ran, Run
from .pods import REQUEST, PodShape, job

_REQUEST_TIMEOUT = "20s"
_REFUSED = re.compile(r"Error from server \((Forbidden|Invalid|NotFound|BadRequest)\)|unknown field")
"""Errors that the same request would have again. Any other is taken for a cluster that does not answer."""
_NO_REASON = re.compile(
    r'^error: |error (when creating|validating) "STDIN": |error validating data: |; if you choose to ignore .*$'
)
_EXISTS = "(AlreadyExists)"
_KLOG = re.compile(r"^[EWIF]\d{4} \d\d:")
_VARIABLES = ("KUBECONFIG", *(name for one in ("http_proxy", "https_proxy", "no_proxy") for name in (one, one.upper())))
_PREFIXES = ("KUBERNETES_", "AWS_", "AZURE_", "CLOUDSDK_", "GOOGLE_")
"""Of variables that kubectl's login programs read."""
_ENDED = frozenset({"Complete", "Failed", "FailureTarget", "SuccessCriteriaMet"})
_LONGEST = 500

Object = Mapping[str, Any]


def run_kubectl(argv: Sequence[str], text: str) -> Ran:
    """See `Run`."""
    return commands.run_command(argv, text, "install it on the service's machine", _VARIABLES, _PREFIXES)


class KubernetesPool:
    """A namespace of a Kubernetes cluster, through the `kubectl` of the service's machine.

    Args:
        labels: of the nodes, in the service.
        kubeconfig, context: of kubectl; None: its own choice.
    """

    def __init__(
        self,
        shape: PodShape,
        service_url: str,
        labels: Mapping[str, str],
        namespace: str,
        kubeconfig: Path | None = None,
        context: str | None = None,
        run: Run = run_kubectl,
    ) -> None:
        self._shape, self._service_url, self._labels, self._run = shape, service_url, labels, run
        self._kubectl = ["kubectl", f"--namespace={namespace}", f"--request-timeout={_REQUEST_TIMEOUT}"]
        self._kubectl += [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
        self._kubectl += [f"--context={context}"] if context else []

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        return f"trl-{request_id}"

    def request(self, order: PoolOrder) -> None:
        manifest = json.dumps(job(order, self._shape, self._service_url, self._labels))
        ran = self._run([*self._kubectl, "create", "--filename=-", "--output=name"], manifest)
        if ran.status and _EXISTS not in ran.errors:
            reason = _reason(ran)
            raise (PoolRefusal if _REFUSED.search(ran.errors) else PoolUnavailable)(f"kubectl create: {reason}")

    def observe(self, order: PoolOrder) -> Seen:
        listed = self._get("jobs,pods", f"--selector={REQUEST}={order.request_id}")
        pods = sorted((one for one in listed if one["kind"] == "Pod"), key=_name)
        jobs = [one for one in listed if one["kind"] == "Job"]
        return self._seen(order, jobs[0], pods) if jobs else _without_job(order, pods)

    def release(self, order: PoolOrder) -> None:
        # The Job stays until its pods have ended, which get SIGTERM.
        self._call("delete", "jobs", order.handle, "--cascade=foreground", "--wait=false", "--ignore-not-found")

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
        return Seen(Given.pending, f"{name} waits: {self._why_pending(order, pods)}"[:_LONGEST])

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
            events = self._get("events", f"--field-selector=involvedObject.name={name},type=Warning")
        except PoolUnavailable:  # events are a role of their own
            return ""
        found = max(events, key=_when, default=None)
        return "" if found is None else f"{found.get('reason')}: {_line(found.get('message'))}"

    def _get(self, kinds: str, *options: str) -> list[dict[str, Any]]:
        output = self._call("get", kinds, "--output=json", *options)
        try:
            return list(json.loads(output)["items"])
        except (ValueError, KeyError, TypeError) as error:
            raise PoolUnavailable(f"kubectl get {kinds} has written what is no list of objects") from error

    def _call(self, *words: str) -> str:
        ran = self._run([*self._kubectl, *words], "")
        if ran.status:
            raise PoolUnavailable(f"kubectl {words[0]}: {_reason(ran)}")
        return ran.output


def _reason(ran: Ran) -> str:
    """The error of a kubectl, without the lines of its log."""
    lines = [line.strip() for line in ran.errors.splitlines() if line.strip() and not line.startswith("Warning: ")]
    own = [_NO_REASON.sub("", line) for line in lines if not _KLOG.match(line)]
    return "; ".join(dict.fromkeys(own or lines[-1:]))[:_LONGEST] or f"exit status {ran.status}"


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
