"""What is requested of Kubernetes, and what its answers mean; `kubectl` is played."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from llama_stack_provider_trl_remote.nodes.pools.base import Given, PoolOrder, PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.commands import Ran
from llama_stack_provider_trl_remote.nodes.pools.kubectl import Kubectl, run_kubectl
from llama_stack_provider_trl_remote.nodes.pools.kubernetes import KubernetesPool
from llama_stack_provider_trl_remote.nodes.pools.pods import PodShape
from tests.kubernetes_api import CORE, JOBS, Namespace, validate

ORDER = PoolOrder("abc", ("gpu-abc-0", "gpu-abc-1"), "trl-abc")
GIB = 1 << 30


class PlayedKubectl:
    """Reads the commands that a pool runs, and calls a namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.fails: str | None = None
        self.called: list[str] = []
        self.manifest: dict[str, Any] = {}

    def __call__(self, argv: Sequence[str], text: str) -> Ran:
        program, namespace, timeout, *words = argv
        assert (program, namespace, timeout) == ("kubectl", "--namespace=training", "--request-timeout=20s")
        self.called.append(" ".join(words))
        if self.fails is not None:
            return Ran(1, "", self.fails)
        query = {
            {"--selector": "labelSelector", "--field-selector": "fieldSelector"}[name]: value
            for name, _, value in (word.partition("=") for word in words)
            if name.endswith("selector")
        }
        if words[0] == "create":
            self.manifest = json.loads(text)
            return self._ran("POST", JOBS, self.manifest)
        if words[0] == "delete":
            ran = self._ran("DELETE", f"{JOBS}/{words[2]}", {"propagationPolicy": words[3].split("=")[1].title()})
            return Ran(0, "", "") if "--ignore-not-found" in words and "(NotFound)" in ran.errors else ran
        items = []
        for kind in words[1].split(","):
            _, found = self.namespace.call("GET", JOBS if kind == "jobs" else f"{CORE}/{kind}", query, {})
            items += found["items"]
        return Ran(0, json.dumps({"kind": "List", "items": items}), "")

    def _ran(self, method: str, path: str, body: dict[str, Any]) -> Ran:
        code, answer = self.namespace.call(method, path, {}, body)
        if code < 400:
            return Ran(0, "job.batch/trl-abc\n", "")
        where = 'error when creating "STDIN": ' if method == "POST" else ""
        return Ran(1, "", f"Error from server ({answer['reason']}): {where}{answer['message']}\n")


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@pytest.fixture
def kubectl(namespace: Namespace) -> PlayedKubectl:
    return PlayedKubectl(namespace)


@pytest.fixture
def pool(kubectl: PlayedKubectl) -> KubernetesPool:
    shape = PodShape("registry.example/trl:1", "trl-node-token", 8, 64 * GIB, gpus=2)
    return KubernetesPool(shape, "http://10.0.0.1:8322", {"rack": "$(HOME)'s"}, Kubectl("training", run=kubectl))


def test_an_order_is_one_job_however_often_it_is_requested(pool: KubernetesPool, kubectl: PlayedKubectl) -> None:
    assert pool.choose("abc", 2, []) == "trl-abc"
    assert pool.observe(ORDER) == (Given.nothing, "")
    pool.request(ORDER)
    pool.request(ORDER)
    assert list(kubectl.namespace.jobs) == ["trl-abc"]
    assert pool.observe(ORDER) == (Given.pending, "Kubernetes Job trl-abc waits: it has 0 of 2 pods")


def test_the_job_has_a_pod_with_an_agent_for_each_machine(pool: KubernetesPool, kubectl: PlayedKubectl) -> None:
    pool.request(ORDER)
    spec = kubectl.manifest["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        *("Indexed", 2, 2),
        0,
    )
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"] == [
        *("trl-remote", "agent", "--service", "http://10.0.0.1:8322", "--token-file", "/run/secrets/trl/node-token"),
        *("--data-dir", "/work/agent", "--label", "rack=$$(HOME)'s"),
    ]
    names = {one["name"]: one.get("value") for one in container["env"]}
    assert names["TRL_NODE_NAME"] == "gpu-abc-$(TRL_NODE_INDEX)"
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}
    assert fields == {
        "TRL_NODE_INDEX": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        **{"TRL_NODE_ADDRESS": "status.podIP", "TRL_NODE_MACHINE_ID": "metadata.uid"},
        "TRL_NODE_HOST_ID": "spec.nodeName",
    }
    amounts = {"cpu": "8", "memory": "65536Mi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}


def test_pods_have_no_privileges_and_the_token_as_a_file_of_mode_0440(
    pool: KubernetesPool, kubectl: PlayedKubectl
) -> None:
    """What the Pod Security Standard `restricted` demands."""
    pool.request(ORDER)
    pod = kubectl.manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert pod["volumes"][0]["secret"] == {"secretName": "trl-node-token", "defaultMode": 0o440}
    assert container["volumeMounts"][0] == {"name": "tokens", "mountPath": "/run/secrets/trl", "readOnly": True}


def test_what_the_settings_add_to_pods(kubectl: PlayedKubectl) -> None:
    shape = PodShape(
        **{"image": "i", "secret": "s", "cpus": 1, "memory_bytes": GIB, "gpus": 1, "gpu_resource": "amd.com/gpu"},
        node_selector={"pool": "gpu"},
        tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        runtime_class="nvidia",
        image_pull_secrets=["registry"],
        claims={"models": "/models"},
        environment={"HF_HOME": "/models/$(x)"},
        **{"user": 2000, "grace_seconds": 600},
    )
    KubernetesPool(shape, "http://10.0.0.1:8322", {}, Kubectl("training", run=kubectl)).request(ORDER)
    pod = kubectl.manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["amd.com/gpu"] == "1"
    assert (pod["nodeSelector"], pod["runtimeClassName"]) == ({"pool": "gpu"}, "nvidia")
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["volumes"][-1] == {"name": "claim-0", "persistentVolumeClaim": {"claimName": "models"}}
    assert container["volumeMounts"][-1] == {"name": "claim-0", "mountPath": "/models"}
    assert {"name": "HF_HOME", "value": "/models/$$(x)"} in container["env"]
    assert (pod["securityContext"]["runAsUser"], pod["terminationGracePeriodSeconds"]) == (2000, 600)


AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}]
        }
    }
}


def test_pods_fit_clusters_with_queues_rdma_and_networks_of_their_own(kubectl: PlayedKubectl) -> None:
    shape = PodShape(
        **{"image": "i", "secret": "s", "cpus": 1, "memory_bytes": GIB, "priority_class": "batch"},
        labels={"kueue.x-k8s.io/queue-name": "research", "team": "nlp", "app.kubernetes.io/name": "other"},
        annotations={"k8s.v1.cni.cncf.io/networks": "rdma-net"},
        affinity=AFFINITY,
        resources={"rdma/hca_shared_devices_a": "1", "ephemeral-storage": "100Gi"},
        capabilities=("IPC_LOCK",),
    )
    KubernetesPool(shape, "http://10.0.0.1:8322", {}, Kubectl("training", run=kubectl)).request(ORDER)
    template = kubectl.manifest["spec"]["template"]
    for metadata in (kubectl.manifest["metadata"], template["metadata"]):
        assert metadata["labels"].items() >= {"kueue.x-k8s.io/queue-name": "research", "team": "nlp"}.items()
        assert metadata["labels"]["app.kubernetes.io/name"] == "trl-node"  # NetworkPolicies know pods by it
        assert metadata["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}
    pod = template["spec"]
    (container,) = pod["containers"]
    assert (pod["priorityClassName"], pod["affinity"]) == ("batch", AFFINITY)
    for amounts in container["resources"].values():
        assert (amounts["rdma/hca_shared_devices_a"], amounts["ephemeral-storage"]) == ("1", "100Gi")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_manifest_with_an_unknown_field_would_fail_these_tests(pool: KubernetesPool, kubectl: PlayedKubectl) -> None:
    pool.request(ORDER)
    kubectl.manifest["spec"]["template"]["spec"]["containers"][0]["gpus"] = 1
    with pytest.raises(Exception, match="'gpus' was unexpected"):
        validate(kubectl.manifest)


UNSCHEDULABLE = {
    "conditions": [
        {
            **{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ]
}


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def ended(reason: str, code: int, message: str) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"terminated": {"reason": reason, "exitCode": code, "message": message}}}]}


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (UNSCHEDULABLE, "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        (waiting("ImagePullBackOff", 'Back-off pulling image "i"'), 'ImagePullBackOff: Back-off pulling image "i"'),
        (waiting("CreateContainerConfigError", "no such user"), "CreateContainerConfigError: no such user"),
        (waiting("ContainerCreating", ""), "1 of 2 pods start"),
    ],
)
def test_a_pod_that_waits_has_its_reason_in_the_sentence(
    pool: KubernetesPool, namespace: Namespace, status: dict[str, Any], message: str
) -> None:
    pool.request(ORDER)
    namespace.make_pods("Running", "Pending")[1]["status"] |= status
    assert pool.observe(ORDER) == (Given.some, f"Kubernetes Job trl-abc waits: {message}")


def test_a_secret_that_is_missing_is_in_the_sentence(pool: KubernetesPool, namespace: Namespace) -> None:
    pool.request(ORDER)
    (pod, _) = namespace.make_pods("Pending", "Pending")
    pod["status"] |= waiting("ContainerCreating", "")
    name = pod["metadata"]["name"]
    namespace.warn(name, "FailedMount", 'secret "trl-node-token" not found', "2026-11-24T09:41:09Z")
    namespace.warn(name, "FailedScheduling", "an older event")
    assert pool.observe(ORDER).message.endswith('waits: FailedMount: secret "trl-node-token" not found')


def test_a_quota_that_refuses_pods_is_in_the_sentence(pool: KubernetesPool, namespace: Namespace) -> None:
    pool.request(ORDER)
    why = (
        'Error creating: pods "trl-abc-0-x" is forbidden: failed quota: training: must specify limits.ephemeral-storage'
    )
    namespace.warn("trl-abc", "FailedCreate", why)
    assert pool.observe(ORDER) == (Given.pending, f"Kubernetes Job trl-abc waits: FailedCreate: {why}")


def test_a_quota_that_refuses_the_job_is_a_refusal(pool: KubernetesPool, namespace: Namespace) -> None:
    namespace.refusal = "exceeded quota: training, requested: count/jobs.batch=1, used: 1, limited: 1"
    expected = r'^kubectl create: Error from server \(Forbidden\): jobs.batch "trl-abc" is forbidden: exceeded quota: '
    with pytest.raises(PoolRefusal, match=expected):
        pool.request(ORDER)


def test_running_pods_are_what_was_given_also_where_one_has_left(pool: KubernetesPool, namespace: Namespace) -> None:
    pool.request(ORDER)
    for phases in (("Running", "Running"), ("Succeeded", "Running")):
        namespace.make_pods(*phases)
        assert pool.observe(ORDER) == (Given.all, "Kubernetes Job trl-abc")
    namespace.make_pods("Succeeded", "Succeeded")
    assert pool.observe(ORDER).given is Given.pending
    namespace.end_job("Complete", "Job completed")
    assert pool.observe(ORDER) == (Given.nothing, "Kubernetes Job trl-abc: Job completed")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            ended("Error", 1, "   node  gpu-abc-1\ntrl-remote: its token is wrong\n"),
            "Error (exit status 1): trl-remote: its token is wrong",
        ),
        (ended("OOMKilled", 137, ""), "OOMKilled (exit status 137)"),
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
    ],
)
def test_a_pod_that_fails_ends_the_order_with_its_reason(
    pool: KubernetesPool, namespace: Namespace, status: dict[str, Any], message: str
) -> None:
    pool.request(ORDER)
    (first, second) = namespace.make_pods("Running", "Failed", machine="gpu-7")
    second["status"] |= status
    namespace.end_job("FailureTarget", "Job has reached the specified backoff limit")
    seen = pool.observe(ORDER)
    assert seen.given is Given.pending
    assert seen.message == f"Kubernetes Job trl-abc ends trl-abc-0-x2v4f (gpu-7): trl-abc-1-x2v4f: {message}"
    first["status"]["phase"] = "Succeeded"
    assert pool.observe(ORDER) == (Given.nothing, f"Kubernetes Job trl-abc: trl-abc-1-x2v4f: {message}")


def test_a_release_deletes_the_job_which_stays_until_its_pods_have_ended(
    pool: KubernetesPool, namespace: Namespace
) -> None:
    pool.release(ORDER)
    pool.request(ORDER)
    namespace.make_pods("Running", "Running", machine="gpu-7")
    pool.release(ORDER)
    pool.release(ORDER)
    seen = pool.observe(ORDER)
    assert seen.given is Given.pending
    assert "ends trl-abc-0-x2v4f (gpu-7) trl-abc-1-x2v4f (gpu-7)" in seen.message
    namespace.jobs.clear()  # by hand, with --cascade=background
    assert pool.observe(ORDER).given is Given.pending
    namespace.end_pods()
    assert pool.observe(ORDER).given is Given.nothing


AWAY = "The connection to the server 10.0.0.9:6443 was refused - did you specify the right host or port?"
OPENAPI = (
    'error: error validating "STDIN": error validating data: failed to download openapi: Get "https://10.0.0.9:6443/'
    'openapi/v2?timeout=20s": dial tcp 10.0.0.9:6443: connect: connection refused; if you choose to ignore these '
    "errors, turn validation off with --validate=false"
)
LOG = 'E1124 22:10:11.126018   19389 memcache.go:265] "Unhandled Error" err="couldn\'t get"\n'


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (LOG + AWAY, AWAY),
        (OPENAPI, 'failed to download openapi: Get "https://10.0.0.9:6443/openapi/v2?timeout=20s": dial tcp '
         "10.0.0.9:6443: connect: connection refused"),
        ("error: You must be logged in to the server (Unauthorized)", "You must be logged in to the server"),
        (LOG, "memcache.go:265"),
        ("", "exit status 1"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_away_is_no_refusal(
    pool: KubernetesPool, kubectl: PlayedKubectl, errors: str, message: str
) -> None:
    kubectl.fails = errors
    for call in (pool.request, pool.observe, pool.release):
        with pytest.raises(PoolUnavailable) as caught:
            call(ORDER)
        assert message in str(caught.value)
        assert "turn validation off" not in str(caught.value)


@pytest.mark.parametrize(
    "errors",
    [
        'Error from server (NotFound): error when creating "STDIN": namespaces "training" not found',
        'Error from server (Forbidden): error when creating "STDIN": jobs.batch is forbidden: User "trl" cannot create',
        'Error from server (BadRequest): error when creating "STDIN": Job in version "v1" cannot be handled as a Job: '
        'strict decoding error: unknown field "spec.podReplacementPolicy"',
    ],
)
def test_what_a_cluster_would_refuse_again_is_a_refusal(
    pool: KubernetesPool, kubectl: PlayedKubectl, errors: str
) -> None:
    kubectl.fails = errors
    with pytest.raises(PoolRefusal) as caught:
        pool.request(ORDER)
    assert str(caught.value) == f"kubectl create: {errors.replace('error when creating "STDIN": ', '')}"
    with pytest.raises(PoolUnavailable):  # of an order that exists: nothing has ended
        pool.observe(ORDER)


def test_a_kubectl_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolUnavailable, match="there is no no-such-command here: install it on the service's machine"):
        run_kubectl(["no-such-command"], "")
    monkeypatch.setenv("TRL_SERVICE_TOKEN", "hush")
    monkeypatch.setenv("KUBECONFIG", "/etc/trl/kubeconfig")
    shown = run_kubectl(["env"], "").output
    assert "hush" not in shown
    assert "KUBECONFIG=/etc/trl/kubeconfig" in shown


def test_output_that_is_no_list_is_reported(pool: KubernetesPool, kubectl: PlayedKubectl) -> None:
    kubernetes = KubernetesPool(
        PodShape("i", "s", 1, GIB),
        "http://10.0.0.1:8322",
        {},
        Kubectl("training", run=lambda argv, text: Ran(0, "hello", "")),
    )
    with pytest.raises(PoolUnavailable, match="kubectl get jobs,pods has written what is no list of objects"):
        kubernetes.observe(ORDER)
