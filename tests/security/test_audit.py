"""The audit log: numbered without gaps over kills, bounded under a flood, silent about tokens and bodies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl.jobs.store.tokens import PREFIX
from llama_stack_provider_trl.system.process import FileLock
from llama_stack_provider_trl_remote.service.security.audit import AuditLog, Refusal, Refusals, shortened
from llama_stack_provider_trl_remote.service.security.recording import Call, record, recorded
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running_service
from tests.contract.stack import SFT
from tests.fakes import FakeClock

OPERATOR, SUBMITTER = "operator-secret", "submitter-secret"
KILLS, LINES = 20, 10_000
WRITERS = """
import os, signal, sys
from pathlib import Path
from llama_stack_provider_trl.system.process import die_with_parent
from llama_stack_provider_trl_remote.service.security.audit import AuditLog
def write():
    audit = AuditLog(Path(sys.argv[1]), 200_000, 1000)
    audit.open()
    answered = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
    while True:
        params = {"job": "a" * 30}
        number = audit.write("end", caller="ci", role="submit", address="10.0.0.7", params=params, status=200)
        os.pwrite(answered, b"%12d" % number, 0)
die_with_parent(os.getppid())
parent = os.getpid()
while sys.stdin.readline():
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            write()
        finally:
            os._exit(1)
    sys.stdin.readline()
    os.kill(pid, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Forks a process that writes at a line, kills it at the next one, and prints its exit status."""
KIND = Refusal(401, "", None, None, "10.0.0.7", "GET", "/v1/nodes")


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[AuditLog]:
    """On a stopped clock, with files of about ten lines."""
    log = AuditLog(tmp_path / "audit", 1000, 4, FakeClock())
    log.open()
    yield log
    log.close()


def everything(log: AuditLog) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        lines, last = log.page(after, 1000)
        if last == after:
            return found
        found, after = found + lines, last


def reopened(log: AuditLog) -> tuple[AuditLog, int]:
    again = AuditLog(log.directory, 1000, 4, FakeClock())
    return again, again.open()


def newest(log: AuditLog) -> Path:
    return max(log.directory.iterdir())


@pytest.mark.process
@pytest.mark.timeout(120)
def test_ten_thousand_lines_survive_twenty_kills_in_order_and_without_a_gap(tmp_path: Path) -> None:
    chance = random.Random(15)
    directory, answered = tmp_path / "audit", tmp_path / "answered"
    answered.write_text("0")
    command = [sys.executable, "-c", WRITERS, directory, answered]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for _ in range(KILLS):
            before = int(answered.read_text())
            writers.stdin.write("\n")
            writers.stdin.flush()
            deadline = time.monotonic() + 30
            while int(answered.read_text()) < before + LINES // KILLS:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.03))
            writers.stdin.write("\n")
            writers.stdin.flush()
            assert int(writers.stdout.readline()) == -signal.SIGKILL
            log = AuditLog(directory, 200_000, 1000)
            log.open()
            assert log.last >= int(answered.read_text()), "a line that was answered is missing"
            log.close()
    numbers = [line["seq"] for line in everything(log)]
    assert len(numbers) >= LINES
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(list(directory.iterdir())) > 5, "rotation was killed too"


@pytest.mark.parametrize("torn", [b'{"seq":4,"time":"2026', b'{"seq":4}', b"\0" * 200_000, b"no JSON\n"])
def test_a_torn_or_damaged_end_is_cut_off_and_numbering_continues(audit: AuditLog, torn: bytes) -> None:
    for _ in range(3):
        audit.write("end", status=200)
    with open(newest(audit), "ab") as file:
        file.write(torn)
    again, cut = reopened(audit)
    assert cut == len(torn)
    assert again.write("started") == 4
    assert [line["seq"] for line in everything(again)] == [1, 2, 3, 4]


def test_a_kill_between_two_files_leaves_no_gap(audit: AuditLog) -> None:
    for _ in range(3):
        audit.write("end", status=200)
    (audit.directory / "audit-000000000004.jsonl").touch()
    again, cut = reopened(audit)
    assert (again.write("started"), cut) == (4, 0)
    assert [line["seq"] for line in everything(again)] == [1, 2, 3, 4]


def test_only_the_newest_files_are_kept_and_only_their_owner_reads_them(audit: AuditLog) -> None:
    for _ in range(500):
        audit.write("end", caller="ci", status=200)
    files = sorted(audit.directory.iterdir())
    assert len(files) == 4
    assert all(path.stat().st_size <= 1000 for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert audit.directory.stat().st_mode & 0o777 == 0o700
    numbers = [line["seq"] for line in everything(audit)]
    assert numbers == list(range(numbers[0], 501))
    again, _ = reopened(audit)
    assert again.write("started") == 501


def test_a_page_begins_behind_any_line(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", 1 << 20, 4)
    log.open()
    for number in range(1, 6001):
        log.write("end", caller="even" if number % 2 == 0 else "odd", status=200)
    for after in (0, 1, 2999, 5998, 5999):
        lines, last = log.page(after, 2)
        assert [line["seq"] for line in lines] == list(range(after + 1, min(after + 3, 6001)))
        assert last == lines[-1]["seq"]
    assert log.page(6000, 2) == ([], 6000)
    assert [line["seq"] for line in log.page(3000, 2, caller="even")[0]] == [3002, 3004]
    assert log.page(3000, 2, caller="nobody") == ([], 6000)
    log.close()


def test_what_could_not_be_written_is_reported_by_the_next_line(
    audit: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit.write("started")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: len(data) // 2)
        assert audit.write("end", status=200) is None
        assert audit.write("end", status=200) is None
    assert audit.write("end", status=204) == 3
    assert [(line["seq"], line["event"], line.get("count")) for line in everything(audit)] == [
        (1, "started", None),
        (2, "lost", 2),
        (3, "end", None),
    ]


@pytest.mark.parametrize("sync", [True, False], ids=["an admin's action", "a full file"])
def test_lines_are_written_while_an_earlier_one_is_forced_to_disk(
    audit: AuditLog, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    begun, slow, fsync = threading.Event(), threading.Event(), os.fsync

    def stands(file: int) -> None:
        begun.set()
        slow.wait(10)
        fsync(file)

    audit.write("started")
    monkeypatch.setattr(os, "fsync", stands)
    forcing = threading.Thread(target=audit.sync)
    if sync:
        forcing.start()
        assert begun.wait(10)
    lines = 2 if sync else 50
    writing = threading.Thread(target=lambda: [audit.write("end", status=200) for _ in range(lines)])
    writing.start()
    writing.join(5)
    was_slow = writing.is_alive()
    slow.set()
    writing.join()
    if sync:
        forcing.join()
    audit.sync()
    assert not was_slow
    assert audit.last == lines + 1
    monkeypatch.undo()


def test_a_token_in_the_place_of_a_name_is_masked() -> None:
    token = PREFIX + "aB3-_" * 8 + "xyz"
    assert shortened({"name": token, "job_uuid": f"x{token}"}) == {"name": "trl_[masked]", "job_uuid": "xtrl_[masked]"}
    assert shortened({"name": "trl_lib-ultrafeedback"}) == {"name": "trl_lib-ultrafeedback"}


def test_half_a_surrogate_pair_is_shown_as_a_question_mark(audit: AuditLog) -> None:
    audit.write("refused", caller="a", params={"name": "\ud800"})
    with open(newest(audit), "ab") as file:  # as no log writes it
        file.write(b'{"seq":2,"event":"refused","route":"\\uD800x"}\n')
    again, _ = reopened(audit)
    first, second = everything(again)
    again.close()
    assert (first["params"], second["route"]) == ({"name": "?"}, "?x")


def test_a_flood_of_refusals_is_a_line_and_a_count(audit: AuditLog) -> None:
    flooded(audit, [KIND] * 10_000)
    first, repeated = everything(audit)
    assert (first["status"], first["address"], first.get("count")) == (401, "10.0.0.7", None)
    assert repeated["count"] == 9_999


def test_refusals_of_ever_new_kinds_are_bounded_and_none_is_uncounted(audit: AuditLog) -> None:
    log = AuditLog(audit.directory, 1 << 20, 4, FakeClock())
    log.open()
    flooded(log, [KIND._replace(address=f"10.0.{number // 250}.{number % 250}") for number in range(10_000)])
    lines = everything(log)
    assert len(lines) < 120
    assert sum(line.get("count", 1) for line in lines) == 10_000
    log.close()


def test_a_flood_of_unknown_callers_hides_no_refusal_of_a_known_one(audit: AuditLog) -> None:
    log = AuditLog(audit.directory, 1 << 20, 4, FakeClock())
    log.open()
    unknown = [KIND._replace(address=f"10.0.{number // 250}.{number % 250}") for number in range(1000)]
    flooded(log, [*unknown, KIND._replace(status=403, caller="ci", role="submit")])
    assert [line["route"] for line in everything(log) if line.get("caller") == "ci"] == ["/v1/nodes"]
    log.close()


def flooded(log: AuditLog, refused: list[Refusal]) -> None:
    async def flood() -> None:
        refusals = Refusals(log, FakeClock())
        for one in refused:
            refusals.add(one)
        refusals.flush()
        assert refusals._timer is not None
        refusals._timer.cancel()

    asyncio.run(flood())
    log._writer.drain()


@pytest.mark.parametrize(
    ("raised", "status", "error"),
    [(None, 204, None), (ValueError(), 500, "ValueError"), (asyncio.CancelledError(), None, "broken off")],
)
def test_a_call_is_in_the_log_before_it_takes_effect_and_its_end_has_the_outcome(
    audit: AuditLog, raised: BaseException | None, status: int | None, error: str | None
) -> None:
    log = AuditLog(audit.directory, 1 << 20, 4, FakeClock())
    log.open()
    sent: list[int] = []

    @recorded
    async def endpoint(job_uuid: str) -> None:
        (line,) = everything(log)
        assert (line["event"], line["params"]) == ("begin", {"job_uuid": "a"})
        if raised is not None:
            raise raised

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        await endpoint(job_uuid="a")
        await send({"type": "http.response.start", "status": 204})

    async def send(message: Any) -> None:
        assert everything(log)[-1]["event"] == "end", "it was answered first"
        sent.append(message["status"])

    call = Call(
        log, {"caller": "ci", "method": "DELETE", "route": "/r"}, {}, forced=True, state_of=lambda job_uuid: None
    )
    with pytest.raises(type(raised)) if raised else nullcontext():
        asyncio.run(record(call, {}, send, send, handle))
    end = everything(log)[1]
    assert (end["of"], end.get("status"), end.get("error")) == (1, status, error)
    assert sent == ([] if raised else [204])
    log.close()


# --- A service --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """Nothing trains, since the device is locked by us; the job `blocker` waits for it, and all others for that job."""
    root = tmp_path_factory.mktemp("service")
    (root / "locks").mkdir()
    device = FileLock(root / "locks" / "cpu.lock")
    assert device.acquire("test_audit.py")
    tokens = [{"token": SUBMITTER, "name": "ci"}]
    with running_service(root, api_token=OPERATOR, tokens=tokens) as service:
        service.session.headers["Authorization"] = f"Bearer {OPERATOR}"
        service.submit(SFT, sft("blocker", service.register("questions", QUESTIONS)))
        service.wait_state("blocker", "launching")
        yield service
    device.release()


@pytest.fixture
def since(service: TrainingService) -> Callable[[], list[dict[str, Any]]]:
    """The lines that were written since the test began, without number and time."""
    begin = service.get("/audit", limit=1).json()["last"]

    def lines() -> list[dict[str, Any]]:
        return list(service.get("/audit", after=begin, limit=1000).json()["data"])

    return lines


Since = Callable[[], list[dict[str, Any]]]


@pytest.mark.contract
def test_a_call_is_recorded_with_its_caller_names_and_result(service: TrainingService, since: Since) -> None:
    questions = service.register("more-questions", QUESTIONS)
    ci = {"Authorization": f"Bearer {SUBMITTER}"}
    assert service.post(SFT, sft("recorded", questions), headers=ci).status_code == 200
    assert service.post(f"{JOBS}/recorded/cancel", headers=ci).status_code == 200
    assert service.delete(f"{JOBS}/recorded", checkpoints="true").status_code == 204
    assert service.get(JOBS).status_code == 200
    reported = [
        tuple(line.get(name) for name in ("event", "caller", "role", "route", "status", "state")) for line in since()
    ]
    sft_route, job = "/v1/post-training/supervised-fine-tune", "/v1/post-training/jobs/{job_uuid}"
    assert reported == [
        ("begin", "operator", "admin", "/v1/datasets", None, None),
        ("end", "operator", "admin", "/v1/datasets", 200, None),
        ("begin", "ci", "submit", sft_route, None, None),
        ("end", "ci", "submit", sft_route, 200, "scheduled"),
        ("begin", "ci", "submit", f"{job}/cancel", None, None),
        ("end", "ci", "submit", f"{job}/cancel", 200, "cancelled"),
        ("begin", "operator", "admin", job, None, None),
        ("end", "operator", "admin", job, 204, None),
    ]
    lines = since()
    assert [line["params"] for line in lines[2:6]] == [{"job_uuid": "recorded"}] * 4
    assert lines[6]["params"] == {"job_uuid": "recorded", "checkpoints": True}
    assert lines[3]["of"] == lines[2]["seq"]
    assert {line["address"] for line in lines} == {"127.0.0.1"}


@pytest.mark.contract
def test_a_refusal_is_recorded_and_neither_a_token_nor_a_body_is(service: TrainingService, since: Since) -> None:
    url = f"{service.url}/v1{JOBS}/a"
    guessed, forged = {"Authorization": "Bearer guessed-secret"}, {"X-Forwarded-For": "203.0.113.9"}
    assert requests.delete(url, headers={**guessed, **forged}, timeout=30).status_code == 401
    assert requests.delete(url, headers={"Authorization": f"Bearer {SUBMITTER}"}, timeout=30).status_code == 403
    assert requests.get(url, headers={"Host": "evil.example"}, timeout=30).status_code == 403
    bad = service.post("/datasets", {"dataset_id": "x", "source": {"type": "rows", "rows": "private-rows"}})
    assert bad.status_code == 400
    lines = since()
    reported = [tuple(line.get(name) for name in ("event", "caller", "status", "route")) for line in lines]
    assert reported == [
        ("refused", None, 401, "/v1/post-training/jobs/{job_uuid}"),
        ("refused", "ci", 403, "/v1/post-training/jobs/{job_uuid}"),
        ("refused", None, 403, None),
        ("end", "operator", 400, "/v1/datasets"),
    ]
    assert {line["address"] for line in lines} == {"127.0.0.1"}, "a header chose the address"
    written = "".join(path.read_text() for path in (service.data_dir / "audit").iterdir())
    for secret in ("guessed-secret", OPERATOR, SUBMITTER, "private-rows"):
        assert secret not in written


@pytest.mark.contract
def test_a_call_that_was_answered_or_took_effect_is_in_the_log_of_a_killed_service(service: TrainingService) -> None:
    begin = service.get("/audit", limit=1).json()["last"]
    service.register("killed-dataset", QUESTIONS)
    service.kill()
    service.start()
    lines = service.get("/audit", after=begin).json()["data"]
    assert [line["event"] for line in lines] == ["begin", "end", "started"]
    assert lines[1]["params"] == {"dataset_id": "killed-dataset"}
    assert [line["seq"] for line in lines] == [begin + 1, begin + 2, begin + 3]


@pytest.mark.contract
def test_only_admins_read_the_log_and_its_bounds_are_checked(service: TrainingService) -> None:
    ci = {"Authorization": f"Bearer {SUBMITTER}"}
    assert "role admin" in refusal(service.get("/audit", headers=ci), 403)
    for bad in ({"after": -1}, {"limit": 0}, {"limit": 1001}, {"after": "x"}):
        refusal(service.get("/audit", **bad))
    first = service.get("/audit", limit=1).json()
    assert (first["data"][0]["event"], first["data"][0]["seq"], first["next"]) == ("started", 1, 1)
    only = service.get("/audit", caller="ci", limit=1000).json()["data"]
    assert {line["caller"] for line in only} == {"ci"}


@pytest.mark.contract
def test_trl_remote_audit_shows_the_log(service: TrainingService) -> None:
    environ = {**os.environ, "TRL_SERVICE_URL": service.url, "TRL_SERVICE_TOKEN": OPERATOR}
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "audit"]
    shown = subprocess.run([*command, "--after", "0"], env=environ, capture_output=True, text=True, check=True).stdout
    assert "started" in shown.splitlines()[0]
    raw = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=True).stdout
    numbers = [json.loads(line)["seq"] for line in raw.splitlines()]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
