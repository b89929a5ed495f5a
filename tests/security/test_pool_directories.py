"""Directories on machines that others use: what another user has made first, or could change, is not used."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.nodes import start
from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.pools import ssh
from llama_stack_provider_trl_remote.nodes.pools.base import AgentStart, PoolOrder
from llama_stack_provider_trl_remote.nodes.pools.slurm import SlurmPool
from llama_stack_provider_trl_remote.service.pool_settings import RayPoolSettings, SlurmPoolSettings
from tests.tiny import REPOSITORY

ATTACKER = 1234
PRODUCT = ("llama_stack_provider_trl", "llama_stack_provider_trl_remote", "deploy", "examples", "scripts")
KNOWN = {
    'llama_stack_provider_trl/launch/runner.py: LOCKS = Path("/tmp")': "checked by `_make_private`; else another one",
    'llama_stack_provider_trl/launch/isolation.py: _SCRATCH = ("/tmp", "/var/tmp")': "what a training may write to",
    "llama_stack_provider_trl/system/files.py: and never removes": "what torchrun would do",
    "llama_stack_provider_trl/export/wandb.py: else it logs to": "what wandb would do",
}
"""Lines of the product with /tmp -> why none of them is a place of our own that another user can take first."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp of a machine that several people use, where another user was first."""
    if os.getuid():
        pytest.skip("only root can give files to another user")
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "trl-node").mkdir(mode=0o777)
    (shared / "trl-node").chmod(0o777)
    os.chown(shared / "trl-node", ATTACKER, ATTACKER)
    return shared


def written(shared: Path) -> list[str]:
    return sorted(str(path.relative_to(shared)) for path in (shared / "trl-node").rglob("*"))


def test_an_agent_does_not_start_in_another_user_s_directory(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "make_agent", lambda settings: pytest.fail("it has started"))
    settings = start.worker_settings(
        "http://192.0.2.1:8322",
        {"TRL_SERVICE_NODE_TOKEN": "secret", "TRL_NODE_ADDRESS": "192.0.2.2"},
        data_dir=str(shared / "trl-node" / "agent"),
        device="cpu",
    )
    with pytest.raises(NodeError, match=r"trl-node belongs to user 1234.*choose a directory below your home"):
        start.serve(settings)
    assert written(shared) == []


def test_a_machine_over_ssh_is_not_set_up_in_another_user_s_directory(shared: Path) -> None:
    for action in ("up", "down", "status"):
        (shared / "trl-node" / "ssh").mkdir(exist_ok=True)
        os.chown(shared / "trl-node" / "ssh", ATTACKER, ATTACKER)
        request = {"action": action, "data_dir": str(shared / "trl-node"), "only": None}
        done = subprocess.run(
            [sys.executable, "-I", "-c", ssh.program().decode()],
            input=json.dumps(request) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        assert "belongs to user 1234" in answer["error"], (action, done.stderr)
    assert written(shared) == ["trl-node/ssh"]


def test_a_guard_does_not_use_another_user_s_directory(shared: Path) -> None:
    program = "llama_stack_provider_trl_remote.nodes.pools.guard"
    request = {"home": str(shared / "trl-node" / "gpu-1"), "command": ["/bin/false"]}
    done = subprocess.run(
        [sys.executable, "-m", program, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=60,
    )
    answer = json.loads(done.stdout)
    assert (answer["status"], "belongs to user 1234" in answer["message"]) == (1, True)
    assert written(shared) == []


def test_a_slurm_node_runs_nothing_in_another_user_s_directory(shared: Path) -> None:
    agent = AgentStart("http://10.0.0.1:8322", "/etc/trl-token", str(shared / "ran"), str(shared / "trl-node"))
    (shared / "trl-node" / "old").mkdir()
    (shared / "trl-node" / "old" / "pid").write_text(f"{os.uname().nodename} 999999999\n")
    script = SlurmPool(agent).script(PoolOrder("abc", ("gpu-abc-0",), "trl-abc"))
    (start_words,) = re.findall(r"^srun --kill-on-bad-exit=0 --ntasks-per-node=1 (.*) &$", script, re.MULTILINE)
    (shared / "ran").write_text("#!/bin/sh\ntouch " + shlex.quote(str(shared / "was-run")))
    (shared / "ran").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", start_words],
        env={"SLURM_PROCID": "0", "PATH": os.environ["PATH"], "HOME": str(shared)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "belongs to another user" in done.stderr
    assert written(shared) == ["trl-node/old", "trl-node/old/pid"]
    assert not (shared / "was-run").exists()


def test_the_pools_of_machines_have_a_directory_below_the_home_directory() -> None:
    (agents,) = [field.default for field in fields(AgentStart) if field.name == "data_dir"]
    for settings in (SlurmPoolSettings, RayPoolSettings):
        assert str(settings.model_fields["data_dir"].default) == agents
    assert str(agents).startswith("~/")


def test_no_place_in_tmp_is_a_default_of_the_product() -> None:
    found: list[str] = []
    used: set[Any] = set()
    for top in PRODUCT:
        for path in (REPOSITORY / top).rglob("*"):
            if not path.is_file() or path.suffix in (".js", ".css", ".svg", ".png", ".pyc"):
                continue
            for line in path.read_text(errors="replace").splitlines():
                if not re.search(r"/(var/)?tmp\b", line) or line.lstrip().startswith(("#", "ReadWritePaths")):
                    continue
                name = f"{path.relative_to(REPOSITORY)}: {line.strip()}"
                matching = [known for known in KNOWN if _is(known, name)]
                used.update(matching)
                if not matching and not _is_prose(path, line):
                    found.append(name)
    assert found == [], "another user can create it first: use own_directory, or mktemp -d"
    assert used == set(KNOWN)


def _is(known: str, line: str) -> bool:
    file, _, text = known.partition(": ")
    return line.startswith(f"{file}: ") and text in line


def _is_prose(path: Path, line: str) -> bool:
    """A sentence of a docstring."""
    return path.suffix == ".py" and not re.search(r"[\"'(=}/]/(var/)?tmp", line.replace('"""', ""))
