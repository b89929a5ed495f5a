"""What a request may make large is computed in processes with limits, and nothing of it in the one that serves."""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, LimitReached, is_exhausted
from llama_stack_provider_trl.jobs.inputs import vocabularies
from llama_stack_provider_trl.jobs.inputs.vocabularies import refuse_other_vocabularies
from llama_stack_provider_trl.jobs.store.database import Database, _inherited
from llama_stack_provider_trl.specs import answer_rows
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, refuse_unusable
from llama_stack_provider_trl.specs.answer_rows import refuse_unchecked_rows
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.system import call_server, limited
from llama_stack_provider_trl.system.limited import Limited, LimitExceeded
from llama_stack_provider_trl.system.process import identify, resident_memory
from tests.process.waiting import until
from tests.tiny import REPOSITORY

pytestmark = pytest.mark.process

NESTED = "(" * 60 + "a" + ")+" * 60
"""Each of its parts is written out twice when it is compiled."""
GROWING = ["a{4000000000}", "(?:(?:a{1000}){1000}){1000}", "(?x)(?:a{ 9 9 9 9 9 }){99999}", NESTED]


def _values() -> Iterator[Any]:
    return iter([1, None, "\ud800", {"a": [2]}])


def _failing() -> Iterator[int]:
    yield 1
    raise ValueError("of a test")


def test_values_come_back_and_exceptions_are_named() -> None:
    assert Limited(5, 64 << 20).call(_values) == [1, None, "\ud800", {"a": [2]}]
    with pytest.raises(RuntimeError, match=r"^ValueError: of a test$"):
        Limited(5, 64 << 20).call(_failing)


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


def _without_a_keeper(path: Path) -> Iterator[int]:
    yield 1
    path.write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def _killed_within_a_line() -> Iterator[int]:
    yield 1
    (connection,) = (number for number in range(3, 100) if _is_socket(number))
    os.write(connection, b"[1, ")
    os.abort()


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


def _without_a_server() -> Iterator[int]:
    server = psutil.Process().parents()[1]
    server.kill()
    yield server.pid


def _echo(*values: Any) -> Iterator[Any]:
    return iter(values)


def _where() -> Iterator[int]:
    """This process, its keeper, the server, and threads and children of the latter."""
    server = psutil.Process().parents()[1]
    yield from (os.getpid(), os.getppid(), server.pid, server.num_threads(), len(server.children()))


def _is_gone(pids: Iterable[int]) -> bool:
    return until(lambda: all(identify(pid) is None for pid in pids))


def _end_the_server() -> None:
    if limited._server is not None:
        limited._server.end()


@pytest.mark.parametrize("function", [_all_memory, _all_time, _crash, _killed_within_a_line])
def test_a_call_ends_at_its_limits_with_what_it_found(
    function: Callable[[], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "_LEAST_WALL_S", 100.0)  # the machine may have other work
    with pytest.raises(LimitExceeded) as caught:
        Limited(1, 64 << 20).call(function)
    assert caught.value.found == [1]


@pytest.mark.parametrize("function", [_waiting, _killed])
def test_a_call_that_the_machine_ends_can_be_sent_again(
    function: Callable[[], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Limited(5, 64 << 20)
    calls.call(_values)  # the server has started
    monkeypatch.setattr(limited, "_LEAST_WALL_S", 1.5)
    monkeypatch.setattr(limited, "_WALL", 0)
    with pytest.raises(LimitReached, match="too busy, or short of memory"):
        calls.call(function)
    monkeypatch.undo()
    *own, server, threads, _ = calls.call(_where)
    assert (len({*own, server, os.getpid()}), threads) == (4, 1)
    assert _is_gone(own)
    assert until(lambda: not psutil.Process(server).children())
    assert os.getsid(server) == server  # Ctrl-C is for this process


def test_without_its_keeper_a_call_ends(tmp_path: Path) -> None:
    with pytest.raises(LimitReached, match="too busy, or short of memory"):
        Limited(5, 64 << 20).call(_without_a_keeper, tmp_path / "pid")
    assert _is_gone([int((tmp_path / "pid").read_text())])


def test_a_fork_of_this_process_has_a_server_of_its_own() -> None:
    calls = Limited(5, 64 << 20)
    *_, ours, _, _ = calls.call(_where)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            os.write(writer, str(calls.call(_where)[2]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        theirs = int(pipe.read())
    os.waitpid(pid, 0)
    assert theirs != ours
    assert calls.call(_where)[2] == ours


def test_the_next_call_has_another_server_where_one_was_killed() -> None:
    calls = Limited(5, 64 << 20)
    (killed,) = calls.call(_without_a_server)
    assert _is_gone([killed])
    assert calls.call(_values) == [*_values()]


def test_a_server_without_calls_ends_and_one_with_calls_does_not() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = socket.socketpair()
    idles = "import serve; serve.__globals__['IDLE_S'] = 0.1;"
    argv = [part.replace("import serve;", idles) for part in call_server.program(theirs.fileno())]
    assert any(idles in part for part in argv)
    with ours, theirs, here:
        server = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        with there:
            order = call_server.CallOrder(tuple(sys.path), __name__, None)
            socket.send_fds(ours, [pickle.dumps(order)], [there.fileno()])
        request = pickle.dumps(call_server.LimitedCall(_waiting, 5, 64 << 20))
        here.sendall(call_server.SIZE.pack(len(request)) + request)
        assert here.recv(1) == call_server.RECEIVED
        assert here.recv(100) == b"[0, 1]\n"
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1.0)
        here.shutdown(socket.SHUT_WR)
        assert server.wait(30) == 0  # and not after the minute that it has otherwise


def test_where_the_caller_is_killed_the_call_ends(tmp_path: Path) -> None:
    program = "from tests.security import test_limited as t; t.Limited(60, 64 << 20).call(t._reported, {!r})"
    caller = subprocess.Popen([sys.executable, "-c", program.format(str(tmp_path / "reported"))], cwd=REPOSITORY)
    try:
        assert until((tmp_path / "reported").exists)
    finally:
        caller.kill()
        caller.wait()
    assert _is_gone(json.loads((tmp_path / "reported").read_text()))


def _reported(path: str) -> Iterator[int]:
    """Write which processes there are, and stay."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps([one.pid for one in (psutil.Process(), *psutil.Process().parents()[:2])]))
    part.rename(path)
    threading.Event().wait()
    yield 1


def _before() -> None:
    importlib.import_module("of_a_test").seen.append(1)


def _seen() -> Iterator[int]:
    yield len(sys.modules["of_a_test"].seen)


def test_what_a_function_needs_is_imported_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _end_the_server()
    (tmp_path / "of_a_test.py").write_text("seen = []")
    calls = Limited(5, 64 << 20)
    with monkeypatch.context() as other:
        other.syspath_prepend(tmp_path)
        assert [calls.call(_seen, before=_before) for _ in range(2)] == [[1], [2]]  # by the server
    _end_the_server()
    assert calls.call(_echo, 1) == [1]
    monkeypatch.syspath_prepend(tmp_path)
    assert [calls.call(_seen, before=_before) for _ in range(2)] == [[1], [1]]  # by the keeper of each call


def test_a_function_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_by_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def function(): yield 1", module.__dict__)
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'made_by_a_test'"):
        Limited(5, 64 << 20).call(module.function)


def test_what_imports_nothing_that_is_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_by_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def function(): pass", module.__dict__)
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'made_by_a_test'"):
        Limited(5, 64 << 20).call(_values, before=module.function)
    assert Limited(5, 64 << 20).call(_values) == [*_values()]


def test_a_server_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _end_the_server()
    monkeypatch.setattr(limited, "program", lambda number: [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(LimitReached, match="the process for it ended with status 7"):
        Limited(5, 64 << 20).call(_values)


def test_a_server_that_takes_no_order_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Limited(5, 64 << 20)
    *_, server, _, _ = calls.call(_where)
    psutil.Process(server).suspend()
    monkeypatch.setattr(limited, "_RECEIVED_S", 3.0)

    def end(stopped: Any) -> int:
        monkeypatch.undo()  # the next one has as long as ever: the machine may have other work
        return int(stopped.end())

    monkeypatch.setattr(limited._CallServer, "end", end)
    *_, other, _, _ = calls.call(_where)
    assert other != server
    assert _is_gone([server])


def _environment() -> Iterator[list[str]]:
    yield sorted(os.environ)


def _is_hidden() -> Iterator[int]:
    yield ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE


def test_other_processes_read_nothing_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service has hidden itself, and its tokens are in its environment."""
    _end_the_server()
    monkeypatch.setenv("TRL_SERVICE_TOKEN", "secret-of-a-test")
    for name in ("HF_TOKEN", "https_proxy", "ALL_PROXY", "HF_ENDPOINT", "TORCH_HOME"):
        monkeypatch.setenv(name, "secret-of-a-test")
    calls = Limited(5, 64 << 20)
    (names,) = calls.call(_environment)
    assert "PATH" in names
    names.remove("PATH")
    names = [name for name in names if not name.endswith("_OFFLINE")]
    assert [name for name in names if any(part in name.upper() for part in ("TOKEN", "PROXY", "HF_", "TORCH"))] == []
    assert calls.call(_is_hidden) == [0]
    _, _, server, _, _ = calls.call(_where)
    assert b"secret-of-a-test" not in Path(f"/proc/{server}/environ").read_bytes()
    _end_the_server()


def test_sockets_with_timeouts_by_default_change_nothing() -> None:
    text = "a" * (4 << 20)
    socket.setdefaulttimeout(60.0)
    try:
        _end_the_server()
        assert Limited(5, 256 << 20).call(_echo, text) == [text]
    finally:
        socket.setdefaulttimeout(None)


def test_where_a_fork_fails_the_reason_is_that_of_the_system() -> None:
    here, there = socket.socketpair()
    with here, there:
        call_server._report_no_process(there, BlockingIOError(errno.EAGAIN, "no more processes"))
        lines = here.recv(1000).split(b"\n")
    with pytest.raises(OSError, match="no more processes") as caught:
        Limited(5, 64 << 20)._found(lines, False, None)
    assert is_exhausted(caught.value)


def test_a_count_that_the_function_has_written_allocates_nothing() -> None:
    ending = call_server.CallEnding(False, 0.0, 1 << 60)._asdict()
    with pytest.raises(LimitExceeded) as caught:
        Limited(5, 64 << 20, values=1)._found([json.dumps(ending).encode()], False, None)
    assert caught.value.found == []


def test_without_a_further_process_a_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _end_the_server()

    def popen(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="no more processes"):
        Limited(5, 64 << 20).call(_values)


def test_arguments_may_be_large_and_an_order_may_not() -> None:
    text = "a" * (8 << 20)
    assert Limited(5, 256 << 20).call(_echo, text) == [text]
    with pytest.raises(ValueError, match="an order has"):
        Limited(5, 64 << 20).call(_echo, before=partial(len, "a" * (1 << 20)))


def _adjustment() -> Iterator[str]:
    yield Path("/proc/self/oom_score_adj").read_text().strip()


def test_where_memory_runs_out_the_call_ends_before_the_server() -> None:
    assert Limited(5, 64 << 20).call(_adjustment) == ["1000"]


def test_a_server_that_ignores_its_children_gets_what_they_found() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert Limited(5, 64 << 20).call(_echo, 1, None) == [1, None]
    finally:
        signal.signal(signal.SIGCHLD, before)


def _files() -> Iterator[list[str]]:
    yield sorted(os.listdir("/proc/self/fd"), key=int)


def test_a_call_has_no_files_of_this_process() -> None:
    (found,) = Limited(5, 64 << 20).call(_files)
    assert len(found) == 6  # three streams, the socket, the keeper's pipe, and the directory itself


@pytest.mark.parametrize("pattern", GROWING, ids=["count", "nested", "spaced", "plus"])
@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_a_pattern_that_would_take_all_memory_is_refused_by_name(pattern: str, kind: str) -> None:
    given: dict[str, Any] = {"pattern": pattern}
    given = given if kind == "regex" else {"json_schema": {"properties": {"a": given}}}
    checks = [AnswerCheck(type="regex", pattern="ok"), AnswerCheck.model_validate({"type": kind, "name": "b", **given})]
    before = resident_memory()
    with pytest.raises(
        InvalidRequest, match="takes more than 5 s or 256 MiB to be compiled and tried: make it"
    ) as caught:
        refuse_unusable(checks, "checks")
    assert caught.value.field == f"checks.1.{next(iter(given))}"
    assert resident_memory() - before < 64 << 20


def test_a_tokenizer_that_would_take_much_memory_is_left_to_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabularies, "_LIMITS", Limited(seconds=5, memory=256 << 20))
    found = []
    for name, content in (("small", '{"model": {"vocab": {"a": 0}}}'), ("large", f"[{'[],' * (8 << 20)}[]]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
        found.append(ModelSource(model=str(tmp_path / name)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    before = resident_memory()
    refuse_other_vocabularies([("models.0.model", "small"), ("models.1.model", "large")], found, "name others")
    assert resident_memory() - before < 64 << 20
    found[1] = ModelSource(model=str(tmp_path / "other"))
    with pytest.raises(InvalidRequest, match="has another number for the token 'a'"):
        refuse_other_vocabularies([("models.0.model", "small"), ("models.1.model", "other")], found, "name others")


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


def test_a_fork_leaves_the_database_of_other_threads_alone(tmp_path: Path) -> None:
    """Another thread runs a statement, and SQLite holds the mutex of its connection meanwhile."""
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                os._exit(0 if connections[0] in _inherited else 1)
            statuses: list[int] = []

            def is_over() -> bool:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses.append(status)
                return bool(ended)

            try:
                until(is_over)  # and does not wait for that mutex
            finally:
                if not statuses:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            assert statuses == [0]
        finally:
            may_end.set()
        assert other.result() == (1,)
    database.close()
