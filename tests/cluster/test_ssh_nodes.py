"""`trl-remote nodes up` and `down` against real SSH servers on machines out of network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_stack_provider_trl_remote.cli.main import main
from tests.cluster.bed import NODE_TOKEN, TOKEN, Bed, Machine
from tests.cluster.jobs import dpo, ready, submit, trains
from tests.cluster.ssh_host import _key, host, nothing_but_sshd
from tests.contract.stack import Json
from tests.required import IN_FULL, lacking
from tests.tiny import REPOSITORY, tiny_model

pytest.importorskip("asyncssh")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
Remote = Callable[..., tuple[int, str]]
"""Arguments -> exit status of `trl-remote nodes`, and all that it printed."""


@pytest.fixture
def remote(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Remote:
    """The command of an operator who has an empty directory, and a key."""
    if shutil.which("sshd", path="/usr/sbin") is None:
        lacking("there is no sshd: scripts/install-debian-packages.sh installs it")
    home = tmp_path / "operator"
    home.mkdir()
    _key(home / "id")
    for name, value in {"TRL_SERVICE_TOKEN": TOKEN, "TRL_SERVICE_NODE_TOKEN": NODE_TOKEN}.items():
        monkeypatch.setenv(name, value)
    for name in ("SSH_AUTH_SOCK", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(home)

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setenv("TRL_SERVICE_URL", bed.url.removesuffix("/v1"))
        if "SSL_CERT_FILE" in os.environ:  # aiohttp reads it once, when it is imported
            program = [sys.executable, "-m", "llama_stack_provider_trl_remote", "nodes", *words]
            given = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300, env=given)
            return done.returncode, done.stderr + done.stdout
        capsys.readouterr()
        code = main(["nodes", *words])
        printed = capsys.readouterr()
        assert NODE_TOKEN not in printed.out + printed.err
        return code, printed.err + printed.out

    return call


def test_a_machine_becomes_a_node_and_is_none_afterwards(bed: Bed, remote: Remote, tmp_path: Path) -> None:
    """Also: what is there is left alone, and another host key than the known one receives nothing."""
    (a,) = prepared(bed, tmp_path, "a")
    write_inventory(tmp_path, [a], host_key=(tmp_path / "operator" / "id.pub").read_text().strip())
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 1
    assert re.search(r"a +\S+ +failed +its host key ssh-ed25519 SHA256:\S+ is not the one in `host_key`", printed)
    assert not a.data_dir.exists()

    write_inventory(tmp_path, [a], environment={"TRL_NODE_WARM_START": "off"}, labels={"rack": 7})
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 0, (printed, a.log_tail())
    agent = int(re.search(r"started +joined, pid (\d+)", printed)[1])  # type: ignore[index]
    (row,) = [node for node in bed.get("/nodes")["data"] if node["node"] == "a"]
    assert (row["state"], row["labels"]) == ("open", {"rack": "7"})
    assert NODE_TOKEN not in _shown(a)
    assert Path(f"/proc/{agent}/cmdline").read_bytes().startswith(bytes(a.data_dir / "ssh" / "environments"))
    assert ((a.data_dir / "ssh" / "token").stat().st_mode & 0o777) == 0o600
    assert "unchanged" in remote("up", "a", "--site-packages", "--offline")[1]
    assert f"agent {agent}, 1 processes; at the service: open" in remote("status")[1]

    code, printed = remote("down")
    assert code == 0, printed
    assert "removed at the service" in printed
    nothing_but_sshd(bed, a)
    assert not (a.data_dir / "ssh" / "token").exists()
    assert "a" not in [node["node"] for node in bed.get("/nodes")["data"]]
    code, printed = remote("down")
    assert code == 0
    assert "no process ran; the service has no such node" in printed


@IN_FULL
def test_from_an_empty_directory_to_a_job_on_two_machines(bed: Bed, remote: Remote, tmp_path: Path) -> None:
    machines = prepared(bed, tmp_path, "a", "b")
    keys = tmp_path / "operator" / "hosts"
    write_inventory(tmp_path, machines, labels={"rack": "7"}, host_key=None, known_hosts="hosts")
    keys.write_text("".join(f"{m.address} {(m.root / 'host_key.pub').read_text()}" for m in machines[:1]))
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 1
    assert re.search(r"a +\S+ +started", printed)
    assert re.search(r"b +\S+ +failed +its host key ssh-ed25519 SHA256:\S+ is not the one in \S+/hosts, and", printed)
    keys.write_text("".join(f"{m.address} {(m.root / 'host_key.pub').read_text()}" for m in machines))
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 0, (printed, [machine.log_tail() for machine in machines])
    assert re.search(r"a +\S+ +unchanged", printed)
    ready(bed, "a", "b")
    submit(bed, dpo("pair", 8, resources={"nodes": 2, "labels": {"rack": "7"}}))
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, [machine.log_tail() for machine in machines])
    assert sorted(status["resources_allocated"]["device"].split(",")) == ["a/cpu", "b/cpu"]
    assert sorted(bed.losses("pair")) == list(range(1, 9))

    # In the middle of a job whose agents were killed: its trainings are ended, too.
    bed.hold("step-6")  # for good: nothing but `down` ends it
    submit(bed, dpo("cut", 8, resources={"nodes": 2, "labels": {"rack": "7"}}))
    bed.wait(lambda: trains(bed, "cut", beyond=4), "the job trains", 240)
    assert all(machine.trainings() for machine in machines)
    machines[0].kill_agent()
    code, printed = remote("down")
    assert code == 0, printed
    for machine in machines:
        nothing_but_sshd(bed, machine)
    assert [node["node"] for node in bed.get("/nodes")["data"]] == ["head"]


@IN_FULL
def test_an_interrupted_up_is_repeated(bed: Bed, remote: Remote, tmp_path: Path) -> None:
    """Its connection ends while pip works, and the command is killed."""
    (a,) = prepared(bed, tmp_path, "a")
    write_inventory(tmp_path, [a], environment={"TRL_NODE_WARM_START": "off"})
    words = ("nodes", "up", "--site-packages", "--offline", "--url", bed.url.removesuffix("/v1"))
    command = subprocess.Popen([sys.executable, "-m", "llama_stack_provider_trl_remote", *words], env=environment())
    bed.wait(lambda: any(b"pip" in one for one in commands_of(a)), "pip works", 60)
    command.kill()
    command.wait()

    def repeated() -> tuple[int, str] | None:
        """As the command proposes while what works on the machine has not noticed the end of its connection."""
        code, printed = remote("up", "--site-packages", "--offline")
        return None if "another `trl-remote nodes` works on" in printed else (code, printed)

    code, printed = bed.wait(repeated, "the interrupted one has ended", 120)
    assert code == 0, printed
    assert "started" in printed
    assert len(list((a.data_dir / "ssh" / "environments").iterdir())) == 1
    assert remote("down")[0] == 0
    nothing_but_sshd(bed, a)


@IN_FULL
def test_a_service_with_tls_is_trusted_by_its_certificate_in_the_inventory(
    bed: Bed, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, settings = bed.certificate()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    (a,) = prepared(bed, tmp_path, "a", settings=settings)
    write_inventory(tmp_path, [a])
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 1
    assert "has a certificate that is not trusted there (self-signed certificate): set `certificate`" in printed
    shutil.copy(certificate, tmp_path / "operator" / "service.pem")
    write_inventory(tmp_path, [a], certificate="service.pem")
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 0, (printed, a.log_tail())
    assert remote("down")[0] == 0
    nothing_but_sshd(bed, a)


@IN_FULL
def test_another_version_replaces_the_agent_and_trainings_continue(bed: Bed, remote: Remote, tmp_path: Path) -> None:
    (a,) = prepared(bed, tmp_path, "a")
    write_inventory(tmp_path, [a], labels={"rack": "7"})
    assert remote("up", "--site-packages", "--offline")[0] == 0
    ready(bed, "a")
    release = bed.hold("step-6")
    submit(bed, dpo("one", 8, resources={"labels": {"rack": "7"}}))
    bed.wait(lambda: trains(bed, "one", beyond=4), "the job trains", 240)
    trainings = a.trainings()
    write_inventory(tmp_path, [a], labels={"rack": "7"}, environment={"ANOTHER": "1"})
    code, printed = remote("up", "--site-packages", "--offline")
    assert code == 0, printed
    assert "replaced" in printed
    assert set(trainings) <= set(a.trainings())
    release()
    status = bed.wait_for_end("one")
    assert status["status"] == "completed", status
    assert [attempt["reason"] for attempt in status["resources_allocated"]["attempts"]] == [None]
    assert remote("down", "--drain")[0] == 0
    nothing_but_sshd(bed, a)


@IN_FULL
def test_each_machine_that_cannot_be_a_node_has_its_sentence_and_the_others_are_nodes(
    bed: Bed, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, full = prepared(bed, tmp_path, "a", "full", disk_mb={"full": 1})
    _key(tmp_path / "operator" / "other")
    old = tmp_path / "bed" / "a" / "python3"
    old.write_text("#!/bin/sh\necho 3.9.2\n")
    old.chmod(0o755)
    fine = host(tmp_path, a)
    cases: dict[str, Json] = {
        "fine": fine,
        "refused": fine | {"key_file": "other"},
        "old-python": fine | {"python": str(old)},
        "no-python": fine | {"python": "/nowhere/python3"},
        "no-ssh": fine | {"port": 1},
        "nowhere": fine | {"host": f"{bed.network}.77"},
        "read-only": fine | {"data_dir": "/sys/kernel/trl-node"},
        "full": host(tmp_path, full),
    }
    nodes = [
        {
            **case,
            "name": name,
            "data_dir": case["data_dir"] if name in ("full", "read-only") else f"{a.data_dir}/{name}",
        }
        for name, case in cases.items()
    ]
    (tmp_path / "operator" / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes}))
    began = time.monotonic()
    code, printed = remote("up", "--site-packages", "--offline", "--json")
    assert code == 1
    assert time.monotonic() - began < 60
    rows = {row["node"]: row for row in json.loads(printed[printed.index("[\n") :])}
    expected = {
        "fine": r"joined, pid \d+",
        "refused": r"it refuses the key \S+/other for user root: add the public key",
        "old-python": r"`python` '\S+/python3' is needed there, found \S+ 3.9.2: install python3.12",
        "no-python": r"`python` '/nowhere/python3' is needed there, it does not run there: install",
        "no-ssh": r"port 1 of \S+ cannot be reached \(.*refused.*\): check host and port",
        "nowhere": r"port 22 of \S+ cannot be reached \(.*(no answer within 10 s|No route to host).*\)",
        "read-only": r"\S+ cannot be written by user root \(.*\): give that user the directory",
        "full": r"the disk of \S+ is full \(\d+\.\d of 1\.0 MiB are free\): free space there",
    }
    for name, sentence in expected.items():
        assert re.search(sentence, rows[name]["detail"]), rows[name]
        assert (rows[name]["result"] == "started") == (name == "fine"), rows[name]
    assert not list(a.data_dir.glob("*/ssh/token"))[1:], "only the node that joined has a token"

    # Without the packages of its Python, and without an index: the agent that runs is left alone.
    code, printed = remote("up", "fine", "--offline")
    assert code == 1
    assert re.search(r"failed +pip could not install it \(.*No matching distribution.*\): install it there", printed)
    assert re.search(r"running +agent \d+, .*at the service: open", remote("status", "fine")[1])

    monkeypatch.setenv("TRL_SERVICE_NODE_TOKEN", "wrong-token")
    write_inventory(tmp_path, [full], data_dir="/dev/shm/trl-ssh-test", name="stranger")
    try:
        assert re.search(r"failed +the agent ended: .* answered 401", remote("up", "--site-packages", "--offline")[1])
        write_inventory(
            tmp_path, [full], data_dir="/dev/shm/trl-ssh-test", name="stranger", service="http://10.1.2.3:1"
        )
        assert "cannot be reached from there" in remote("up", "--site-packages", "--offline")[1]
    finally:
        shutil.rmtree("/dev/shm/trl-ssh-test", ignore_errors=True)


def prepared(
    bed: Bed, directory: Path, *workers: str, disk_mb: dict[str, int] | None = None, settings: Json | None = None
) -> list[Machine]:
    """A service on `head`, and machines with nothing but an SSH server."""
    tiny_model()
    head = bed.machines[0] if bed.machines else bed.machine("head")
    head.serve(settings)
    machines = [bed.machine(name) for name in workers]
    for machine in machines:
        machine.disk_mb = (disk_mb or {}).get(machine.name, 0)
        keys = machine.root / "authorized_keys"
        shutil.copy(directory / "operator" / "id.pub", keys)
        machine.serve_ssh(keys)
    bed.wait(lambda: bed.session.get(f"{bed.url}/health", timeout=5).ok, "the service answers", 240)
    return machines


def write_inventory(directory: Path, machines: list[Machine], **changed: Any) -> None:
    of_file = {key: changed.pop(key) for key in ("service", "certificate") if key in changed}
    nodes = []
    for machine in machines:
        found = host(directory, machine)
        found["environment"] |= changed.get("environment", {})
        nodes.append({**found, **{key: value for key, value in changed.items() if key != "environment"}})
    (directory / "operator" / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes, **of_file}))


def commands_of(machine: Machine) -> list[bytes]:
    """The command lines of its processes."""
    found = []
    for pid in machine.pids():
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def environment() -> dict[str, str]:
    """Of a command in a process of its own, which finds this checkout."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def _shown(machine: Machine) -> str:
    """What `ps axe` shows of its processes."""
    found = []
    for pid in machine.pids():
        for part in ("cmdline", "environ"):
            found.append(Path(f"/proc/{pid}/{part}").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return " ".join(found)
