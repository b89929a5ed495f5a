"""`deploy/`: every file is one that its system can read, and names what we name."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl_remote.cli import main as cli
from llama_stack_provider_trl_remote.nodes.pools.base import PoolOrder
from llama_stack_provider_trl_remote.nodes.pools.own_pod import ACCOUNT
from llama_stack_provider_trl_remote.nodes.pools.pods import SCRIPT, PodShape, job
from llama_stack_provider_trl_remote.service.loading import load_settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CONTAINERS = ("compose.yaml", "swarm.yaml")
KNOWN = re.compile(r"TRL_(?:SERVICE|NODE)_[A-Z_]+")
OF_SLURM = {"TRL_NODE_HOME"}
"""A variable of deploy/slurm/agents.sh alone."""


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", "1.2.3.4") for one in container["env"]}


def check_service(variables: dict[str, str], *names: str) -> None:
    """The service would start with these variables, and answers under these names."""
    given = {"TRL_SERVICE_TOKEN": "a" * 48, "TRL_SERVICE_NODE_TOKEN": "b" * 48, **variables}
    settings, _ = load_settings(None, given, insecure=True)
    settings.check_exposure()
    assert (settings.host, settings.port) == ("0.0.0.0", 8322)
    assert set(names) <= set(settings.allowed_hosts)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no run_fsdp.yaml is


def test_every_variable_is_one_that_we_read() -> None:
    source = DEPLOY.parent
    files = [
        path
        for name in ("llama_stack_provider_trl", "llama_stack_provider_trl_remote")
        for path in (source / name).rglob("*.py")
    ]
    read = {name for path in files for name in KNOWN.findall(path.read_text())}
    used = {name: path for path in DEPLOY.rglob("*") if path.is_file() for name in KNOWN.findall(path.read_text())}
    assert used.keys() - read == OF_SLURM


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_reads_every_object(path: Path) -> None:
    for found in objects(path):
        for release in ("1.29", "1.33", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(found, release, strict=True)


def test_a_service_in_kubernetes_listens_where_its_service_sends() -> None:
    found = {one["kind"]: one for one in objects(DEPLOY / "kubernetes" / "service.yaml")}
    service, deployed = found["Service"], found["StatefulSet"]
    spec = deployed["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert service["spec"]["selector"].items() <= deployed["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == 8322
    assert deployed["spec"]["replicas"] == 1
    assert spec["enableServiceLinks"] is False
    given = {name: str(value).replace("$(TRL_NAMESPACE)", "training") for name, value in variables(container).items()}
    secrets = [one["name"] for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})]
    assert secrets == ["TRL_SERVICE_TOKEN", "TRL_SERVICE_NODE_TOKEN"]
    check_service(given | dict.fromkeys(secrets, "c" * 48) | {"TRL_SERVICE_NODE_TOKEN": "d" * 48}, "trl-service")
    assert "trl-service.training.svc.cluster.local" in given["TRL_SERVICE_ALLOWED_HOSTS"].split(",")


def test_agents_in_kubernetes_leave_as_those_of_a_pool() -> None:
    deployed = objects(DEPLOY / "kubernetes" / "agents.yaml")[-1]
    spec = deployed["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["/bin/sh", "-c", SCRIPT, "trl-node"]
    assert container["readinessProbe"]["exec"]["command"][-1] == str(
        NodeDir(Path(variables(container)["TRL_NODE_DATA_DIR"])).credential
    )
    assert spec["volumes"][0]["secret"]["defaultMode"] == 0o440
    assert [one["key"] for one in spec["volumes"][0]["secret"]["items"]] == ["node-token"]  # not the operator's
    assert variables(container)["TRL_SERVICE_URL"] == "http://trl-service:8322"


@pytest.mark.parametrize("path", ["service.yaml", "agents.yaml"])
def test_pods_have_no_privileges(path: str) -> None:
    spec = objects(DEPLOY / "kubernetes" / path)[-1]["spec"]["template"]["spec"]
    assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (True, False)
    assert spec["containers"][0]["securityContext"] == {
        **{"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def labels_of_pods(path: str) -> dict[str, str]:
    labels: dict[str, str] = objects(DEPLOY / "kubernetes" / path)[-1]["spec"]["template"]["metadata"]["labels"]
    return labels


@pytest.mark.parametrize(("path", "unavailable"), [("service.yaml", 0), ("agents.yaml", 1)])
def test_a_drain_of_machines_takes_at_most_so_many_pods_away(path: str, unavailable: int) -> None:
    (budget,) = (one for one in objects(DEPLOY / "kubernetes" / path) if one["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == unavailable
    assert budget["spec"]["selector"]["matchLabels"] == labels_of_pods(path)


def admits(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a selector of Kubernetes has pods with these labels."""
    expressions = selector.get("matchExpressions", ())
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"] for one in expressions
    )


def test_only_what_trains_reaches_agents_and_only_clients_reach_the_service_besides() -> None:
    policies = [one["spec"] for one in objects(DEPLOY / "kubernetes" / "network-policy.yaml")]
    order = PoolOrder("abc", ("gpu-abc-0",), "trl-abc")
    of_pool = job(order, PodShape("i", "s", 1, 1 << 30), "http://10.0.0.1:8322", {})["spec"]["template"]["metadata"]
    pods = {
        **{"service": labels_of_pods("service.yaml"), "agent": labels_of_pods("agents.yaml")},
        **{"pool": of_pool["labels"], "client": {"trl-remote/client": "true"}, "other": {"app": "database"}},
    }

    def reaches(source: str, target: str) -> set[int | None]:
        """Ports of a pod to which another one may connect; None: every one."""
        rules = [rule for one in policies if admits(one["podSelector"], pods[target]) for rule in one["ingress"]]
        allowed = [rule for rule in rules if any(admits(one["podSelector"], pods[source]) for one in rule["from"])]
        return {port["port"] if port else None for rule in allowed for port in rule.get("ports", [None])}

    training = ("service", "agent", "pool")
    assert all(reaches(source, target) == {None} for source in training for target in training)
    assert [reaches("client", target) for target in training] == [{8322}, set(), set()]
    assert not any(reaches("other", target) for target in training)


def test_a_pool_in_the_cluster_has_the_rights_that_it_uses_and_no_others() -> None:
    spec = objects(DEPLOY / "kubernetes" / "service.yaml")[-1]["spec"]["template"]["spec"]
    account = objects(DEPLOY / "kubernetes" / "service.yaml")[0]
    role, binding = objects(DEPLOY / "kubernetes" / "pool-role.yaml")[1:]
    assert (account["kind"], account["metadata"]["name"]) == ("ServiceAccount", spec["serviceAccountName"])
    assert {"kind": "ServiceAccount", "name": spec["serviceAccountName"]} in binding["subjects"]
    rights = {(name, verb) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}
    assert rights == {*(("jobs", verb) for verb in ("create", "list", "delete")), ("pods", "list"), ("events", "list")}
    assert all("*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]) for rule in role["rules"])
    # What the service reads is what is mounted.
    (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "account")
    assert Path(mount["mountPath"]) == ACCOUNT
    (volume,) = (one for one in spec["volumes"] if one["name"] == "account")
    token, ca, namespace = volume["projected"]["sources"]
    paths = [token["serviceAccountToken"]["path"], ca["configMap"]["items"][0]["path"]]
    assert [*paths, namespace["downwardAPI"]["items"][0]["path"]] == ["token", "ca.crt", "namespace"]
    agents = objects(DEPLOY / "kubernetes" / "agents.yaml")[-1]["spec"]["template"]["spec"]
    assert "serviceAccountName" not in agents


SERVED = {
    *("service", "dashboard", "search", "tensorboard", "mlflow", "wandb", "trackio", "ssh", "discovery", "s3"),
    "graders",
}
TRAINED = {"train", "quantization", "harness", "images", "gguf", "schemas", "liger"}
NOT_IN_IMAGES = {
    "stack": "Llama Stack has images of its own",
    "ogx": "as Llama Stack",
    "ray": "a Ray cluster has its own interpreter; the service calls its HTTP API",
    "llamacpp": "100 MB: transformers reads exports where it is not there",
    **{"plot": "of the command line", "completion": "of the command line"},
    **{"demo": "of an example", "dev": "of a checkout"},
}


@pytest.mark.parametrize(("target", "extras"), [("slim", SERVED), ("train", SERVED | TRAINED)])
def test_images_have_every_extra_that_the_service_accepts(target: str, extras: set[str]) -> None:
    known = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert known.keys() == SERVED | TRAINED | NOT_IN_IMAGES.keys()
    (installed,) = re.findall(r"'\.\[(.*)\]'", stage(target))
    assert set(installed.split(",")) == extras


@pytest.mark.parametrize("target", ["slim", "train"])
def test_a_change_of_the_code_does_not_install_packages_again(target: str) -> None:
    lines = (stage("base") + stage(target)).splitlines()
    copied = [number for number, line in enumerate(lines) if line.startswith("COPY llama_stack_provider_trl")]
    installed = [number for number, line in enumerate(lines) if line.startswith("RUN pip install")]
    assert len(copied) == 2
    assert installed[0] < min(copied) < max(copied) < installed[1]
    assert "--no-deps" in lines[installed[1]]


def stage(target: str) -> str:
    """The lines of one target of the Dockerfile."""
    stages = re.split(r"^FROM .* AS ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    return next(text for text in stages if text.startswith(f"{target}\n"))


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_have_their_tokens_as_secrets(name: str) -> None:
    (found,) = objects(DEPLOY / name)
    service, agent = found["services"]["service"], found["services"]["agent"]
    check_service(service["environment"], "service")
    assert agent["environment"]["TRL_SERVICE_URL"] == "http://service:8322"
    assert set(found["secrets"]) == {"token", "node-token"}
    names = [one if isinstance(one, str) else one["target"] for one in agent["secrets"]]
    assert names == ["node-token"]  # an agent has no operator's token
    assert agent["environment"]["TRL_SERVICE_NODE_TOKEN_FILE"] == "/run/secrets/node-token"
    assert agent["stop_signal"] == "SIGUSR1"
    for one in (service, agent):
        assert (one["init"], one["cap_drop"]) == (True, ["ALL"])
    script = service["entrypoint"][2].replace("$$", "$")
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_service_with_gpus_is_the_same_service() -> None:
    (over,) = objects(DEPLOY / "compose.gpu.yaml")
    (devices,) = over["services"]["service"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"]
    assert over["services"].keys() <= objects(DEPLOY / "compose.yaml")[0]["services"].keys()


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker here")
@pytest.mark.parametrize("source", ["deploy", "jobspec"])
def test_docker_reads_the_stacks(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = DEPLOY / "swarm.yaml"
    if source == "jobspec":
        words = ["--model", "m", "--dataset", "/d/r.jsonl", "--output", "/d/out", "--image", "i", "--nodes", "2"]
        assert cli.main(["jobspec", "swarm", *words, "--gpus", "2"]) == 0
        path = tmp_path / "job.yaml"
        path.write_text(capsys.readouterr().out)
    done = subprocess.run(["docker", "stack", "config", "-c", str(path)], capture_output=True, text=True, check=False)
    if "unknown command" in done.stderr or "not a docker command" in done.stderr:
        pytest.skip("this docker has no stacks")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["trl-service", "trl-agent"])
def test_systemd_reads_the_units(name: str) -> None:
    path = DEPLOY / "systemd" / f"{name}.service"
    text = path.read_text()
    assert re.findall("^ExecStart=(.*)", text, re.MULTILINE) == [
        f"/opt/trl/bin/trl-remote {'serve' if name == 'trl-service' else 'agent'}"
    ]
    if shutil.which("systemd-analyze"):
        words = ["systemd-analyze", "verify", "--man=no", str(path)]
        found = subprocess.run(words, capture_output=True, text=True, check=False).stderr.splitlines()
        assert [line for line in found if name in line and "is not executable" not in line] == []
