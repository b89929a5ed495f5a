"""`trl-remote doctor`: what it finds, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch.isolation import Isolation
from llama_stack_provider_trl_remote.cli import doctor
from llama_stack_provider_trl_remote.cli import main as cli


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that is fit for the service; returns the service's data directory."""
    monkeypatch.setenv("TRL_SERVICE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TRL_SERVICE_TOKEN", "secret")
    for name in ("TRL_SERVICE_CONFIG", "TRL_SERVICE_HOST", "TRL_SERVICE_PORT", "TRL_SERVICE_NODE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "probe", lambda: Isolation("root"))
    monkeypatch.setattr(doctor, "free_bytes", lambda path: 1 << 40)
    monkeypatch.setattr(doctor, "check_interpreter", lambda python: None)
    monkeypatch.setattr(doctor, "versions", lambda python: {"python": "3.12.1"})
    return tmp_path / "data"


def findings(*arguments: str) -> dict[str, doctor.Finding]:
    config = Path(arguments[0]) if arguments else None
    return {finding.what: finding for finding in doctor.examine(config)}


def test_a_fit_machine_has_no_failure_and_every_finding_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    assert any(line.startswith("ok    isolation     trainings are isolated (root)") for line in lines)


def test_the_findings_as_json_have_levels_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {frozenset(one) for one in found} == {frozenset({"level", "what", "found", "advice"})}


def test_a_token_that_is_missing_beyond_loopback_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRL_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("TRL_SERVICE_TOKEN")
    assert cli.main(["doctor"]) == 1
    assert "set TRL_SERVICE_TOKEN" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "level"), [("auto", "warn"), ("required", "fail")])
def test_isolation_that_cannot_be_had_reports_why_and_what_to_do(
    machine: Path, monkeypatch: pytest.MonkeyPatch, mode: str, level: str
) -> None:
    config = machine.with_name("run.yaml")
    block = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": {"isolation": mode}}
    config.write_text(json.dumps({"providers": {"post_training": [block]}}))
    monkeypatch.setattr(doctor, "probe", lambda: Isolation(why_not="a user namespace: Operation not permitted"))
    found = findings(str(config))["isolation"]
    assert (found.level, found.found) == (
        level,
        "trainings cannot be isolated: a user namespace: Operation not permitted",
    )
    assert "max_user_namespaces" in found.advice


def test_settings_that_cannot_be_loaded_are_a_failure_and_the_rest_is_examined(machine: Path) -> None:
    config = machine.with_name("run.yaml")
    config.write_text("providers: [")
    found = findings(str(config))
    assert found["settings"].level == "fail"
    assert "isolation" in found


def test_a_data_directory_that_others_can_read_is_a_warning(machine: Path) -> None:
    machine.mkdir()
    machine.chmod(0o755)
    assert (findings()["data_dir"].level, findings()["data_dir"].advice) == ("warn", f"chmod 0700 {machine}")
    machine.chmod(0o700)
    assert findings()["data_dir"].level == "ok"


def test_a_read_only_disk_is_a_failure_and_its_database_is_not_to_be_replaced(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.mkdir(mode=0o700)
    (machine / "jobs.sqlite3").write_bytes(b"cannot be opened" * 100)
    assert "put a backup of it in its place" in findings()["own files"].found
    monkeypatch.setattr(doctor, "is_read_only", lambda path: True)
    found = findings()
    assert (found["data_dir"].level, "own files" in found) == ("fail", False)
    assert "is read-only: the service accepts no jobs" in found["data_dir"].found
    assert "make it writable again" in found["data_dir"].advice


def test_a_full_disk_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda path: 1 << 20)
    assert findings()["disk"].level == "fail"


@pytest.mark.parametrize(
    ("visible", "found"), [("0,1,2", "3 per job unless it sets a number (auto: one per GPU)"), ("", "1 per job")]
)
def test_the_ranks_of_a_job_are_named_with_the_origin_of_their_number(
    monkeypatch: pytest.MonkeyPatch, visible: str, found: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert findings()["ranks"].found.startswith(found)


def test_more_ranks_than_gpus_are_a_failure(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = machine.with_name("run.yaml")
    block = {
        "provider_id": "trl",
        "provider_type": "remote::trl_remote",
        "config": {"torch_run_config": {"nproc_per_node": 2}},
    }
    config.write_text(json.dumps({"providers": {"post_training": [block]}}))
    assert findings(str(config))["ranks"].level == "fail"


@pytest.mark.parametrize(("visible", "missing", "level"), [("0", "", "ok"), ("0", "no C compiler was found", "warn")])
def test_a_machine_with_gpus_is_examined_for_what_triton_compiles_with(
    monkeypatch: pytest.MonkeyPatch, visible: str, missing: str, level: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(doctor, "missing_compiler", lambda: missing)
    found = findings()["triton"]
    assert found.level == level
    assert ("install gcc" in found.advice) == bool(missing)


def test_a_machine_without_gpus_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "triton" not in findings()


def test_the_interpreter_that_trains_is_the_one_that_is_examined(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    python = machine.with_name("python")
    python.write_text('#!/bin/sh\necho -n "no Python.h ($2)"\n')
    python.chmod(0o755)
    config = machine.with_name("run.yaml")
    block = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": {"train_python": str(python)}}
    config.write_text(json.dumps({"providers": {"post_training": [block]}}))
    assert findings(str(config))["triton"].found == "no Python.h (llama_stack_provider_trl.system.compiler)"
