"""Makes the pools that the configuration names. `context` imports it where there are any."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from llama_stack_provider_trl.errors import TrlError

from ..nodes.identity import versions
from ..nodes.pools.base import AgentStart, Pool
from ..nodes.pools.cluster_api import InClusterApi
from ..nodes.pools.inventory import read_inventory
from ..nodes.pools.kubectl import Kubectl
from ..nodes.pools.kubernetes import ClusterApi, KubernetesPool
from ..nodes.pools.own_pod import is_in_cluster, own_namespace, server_of
from ..nodes.pools.pods import PodShape
from ..nodes.pools.ray_dashboard import sender
from ..nodes.pools.ray_jobs import RayJobs
from ..nodes.pools.ray_pool import RayPool
from ..nodes.pools.slurm import SlurmPool
from ..nodes.pools.ssh import NodePlan, equal_versions, require_asyncssh
from ..nodes.pools.ssh_pool import SshPool
from ..nodes.pools.wheel import wheel_of_this_installation
from .cluster.pools import ManagedPool
from .cluster.ray_datasets import RaySource
from .pool_settings import KubernetesPoolSettings, PoolSettings, RayPoolSettings, SlurmPoolSettings, SshPoolSettings
from .settings import ServiceSettings, SettingsError

_GIB = 1 << 30


def managed_pool(settings: PoolSettings, service: ServiceSettings) -> ManagedPool:
    """A pool as it is configured, with its limits. Raises SettingsError: a pool of kind ssh cannot work as configured;
    MissingExtra: it needs asyncssh."""
    return ManagedPool(
        settings.name,
        _pool(settings, service),
        settings.node.node(),
        settings.node.words(),
        settings.max_nodes,
        settings.node_hours,
        settings.idle_seconds,
        settings.join_seconds,
        settings.partial_seconds if isinstance(settings, KubernetesPoolSettings) else None,
    )


def _pool(settings: PoolSettings, service: ServiceSettings) -> Pool:
    match settings:
        case SshPoolSettings():
            return _ssh_pool(settings, service)
        case KubernetesPoolSettings():
            return KubernetesPool(
                _pod_shape(settings), settings.service_url, settings.node.labels, _cluster_api(settings)
            )
        case SlurmPoolSettings():
            return SlurmPool(_agent(settings, settings.command), settings.options, settings.warning_seconds)
        case RayPoolSettings():
            return RayPool(_ray_jobs(settings), _agent(settings), settings.python, settings.bundle())


def ray_sources(service: ServiceSettings) -> list[RaySource]:
    """The configured Ray clusters, which read datasets."""
    return [
        RaySource(
            pool=pool.name,
            jobs=_ray_jobs(pool),
            python=pool.python,
            roots=pool.dataset_roots,
            service_url=pool.service_url,
            token_file=str(pool.token_file),
        )
        for pool in service.pools
        if isinstance(pool, RayPoolSettings)
    ]


def _ray_jobs(settings: RayPoolSettings) -> RayJobs:
    return RayJobs(settings.address, sender(settings.address, settings.auth_token_file))


def _agent(settings: SlurmPoolSettings | RayPoolSettings, command: str = "") -> AgentStart:
    files = str(settings.token_file), command, str(settings.data_dir)
    return AgentStart(settings.service_url, *files, settings.node.labels)


def _cluster_api(settings: KubernetesPoolSettings) -> ClusterApi:
    """The API of the cluster that the service runs in, where nothing else is configured; else kubectl."""
    if settings.kubeconfig is None and settings.context is None and is_in_cluster():
        return InClusterApi(settings.namespace or own_namespace() or "default", server_of())
    return Kubectl(settings.namespace or "default", settings.kubeconfig, settings.context)


def _pod_shape(settings: KubernetesPoolSettings) -> PodShape:
    return PodShape(
        image=settings.image,
        secret=settings.secret,
        cpus=settings.node.cpus,
        memory_bytes=int(settings.node.memory_gb * _GIB),
        gpus=settings.node.gpus,
        gpu_resource=settings.gpu_resource,
        node_selector=settings.node_selector,
        tolerations=[one.model_dump(exclude_none=True) for one in settings.tolerations],
        runtime_class=settings.runtime_class,
        image_pull_secrets=settings.image_pull_secrets,
        claims=settings.claims,
        environment=settings.environment,
        labels=settings.pod_labels,
        annotations=settings.pod_annotations,
        priority_class=settings.priority_class,
        affinity=settings.affinity,
        resources=settings.pod_resources,
        capabilities=settings.capabilities,
        user=settings.user,
        grace_seconds=settings.grace_seconds,
    )


def _ssh_pool(settings: SshPoolSettings, service: ServiceSettings) -> SshPool:
    where = f"pools: {settings.name!r}"
    require_asyncssh()
    if service.node_token is None:
        raise SettingsError(f"{where}: its agents join with the node_token of the service: set TRL_SERVICE_NODE_TOKEN")
    try:
        read_inventory(settings.inventory).chosen(settings.machines)
    except TrlError as error:
        raise SettingsError(f"{where}: {error}") from error
    plan = cache(partial(_node_plan, settings, service.node_token.get_secret_value(), service.train_python))
    return SshPool(
        lambda: read_inventory(settings.inventory),
        lambda inventory: plan(inventory.service, inventory.certificate, inventory.constraints),
        settings.machines,
        settings.node.labels,
    )


def _node_plan(
    settings: SshPoolSettings,
    token: str,
    train_python: Path | None,
    service: str | None,
    certificate: Path | None,
    constraints: Path | None,
) -> NodePlan:
    """What the machines of a pool get, from what their inventory has for all of them. Raises SettingsError, OSError."""
    if service not in (None, settings.service_url):
        raise SettingsError(
            f"the inventory {settings.inventory} has the service {service}, the pool has service_url "
            f"{settings.service_url}: leave it out of the inventory"
        )
    ours = versions(str(train_python) if train_python else None) if constraints is None else {}
    return NodePlan(
        url=settings.service_url,
        token=token,
        wheel=wheel_of_this_installation(),
        certificate=certificate.read_text(encoding="utf-8-sig") if certificate else None,
        constraints=constraints.read_text(encoding="utf-8-sig") if constraints else equal_versions(ours),
        offline=settings.offline,
        site_packages=settings.site_packages,
        join_timeout=min(settings.join_seconds, 90.0),
    )
