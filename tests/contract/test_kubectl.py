"""The pool through a real `kubectl`, of a namespace that answers as an API server does. Skipped where there is none."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.nodes.pools.base import Given, PoolOrder, PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.kubectl import Kubectl
from llama_stack_provider_trl_remote.nodes.pools.kubernetes import KubernetesPool
from llama_stack_provider_trl_remote.nodes.pools.pods import PodShape
from tests.kubernetes_api import JOBS, Namespace, server

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here"),
]
ORDER = PoolOrder("abc", ("gpu-abc-0", "gpu-abc-1"), "trl-abc")
SHAPE = PodShape("registry.example/trl:1", "trl-node-token", 8, 64 << 30, gpus=2)


def pool_at(address: str, tmp_path: Path, context: str = "here") -> KubernetesPool:
    config = {
        **{"apiVersion": "v1", "kind": "Config", "current-context": "none"},
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    return KubernetesPool(SHAPE, "http://10.0.0.1:8322", {}, Kubectl("training", tmp_path / "kubeconfig", context))


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Namespace, KubernetesPool]]:
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl caches what a server has
    found = Namespace()
    with server(found) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield found, pool_at(f"http://127.0.0.1:{http.server_port}", tmp_path)
        http.shutdown()


def test_an_order_from_its_request_to_its_release(namespace: tuple[Namespace, KubernetesPool]) -> None:
    cluster, pool = namespace
    assert pool.observe(ORDER).given is Given.nothing
    pool.request(ORDER)
    pool.request(ORDER)
    assert list(cluster.jobs) == ["trl-abc"]
    assert cluster.called.count(("POST", JOBS)) == 2
    cluster.warn("trl-abc", "FailedCreate", "exceeded quota: training")
    assert pool.observe(ORDER).message == "Kubernetes Job trl-abc waits: FailedCreate: exceeded quota: training"
    cluster.make_pods("Running", "Running")
    assert pool.observe(ORDER) == (Given.all, "Kubernetes Job trl-abc")
    pool.release(ORDER)
    # The role of deploy/kubernetes/pool-role.yaml: kubectl reads no single Job.
    assert {path for method, path in cluster.called if method == "GET" and path.startswith(JOBS)} == {JOBS}
    assert pool.observe(ORDER).given is Given.pending
    cluster.end_pods()
    assert pool.observe(ORDER).given is Given.nothing
    pool.release(ORDER)


def test_a_quota_that_refuses_the_job_is_one_sentence(namespace: tuple[Namespace, KubernetesPool]) -> None:
    cluster, pool = namespace
    cluster.refusal = "exceeded quota: training, requested: count/jobs.batch=1, used: count/jobs.batch=1"
    with pytest.raises(
        PoolRefusal, match=r'^kubectl create: Error from server \(Forbidden\): jobs.batch "trl-abc" is '
    ):
        pool.request(ORDER)


def test_a_cluster_that_cannot_be_reached_is_one_sentence(
    namespace: tuple[Namespace, KubernetesPool], tmp_path: Path
) -> None:
    nowhere = pool_at("http://127.0.0.1:9", tmp_path)
    for call in (nowhere.request, nowhere.observe, nowhere.release):
        with pytest.raises(PoolUnavailable, match=r"127\.0\.0\.1:9.* refused") as caught:
            call(ORDER)
        assert "\n" not in str(caught.value)
    with pytest.raises(PoolUnavailable, match=r"^kubectl get: .*context.*elsewhere"):
        pool_at("http://127.0.0.1:9", tmp_path, "elsewhere").observe(ORDER)
