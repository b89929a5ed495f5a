"""`deploy/`: every file is one that its system can read, and names what we name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl_remote.cli import main as cli
from llama_stack_provider_trl_remote.nodes.pools.pods import SCRIPT
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


def test_a_service_in_kubernetes_listens_where_its_service_sends(tmp_path: Path) -> None:
    service, deployed = objects(DEPLOY / "kubernetes" / "service.yaml")
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


def test_agents_in_kubernetes_leave_as_those_of_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    (deployed,) = objects(DEPLOY / "kubernetes" / "agents.yaml")
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
