"""Directories that only their user can change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llama_stack_provider_trl.system import owned_paths
from llama_stack_provider_trl.system.owned_paths import UnsafePath, own_directory


def test_what_is_missing_is_created_for_its_user_alone(tmp_path: Path) -> None:
    own_directory(tmp_path / "a" / "b")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    own_directory(tmp_path / "a" / "b")
    own_directory(tmp_path / "a" / ".." / "a" / "b", create=False)


def test_nothing_is_created_where_the_caller_only_checks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        own_directory(tmp_path / "a" / "b", create=False)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
def test_a_directory_that_others_can_write_is_refused_wherever_it_is_on_the_path(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open" / "own").mkdir(parents=True)
    (tmp_path / "open").chmod(mode)
    os.chown(tmp_path / "open", -1, 100) if os.getuid() == 0 else None
    if os.getuid() and mode == 0o775:
        pytest.skip("only root can give it to another group")
    for path in (tmp_path / "open", tmp_path / "open" / "own", tmp_path / "open" / "new"):
        with pytest.raises(UnsafePath, match=rf"{tmp_path}/open can be written by .*mode 0{mode:o}.*chmod go-w"):
            own_directory(path)
    assert not (tmp_path / "open" / "new").exists()


def test_a_directory_such_as_tmp_may_be_on_the_path_and_may_not_be_its_end(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    own_directory(tmp_path / "tmp" / "own")
    with pytest.raises(UnsafePath, match="can be written by every user"):
        own_directory(tmp_path / "tmp")


def test_a_link_of_this_user_is_followed_and_what_it_names_is_checked(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "absolute").symlink_to(tmp_path / "there")
    (tmp_path / "relative").symlink_to("absolute/../there")
    own_directory(tmp_path / "absolute" / "own")
    own_directory(tmp_path / "relative" / "own", create=False)
    (tmp_path / "there").chmod(0o777)
    with pytest.raises(UnsafePath, match="there can be written by every user"):
        own_directory(tmp_path / "relative" / "own")


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UnsafePath, match="more than 40 symbolic links"):
        own_directory(tmp_path / "a")


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafePath, match="file is no directory"):
        own_directory(tmp_path / "file" / "own")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    own_directory(tmp_path / "a" / "b")
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(UnsafePath):
        own_directory(tmp_path / "a" / "b")
    assert before in (0, len(os.listdir("/proc/self/fd")))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to other users")
@pytest.mark.parametrize("what", ["directory", "parent", "link"])
def test_what_another_user_has_made_first_is_refused(tmp_path: Path, what: str) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    if what == "link":
        (shared / "trl-node").symlink_to(tmp_path)
        os.chown(shared / "trl-node", 1234, 1234, follow_symlinks=False)
    else:
        (shared / "trl-node").mkdir(mode=0o755)
        os.chown(shared / "trl-node", 1234, 1234)
    wanted = shared / "trl-node" / "agent" if what == "parent" else shared / "trl-node"
    with pytest.raises(UnsafePath, match=r"user 1234.*choose a directory below your home"):
        own_directory(wanted)
    assert list(tmp_path.glob("tmp/trl-node/agent")) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_s_directory_is_refused_by_a_user_without_rights(tmp_path: Path) -> None:
    shared = Path("/tmp") / f"trl-owned-{os.getpid()}"
    shared.mkdir()
    try:
        shared.chmod(0o1777)
        victim, attacker = 4321, 1234
        (shared / "trl-node").mkdir()
        os.chown(shared / "trl-node", attacker, attacker)
        (shared / "trl-node").chmod(0o777)
        assert _as_user(victim, shared / "trl-node" / "agent") == "UnsafePath"
        assert _as_user(victim, shared / "own" / "agent") == ""
        assert (shared / "own").stat().st_uid == victim
        assert _as_user(attacker, shared / "own" / "agent") == "UnsafePath"
    finally:
        for path in sorted(shared.rglob("*"), reverse=True):
            path.rmdir()
        shared.rmdir()


def _as_user(uid: int, path: Path) -> str:
    """The name of the error that this user meets; empty: none."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        name = ""
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            own_directory(path)
        except BaseException as error:
            name = type(error).__name__
        os.write(write, name.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as answer:
        return answer.read()


def test_the_user_s_own_group_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own").chmod(0o770)
    monkeypatch.setattr(owned_paths, "_is_own_group", lambda gid: gid == (tmp_path / "own").stat().st_gid)
    own_directory(tmp_path / "own" / "agent")
