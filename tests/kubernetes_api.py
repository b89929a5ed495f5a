"""A namespace of a Kubernetes cluster, as `kubectl` sees it: Jobs, their pods and events; in memory, and over HTTP.

It is no API server: it refuses a Job by the schema of its release, by the name, or by a quota, and makes the pods that
the Job's controller would make. What becomes of them is the test's part.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

RELEASES = ("1.29", "1.33", kubernetes_validate.latest_version())
"""Releases whose schemas every manifest fits. The first one knows every field that we set."""

JOBS = "/apis/batch/v1/namespaces/training/jobs"
CORE = "/api/v1/namespaces/training"
_KINDS = {"jobs": "Job", "pods": "Pod", "events": "Event"}
_VERSIONS = {"jobs": "batch/v1", "pods": "v1", "events": "v1"}
_PATCH = {
    "x-kubernetes-group-version-kind": {"group": "batch", "version": "v1", "kind": "Job"},
    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
    "responses": {},
}
_SPEC = {
    **{"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "1"}, "components": {"schemas": {}}},
    "paths": {f"{JOBS.replace('training', '{namespace}')}/{{name}}": {"patch": _PATCH}},
}


def validate(manifest: Mapping[str, Any]) -> None:
    """Raises the error of kubernetes-validate: unknown fields are errors, too."""
    for release in RELEASES:
        kubernetes_validate.validate(dict(manifest), release, strict=True)


class Namespace:
    """The namespace `training`."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.token = ""
        """Of its one user; empty: calls need none."""
        self.refusal = ""
        """Why the next Jobs are forbidden."""
        self.called: list[tuple[str, str]] = []
        self.lock = threading.RLock()

    def call(self, method: str, path: str, query: Mapping[str, str], body: Any) -> tuple[int, dict[str, Any]]:
        """Status and answer of a call of the API."""
        with self.lock:
            return self._call(method, path, query, body)

    def _call(self, method: str, path: str, query: Mapping[str, str], body: Any) -> tuple[int, dict[str, Any]]:
        self.called.append((method, path))
        if method == "POST" and path == JOBS:
            return self._create(body)
        if method == "DELETE" and path.startswith(f"{JOBS}/"):
            return self._delete(path.rpartition("/")[2], body)
        what = path.rpartition("/")[2]
        if method == "GET" and path in (JOBS, f"{CORE}/pods", f"{CORE}/events"):
            found: list[dict[str, Any]] = [*getattr(self, what).values()] if what != "events" else self.events
            kept = [one for one in found if _selected(one, query)]
            return 200, {"kind": f"{_KINDS[what]}List", "apiVersion": _VERSIONS[what], "metadata": {}, "items": kept}
        return _discovery(path) or _status(404, "NotFound", "the server could not find the requested resource", "")

    def _create(self, found: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = found["metadata"]["name"]
        validate(found)
        if name in self.jobs:
            return _status(409, "AlreadyExists", f'jobs.batch "{name}" already exists', name)
        if self.refusal:
            return _status(403, "Forbidden", f'jobs.batch "{name}" is forbidden: {self.refusal}', name)
        self.jobs[name] = {**copy.deepcopy(found), "status": {}}
        return 201, self.jobs[name]

    def _delete(self, name: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if name not in self.jobs:
            return _status(404, "NotFound", f'jobs.batch "{name}" not found', name)
        assert body["propagationPolicy"] == "Foreground"
        self.jobs[name]["metadata"]["deletionTimestamp"] = "2026-11-24T09:41:07Z"
        if not self.pods:
            del self.jobs[name]
        return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    # What a cluster does

    def make_pods(self, *phases: str, machine: str | None = None) -> list[dict[str, Any]]:
        """The pods of the one Job, in these phases."""
        ((name, job),) = self.jobs.items()
        template = copy.deepcopy(job["spec"]["template"])
        for number, phase in enumerate(phases):
            pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template), "status": {"phase": phase}}
            pod["metadata"] |= {"name": f"{name}-{number}-x2v4f"}
            pod["spec"] |= {"nodeName": machine} if machine else {}
            self.pods[pod["metadata"]["name"]] = pod
        return list(self.pods.values())

    def end_pods(self) -> None:
        """Every pod has ended; a Job that was to be deleted is gone."""
        self.pods.clear()
        self.jobs = {name: one for name, one in self.jobs.items() if "deletionTimestamp" not in one["metadata"]}

    def warn(self, name: str, reason: str, message: str, when: str = "2026-11-24T09:41:07Z") -> None:
        """An event about an object."""
        found = {"involvedObject": {"name": name}, "type": "Warning", "reason": reason, "message": message}
        known = {"metadata": {"name": f"{name}.{len(self.events)}"}, "lastTimestamp": when}
        self.events.append({"apiVersion": "v1", "kind": "Event", **known, **found})

    def end_job(self, kind: str, message: str) -> None:
        """The one Job is complete or has failed."""
        (job,) = self.jobs.values()
        job["status"]["conditions"] = [{"type": kind, "status": "True", "message": message}]


def server(namespace: Namespace, address: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Serves a namespace on a free port of an address, once `serve_forever` is called. Where it has a token, calls
    without it are unauthorized. As in a real one, items of a list have no kind and version of their own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if namespace.token and self.headers.get("Authorization") != f"Bearer {namespace.token}":
                code, found = _status(401, "Unauthorized", "Unauthorized", "")
            else:
                code, found = namespace.call(self.command, parts.path, query, json.loads(text) if text else {})
            if code == 200 and "items" in found:
                items = [{key: one[key] for key in one if key not in ("kind", "apiVersion")} for one in found["items"]]
                found = {**found, "items": items}
            content = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer((address, 0), Handler)


def _selected(found: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    fields = {"involvedObject.name": found.get("involvedObject", {}).get("name"), "type": found.get("type")}
    wanted = [(labels, query.get("labelSelector", "")), (fields, query.get("fieldSelector", ""))]
    pairs = [(have, one.partition("=")) for have, text in wanted for one in text.split(",") if one]
    return all(have.get(name) == value for have, (name, _, value) in pairs)


def _status(code: int, reason: str, message: str, name: str) -> tuple[int, dict[str, Any]]:
    details = {"details": {"name": name, "group": "batch", "kind": "jobs"}}
    return code, {
        **{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code},
        **{"reason": reason, "message": message, **details},
    }


def _discovery(path: str) -> tuple[int, dict[str, Any]] | None:
    """What kubectl reads first: the groups, kinds and parameters that the server knows."""
    group = {"groupVersion": "batch/v1", "version": "v1"}
    answers: dict[str, dict[str, Any]] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            **{"kind": "APIGroupList", "apiVersion": "v1"},
            "groups": [{"name": "batch", "versions": [group], "preferredVersion": group}],
        },
        "/api/v1": _resources("v1", "pods", "events"),
        "/apis/batch/v1": _resources("batch/v1", "jobs"),
        "/openapi/v3": {"paths": {"apis/batch/v1": {"serverRelativeURL": "/openapi/v3/apis/batch/v1?hash=1"}}},
        "/openapi/v3/apis/batch/v1": _SPEC,
    }
    return (200, answers[path]) if path in answers else None


def _resources(version: str, *names: str) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list"]
    found = [
        {"name": name, "singularName": "", "namespaced": True, "kind": _KINDS[name], "verbs": verbs} for name in names
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}
