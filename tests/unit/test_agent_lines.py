"""`trl-remote nodes commands`, and the token file that its lines name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.cli import main as cli
from llama_stack_provider_trl_remote.cli.machine_commands import worker_lines
from llama_stack_provider_trl_remote.nodes.identity import NodeError, read_token
from tests.tiny import REPOSITORY

SECRET = "s3cret-of-the-cluster"


def test_the_documented_commands_are_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRL_SERVICE_TOKEN", SECRET)
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    command, _, printed = page.partition("$ trl-remote ")[2].partition("```")[0].partition("\n")
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == printed
    assert SECRET not in printed


@pytest.mark.parametrize(
    ("nodes", "url", "message"),
    [
        ("0", "http://10.0.0.1:8322", "--nodes=0 "),
        ("2", "http://127.0.0.1:8322", "other machines cannot reach this address"),
        ("2", "http://localhost:8322", "other machines cannot reach this address"),
        ("2", "http://[::1]:8322", "other machines cannot reach this address"),
        ("2", "http://0.0.0.0:8322", "other machines cannot reach this address"),
    ],
)
def test_what_no_cluster_can_be_made_of(capsys: pytest.CaptureFixture[str], nodes: str, url: str, message: str) -> None:
    assert cli.main(["nodes", "commands", "--nodes", nodes, "--url", url]) == 1
    written = capsys.readouterr()
    assert message in written.err
    assert (written.err.count("\n"), written.out) == (1, "")


def test_one_machine_needs_no_address_for_others() -> None:
    assert worker_lines("http://127.0.0.1:8322", 1, "~/token") == []


def test_a_line_starts_an_agent_with_its_rank_address_and_files(tmp_path: Path) -> None:
    """The script's Python is played: it prints what an agent would get."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts" / "run-remote-fsdp-server.sh", tmp_path / "scripts")
    (tmp_path / ".venv" / "prepare-env.stamp").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$3 $NODE_RANK $TRL_SERVICE_URL $TRL_SERVICE_NODE_TOKEN_FILE $SSL_CERT_FILE"\n')
    python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "HOME": "/home/one"}
    for given, read in (("~/a token", "/home/one/a token"), ("its token", f"{tmp_path}/its token"), ("/t$1", "/t$1")):
        line = worker_lines("https://head:9000", 3, given, "/etc/c.pem")[1]
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.stdout == f"agent 2 https://head:9000 {read} /etc/c.pem\n", done.stderr


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_token_is_read_from_a_file(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(mode)
    assert read_token(str(file)) == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o660, 0o644])
def test_a_token_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(mode)
    with pytest.raises(NodeError, match=f"has mode {mode:04o}.*: chmod 600 {file}"):
        read_token(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", "has no token"),
        (b"x" * 4097, "more than 4096 bytes"),
        (SECRET.encode() + b"\nmore", "does not hold one line of text"),
        (b"\xff\xfe", "does not hold one line of text"),
    ],
)
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(NodeError, match=message) as refused:
        read_token(str(file))
    assert SECRET not in str(refused.value)


def test_a_pipe_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(NodeError, match="not a regular file"):
        read_token(str(tmp_path / "pipe"))
    with pytest.raises(NodeError, match="No such file"):
        read_token(str(tmp_path / "none"))


@pytest.mark.parametrize("by_option", [True, False])
def test_an_agent_takes_its_token_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(SECRET)
    found: list[str] = []
    monkeypatch.setattr(
        cli, "_agent", lambda url, options, environ: found.append(environ["TRL_SERVICE_NODE_TOKEN"]) or 0
    )
    monkeypatch.setenv("TRL_SERVICE_NODE_TOKEN", "another")
    if not by_option:
        monkeypatch.setenv("TRL_SERVICE_NODE_TOKEN_FILE", str(file))
    words = ["--token-file", str(file)] if by_option else []
    assert cli.main(["agent", "--service", "http://10.0.0.1:8322", *words]) == 0
    assert found == [SECRET]
