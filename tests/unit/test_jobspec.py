"""`trl-remote jobspec`: each system's job is one that it can read, with a script that a shell can read."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from llama_stack_provider_trl_remote.cli import main as cli

IMAGE = ("--image", "registry.example/trl:1")
CONTAINERS = dict.fromkeys(("compose", "swarm"), IMAGE) | {"kubernetes": (*IMAGE, "--claim", "training")}
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
        *("--requeue", "--open-mode=append", "--output=trl-job-%j.log"),
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
    text = printed(
        capsys, "kubernetes", *GIVEN, *CONTAINERS["kubernetes"], "--nodes", "2", "--gpus", "4", "--name", "tune"
    )
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
    size = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 4}
    assert container["resources"] == {"requests": size, "limits": size}
    check_script(container["command"][2])
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables == {
        **dict.fromkeys(("TRL_RANK", "TRL_ADDRESS", "TRL_NODE_HOST_ID", "HF_TOKEN")),
        "HF_HOME": "/work/huggingface",
        **{"TRL_HEAD": "tune-0.tune", "TRL_TOKENS": "/run/secrets", "TRL_WORK": "/work", "TRL_NODE_CHECK_PATH": "off"},
    }
    named = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == named
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False
    assert pod["volumes"][0]["secret"]["secretName"] == "tune-tokens"
    assert "kubectl create secret generic tune-tokens" in text


@pytest.mark.parametrize("system", ["compose", "swarm"])
def test_containers_get_their_tokens_as_secrets(capsys: pytest.CaptureFixture[str], system: str) -> None:
    found = yaml.safe_load(printed(capsys, system, *GIVEN, *CONTAINERS[system], "--nodes", "3", "--gpus", "1"))
    head, *nodes = found["services"].values()
    assert [one["environment"]["TRL_RANK"] for one in nodes] == (["1"] if system == "swarm" else ["1", "2"])
    assert nodes[0]["deploy"].get("replicas") == (2 if system == "swarm" else None)
    for one in (head, *nodes):
        script = one["entrypoint"][2]
        assert "$" not in script.replace("$$", "")  # compose would expand it
        check_script(script.replace("$$", "$"))
        assert [secret["source"] for secret in one["secrets"]] == list(found["secrets"]) == ["token", "node-token"]
        assert one["deploy"]["resources"]["reservations"]
    external = [secret.get("external") for secret in found["secrets"].values()]
    assert external == ([True, True] if system == "swarm" else [None, None])
    alone = yaml.safe_load(printed(capsys, system, *GIVEN, *CONTAINERS[system]))
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


TABLE = [
    ("/data/m", "/data/rows.jsonl", "/data/result", ()),
    ("org/name", "/data/in/rows.jsonl", "/data/out/deep/result", ("--nodes", "3")),
    ("/srv/x/models/m", "/srv/x/rows: $1.csv", "/srv/x/out/r", ("--nodes", "2", "--gpus", "2")),
    ("/mnt/m", "/mnt/a/b/rows.json", "/mnt/a/result", ("--gpus", "8", "--options=--lora-r 16")),
]
"""Model, rows, result, and further options."""
APART = ("/models/m", "/rows/rows.jsonl", "/results/r", ("--nodes", "2", "--gpus", "1"))


def written(capsys: pytest.CaptureFixture[str], system: str, row: tuple[str, str, str, tuple[str, ...]]) -> str:
    model, rows, result, further = row
    return printed(
        capsys, system, "--model", model, "--dataset", rows, "--output", result, *CONTAINERS[system], *further
    )


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("version", ["1.29", "1.30", "1.31", "1.32", "1.33", "1.34"])
def test_kubernetes_accepts_each_manifest_strictly(
    capsys: pytest.CaptureFixture[str], row: tuple[str, str, str, tuple[str, ...]], version: str
) -> None:
    for manifest in yaml.safe_load_all(written(capsys, "kubernetes", row)):
        kubernetes_validate.validate(manifest, version, strict=True)


def is_below(path: str, directory: str) -> bool:
    return Path(directory) in Path(path).parents


@pytest.mark.parametrize("row", [*TABLE, APART])
@pytest.mark.parametrize("system", ["kubernetes", "compose", "swarm"])
def test_each_path_is_in_a_mounted_directory_and_the_result_in_one_to_write_to(
    capsys: pytest.CaptureFixture[str], row: tuple[str, str, str, tuple[str, ...]], system: str
) -> None:
    if system == "kubernetes" and row is APART:
        return  # refused: it has one volume
    model, rows, result, _ = row
    *_, last = yaml.safe_load_all(written(capsys, system, row))
    if system == "kubernetes":
        (container,) = last["spec"]["template"]["spec"]["containers"]
        mounts = {one["mountPath"]: one.get("readOnly") for one in container["volumeMounts"]}
        places = [mounts]
    else:
        places = [
            {one["target"].replace("$$", "$"): one.get("read_only") for one in service["volumes"]}
            for service in last["services"].values()
        ]
    for mounts in places:
        for path in (rows, result, *([model] if model.startswith("/") else [])):
            assert [directory for directory in mounts if is_below(path, directory)], path
        assert [read for directory, read in mounts.items() if is_below(result, directory)] in ([False], [None])
        assert "/" not in mounts


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 1), (3, 2), (2, 8)])
def test_containers_of_one_machine_share_no_gpu(capsys: pytest.CaptureFixture[str], nodes: int, gpus: int) -> None:
    text = printed(capsys, "compose", *GIVEN, *CONTAINERS["compose"], "--nodes", str(nodes), "--gpus", str(gpus))
    services = yaml.safe_load(text)["services"].values()
    reserved = [one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for one in services]
    assert [number for ids in reserved for number in ids] == [str(number) for number in range(nodes * gpus)]
    assert {len(ids) for ids in reserved} == {gpus}


@pytest.mark.parametrize("system", ["compose", "swarm"])
def test_checkpoints_of_containers_are_on_a_disk_and_shared_memory_has_a_size(
    capsys: pytest.CaptureFixture[str], system: str
) -> None:
    for one in yaml.safe_load(printed(capsys, system, *GIVEN, *CONTAINERS[system], "--nodes", "2"))[
        "services"
    ].values():
        mounts = {mount["target"]: mount for mount in one["volumes"]}
        assert mounts["/work"]["type"] == "volume"
        assert mounts["/dev/shm"]["tmpfs"]["size"] == 8 << 30
        assert not {"tmpfs", "shm_size"} & one.keys()
        assert one["environment"]["HF_HOME"].startswith("/work/")
        assert one["environment"]["HF_TOKEN"] is None


@pytest.mark.parametrize("row", [*TABLE, APART])
@pytest.mark.parametrize(
    ("system", "words"), [("swarm", ["docker", "stack", "config", "-c"]), ("compose", ["docker-compose", "-f"])]
)
def test_the_engine_reads_each_file(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    row: tuple[str, str, str, tuple[str, ...]],
    system: str,
    words: list[str],
) -> None:
    if not shutil.which(words[0]):
        pytest.skip(f"no {words[0]}")
    text = written(capsys, system, row)
    if system == "compose":  # docker-compose 1.29 knows the specification, but not `name`
        text = re.sub(r"^name: .*\n", "", text, flags=re.MULTILINE)
        for name in ("token", "node-token"):
            (tmp_path / f"trl-job-{name}").write_text("x")
    (tmp_path / "job.yaml").write_text(text)
    words = [*words, str(tmp_path / "job.yaml"), *(["config"] if system == "compose" else [])]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_an_agent_of_a_kubernetes_job_ends_with_the_service(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before 1.31 a Job is done when all its pods are; one that failed would have ended the job."""
    _, job = yaml.safe_load_all(printed(capsys, "kubernetes", *GIVEN, *CONTAINERS["kubernetes"], "--nodes", "2"))
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = script.replace("8322", str(server.getsockname()[1])).replace("sleep 5", "sleep 0.05")
        program = tmp_path / "trl-remote"
        program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/agent\nexec sleep 60\n")
        program.chmod(0o755)
        names = {"TRL_RANK": "1", "TRL_HEAD": "127.0.0.1", "TRL_TOKENS": "/none", "TRL_WORK": str(tmp_path)}
        words = {**names, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"}
        agent = subprocess.Popen(["/bin/sh", "-c", script], env=words)
        server.accept()[0].close()
        assert agent.poll() is None
    assert agent.wait(30) == 0
    assert not Path("/proc", (tmp_path / "agent").read_text().strip()).exists()


@pytest.mark.parametrize("left", ["token", "node-token", "status"])
def test_a_requeued_slurm_job_begins_with_new_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, left: str
) -> None:
    """Its directory is there, where Slurm killed the job before."""
    text = printed(capsys, "slurm", *GIVEN)
    (tmp_path / ".trl-7").mkdir()
    (tmp_path / ".trl-7" / left).write_text("old")
    for name, body in {
        "scontrol": "echo NodeAddr=10.0.0.1",
        "srun": '[ "$4" = clean ] && exit; cat "$TRL_TOKENS/token"; echo; grep -l old "$TRL_TOKENS"/*;'
        ' echo 0 > "$TRL_TOKENS/status"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    names = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "n1"}
    environment = {**names, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert re.fullmatch("[0-9a-f]{48}\n", found.stdout)
    assert not (tmp_path / ".trl-7").exists()


PLAYED = {
    "scontrol": "echo NodeAddr=10.0.0.1",
    "trl-remote": """case "$1" in
    agent) echo $$ > "$PLAYED/agent"; trap 'echo late > "$9/late"; exit' TERM
        for _ in {1..300}; do sleep 0.1; done;;
    serve) echo > "$PLAYED/serving"; exec sleep 60;;
    train) until [ -e "$PLAYED/agent" ] && [ -e "$PLAYED/serving" ]; do sleep 0.1; done; exit "$CODE";;
esac""",
    "srun": """if [ "$4" = clean ]; then SLURM_PROCID=0 bash "$3" clean; exit; fi
SLURM_PROCID=1 bash "$5" & agents=$!
SLURM_PROCID=0 bash "$5"; status=$?
if [ "$END" = kill ]; then kill -9 "$agents" "$(cat "$PLAYED/agent")"; fi
wait "$agents"
exit "$status"
""",
}
"""Programs that stand in for those of Slurm, with two tasks on one machine, and for ours."""


@pytest.mark.parametrize(("code", "end"), [("0", "well"), ("3", "well"), ("0", "kill")])
def test_a_slurm_job_removes_its_directories_on_every_node_however_it_ends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, end: str
) -> None:
    text = printed(capsys, "slurm", *GIVEN, "--nodes", "2")
    for name, body in PLAYED.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (work := tmp_path / "work").mkdir()
    (work / "trl-70-0-other").mkdir()
    names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "TMPDIR": str(work), "PLAYED": str(tmp_path)}
    environment = {**names, "CODE": code, "END": end, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    assert str(found.returncode) == code, found.stderr
    assert [path.name for path in work.iterdir()] == ["trl-70-0-other"], "that of another job"
    assert not (tmp_path / ".trl-7").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("slurm", *GIVEN, "--nodes", "0"), "--nodes=0"),
        (("slurm", *GIVEN, "--gpus", "-1"), "--gpus=-1"),
        (("slurm", *GIVEN, "--name", "My Job"), "lower-case letters, digits and hyphens"),
        (("kubernetes", *GIVEN, "--claim", "c"), "--image is missing: name the image with trl-remote"),
        (("kubernetes", *GIVEN, "--image", "i"), "name the PersistentVolumeClaim"),
        (("systemd", *GIVEN, "--nodes", "2"), "a unit runs on one machine"),
        (("compose", "--model", "m", "--dataset", "rows.jsonl", *CONTAINERS["compose"]), "expected a whole path"),
        (
            ("kubernetes", *GIVEN, *CONTAINERS["kubernetes"], "--output", "/result"),
            "a directory that the image does not have",
        ),
        (
            ("compose", *GIVEN, *CONTAINERS["compose"], "--dataset", "/work/rows.jsonl"),
            "a directory that the image does not have",
        ),
        (("swarm", *GIVEN, *CONTAINERS["swarm"], "--model", "/data/../etc/m"), "without `..`"),
        (
            ("kubernetes", *GIVEN, *CONTAINERS["kubernetes"], "--model", "/models/m"),
            "one volume has all of --dataset /data/it",
        ),
        (("kubernetes", *GIVEN, *CONTAINERS["kubernetes"], "--memory-gib", "1"), "--memory-gib=1"),
        (("kubernetes", *GIVEN, *CONTAINERS["kubernetes"], "--cpus", "0"), "--cpus=0"),
        (
            ("slurm", *GIVEN, "--image", "i"),
            "--image='i' is not supported: a specification for slurm has none (only kube",
        ),
        (("systemd", *GIVEN, "--gpus", "1"), "--gpus=1 is not supported: a specification for systemd has none"),
        (("compose", *GIVEN, *IMAGE, "--claim", "c"), "--claim='c' is not supported"),
        (("swarm", *GIVEN, *IMAGE, "--cpus", "4"), "--cpus=4 is not supported"),
        (("slurm", *GIVEN, "--memory-gib", "16"), "--memory-gib=16 is not supported"),
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
