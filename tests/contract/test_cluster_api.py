"""The pool through the API of the cluster that the service runs in, over TLS, with the token of a service account."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.nodes.pools.base import Given, PoolOrder, PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.cluster_api import InClusterApi
from llama_stack_provider_trl_remote.nodes.pools.kubernetes import KubernetesPool
from llama_stack_provider_trl_remote.nodes.pools.own_pod import (
    account_directories,
    is_in_cluster,
    own_namespace,
    server_of,
)
from llama_stack_provider_trl_remote.nodes.pools.pods import PodShape
from tests.kubernetes_api import JOBS, Namespace, server

pytestmark = pytest.mark.contract
ORDER = PoolOrder("abc", ("gpu-abc-0", "gpu-abc-1"), "trl-abc")
SHAPE = PodShape("registry.example/trl:1", "trl-node-token", 8, 64 << 30, gpus=2)


@dataclass
class World:
    cluster: Namespace
    account: Path
    address: str

    def pool(self, address: str | None = None, namespace: str = "training") -> KubernetesPool:
        api = InClusterApi(namespace, address or self.address, self.account)
        return KubernetesPool(SHAPE, "http://10.0.0.1:8322", {}, api)


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    paths = directory / f"{name}.crt", directory / f"{name}.key"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kubernetes", "-days", "2"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(made, check=True, capture_output=True)
    return paths


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # the cluster's own network has none
    crt, key = certificate(tmp_path, "ca")
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("training")
    cluster = Namespace()
    cluster.token = "first"
    with server(cluster) as http:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(crt, key)
        http.socket = context.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield World(cluster, tmp_path, f"https://127.0.0.1:{http.server_port}")
        http.shutdown()
        thread.join(10)


def test_an_order_from_its_request_to_its_release_with_a_token_that_is_renewed(world: World) -> None:
    cluster, pool = world.cluster, world.pool()
    assert pool.observe(ORDER).given is Given.nothing
    pool.request(ORDER)
    cluster.token = "second"
    with pytest.raises(PoolUnavailable, match=r"^Kubernetes: Unauthorized: Unauthorized$"):
        pool.observe(ORDER)
    (world.account / "token").write_text("second\n")
    pool.request(ORDER)
    assert list(cluster.jobs) == ["trl-abc"]
    assert cluster.called.count(("POST", JOBS)) == 2
    cluster.warn("trl-abc", "FailedCreate", "exceeded quota: training")
    assert pool.observe(ORDER).message == "Kubernetes Job trl-abc waits: FailedCreate: exceeded quota: training"
    cluster.make_pods("Running", "Pending")
    assert pool.observe(ORDER).given is Given.some
    cluster.make_pods("Running", "Running")
    assert pool.observe(ORDER) == (Given.all, "Kubernetes Job trl-abc")
    pool.release(ORDER)
    assert pool.observe(ORDER).given is Given.pending
    cluster.end_pods()
    assert pool.observe(ORDER).given is Given.nothing
    pool.release(ORDER)  # nothing is left


def test_what_the_cluster_would_refuse_again_is_a_refusal(world: World) -> None:
    world.cluster.refusal = "exceeded quota: training, requested: count/jobs.batch=1, used: count/jobs.batch=1"
    with pytest.raises(PoolRefusal, match=r'^Kubernetes: Forbidden: jobs.batch "trl-abc" is forbidden: exceeded'):
        world.pool().request(ORDER)
    with pytest.raises(PoolRefusal, match=r"^Kubernetes: NotFound: "):
        world.pool(namespace="elsewhere").request(ORDER)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("away", r"^Kubernetes at https://127\.0\.0\.1:9 cannot be reached \(Connection refused\)$"),
        ("authority", r"cannot be reached \(.*certificate verify failed"),
        ("token", r"^the service account in \S+ cannot be read \(.*token.*deploy/kubernetes/service.yaml does$"),
        ("ca.crt", r"^the service account in \S+ cannot be read"),
    ],
)
def test_a_cluster_that_is_away_or_not_trusted_is_one_sentence(world: World, fault: str, message: str) -> None:
    if fault == "authority":
        certificate(world.account, "other")[0].rename(world.account / "ca.crt")
    elif fault != "away":
        (world.account / fault).unlink()
    pool = world.pool("https://127.0.0.1:9" if fault == "away" else None)
    for call in (pool.request, pool.observe, pool.release):
        with pytest.raises(PoolUnavailable, match=message) as caught:
            call(ORDER)
        assert "first" not in str(caught.value)
    assert not world.cluster.called


def test_the_api_is_used_where_kubectl_would_use_it(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert not is_in_cluster(pod, tmp_path)
    assert own_namespace(tmp_path) is None
    assert account_directories(tmp_path) == []
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("training\n")
    assert is_in_cluster(pod, tmp_path)
    assert account_directories(tmp_path) == [tmp_path]  # hidden from trainings
    assert own_namespace(tmp_path) == "training"
    assert not is_in_cluster({}, tmp_path)
    assert not is_in_cluster({**pod, "KUBECONFIG": "/etc/trl/kubeconfig"}, tmp_path)
    assert server_of(pod) == "https://10.96.0.1:443"
    assert server_of({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"
