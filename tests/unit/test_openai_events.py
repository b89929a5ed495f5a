"""Lists whose newest entry is first: events are read backwards as they are read forwards, jobs by name and metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store import reader
from llama_stack_provider_trl.jobs.store.records import EventFile
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import LINE_BYTES
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl_remote.openai.models import OpenAIModels
from llama_stack_provider_trl_remote.service.http.errors import OpenAIRefused
from llama_stack_provider_trl_remote.service.serving.chats import Chats
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from llama_stack_provider_trl_remote.service.views.events import Cursor, Line, read_back, read_page
from tests.fakes import FakeClock, job_spec


def line(number: int, size: int = 20) -> bytes:
    return json.dumps({"type": "warning", "time": 1.0, "message": f"{number} " + "x" * size}).encode() + b"\n"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Two attempts: lines of all lengths around a piece's, one that is no event, and one that is too long for one."""
    files: list[EventFile] = []
    attempts = (
        [
            line(0),
            line(1, 65_000),
            line(2),
            b"no event\n",
            line(3, 70_000),
            b"x" * (LINE_BYTES + 70_000) + b"\n",
            line(4),
        ],
        [line(5), *(line(6 + n, 13 * n) for n in range(40)), line(46, 500_000), line(47)],
    )
    for number, lines in enumerate(attempts, 1):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        data = b"".join(lines)
        RunDir(run_dir).events.write_bytes(data + b'{"type": "warn')  # what follows the end was not ingested
        files.append(EventFile(number, run_dir, len(data)))

    def event_files(job_uuid: str, first: int = 0) -> tuple[JobState, Sequence[EventFile]]:
        return JobState.in_progress, [file for file in files if file.attempt >= first]

    return SimpleNamespace(event_files=event_files)


def forwards(store: Any) -> list[Line]:
    lines: list[Line] = []
    cursor = Cursor()
    while True:
        page = read_page(store, "job", cursor, 10)
        lines += page.lines
        cursor = page.next
        if page.is_last:
            return lines


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_pages_backwards_have_each_event_once(store: Any, limit: int) -> None:
    expected = forwards(store)
    assert len(expected) == 48
    found: list[Line] = []
    while page := read_back(store, "job", found[-1].cursor if found else None, limit):
        assert len(page) <= limit
        found += page
    assert found == expected[::-1]


def test_a_cursor_of_another_job_is_refused(store: Any) -> None:
    for cursor in (Cursor(3, 5), Cursor(1, 10**9)):
        with pytest.raises(InvalidRequest, match="after"):
            read_back(store, "job", cursor, 10)


def test_jobs_are_found_by_the_beginning_of_their_names_and_their_metadata(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.sqlite3")
    texts = ["a", "ä\U0001f600", '\x00\x1f\x7f\b\f\n\r\t\\"/\u2028', "", "a"]
    for number, text in enumerate(texts):
        spec = job_spec(f"ft-{number}", checkpoint_dir=tmp_path / str(number), metadata={"team": text, "n": "1"})
        store.add_job(spec, "digest")
    store.add_job(job_spec("gt-1", checkpoint_dir=tmp_path / "gt-1", metadata={"team": "a"}), "digest")
    store.add_job(job_spec("ft", checkpoint_dir=tmp_path / "ft"), "digest")
    assert store.newest("ft-") == ["ft-4", "ft-3", "ft-2", "ft-1", "ft-0"]
    assert store.newest("ft-", after="ft-3", limit=2) == ["ft-2", "ft-1"]
    assert store.named_alike("ft-", 2) == ["ft-4", "ft-3"]
    assert store.newest("ft-", metadata={"team": "a", "n": "1"}) == ["ft-4", "ft-0"]
    assert store.newest("ft-", after="ft-4", metadata={"team": "a"}, limit=5) == ["ft-0"]
    for number, text in enumerate(texts[1:4], 1):
        assert store.newest("ft-", metadata={"team": text}) == [f"ft-{number}"]
    for wanted in ({"team": "b"}, {"n": "1", "team": "b"}, {"": "a"}, {"source": "a"}):
        assert store.newest("ft-", metadata=wanted) == []
    with pytest.raises(JobNotFound):
        store.newest("ft-", after="gone")
    assert list(store.completed("ft-")) == []
    store.close()


def test_completed_jobs_are_read_in_the_order_of_their_ends_from_any_time_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_PIECE", 2)
    clock = FakeClock()
    with closing(Store(tmp_path / "jobs.sqlite3", clock=clock)) as store:
        for number, name in enumerate(("ft-b", "ft-a", "ft-c", "gt-a", "ft-d", "ft-e")):
            store.add_job(job_spec(name, checkpoint_dir=tmp_path / name), "digest")
            store.launch(name, 1, "cpu", tmp_path)
            clock.advance(number > 1)  # the first two end together
            store.transition(name, 1, JobState.launching, JobState.completed)
        ends = {name: end for end, name in store.completed("ft-")}
        names = ["ft-a", "ft-b", "ft-c", "ft-d", "ft-e"]
        assert list(ends) == names
        assert [name for _, name in store.completed("ft-", newest_first=True)] == names[::-1]
        assert [name for _, name in store.completed("ft-", ends["ft-c"])] == names[2:]
        assert [name for _, name in store.completed("ft-", ends["ft-c"], newest_first=True)] == names[2::-1]


def test_a_base_model_is_known_by_the_job_that_was_first_to_complete_with_it(tmp_path: Path) -> None:
    clock = FakeClock()
    with closing(Store(tmp_path / "jobs.sqlite3", clock=clock)) as store:
        for name, model in (("a", "org/one"), ("b", "org/one"), ("c", "org/two")):
            store.add_job(job_spec(name, checkpoint_dir=tmp_path / name, model=model), "digest")
            store.launch(name, 1, "cpu", tmp_path)
            clock.advance(1)
        for name in ("b", "a"):
            store.transition(name, 1, JobState.launching, JobState.completed)
            clock.advance(1)
        assert store.first_trained_from("org/one") == store.get("b").scheduled_at
        assert store.first_trained_from("org/two") is None
        settings = ServiceSettings.model_validate({"data_dir": tmp_path, "device": "cpu"})
        models = OpenAIModels(Chats(settings, None, store), None, store)  # type: ignore[arg-type]
        assert models.get("org/one") in models.all()
        for name in ("org/two", "ft:c", str(tmp_path / "checkpoints" / "a")):
            with pytest.raises(OpenAIRefused, match="is listed"):
                models.get(name)
