"""What a request may make large is computed in forks with limits, and nothing of it in the process that serves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, LimitReached
from llama_stack_provider_trl.jobs import vocabularies
from llama_stack_provider_trl.jobs.database import Database, _inherited
from llama_stack_provider_trl.jobs.vocabularies import refuse_other_vocabularies
from llama_stack_provider_trl.requests.bases import Base
from llama_stack_provider_trl.specs import answer_rows
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, refuse_unusable
from llama_stack_provider_trl.specs.answer_rows import refuse_unchecked_rows
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.system import limited
from llama_stack_provider_trl.system.limited import Limited, LimitExceeded
from llama_stack_provider_trl.system.process import resident_memory

pytestmark = pytest.mark.process

NESTED = "(" * 60 + "a" + ")+" * 60
"""Each of its parts is written out twice when it is compiled."""
GROWING = ["a{4000000000}", "(?:(?:a{1000}){1000}){1000}", "(?x)(?:a{ 9 9 9 9 9 }){99999}", NESTED]


def test_values_come_back_and_exceptions_are_named() -> None:
    assert Limited(5, 64 << 20).call(lambda: iter([1, None, "\ud800", {"a": [2]}])) == [1, None, "\ud800", {"a": [2]}]

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("of a test")

    with pytest.raises(RuntimeError, match=r"^ValueError: of a test$"):
        Limited(5, 64 << 20).call(failing)


def _all_memory() -> Iterator[int]:
    yield 1
    yield len(bytearray(1 << 30))


def _all_time() -> Iterator[int]:
    yield 1
    while True:
        pass


def _waiting() -> Iterator[int]:
    yield 1
    threading.Event().wait()


def _crash() -> Iterator[int]:
    yield 1
    os.abort()


def _killed() -> Iterator[int]:
    yield 1
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where the machine's memory runs out


@pytest.mark.parametrize("function", [_all_memory, _all_time, _crash])
def test_a_call_ends_at_its_limits_with_what_it_found(
    function: Callable[[], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "_LEAST_WALL_S", 100.0)  # the machine may have other work
    before = psutil.Process().children()  # such as what other tests fork from
    with pytest.raises(LimitExceeded) as caught:
        Limited(1, 64 << 20).call(function)
    assert caught.value.found == [1]
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize("function", [_waiting, _killed])
def test_a_call_that_the_machine_ends_can_be_sent_again(
    function: Callable[[], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "_LEAST_WALL_S", 0.5)
    monkeypatch.setattr(limited, "_WALL", 0)
    with pytest.raises(LimitReached, match="too busy, or short of memory"):
        Limited(5, 64 << 20).call(function)


def test_where_memory_runs_out_the_fork_ends_before_the_server() -> None:
    assert Limited(5, 64 << 20).call(lambda: [Path("/proc/self/oom_score_adj").read_text().strip()]) == ["1000"]


def test_a_server_that_ignores_its_children_gets_what_they_found() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert Limited(5, 64 << 20).call(lambda: [1, None]) == [1, None]
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_few_calls_run_at_once_and_the_others_are_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_WAIT_S", 0.2)
    calls = Limited(1, 64 << 20)

    def call(_: int) -> str:
        try:
            calls.call(_all_time)
        except (LimitExceeded, LimitReached) as error:
            return type(error).__name__
        return ""

    with ThreadPoolExecutor(5) as pool:
        assert sorted(pool.map(call, range(5))) == ["LimitExceeded"] * 2 + ["LimitReached"] * 3
    assert calls.call(lambda: [1]) == [1]


def test_a_fork_is_quick_and_has_no_files_of_its_parent() -> None:
    """Measured: 3 ms."""
    calls = Limited(5, 64 << 20)
    seconds = []
    for _ in range(10):  # of which one is undisturbed
        began = time.monotonic()
        (found,) = calls.call(lambda: [sorted(os.listdir("/proc/self/fd"), key=int)])
        seconds.append(time.monotonic() - began)
        assert len(found) == 5  # three streams, the pipe, and the directory itself
    assert min(seconds) < 2


@pytest.mark.parametrize("pattern", GROWING, ids=["count", "nested", "spaced", "plus"])
@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_a_pattern_that_would_take_all_memory_is_refused_by_name(pattern: str, kind: str) -> None:
    given: dict[str, Any] = {"pattern": pattern}
    given = given if kind == "regex" else {"json_schema": {"properties": {"a": given}}}
    checks = [AnswerCheck(type="regex", pattern="ok"), AnswerCheck.model_validate({"type": kind, "name": "b", **given})]
    before, began = resident_memory(), time.monotonic()
    with pytest.raises(InvalidRequest, match="takes more than 5 s or 256 MiB to be compiled: make it") as caught:
        refuse_unusable(checks, "checks")
    assert caught.value.field == f"checks.1.{next(iter(given))}"
    assert resident_memory() - before < 64 << 20
    assert time.monotonic() - began < 60


def test_a_tokenizer_that_would_take_much_memory_is_left_to_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabularies, "_LIMITS", Limited(seconds=5, memory=256 << 20))
    found = []
    for name, content in (("small", '{"model": {"vocab": {"a": 0}}}'), ("large", f"[{'[],' * (8 << 20)}[]]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
        found.append(Base(model=str(tmp_path / name)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    before = resident_memory()
    refuse_other_vocabularies([("models.0.model", "small"), ("models.1.model", "large")], found)
    assert resident_memory() - before < 64 << 20
    found[1] = Base(model=str(tmp_path / "other"))
    with pytest.raises(InvalidRequest, match="has another number for the token 'a'"):
        refuse_other_vocabularies([("models.0.model", "small"), ("models.1.model", "other")], found)


def test_a_row_whose_pattern_would_take_all_memory_is_refused_by_number(tmp_path: Path) -> None:
    patterns = ["a", "a{3}", "a{4000000000}"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "form": pattern}) + "\n" for pattern in patterns))
    dataset = DatasetRef(dataset_id="forms", path=path, sha256="0" * 64, num_rows=3)
    before = resident_memory()
    with pytest.raises(InvalidRows, match="dataset 'forms', row 2: patterns and schemas up to this row take more than"):
        refuse_unchecked_rows(dataset, [AnswerCheck(type="regex", column="form")])
    assert resident_memory() - before < 64 << 20


def test_the_patterns_of_all_rows_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_rows, "_LIMITS", Limited(seconds=60, memory=64 << 20))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "form": f"a{{{20_000 + n}}}"}) + "\n" for n in range(400)))
    dataset = DatasetRef(dataset_id="many", path=path, sha256="1" * 64, num_rows=400)
    with pytest.raises(InvalidRows, match=r"row \d+: patterns and schemas up to this row take .* 64 MiB"):
        refuse_unchecked_rows(dataset, [AnswerCheck(type="regex", column="form")])


def test_a_bad_pattern_of_a_row_is_named_as_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "form": pattern}) + "\n" for pattern in ["a", "("]))
    dataset = DatasetRef(dataset_id="forms", path=path, sha256="2" * 64, num_rows=2)
    with pytest.raises(InvalidRows, match=r"dataset 'forms', row 1: column form \(checks.0.column\): it is not"):
        refuse_unchecked_rows(dataset, [AnswerCheck(type="regex", column="form")])


def test_a_fork_leaves_the_database_of_other_threads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs a statement, and SQLite holds the mutex of its connection meanwhile."""
    monkeypatch.setattr(limited, "_TRIES", 1)
    database = Database(tmp_path / "jobs.sqlite3")
    runs, may_end = threading.Event(), threading.Event()
    connections: list[Any] = []

    def held() -> int:
        runs.set()
        return int(may_end.wait(300))

    def statement() -> tuple[int]:
        connection = database._connection()
        connections.append(connection)
        connection.create_function("held", 0, held)
        return tuple(connection.execute("SELECT held()").fetchone())

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(statement)
        try:
            assert runs.wait(60)
            # Threads of other tests may have some, too.
            assert Limited(5, 64 << 20).call(lambda: [connections[0] in _inherited]) == [True]
        finally:
            may_end.set()
        assert other.result() == (1,)
    database.close()


def test_a_fork_that_waits_for_a_lock_of_another_thread_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held at the first fork only."""
    monkeypatch.setattr(limited, "_BLOCKED_S", 1.5)
    tried = tmp_path / "tried"

    def function() -> Iterator[int]:
        if not tried.exists():
            tried.touch()
            held = threading.Lock()
            held.acquire()
            held.acquire()
        yield 7

    assert Limited(seconds=5, memory=64 << 20).call(function) == [7]
    assert tried.exists()
