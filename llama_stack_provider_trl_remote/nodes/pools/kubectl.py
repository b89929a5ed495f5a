"""Jobs and pods of a namespace through the `kubectl` of the service's machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import commands
from .base import PoolRefusal, PoolUnavailable
from .commands import Ran, Run

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
_LONGEST = 500


def run_kubectl(argv: Sequence[str], text: str) -> Ran:
    """See `Run`."""
    return commands.run_command(argv, text, "install it on the service's machine", _VARIABLES, _PREFIXES)


class Kubectl:
    """A `ClusterApi`.

    Args:
        kubeconfig, context: of kubectl; None: its own choice.
    """

    def __init__(
        self, namespace: str, kubeconfig: Path | None = None, context: str | None = None, run: Run = run_kubectl
    ) -> None:
        self._run = run
        self._kubectl = ["kubectl", f"--namespace={namespace}", f"--request-timeout={_REQUEST_TIMEOUT}"]
        self._kubectl += [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
        self._kubectl += [f"--context={context}"] if context else []

    def create_job(self, manifest: Mapping[str, Any]) -> None:
        ran = self._run([*self._kubectl, "create", "--filename=-", "--output=name"], json.dumps(manifest))
        if ran.status and _EXISTS not in ran.errors:
            reason = _reason(ran)
            raise (PoolRefusal if _REFUSED.search(ran.errors) else PoolUnavailable)(f"kubectl create: {reason}")

    def delete_job(self, name: str) -> None:
        self._call("delete", "jobs", name, "--cascade=foreground", "--wait=false", "--ignore-not-found")

    def jobs_and_pods(self, selector: str) -> list[dict[str, Any]]:
        return self._get("jobs,pods", f"--selector={selector}")

    def events(self, selector: str) -> list[dict[str, Any]]:
        return self._get("events", f"--field-selector={selector}")

    def _get(self, kinds: str, option: str) -> list[dict[str, Any]]:
        output = self._call("get", kinds, "--output=json", option)
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
