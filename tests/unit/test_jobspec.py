"""`trl-remote jobspec`: each system's job is one that it can read, with a script that a shell can read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from llama_stack_provider_trl_remote.cli import main as cli

CONTAINERS = ("--image", "registry.example/trl:1", "--claim", "training")
GIVEN = ("--model", "/data/mo del", "--dataset", "/data/it's $rows.jsonl", "--output", "/data/result")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["jobspec", *words]) == 0
    return capsys.readouterr().out


def check_script(script: str, shell: str = "sh") -> None:
    found = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert 'TRL_SERVICE_ALLOWED_HOSTS="$TRL_HEAD"' in script  # a name, where it is not an address
    assert r"""trl-remote train '/data/it'"'"'s $rows.jsonl' --model '/data/mo del' --pull /data/result""" in script


def test_a_slurm_job_makes_its_tokens_and_ends_with_its_first_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = printed(capsys, "slurm", *GIVEN, "--nodes", "3", "--gpus", "8", "--options=--epochs 2")
    check_script(text, "bash")
    assert re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE) == [
        *("--job-name=trl-job", "--nodes=3", "--ntasks-per-node=1", "--exclusive", "--gpus-per-node=8"),
        "--output=trl-job-%j.log",
    ]
    assert "--job trl-job --nodes 3 --epochs 2 --url" in text
    node = text.split("<<'EOF_NODE'\n")[1].split("EOF_NODE")[0]
    check_script(node, "bash")
    # The tokens, as the script makes them.
    line = next(line for line in text.splitlines() if line.startswith("for name in token"))
    subprocess.run(["bash", "-c", line], env={"TRL_TOKENS": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    tokens = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert tokens.keys() == {"token", "node-token"}
    assert all(re.fullmatch("[0-9a-f]{48}", token) for token in tokens.values())
    assert len(set(tokens.values())) == 2


def test_a_kubernetes_job_is_indexed_and_done_with_its_first_pod(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "kubernetes", *GIVEN, *CONTAINERS, "--nodes", "2", "--gpus", "4", "--name", "tune")
    service, job = yaml.safe_load_all(text)
    for manifest in (service, job):
        kubernetes_validate.validate(manifest, "1.33", strict=True)
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"] == "tune"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    check_script(container["command"][2])
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables == {
        **dict.fromkeys(("TRL_RANK", "TRL_ADDRESS")),
        **{"TRL_HEAD": "tune-0.tune", "TRL_TOKENS": "/run/secrets", "TRL_WORK": "/work", "TRL_NODE_CHECK_PATH": "off"},
    }
    named = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == named
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["enableServiceLinks"] is False
    assert pod["volumes"][0]["secret"]["secretName"] == "tune-tokens"
    assert "kubectl create secret generic tune-tokens" in text


@pytest.mark.parametrize("system", ["compose", "swarm"])
def test_containers_get_their_tokens_as_secrets(capsys: pytest.CaptureFixture[str], system: str) -> None:
    found = yaml.safe_load(printed(capsys, system, *GIVEN, *CONTAINERS, "--nodes", "3", "--gpus", "1"))
    head, node = found["services"]["head"], found["services"]["node"]
    assert (head["environment"]["TRL_RANK"], node["environment"]["TRL_RANK"]) == ("0", "other")
    assert node["deploy"]["replicas"] == 2
    for one in (head, node):
        script = one["entrypoint"][2]
        assert "$" not in script.replace("$$", "")  # compose would expand it
        check_script(script.replace("$$", "$"))
        assert [secret["source"] for secret in one["secrets"]] == list(found["secrets"]) == ["token", "node-token"]
        assert one["deploy"]["resources"]["reservations"]
    external = [secret.get("external") for secret in found["secrets"].values()]
    assert external == ([True, True] if system == "swarm" else [None, None])
    alone = yaml.safe_load(printed(capsys, system, *GIVEN, *CONTAINERS))
    assert list(alone["services"]) == ["head"]


def test_a_unit_of_systemd_has_the_script_as_one_argument(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = printed(capsys, "systemd", *GIVEN, "--name", "nightly")
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    script = json.loads(line.removeprefix("ExecStart=/bin/sh -c "))
    assert "$" not in script.replace("$$", "")
    assert "%" not in script.replace("%%", "")
    check_script(script.replace("$$", "$").replace("%%", "%"))
    assert '"$RUNTIME_DIRECTORY/$name"' in script.replace("$$", "$")
    if shutil.which("systemd-analyze"):
        (tmp_path / "nightly.service").write_text(text)
        words = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "nightly.service")]
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        assert not [line for line in found.stderr.splitlines() if "nightly" in line], found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("slurm", *GIVEN, "--nodes", "0"), "--nodes=0"),
        (("slurm", *GIVEN, "--gpus", "-1"), "--gpus=-1"),
        (("slurm", *GIVEN, "--name", "My Job"), "lower-case letters, digits and hyphens"),
        (("kubernetes", *GIVEN, "--claim", "c"), "name the image with trl-remote"),
        (("kubernetes", *GIVEN, "--image", "i"), "name the PersistentVolumeClaim"),
        (("systemd", *GIVEN, "--nodes", "2"), "a unit runs on one machine"),
        (("compose", "--model", "m", "--dataset", "rows.jsonl", *CONTAINERS), "expected a whole path"),
        (("slurm", *GIVEN, "--options=--job 'a"), "as a shell reads them"),
        (("slurm", "--model", "m\nm", "--dataset", "rows.jsonl"), "expected one line"),
    ],
)
def test_what_cannot_be_a_job_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert cli.main(["jobspec", *words]) == 1
    found: Any = capsys.readouterr()
    assert found.out == ""
    assert re.fullmatch(r"trl-remote: .*\n", found.err, re.DOTALL)
    assert message in found.err


def test_an_unknown_option_of_the_training_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["jobspec", "slurm", *GIVEN, "--options=--epochs many"])
    assert "--epoch" in capsys.readouterr().err
