"""The pod of Kubernetes that this process runs in, if it does. Imports no client of its API."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has the token of its service account, the cluster's certificate, and the name of its namespace."""


def is_in_cluster(environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> bool:
    """Whether this process is in a pod with a service account, and no kubeconfig is chosen, as kubectl decides it."""
    named = "KUBERNETES_SERVICE_HOST" in environ and "KUBECONFIG" not in environ
    return named and (account / "token").exists()


def own_namespace(account: Path = ACCOUNT) -> str | None:
    """The namespace of this process's pod; None: it is in none."""
    try:
        return (account / "namespace").read_text().strip() or None
    except OSError:
        return None


def account_directories(account: Path = ACCOUNT) -> list[Path]:
    """Where this process's pod has a token, which trainings are not to read; none: it has none."""
    return [account] if (account / "token").exists() else []


def server_of(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the API of the cluster that this process runs in."""
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
