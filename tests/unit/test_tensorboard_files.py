"""TensorBoard's files over writes that were not recorded, attempts that resume, and files that others touch."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.export.points import Measured, Step
from llama_stack_provider_trl.export.tracker import CopyLost, Target

pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")

from llama_stack_provider_trl.export.tensorboard import TensorBoard


def target(generation: int = 1, key: str = "a1") -> Target:
    return Target("job-1", "project", "run", key, generation, datetime(2026, 1, 1, tzinfo=UTC), {})


def steps(*numbers: int, loss: float = 0.0) -> list[Step]:
    return [Step(number, (Measured(float(number), {"train/loss": loss + number}),)) for number in numbers]


def found(directory: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        (event.step, value.simple_value)
        for path in sorted(directory.glob("events*"))
        for event in (LegacyEventFileLoader(str(path)).Load() if path.stat().st_size else ())
        for value in event.summary.value
    ]


def test_a_write_that_was_not_recorded_is_made_again_with_the_same_bytes(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    position = board.write(target(), {}, steps(1, 2))
    board.write(target(), position, steps(3, 4))
    (path,) = (tmp_path / "project" / "run").glob("events*")
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(b"a record that a kill has cut")
    board.write(target(), position, steps(3, 4))
    assert path.read_bytes() == before
    assert found(path.parent) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_first_write_that_was_not_recorded_leaves_one_run(tmp_path: Path) -> None:
    TensorBoard(tmp_path).write(target(), {}, steps(1, 2, 3))
    TensorBoard(tmp_path).write(target(), {}, steps(1, 2))
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["run"]
    assert found(tmp_path / "project" / "run") == [(1, 1.0), (2, 2.0)]


def test_another_copy_replaces_the_one_before_in_files_and_in_a_tensorboard_that_is_open(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.write(target(), {}, steps(1, 2, 3, 4))
    run = tmp_path / "project" / "run"
    shown = EventAccumulator(str(run), size_guidance={"scalars": 0})
    shown.Reload()
    board.write(target(2), {}, steps(1, 2, 3, loss=0.5))
    shown.Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 2, 3]
    assert found(run) == [(1, 1.5), (2, 2.5), (3, 3.5)]


@pytest.mark.parametrize("damage", ["removed", "shorter"])
def test_a_file_that_lost_points_is_written_again(tmp_path: Path, damage: str) -> None:
    board = TensorBoard(tmp_path)
    position = board.write(target(), {}, steps(1, 2))
    (path,) = (tmp_path / "project" / "run").glob("events*")
    path.unlink() if damage == "removed" else path.write_bytes(b"")
    with pytest.raises(CopyLost):
        board.write(target(), position, steps(3))
    board.write(target(2), {}, steps(1, 2, 3))
    assert [step for step, _ in found(path.parent)] == [1, 2, 3]


def test_jobs_of_the_same_name_have_directories_of_their_own(tmp_path: Path) -> None:
    positions: list[dict[str, Any]] = [TensorBoard(tmp_path).write(target(key=key), {}, steps(1)) for key in "abc"]
    assert [position["run"] for position in positions] == ["run", "run-2", "run-3"]


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    position = board.write(target(), {}, steps(1))
    (path,) = (tmp_path / "project" / "run").glob("events*")
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(OSError, match="symbolic links"):
        board.write(target(), position, steps(2))
    assert outside.read_bytes() == before
