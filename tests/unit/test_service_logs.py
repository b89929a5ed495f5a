"""Logs of the service and its agents: rotated, private, bounded, without tokens, and read from their end."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.system import logs
from llama_stack_provider_trl.system.logs import PrivateFileHandler, RedactingFormatter, Unsent, start_logging
from llama_stack_provider_trl_remote.service.http.errors import NotFound
from llama_stack_provider_trl_remote.service.views.service_logs import ServiceLogs
from llama_stack_provider_trl_remote.wire import LogEntries

log = logging.getLogger("tests.logs")


@pytest.fixture
def restored() -> Iterator[None]:
    """The handlers and the level of this process after the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = []  # `force` would close those of pytest
    levels = {name: logging.getLogger(name).level for name in logs._OTHERS}
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = before, level
    for name, found in levels.items():
        logging.getLogger(name).setLevel(found)


def formatted(text: str, *secrets: str) -> str:
    return RedactingFormatter(secrets).format(logging.makeLogRecord({"msg": text}))


def written() -> None:
    """Wait for the thread that writes the file."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("restored")
def test_files_rotate_and_only_their_owner_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateFileHandler.__init__, "__defaults__", (400, 2))
    before = os.umask(0)
    try:
        start_logging(tmp_path / "logs" / "service.log")
        for number in range(40):
            log.info("entry %d", number)
            log.debug("left out")
        written()
    finally:
        os.umask(before)
    files = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in files] == ["service.log", "service.log.1", "service.log.2"]
    assert all(path.stat().st_size <= 400 and mode(path) == 0o600 for path in files)
    assert mode(tmp_path / "logs") == 0o700
    assert "left out" not in "".join(path.read_text() for path in files)
    shown = ServiceLogs(tmp_path).read(None, 8, 1 << 20)
    assert [line.rpartition(" ")[2] for line in shown.splitlines()] == [str(number) for number in range(32, 40)]


@pytest.mark.usefixtures("restored")
def test_details_of_our_modules_are_logged_on_request_and_those_of_libraries_are_not(tmp_path: Path) -> None:
    start_logging(tmp_path / "logs" / "service.log", "debug")
    log.debug("our detail")
    logging.getLogger("aiohttp.client").debug("Authorization: secret")
    written()
    text = (tmp_path / "logs" / "service.log").read_text()
    assert "our detail" in text
    assert "Authorization" not in text


@pytest.mark.parametrize(
    "text",
    [
        "the token s3cret-of-ops is wrong",
        "sent Authorization: Bearer abc.def-123",
        "created trl_abcdefghijklmnopqrstuvwxyz0123456789ABCDEFG",
        "bearer s3cret-of-ops-and-more",
    ],
)
def test_tokens_appear_in_no_log(text: str) -> None:
    found = formatted(text, "s3cret-of-ops", "")
    assert "***" in found
    assert not any(part in found for part in ("s3cret", "abc.def", "abcdefghij"))
    assert formatted("job trl_1 of bearer").endswith("job trl_1 of bearer")


def test_a_token_in_a_traceback_is_hidden_too() -> None:
    try:
        raise ValueError("found s3cret-of-ops")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (type(error), error, error.__traceback__)})
    shown = RedactingFormatter(["s3cret-of-ops"]).format(record)
    assert "ValueError: found ***" in shown
    assert "s3cret" not in shown


def test_an_entry_of_50_mb_is_cut_and_a_file_of_2_gb_is_read_from_its_end(tmp_path: Path) -> None:
    assert len(formatted("x" * 50_000_000)) < logs.MOST_CHARACTERS + 100
    path = tmp_path / "logs" / "service.log"
    path.parent.mkdir()
    with open(path, "wb") as file:
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"x" * 50_000_000 + b"\nthe end\n")
    shown = ServiceLogs(tmp_path).read(None, 2, 1 << 16)
    assert shown.endswith("x\nthe end\n")
    assert len(shown) <= 1 << 16


def test_a_full_disk_stops_no_caller_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    handler = PrivateFileHandler(tmp_path / "logs" / "a.log")
    with monkeypatch.context() as full:
        full.setattr(handler, "flush", is_full)
        handler.handle(logging.makeLogRecord({"msg": "lost"}))
    assert capsys.readouterr().err == ""
    handler.handle(logging.makeLogRecord({"msg": "kept"}))
    handler.close()
    assert "kept" in (tmp_path / "logs" / "a.log").read_text()


def test_what_an_agent_could_not_send_is_kept_up_to_a_bound() -> None:
    unsent = Unsent(most=3)
    for number in range(1, 6):
        unsent.handle(logging.makeLogRecord({"msg": f"entry {number}"}))
    assert unsent.first(2) == (3, ("entry 3", "entry 4"))
    unsent.sent(4)
    assert unsent.first(9) == (5, ("entry 5",))
    unsent.sent(4)  # an answer that was late
    assert unsent.first(9) == (5, ("entry 5",))


def test_entries_that_an_agent_sends_again_are_there_once(tmp_path: Path) -> None:
    received = ServiceLogs(tmp_path)
    received.add("a", LogEntries(run="1", number=1, lines=("one", "two")))
    received.add("a", LogEntries(run="1", number=2, lines=("two", "three\nand\rmore")))
    received.add("a", LogEntries(run="1", number=1, lines=("one",)))
    received.add("a", LogEntries(run="2", number=1, lines=("started again",)))
    assert received.read("a", 10, 1000) == "one\ntwo\nthree\n    and more\nstarted again\n"
    path = tmp_path / "logs" / "agent-a.log"
    assert mode(path) == 0o600
    for number in range(400):
        received.add("a", LogEntries(run="3", number=number + 1, lines=("x" * 10_000,)))
    assert path.stat().st_size + path.with_name("agent-a.log.1").stat().st_size <= 2 << 20
    received.forget("a")
    assert list(path.parent.iterdir()) == []


def test_a_log_that_is_missing_is_refused_with_the_names_of_those_that_exist(tmp_path: Path) -> None:
    received = ServiceLogs(tmp_path)
    with pytest.raises(NotFound, match="no log of node 'a'; there are logs of no agent"):
        received.read("a", 10, 1000)
    received.add("b", LogEntries(run="1", number=1, lines=("one",)))
    with pytest.raises(NotFound, match="there are logs of the agents of b"):
        received.read("a", 10, 1000)


def test_a_link_in_the_place_of_a_log_is_set_aside_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").symlink_to(tmp_path / "other")
    PrivateFileHandler(tmp_path / "logs" / "a.log").close()
    assert not (tmp_path / "other").exists()
    assert (tmp_path / "logs" / "a.log.stale-1").is_symlink()
