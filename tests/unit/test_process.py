from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llama_stack_provider_trl.process import FileLock, alive, child_environment, identify, myself


def test_this_process_is_alive() -> None:
    assert alive(myself())


def test_a_process_that_got_the_pid_of_an_earlier_one_is_not_taken_for_it() -> None:
    earlier = replace(myself(), started="the boot before this one:123")
    assert not alive(earlier)


def test_a_pid_that_nobody_has_names_no_process() -> None:
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
    }
    assert child_environment(environ, {}) == environ


@pytest.mark.parametrize("secret", ["TRL_SERVICE_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PATH", "PATHS"])
def test_children_see_no_secret_of_the_server(secret: str) -> None:
    assert child_environment({secret: "x", "PATH": "/bin"}, {"A": "b"}) == {"PATH": "/bin", "A": "b"}


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
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
    assert not other.acquire("somebody else")
    lock.release()
    assert other.acquire("somebody else")
    other.release()
