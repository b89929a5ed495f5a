"""The pools of a service: how many machines may be requested of each, and how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator

from llama_stack_provider_trl.documented import Documented
from llama_stack_provider_trl.jobs.decisions.placement import Node, kind_of
from llama_stack_provider_trl.specs.exact import AbsolutePath, ExactValues, numbers_as_text

_GIB = 1 << 30
_OURS = ("--job-name", "--nodes", "--ntasks-per-node", "--ntasks", "--requeue", "--signal", "--array", "--wrap")
"""Options of sbatch that a pool sets."""
_DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")
_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""Name of an object of Kubernetes."""
_QUALIFIED = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_QualifiedName = Annotated[str, StringConstraints(pattern=f"^{_QUALIFIED}$")]
"""Key of a label or annotation: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/"""
_LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
_OUR_LABELS = frozenset({"app.kubernetes.io/name", "app.kubernetes.io/managed-by", "job-name", "controller-uid"})
_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_ANNOTATION_BYTES = 256 << 10
_RESOURCE = rf"ephemeral-storage|hugepages-[0-9]+[KMG]i|(?=[^/]+/){_QUALIFIED}"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?"
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""


class _PoolBlock(Documented, ExactValues):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)


class NodeShape(_PoolBlock):
    """What each node of a pool has. Jobs that require more do not wait for it."""

    cpus: int = Field(1, gt=0)
    """Cores."""
    memory_gb: float = Field(1.0, gt=0)
    """GiB of memory."""
    gpus: int = Field(0, ge=0, le=64)
    """GPUs; 0: jobs train on its CPU."""
    gpu_memory_gb: float | None = Field(None, gt=0)
    """GiB of each GPU."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that its agents have."""

    def node(self) -> Node:
        devices = tuple(f"cuda:{number}" for number in range(self.gpus)) or ("cpu",)
        memory = dict.fromkeys(devices, int(self.gpu_memory_gb * _GIB)) if self.gpu_memory_gb else None
        return Node(
            "", devices, memory=memory, cpus=self.cpus, memory_bytes=int(self.memory_gb * _GIB), labels=self.labels
        )

    def words(self) -> str:
        """Such as `8 GPUs`."""
        count, what = (self.gpus, "GPU") if self.gpus else (self.cpus, "core")
        return f"{count} {what}{'s' if count > 1 else ''}"


class _PoolSettings(_PoolBlock):
    """What every pool has."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    """Its nodes join as NAME-ID-NUMBER."""
    kind: str
    """slurm, ray, kubernetes or ssh."""
    max_nodes: int = Field(ge=0, le=10_000)
    """Nodes at a time; 0: none."""
    node_hours: float | None = Field(None, gt=0)
    """Hours of its nodes in 30 days; once they are used up its jobs are saved and its nodes given back. null: any."""
    idle_seconds: float = Field(300.0, ge=1)
    """Seconds after which nodes that no job needs are given back."""
    join_seconds: float = Field(600.0, ge=10)
    """Seconds from their start within which agents join, else their nodes are given back."""
    node: NodeShape = NodeShape()
    """What each of its nodes has."""
    service_url: str
    """Address at which its nodes reach this service."""

    @field_validator("service_url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected an address such as https://10.0.0.1:8322")
        if parts.hostname == "localhost" or parts.hostname.startswith("127."):
            raise ValueError("other machines cannot reach it: use this machine's address in their network")
        return value.rstrip("/")


class _OnMachines(_PoolSettings):
    """What pools have whose machines have files of their own."""

    token_file: Path
    """slurm, ray: file on its nodes with a token of the role node (node_token), which only its owner may read."""
    data_dir: Path = Path("~/.llama/trl-pool")
    """slurm, ray: directory on its nodes for the files of agents; no other user may write to its path."""


class SlurmPoolSettings(_OnMachines):
    """Nodes of a Slurm cluster, whose commands (sbatch, squeue, scancel) are on the service's machine."""

    kind: Literal["slurm"]
    command: str = "trl-remote"
    """slurm: `trl-remote` of an installation on its nodes."""
    options: tuple[str, ...] = ()
    """slurm: options of sbatch, such as --partition=gpu, --gpus-per-node=8, --time=12:00:00."""
    warning_seconds: int = Field(120, ge=10, le=3600)
    """slurm: seconds before the time limit at which jobs save, to continue on other nodes."""

    @field_validator("options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if not option.startswith("--") or option.split("=")[0] in _OURS:
                raise ValueError(f"{option!r}: use options of sbatch that begin with --, except {', '.join(_OURS)}")
        return value


class RayPoolSettings(_OnMachines):
    """Nodes of a Ray cluster that exists, through its Jobs API."""

    kind: Literal["ray"]
    address: str
    """ray: address of the cluster's dashboard, such as http://10.0.0.5:8265."""
    auth_token_file: Path | None = None
    """ray: file on this machine with the cluster's token, where its RAY_AUTH_MODE is token."""
    python: str = "python3"
    """ray: interpreter on its nodes, which has ray and this package: Ray's own."""
    resources: dict[str, float] = Field(default_factory=dict)
    """ray: resources of each machine that are reserved beside `node.cpus` and `node.gpus`, such as memory in bytes."""
    dataset_roots: tuple[str, ...] = ()
    """ray: directories on its machines whose files may be named as a dataset's uri (ray://PATH); none: no files."""

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected the address of Ray's dashboard, such as http://10.0.0.5:8265")
        return value.rstrip("/")

    @field_validator("dataset_roots")
    @classmethod
    def _are_directories(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for root in value:
            if not root.startswith("/") or ".." in root.split("/") or not root.strip("/"):
                raise ValueError(f"{root!r}: expected the whole path of a directory, such as /shared/data, and not all")
        return tuple(root.rstrip("/") for root in value)

    @field_validator("resources")
    @classmethod
    def _are_others(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU") or not amount > 0:
                raise ValueError(f"{name}: {amount:g}: use node.cpus and node.gpus for CPU and GPU, and more than 0")
        return value

    def bundle(self) -> dict[str, float]:
        """Resources of each machine, as Ray names them."""
        gpus = {"GPU": float(self.node.gpus)} if self.node.gpus else {}
        return {"CPU": float(self.node.cpus), **gpus, **self.resources}


class Toleration(_PoolBlock):
    """A taint of machines that pods accept, in the words of Kubernetes."""

    key: str | None = None
    """Of the taint; null with operator Exists: every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal: the taint has `value`; Exists: any."""
    value: str | None = None
    """Of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; null: every one."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value")
        if self.operator == "Equal" and not self.key:
            raise ValueError("name the key of the taint, or use operator Exists")
        return self


class KubernetesPoolSettings(_PoolSettings):
    """Pods of a Kubernetes cluster, through its API where the service runs in it, else through `kubectl`."""

    kind: Literal["kubernetes"]
    image: str = Field(min_length=1, pattern=r"^\S+$")
    """kubernetes: image with `trl-remote` and what trains, such as deploy/Dockerfile makes (target train)."""
    namespace: str | None = Field(None, pattern=_DNS_LABEL)
    """kubernetes: namespace of its Jobs and of its Secret; null: the service's own where it runs in the cluster, else
    default."""
    secret: _Name = "trl-node-token"
    """kubernetes: Secret whose key node-token is a token of the role node (node_token)."""
    kubeconfig: Path | None = None
    """kubernetes: file of kubectl; null: its own choice, or no kubectl where the service runs in the cluster."""
    context: str | None = Field(None, min_length=1)
    """kubernetes: context of that file; null: the current one."""
    grace_seconds: int = Field(120, ge=10, le=3600)
    """kubernetes: seconds in which jobs save once a pod is evicted or given back; then its processes are killed."""
    partial_seconds: float = Field(600.0, ge=10)
    """kubernetes: seconds for which running pods of a request wait for its others; then all are given back."""
    gpu_resource: str = Field("nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9_.-]+$")
    """kubernetes: resource that `node.gpus` counts."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """kubernetes: labels of the machines that pods may run on."""
    tolerations: tuple[Toleration, ...] = ()
    """kubernetes: taints of machines that pods accept: `key`, `operator`, `value`, `effect`."""
    runtime_class: _Name | None = None
    """kubernetes: RuntimeClass of pods, where GPUs need one, such as nvidia."""
    image_pull_secrets: tuple[_Name, ...] = ()
    """kubernetes: Secrets with which the image is pulled."""
    claims: dict[_Name, str] = Field(default_factory=dict)
    """kubernetes: PersistentVolumeClaims and the directories at which pods have them, such as {models: /models}."""
    environment: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default_factory=dict
    )
    """kubernetes: variables of agents, such as HF_HOME; no secrets, which everyone who may read pods sees."""
    pod_labels: dict[_QualifiedName, _LabelValue] = Field(default_factory=dict)
    """kubernetes: labels of Jobs and pods, such as those of a queue; `node.labels` are the service's own."""
    pod_annotations: dict[_QualifiedName, str] = Field(default_factory=dict)
    """kubernetes: annotations of Jobs and pods, such as k8s.v1.cni.cncf.io/networks."""
    priority_class: _Name | None = None
    """kubernetes: PriorityClass of pods; null: the cluster's default."""
    affinity: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """kubernetes: affinity of pods, as their specification has it."""
    pod_resources: dict[str, str] = Field(default_factory=dict)
    """kubernetes: resources of each pod besides `node`, such as {rdma/hca_shared_devices_a: "1"}, hugepages-2Mi."""
    capabilities: tuple[Literal["IPC_LOCK", "SYS_NICE", "SYS_PTRACE", "NET_BIND_SERVICE"], ...] = ()
    """kubernetes: capabilities of the container; all others are dropped. RDMA pins memory with IPC_LOCK."""
    user: int = Field(1000, ge=1)
    """kubernetes: id of the user whose processes they are; not 0 (root)."""

    @field_validator("claims")
    @classmethod
    def _at_directories(cls, value: dict[str, str]) -> dict[str, str]:
        for claim, directory in value.items():
            if not re.fullmatch(r"/[^:\s]+", directory):
                raise ValueError(f"{claim}: {directory!r}: expected a whole path, such as /models")
            if any(
                directory.rstrip("/") == one or directory.startswith(f"{one}/") for one in ("/work", "/run", "/dev")
            ):
                raise ValueError(f"{claim}: {directory!r}: pods have directories of their own in /work, /run and /dev")
        if len(set(value.values())) < len(value):
            raise ValueError("two claims have the same directory")
        return value

    @field_validator("pod_labels", "pod_annotations")
    @classmethod
    def _are_not_ours(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name in _OUR_LABELS or name.startswith(("trl-remote/", "batch.kubernetes.io/")):
                raise ValueError(f"{name} is set for each pod by the service or by Kubernetes: choose another name")
        return value

    @field_validator("affinity")
    @classmethod
    def _is_affinity(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name not in _AFFINITIES:
                raise ValueError(f"{name}: expected {', '.join(_AFFINITIES)}")
        return value

    @field_validator("pod_annotations")
    @classmethod
    def _fit(cls, value: dict[str, str]) -> dict[str, str]:
        size = sum(len(name.encode()) + len(text.encode()) for name, text in value.items())
        if size > _ANNOTATION_BYTES:
            raise ValueError(f"they have {size} bytes, and Kubernetes allows {_ANNOTATION_BYTES}")
        return value

    @field_validator("pod_resources", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return numbers_as_text(value)

    @model_validator(mode="after")
    def _resources_are_others(self) -> Self:
        for name, amount in self.pod_resources.items():
            if name in ("cpu", "memory", self.gpu_resource):
                raise ValueError(f"pod_resources: {name}: use node.cpus, node.memory_gb and node.gpus")
            if not re.fullmatch(_RESOURCE, name):
                raise ValueError(
                    f"pod_resources: {name!r} is no resource of Kubernetes: expected such as "
                    "rdma/hca_shared_devices_a, hugepages-2Mi or ephemeral-storage"
                )
            if not re.fullmatch(_QUANTITY, amount) or not re.search("[1-9]", amount):
                raise ValueError(f"pod_resources: {name}: {amount!r}: expected an amount above 0, such as 1 or 100Gi")
        return self

    @field_validator("environment")
    @classmethod
    def _without_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if _SECRET.search(name.upper()):
                raise ValueError(f"{name} looks like a secret, which pods would show")
            if name.startswith("TRL_NODE_"):
                raise ValueError(f"{name} is set for each pod by the service")
        return value


class SshPoolSettings(_PoolSettings):
    """Machines of an inventory, which become nodes over SSH. Their agents get `node_token`."""

    kind: Literal["ssh"]
    inventory: AbsolutePath
    """ssh: the inventory `nodes.yaml`, on this machine."""
    machines: tuple[str, ...] = ()
    """ssh: names of the inventory that are this pool's; none: all."""
    offline: bool = False
    """ssh: call no package index: what is needed is on the machines."""
    site_packages: bool = False
    """ssh: use the packages of the machines' Python, such as torch."""


PoolSettings = Annotated[
    SlurmPoolSettings | RayPoolSettings | KubernetesPoolSettings | SshPoolSettings, Field(discriminator="kind")
]


def gpus_elsewhere(pools: Sequence[PoolSettings], nodes: Sequence[Node]) -> Sequence[str]:
    """The pools and the other machines that have GPUs, as a sentence names them."""
    with_gpus = [f"pool {pool.name}" for pool in pools if pool.max_nodes and pool.node.gpus]
    others = [node for node in nodes if not node.head]
    machines = [f"node {node.name}" for node in others if any(kind_of(one) == "cuda" for one in node.devices)]
    return [*with_gpus, *machines]
