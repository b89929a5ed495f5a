"""TensorBoard: one event file per copy, cut back to the recorded size before each write.

The records behind that size are those of a write that was not recorded. A repeated write appends the same bytes, so a
TensorBoard that has read them continues. A copy is begun again in another file, whose first record has TensorBoard
drop what it has read; the files of earlier copies are emptied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ..jobs.decisions.states import JobState
from ..system.files import atomic_write_json
from .points import Step
from .tracker import CopyLost, Target

_OWNER = ".llama-stack-trl.json"
"""In a run's directory: the key of the job that writes there."""
_MOST_NAMESAKES = 10_000


class TensorBoard:
    """Writes below `directory`, a directory per project with one per run."""

    at_end = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """See `Tracker.write`. Raises OSError."""
        run = position.get("run") or self._claim(target)
        directory = self._directory / target.project / run
        path = directory / f"{_prefix(target)}.{target.generation:06d}"
        if not position:
            _empty_earlier(directory, target, path.name)
        size = position.get("size", 0)
        if position and not path.exists():
            raise CopyLost(f"{path} was removed")
        with open(path, "r+b" if position else "a+b", opener=_no_link) as file:
            if file.seek(0, os.SEEK_END) < size:
                raise CopyLost(f"{path} is shorter than what was written to it")
            file.truncate(size)
            file.seek(size)
            writer = RecordWriter(file)
            for event in _events(target, steps, is_new=size == 0):
                writer.write(event.SerializeToString(deterministic=True))
            file.flush()
            os.fsync(file.fileno())
            return {"run": run, "size": file.tell()}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        """See `Tracker.finish`: a file has no end."""

    def _claim(self, target: Target) -> str:
        """The directory of a run: its name, or with a number where another job's run has that name."""
        project = self._directory / target.project
        project.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MOST_NAMESAKES):
            name = target.run if number == 1 else f"{target.run}-{number}"
            with suppress(FileExistsError):
                _make_owned(project, name, target.key)
            if _owner(project / name) == target.key:
                return name
        raise FileExistsError(f"{project} has {_MOST_NAMESAKES} runs of the name {target.run!r}: choose another")


def _make_owned(project: Path, name: str, key: str) -> None:
    """Make a directory that has its owner's key from its first instant on. Raises FileExistsError."""
    if (project / name).exists():
        raise FileExistsError(project / name)
    made = project / f".{key}"
    made.mkdir(exist_ok=True)
    atomic_write_json(made / _OWNER, {"key": key})
    try:
        made.rename(project / name)
    except OSError as error:  # made by another process at this instant
        raise FileExistsError(project / name) from error


def _owner(directory: Path) -> str | None:
    try:
        found: str = json.loads((directory / _OWNER).read_text())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def _prefix(target: Target) -> str:
    return f"events.out.tfevents.{int(target.scheduled_at.timestamp())}.{target.key}"


def _empty_earlier(directory: Path, target: Target, current: str) -> None:
    """Empty the files of earlier copies. A TensorBoard that reads one continues with the next: removing it while it is
    read is an error there."""
    for path in directory.glob(f"{_prefix(target)}.*"):
        if path.name < current:
            os.truncate(path, 0)


def _events(target: Target, steps: Iterable[Step], *, is_new: bool) -> Iterator[Event]:
    if is_new:
        created = target.scheduled_at.timestamp()
        yield Event(wall_time=created, file_version="brain.Event:2")
        if target.generation > 1:
            yield Event(wall_time=created, step=0, session_log=SessionLog(status=SessionLog.START))
    for step in steps:
        for part in step.parts:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in part.values.items()]
            yield Event(wall_time=part.time, step=step.step, summary=Summary(value=values))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
