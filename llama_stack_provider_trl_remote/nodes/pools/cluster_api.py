"""Jobs and pods of a namespace through the API of the cluster that the service itself runs in: plain HTTP with the
token of its pod's service account. No kubectl is needed.

https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
"""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from .base import PoolRefusal, PoolUnavailable
from .own_pod import ACCOUNT
from .plain_http import RefusedRedirects, why_unreachable

_TIMEOUT = 20.0
_MOST_BYTES = 64 << 20
_LONGEST = 500
_REFUSED = frozenset({400, 403, 404, 413, 422})
"""Answers that the same Job would have again: it is invalid, or a quota, a role or the namespace does not allow it."""


class InClusterApi:
    """A `ClusterApi`.

    Args:
        account: directory with `token`, which Kubernetes renews, so that it is read for each call, and `ca.crt`.
    """

    def __init__(self, namespace: str, server: str, account: Path = ACCOUNT) -> None:
        self._server, self._account = server, account
        self._jobs = f"/apis/batch/v1/namespaces/{quote(namespace, safe='')}/jobs"
        self._core = f"/api/v1/namespaces/{quote(namespace, safe='')}"

    def create_job(self, manifest: Mapping[str, Any]) -> None:
        # Strict: an unknown field is an answer, where the server would leave it out by default.
        status, answer = self._send("POST", f"{self._jobs}?fieldValidation=Strict", manifest)
        if status == 409 and answer.get("reason") == "AlreadyExists":
            return
        if status >= 300:
            error = PoolRefusal if status in _REFUSED else PoolUnavailable
            raise error(f"Kubernetes: {_reason(status, answer)}")

    def delete_job(self, name: str) -> None:
        status, answer = self._send(
            "DELETE", f"{self._jobs}/{quote(name, safe='')}", {"propagationPolicy": "Foreground"}
        )
        if status >= 300 and not (status == 404 and answer.get("reason") == "NotFound"):
            raise PoolUnavailable(f"Kubernetes: {_reason(status, answer)}")

    def jobs_and_pods(self, selector: str) -> list[dict[str, Any]]:
        # Items of a list have no kind of their own.
        jobs = [{**one, "kind": "Job"} for one in self._list(self._jobs, labelSelector=selector)]
        pods = [{**one, "kind": "Pod"} for one in self._list(f"{self._core}/pods", labelSelector=selector)]
        return jobs + pods

    def events(self, selector: str) -> list[dict[str, Any]]:
        return self._list(f"{self._core}/events", fieldSelector=selector)

    def _list(self, path: str, **query: str) -> list[dict[str, Any]]:
        status, answer = self._send("GET", f"{path}?{urlencode(query)}", None)
        if status >= 300:
            raise PoolUnavailable(f"Kubernetes: {_reason(status, answer)}")
        items = answer.get("items")
        if not isinstance(items, list):
            raise PoolUnavailable(f"Kubernetes at {self._server} has answered what is no list of objects")
        return items

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Status and object of an answer."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        handler, headers["Authorization"] = self._credentials()
        # No proxy: the address is one of the cluster's own network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), handler, RefusedRedirects())
        try:
            request = urllib.request.Request(f"{self._server}{path}", data, headers, method=method)
            with opener.open(request, timeout=_TIMEOUT) as answer:
                status, text = answer.status, answer.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PoolUnavailable(
                f"Kubernetes at {self._server} cannot be reached ({why_unreachable(error)})"
            ) from error
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PoolUnavailable(
                f"Kubernetes at {self._server} has answered {status} with what is no object of its API"
            )
        return status, found

    def _credentials(self) -> tuple[urllib.request.HTTPSHandler, str]:
        """What trusts the cluster's own authority alone, and the header with the token."""
        try:
            token = (self._account / "token").read_text().strip()
            trusted = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except OSError as error:
            raise PoolUnavailable(
                f"the service account in {self._account} cannot be read ({error}): mount its token and ca.crt there, "
                "as deploy/kubernetes/service.yaml does"
            ) from error
        return urllib.request.HTTPSHandler(context=trusted), f"Bearer {token}"


def _reason(status: int, answer: Mapping[str, Any]) -> str:
    """The sentence of a Status of Kubernetes, with its reason."""
    message = " ".join(str(answer.get("message") or "no reason is given").split())
    return f"{answer.get('reason') or status}: {message}"[:_LONGEST]
