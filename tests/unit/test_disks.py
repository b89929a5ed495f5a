"""What health reports of disks, while it waits for none of them."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llama_stack_provider_trl_remote.service import disks as disks_module
from llama_stack_provider_trl_remote.service import space as module
from llama_stack_provider_trl_remote.service.disks import DiskWatch
from llama_stack_provider_trl_remote.service.routes.service import health
from llama_stack_provider_trl_remote.service.space import Space
from tests.fakes import FakeClock

MIN_FREE = 100 << 20
PARTS = {
    "uploaded rows": ("datasets", "no rows are accepted"),
    "checkpoints": ("checkpoints", "jobs cannot save"),
    "run directories": ("jobs", "jobs cannot start"),
    "the token cache": ("tokens", "jobs may fail"),
    "the reference cache": ("reference", "jobs may fail"),
}


class Disks:
    """The disk of each directory of a data directory, and of temporary files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data_dir, self.temporary = root / "data", root / "tmp"
        for name in ("datasets", "checkpoints", "jobs", "tokens", "reference"):
            (self.data_dir / name).mkdir(parents=True)
        self.temporary.mkdir()
        self.free: dict[Path, int] = {}
        self.read_only: set[Path] = set()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setattr(module, "free_bytes", lambda path: self.free.get(path, 1 << 40))
        monkeypatch.setattr(module, "is_read_only", lambda path: path in self.read_only)
        self.clock = FakeClock()
        self.watch = DiskWatch(Space(MIN_FREE, clock=self.clock), self.data_dir, [root / "results"], self.clock)

    def problem(self) -> str | None:
        self.watch.examine()
        return self.watch.problem()


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    return Disks(tmp_path, monkeypatch)


def test_the_disk_of_the_data_directory_is_reported_until_it_can_be_written_to(disks: Disks) -> None:
    assert disks.problem() is None
    disks.read_only.add(disks.data_dir)
    assert disks.problem() == (
        "the disk of the data directory is read-only: make it writable again (the kernel's log has the reason); until "
        "then nothing new is accepted"
    )
    disks.read_only.clear()
    disks.free[disks.data_dir] = MIN_FREE - 1
    assert disks.problem() == (
        "the disk of the data directory is full: free some space; until then nothing new is accepted"
    )
    disks.free.clear()
    assert disks.problem() is None


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_it_on_another_disk_is_reported_by_its_name(disks: Disks, part: str) -> None:
    name, consequence = PARTS[part]
    disks.free[disks.data_dir / name] = 0
    assert disks.problem() == f"the disk of {part} is full: free some space; until then {consequence}"


def test_another_directory_for_checkpoints_is_reported(disks: Disks) -> None:
    disks.read_only.add(disks.data_dir.with_name("results"))
    assert disks.problem() == (
        "the disk of a directory of checkpoint_roots is read-only: make it writable again (the kernel's log has the "
        "reason); until then no job saves there"
    )


def test_temporary_files_need_a_little_space_only(disks: Disks) -> None:
    disks.free[disks.temporary] = 1 << 20
    assert disks.problem() is None
    disks.free[disks.temporary] -= 1
    assert disks.problem() == "the disk of temporary files is full: free some space; until then jobs may fail"


def test_a_disk_that_cannot_be_examined_is_reported_with_the_reason(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "is_read_only", fails)
    assert "cannot be examined (Input/output error): check it" in (disks.problem() or "")


@pytest.mark.parametrize("part", ["the data directory", *PARTS])
def test_a_disk_that_looks_writable_and_is_not_is_reported_until_it_is(
    disks: Disks, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """As ext4 after its journal was aborted, or a directory of another owner."""
    name, consequence = PARTS.get(part, (".", "nothing new is accepted"))
    tried: list[Path] = []
    failing: dict[Path, OSError] = {disks.data_dir / name: OSError(5, "Input/output error")}

    def tries(directory: Path) -> None:
        tried.append(directory)
        if directory in failing:
            raise failing[directory]

    monkeypatch.setattr(disks_module, "try_to_write", tries)
    for _ in range(2):
        assert disks.problem() == (
            f"the disk of {part} cannot be written to (Input/output error): check it (the kernel's log has the "
            f"reason); until then {consequence}"
        )
    failing.clear()
    assert disks.problem() is None
    tried.clear()
    disks.clock.advance(19)
    assert (disks.problem(), tried) == (None, []), "each write takes a disk some time"
    disks.clock.advance(1)
    assert disks.problem() is None
    assert {disks.data_dir, disks.temporary, disks.data_dir.parent} <= {*tried}
    failing[disks.data_dir / name] = OSError(28, "No space left on device")  # such as for its directories
    disks.clock.advance(20)
    assert disks.problem() == f"the disk of {part} is full: free some space; until then {consequence}"


def test_a_disk_whose_writes_hang_is_reported(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system that was frozen: it answers what is only asked of it."""
    asked, answers = threading.Event(), threading.Event()

    def hangs(directory: Path) -> None:
        asked.set()
        assert answers.wait(60)

    monkeypatch.setattr(disks_module, "try_to_write", hangs)
    disks.watch.start()
    try:
        assert asked.wait(20)
        disks.clock.advance(6)
        assert "the disk of the data directory has not answered for 6 s" in (disks.watch.problem() or "")
    finally:
        disks.watch.stop()
        answers.set()


def test_nothing_of_what_is_tried_stays_and_a_lack_of_descriptors_is_no_fault_of_the_disk(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(disks.data_dir.parent.rglob("*"))
    assert disks.problem() is None
    assert sorted(disks.data_dir.parent.rglob("*")) == before

    def fails(directory: Path) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(disks_module, "try_to_write", fails)
    disks.clock.advance(20)
    assert disks.problem() is None


def test_a_directory_that_was_moved_away_is_reported_and_one_that_comes_later_is_not(disks: Disks) -> None:
    aside = disks.data_dir.with_name("aside")
    disks.data_dir.rename(aside)
    assert disks.problem() == (
        "the data directory is missing: move it back, or mount its disk; until then nothing new is accepted"
    )
    aside.rename(disks.data_dir)
    (disks.data_dir / "datasets").rename(aside)
    assert "the directory of uploaded rows is missing" in (disks.problem() or "")
    (disks.data_dir / "datasets").symlink_to(aside)
    (disks.data_dir / "tokens").rmdir()
    assert disks.problem() is None
    (disks.data_dir / "tokens").symlink_to(disks.data_dir / "unmounted")
    assert "the directory of the token cache is missing" in (disks.problem() or "")


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, threading.Event]]:
    """A directory whose disk does not answer before the test ends, and whether it has been asked."""
    asked, answers, statvfs, directory = threading.Event(), threading.Event(), os.statvfs, tmp_path / "checkpoints"

    def hanging(path: Any) -> os.statvfs_result:
        if Path(path) == directory:
            asked.set()
            assert answers.wait(60)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", hanging)
    yield directory, asked
    answers.set()


def test_health_answers_and_says_so_while_a_disk_hangs(tmp_path: Path, hung: tuple[Path, threading.Event]) -> None:
    directory, asked = hung
    directory.mkdir()
    clock = FakeClock()
    watch = DiskWatch(Space(0, clock=clock), tmp_path, clock=clock)
    supervisor = cast(Any, SimpleNamespace(supervising=True))

    def answer() -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(asyncio.run(health(watch, supervisor)).body))  # type: ignore[arg-type]

    assert answer()["storage_problem"] is None  # before the first examination
    watch.start()
    try:
        assert asked.wait(20)
        clock.advance(4)
        assert answer()["storage_problem"] is None  # a busy disk
        clock.advance(60)
        assert answer() == {
            "status": "OK",
            "version": answer()["version"],
            "supervising": True,
            "storage_problem": "the disk of checkpoints has not answered for 64 s: check it, or the machine and the "
            "network that it is mounted from; until then jobs cannot save",
        }
    finally:
        watch.stop()
