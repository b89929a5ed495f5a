"""Makes the pools that the configuration names."""

from __future__ import annotations

from ..nodes.pools.base import AgentStart, Pool
from ..nodes.pools.kubernetes import KubernetesPool
from ..nodes.pools.pods import PodShape
from ..nodes.pools.ray_pool import RayPool, sender
from ..nodes.pools.slurm import SlurmPool
from .cluster.pools import ManagedPool
from .pool_settings import KubernetesPoolSettings, PoolSettings, RayPoolSettings, SlurmPoolSettings

_GIB = 1 << 30


def managed_pool(settings: PoolSettings) -> ManagedPool:
    """A pool as it is configured, with its limits."""
    return ManagedPool(
        settings.name,
        _pool(settings),
        settings.node.node(),
        settings.node.words(),
        settings.max_nodes,
        settings.node_hours,
        settings.idle_seconds,
        settings.join_seconds,
    )


def _pool(settings: PoolSettings) -> Pool:
    match settings:
        case KubernetesPoolSettings(namespace=namespace, kubeconfig=file, context=context):
            shape, labels = _pod_shape(settings), settings.node.labels
            return KubernetesPool(shape, settings.service_url, labels, namespace, file, context)
        case SlurmPoolSettings():
            return SlurmPool(_agent(settings, settings.command), settings.options, settings.warning_seconds)
        case RayPoolSettings():
            send = sender(settings.address, settings.auth_token_file)
            return RayPool(settings.address, _agent(settings), settings.python, settings.bundle(), send)


def _agent(settings: SlurmPoolSettings | RayPoolSettings, command: str = "") -> AgentStart:
    files = str(settings.token_file), command, str(settings.data_dir)
    return AgentStart(settings.service_url, *files, settings.node.labels)


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
        user=settings.user,
        grace_seconds=settings.grace_seconds,
    )
