"""The Kubernetes Job of an order: a pod with an agent for each of its machines.

No object contains a token: pods mount a Secret that exists.
https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system.data_dir import NodeDir

from .base import PoolOrder

REQUEST = "trl-remote/request"
"""Label with the id of the order."""
TOKENS = "/run/secrets/trl"
TOKEN_KEY = "node-token"
WORK = "/work"
_KEPT_SECONDS = 600
"""Seconds after which Kubernetes removes a Job that has ended by itself."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_MIB = 1 << 20

SCRIPT = """agent= caught=
leave() {
    caught=1
    [ -n "$agent" ] || return
    trap '' TERM USR1  # repeated signals would interrupt this, and the wait, again and again
    kill -USR1 "$agent"
    sleep 1
    kill -USR1 "$agent"  # a child of the shell that was not yet the agent has lost the first one
} 2>/dev/null
trap leave TERM USR1
"$@" &
agent=$!
[ -z "$caught" ] || leave
wait "$agent"
status=$?
if [ -n "$caught" ]; then
    wait "$agent"  # a signal has ended the first wait, not the agent
    ended=$?
    [ "$ended" = 127 ] || status=$ended  # 127: the shell has reported its status before
fi
[ "$status" != 138 ] || status=0  # it was to leave before it had begun
exit "$status"
"""
"""Process 1 of a pod. It reaps what the agent's trainings orphan. Kubernetes sends SIGTERM before it takes the machine
away: the agent leaves, its jobs save and continue on other nodes. The end of this process ends all processes there."""


@dataclass(frozen=True)
class PodShape:
    """What the pods of a pool have in common."""

    image: str
    secret: str
    """Secret whose key `node-token` is a token of the role node."""
    cpus: int
    memory_bytes: int
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    runtime_class: str | None = None
    image_pull_secrets: Sequence[str] = ()
    claims: Mapping[str, str] = field(default_factory=dict)
    """PersistentVolumeClaim -> directory at which pods have it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the Job and its pods, besides our own."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    priority_class: str | None = None
    affinity: Mapping[str, Any] = field(default_factory=dict)
    """As a pod's specification has it."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Resource -> amount, besides cores, memory and GPUs."""
    capabilities: Sequence[str] = ()
    """Capabilities of Linux that the container keeps."""
    user: int = 1000
    grace_seconds: int = 120
    """Seconds between SIGTERM and SIGKILL."""


def job(order: PoolOrder, shape: PodShape, service_url: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The Job of an order, named by its handle.

    A pod that fails is not replaced, and Kubernetes ends the others: they leave, and the service requests machines
    again. One that was evicted, and has left, is not a failure.
    """
    marks = {
        **shape.labels,
        **{"app.kubernetes.io/name": "trl-node", "app.kubernetes.io/managed-by": "trl-remote"},
        REQUEST: order.request_id,
    }
    annotations = {"annotations": dict(shape.annotations)} if shape.annotations else {}
    count = len(order.names)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": order.handle, "labels": marks, **annotations},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "template": {
                "metadata": {"labels": marks, **annotations},
                "spec": _pod(shape, _container(order, shape, service_url, labels)),
            },
        },
    }


def _container(order: PoolOrder, shape: PodShape, service_url: str, labels: Mapping[str, str]) -> dict[str, Any]:
    prefix = order.names[0].rpartition("-")[0]
    agent = ["trl-remote", "agent", "--service", service_url, "--token-file", f"{TOKENS}/{TOKEN_KEY}"]
    agent += ["--data-dir", f"{WORK}/agent"]
    agent += [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    # A volume that everyone may write to, in a container without other users.
    variables = {"HOME": WORK, "USER": "trl", "TRL_NODE_CHECK_PATH": "off", **shape.environment}
    resources = {
        "cpu": str(shape.cpus),
        "memory": f"{max(1, shape.memory_bytes // _MIB)}Mi",
        **({shape.gpu_resource: str(shape.gpus)} if shape.gpus else {}),
        **shape.resources,
    }
    added = {"add": list(shape.capabilities)} if shape.capabilities else {}
    return {
        "name": "agent",
        "image": shape.image,
        "command": ["/bin/sh", "-c", SCRIPT, "trl-node"],
        "args": [_literal(word) for word in agent],
        "env": [
            {"name": "TRL_NODE_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "TRL_NODE_NAME", "value": f"{prefix}-$(TRL_NODE_INDEX)"},
            {"name": "TRL_NODE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # Images may have an /etc/machine-id, which would make one machine of all pods.
            {"name": "TRL_NODE_MACHINE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            {"name": "TRL_NODE_HOST_ID", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            *({"name": name, "value": _literal(value)} for name, value in variables.items()),
        ],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "readinessProbe": {
            "exec": {"command": ["test", "-f", str(NodeDir(Path(WORK, "agent")).credential)]},
            "periodSeconds": 5,
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}},
        # The last lines of an agent that fails are then part of the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tokens", "mountPath": TOKENS, "readOnly": True},
            {"name": "work", "mountPath": WORK},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *(
                {"name": f"claim-{number}", "mountPath": directory}
                for number, directory in enumerate(shape.claims.values())
            ),
        ],
    }


def _pod(shape: PodShape, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # A Service named `trl` would set TRL_SERVICE_HOST and TRL_SERVICE_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": shape.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": shape.user,
            "runAsGroup": shape.user,
            "fsGroup": shape.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"nodeSelector": dict(shape.node_selector)} if shape.node_selector else {}),
        **({"tolerations": [dict(one) for one in shape.tolerations]} if shape.tolerations else {}),
        **({"affinity": dict(shape.affinity)} if shape.affinity else {}),
        **({"priorityClassName": shape.priority_class} if shape.priority_class else {}),
        **({"runtimeClassName": shape.runtime_class} if shape.runtime_class else {}),
        **(
            {"imagePullSecrets": [{"name": name} for name in shape.image_pull_secrets]}
            if shape.image_pull_secrets
            else {}
        ),
        "containers": [container],
        "volumes": [
            {"name": "tokens", "secret": {"secretName": shape.secret, "defaultMode": 0o440}},
            {"name": "work", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, claim in enumerate(shape.claims)
            ),
        ],
    }


def _literal(text: str) -> str:
    """Text that Kubernetes does not expand: it replaces `$(NAME)` in arguments and variables."""
    return text.replace("$(", "$$(")
