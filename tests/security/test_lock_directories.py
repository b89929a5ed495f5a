"""Device locks: another user of the machine can neither stop trainings nor have a file of ours overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch import runner
from llama_stack_provider_trl.system.process import FileLock


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The usual directory of locks, and one that only this user can make; neither is there."""
    shared, own = tmp_path / "tmp", tmp_path / "home" / "locks"
    shared.mkdir()
    monkeypatch.delenv("TRL_LOCK_DIR", raising=False)
    monkeypatch.setattr(runner, "LOCKS", shared)
    monkeypatch.setattr(runner, "_own_places", lambda: [own], raising=False)
    return shared / f"llama-stack-trl-{os.getuid()}", own


def directories() -> list[Path]:
    found = runner.device_locks()
    return found if isinstance(found, list) else [found]


def test_a_directory_that_another_user_made_first_stops_no_training(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, own = places
    usual.mkdir()
    stat = Path.stat

    def of_another(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = list(stat(path, follow_symlinks=follow_symlinks))
        found[4] += path == usual  # st_uid
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", of_another)  # lstat calls it
    assert directories() == [own]
    assert not list(usual.iterdir())


def test_a_link_in_place_of_the_directory_is_not_followed(places: tuple[Path, Path], tmp_path: Path) -> None:
    usual, own = places
    (tmp_path / "target").mkdir()
    usual.symlink_to(tmp_path / "target")
    assert directories() == [own]
    assert not list((tmp_path / "target").iterdir())
    usual.unlink()
    usual.mkdir(mode=0o700)
    (usual / "devices").symlink_to(tmp_path / "target")
    assert directories() == [own]


def test_a_device_lock_in_the_other_directory_counts_when_the_usual_one_can_be_created(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    usual, own = places
    usual.symlink_to(tmp_path)
    assert directories() == [own]
    usual.unlink()
    assert directories() == [usual / "devices", own]


def test_a_directory_of_ours_that_others_can_write_is_closed_to_them(places: tuple[Path, Path]) -> None:
    usual, _ = places
    usual.mkdir()
    usual.chmod(0o777)
    directories()
    assert usual.stat().st_mode & 0o777 == 0o700


def test_without_any_directory_the_sentence_names_the_setting(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, _ = places
    usual.write_text("")
    monkeypatch.setattr(runner, "_own_places", lambda: [])
    with pytest.raises(OSError, match=r"not a directory.*TRL_LOCK_DIR"):
        directories()


def test_a_link_in_place_of_a_lock_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "cpu.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        FileLock(tmp_path / "cpu.lock").acquire("us")
    assert (tmp_path / "precious").read_text() == "kept"
