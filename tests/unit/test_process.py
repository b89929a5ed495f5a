from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.process import (
    FileLock,
    alive,
    available_memory,
    child_environment,
    identify,
    machine_memory,
    myself,
    usable_cpus,
)


def test_this_process_is_alive() -> None:
    assert alive(myself())


def test_a_process_that_got_the_pid_of_an_earlier_one_is_not_taken_for_it() -> None:
    earlier = replace(myself(), started="the boot before this one:123")
    assert not alive(earlier)


def test_a_pid_without_a_process_names_none() -> None:
    assert identify(2**22 + 1) is None


def test_children_see_what_training_needs() -> None:
    environ = {
        "PATH": "/bin",
        "HOME": "/root",
        "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "1",
        "HF_TOKEN": "hf_x",
        "https_proxy": "http://proxy",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRL_LOCK_DIR": "/run/locks",
        "CC": "gcc-13",
        "CPATH": "/opt/include",
        "FI_PROVIDER": "efa",
        "UCX_TLS": "rc",
    }
    assert child_environment(environ, {}) == environ


@pytest.mark.parametrize("secret", ["TRL_SERVICE_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PATH", "PATHS"])
def test_children_see_no_secret_of_the_server(secret: str) -> None:
    assert child_environment({secret: "x", "PATH": "/bin"}, {"A": "b"}) == {"PATH": "/bin", "A": "b"}


def test_a_lock_reports_who_holds_it(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire("job one")
    assert not second.acquire("job two")
    assert second.holder() == "job one"
    assert first.held
    assert not second.held


def test_a_released_lock_can_be_taken_and_names_only_its_new_holder(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire("a holder with a long name")
    first.release()
    assert second.acquire("short")
    assert second.holder() == "short"
    second.describe("a longer description")
    second.describe("mine")
    assert first.holder() == "mine"


def test_a_lock_is_not_inherited_by_programs_that_are_started(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.acquire("me")
    assert lock._fd is not None
    assert not os.get_inheritable(lock._fd)


def test_a_lock_that_cannot_be_signed_because_the_disk_is_full_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert lock.acquire("me")
    assert lock.held
    assert not other.acquire("another process")
    lock.release()
    assert other.acquire("another process")
    other.release()


class ControlGroups:
    """Files of control groups, and our own entries of /proc."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
        self.root = root
        read_text = Path.read_text
        monkeypatch.setattr(process, "_CONTROL_GROUPS", root)
        monkeypatch.setattr(
            Path, "read_text", lambda path: message if path == Path("/proc/self/cgroup") else read_text(path)
        )
        machine = SimpleNamespace(total=64 << 30, available=40 << 30)
        monkeypatch.setattr(process.psutil, "virtual_memory", lambda: machine)

    def group(self, path: str, controller: str = "memory", **files: int | str) -> None:
        place = self.root / path
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (place / f"{controller}.{name}").write_text(f"{content}\n")


def stat(**fields: int) -> str:
    return "\n".join(f"{name} {value}" for name, value in fields.items())


GIB = 1 << 30
CACHED = {"inactive_file": GIB, "active_file": GIB // 2}


def test_without_a_limit_the_machine_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ControlGroups(tmp_path, monkeypatch, "1:memory:/\n0::/user.slice\n")
    groups.group("user.slice", max="max", high="max", current=5)
    groups.group("memory", limit_in_bytes=9223372036854771712, usage_in_bytes=5 * GIB, stat="")
    assert (machine_memory(), available_memory()) == (64 * GIB, 40 * GIB)


@pytest.mark.parametrize("limits", [{"max": 8 * GIB, "high": "max"}, {"max": "max", "high": 8 * GIB}])
def test_a_control_group_of_version_2_counts_with_what_cannot_be_reclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]
) -> None:
    groups = ControlGroups(tmp_path, monkeypatch, "0::/user.slice/job\n")
    # A tmpfs is in `file`, and in none of the lists of files that can be dropped.
    groups.group("user.slice/job", max="max", high="max", current=GIB, stat=stat(anon=1))
    groups.group("user.slice", **limits, current=6 * GIB, stat=stat(anon=GIB, file=4 * GIB, **CACHED))
    assert (machine_memory(), available_memory()) == (8 * GIB, 3 * GIB + GIB // 2)


@pytest.mark.parametrize("seen_at", ["docker/3f", ""])
def test_a_control_group_of_version_1_counts_wherever_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_at: str
) -> None:
    groups = ControlGroups(tmp_path, monkeypatch, "9:cpu,cpuacct:/other\n4:memory:/docker/3f\n0::/\n")
    of_all = stat(inactive_file=7, **{f"total_{name}": value for name, value in CACHED.items()})
    groups.group(f"memory/{seen_at}", limit_in_bytes=6 * GIB, usage_in_bytes=5 * GIB, stat=of_all)
    assert (machine_memory(), available_memory()) == (6 * GIB, 2 * GIB + GIB // 2)


def test_a_limit_whose_use_is_not_known_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ControlGroups(tmp_path, monkeypatch, "0::/\n")
    groups.group("", max=8 * GIB)
    assert (machine_memory(), available_memory()) == (8 * GIB, 0)


@pytest.mark.parametrize(
    ("lines", "groups", "expected"),
    [
        ("0::/pod/agent\n", {"pod": {"max": "800000 100000"}, "pod/agent": {"max": "max 100000"}}, 8),
        ("0::/pod/agent\n", {"pod": {"max": "max 100000"}, "pod/agent": {"max": "350000 100000"}}, 3),
        ("0::/\n", {"": {"max": "50000 100000"}}, 1),  # a half, seen from inside
        ("0::/pod\n", {"pod": {"max": "9900000 100000"}}, 64),
        ("3:cpu,cpuacct:/pod\n0::/\n", {"cpu/pod": {"cfs_quota_us": 600000, "cfs_period_us": 100000}}, 6),
        ("3:cpu,cpuacct:/pod\n0::/\n", {"cpu/pod": {"cfs_quota_us": -1, "cfs_period_us": 100000}}, 64),
        ("0::/\n", {}, 64),
    ],
)
def test_the_cpus_of_a_container_are_those_of_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, groups: dict[str, dict[str, Any]], expected: int
) -> None:
    found = ControlGroups(tmp_path, monkeypatch, lines)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for path, files in groups.items():
        found.group(path, "cpu", **files)
    assert usable_cpus() == expected
