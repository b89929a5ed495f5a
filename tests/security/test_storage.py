"""A disk that is full or read-only, and a job database that another process has locked: what the service answers then,
what a cancel does, and how jobs continue when storage can be used again."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import pytest

from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl_remote.cli import doctor
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, refusal, running
from tests.contract.stack import SFT, poll
from tests.required import FULL
from tests.security.guarded import (
    BODIES,
    HIDDEN,
    HTTP_METHODS,
    KNOWN,
    NODE,
    QUERIES,
    TOKENS,
    Guarded,
    guarded_service,
    without_version,
)
from tests.security.mounts import mounted, tmpfs

pytestmark = pytest.mark.contract


@contextmanager
def full(data_dir: Path) -> Iterator[None]:
    """The disk has no byte left."""
    file = data_dir / "filling"
    with suppress(OSError), open(file, "wb", buffering=0) as filling:
        while True:
            filling.write(bytes(4096))
    try:
        yield
    finally:
        file.unlink()


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Another process has locked the job database, as a tool of an operator may."""
    with closing(sqlite3.connect(data_dir / DATABASE, isolation_level=None, timeout=30)) as database:
        database.execute("BEGIN EXCLUSIVE")
        yield
        database.execute("ROLLBACK")


@contextmanager
def read_only(data_dir: Path) -> Iterator[None]:
    """Nothing can be written below the directory but to files that are open already: a read-only mount lies on it."""
    with mounted(data_dir, "--bind", str(data_dir)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(data_dir)], check=True)
        yield


TROUBLES: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "full": full,
    "locked": locked,
    "read-only": read_only,
}

SOME = tuple(name for name in TROUBLES if FULL or name != "locked")
"""A lock that stays makes each write wait for it; CI sends every call in such a time."""


# --- Every route ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("storage")
    with tmpfs(root / "data", "size=20m"), guarded_service(root, min_free_disk_mb=0) as service:
        yield service


@pytest.mark.timeout(240)
def test_uploads_leave_the_space_that_the_checkpoint_of_a_waiting_job_takes(guarded: Guarded) -> None:
    """The disk has 20 MiB. The job trains 140,000 weights: 12 bytes each in a step checkpoint, 2 in an export."""
    needed = 140_000 * 14
    too_many = shutil.disk_usage(guarded.data_dir).free - needed + (1 << 18)
    for announce in (True, False):
        status, text = upload(guarded, too_many, announce=announce)
        assert (status, "for the next checkpoint of job 'waiting'" in text) == (507, True), text
    assert shutil.disk_usage(guarded.data_dir).free >= needed
    assert upload(guarded, 1 << 20)[0] == 201


def upload(service: Guarded, size: int, announce: bool = True) -> tuple[int, str]:
    """PUT one row of this size. Returns status and text of the answer."""
    data = json.dumps({"prompt": "x" * (size - 40), "completion": "y"}).encode()
    pieces = [data[begin : begin + (1 << 18)] for begin in range(0, len(data), 1 << 18)]
    body = data if announce else iter(pieces)
    url = f"{service.url}/v1/blobs/{hashlib.sha256(data).hexdigest()}"
    answer = service.session.put(url, data=body, timeout=60)
    return answer.status_code, answer.text


def calls(service: Guarded) -> list[tuple[str, str, str, bytes | None, str]]:
    """(method, target, token, body, content type) of every route, those that delete last.

    Calls of other versions lead to the handlers of those below /v1 (tests/contract/test_service_schema.py).
    """
    found = []
    paths = [one for one in service.document()["paths"].items() if not one[0].startswith(("/v1alpha/", "/v1beta/"))]
    documented = [(method.upper(), path) for path, of in paths for method in of if method in HTTP_METHODS]
    for method, path in [*documented, *HIDDEN]:
        call = f"{method} {without_version(path)}"
        known = {**KNOWN, "job_uuid": "ended"} if "/checkpoints" in path else KNOWN
        target = path.format(**known) + (f"?{QUERIES[call]}" if call in QUERIES else "")
        token = service.credentials[NODE] if "/nodes/{name}/" in path and "/v1" in path else TOKENS["admin"]
        body = json.dumps(BODIES[call]).encode() if call in BODIES else {"POST": b"{}", "PUT": b"x"}.get(method)
        kind = "application/json" if method == "POST" else "application/octet-stream"
        if (method, path) in HIDDEN and method == "POST":
            body, kind = f"token={TOKENS['admin']}".encode(), "application/x-www-form-urlencoded"
        found.append((method, target, token, body, kind))
    return sorted(found, key=lambda one: one[0] == "DELETE")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_route_answers_before_the_trouble_is_over_and_without_a_500(guarded: Guarded, trouble: str) -> None:
    wrong, statuses = [], set()
    with TROUBLES[trouble](guarded.data_dir):
        for method, target, token, body, kind in calls(guarded):
            origin = f"http://127.0.0.1:{guarded.port}"
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind, "Origin": origin}
            with closing(http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)) as connection:
                connection.request(method, target, body, headers)
                answer = connection.getresponse()  # a stream of events continues, so that not all of it is read
                text = answer.read1(2000)
            statuses.add(answer.status)
            is_clear = answer.status == 507 or (answer.status == 503 and int(answer.headers["Retry-After"]))
            if answer.status >= 500 and not is_clear:
                wrong.append(f"{method} {target}: {answer.status}: {text[:300]!r}")
        assert guarded.get("/health").ok
    assert not wrong, "\n".join(wrong)
    assert statuses & {503, 507}, "nothing needed what was taken away"
    assert "Traceback" not in guarded.log.read_text(), guarded.log_tail()
    assert guarded.runs()


@pytest.mark.timeout(240)
def test_a_read_only_disk_is_reported_in_a_sentence_and_left_behind_without_a_restart(guarded: Guarded) -> None:
    body = sft("later", guarded.register("questions for later", QUESTIONS))  # the calls above delete the other one
    poll(lambda: guarded.get("/health").json()["storage_problem"] is None, "health is well", timeout=20)
    with read_only(guarded.data_dir):
        poll(lambda: guarded.get("/health").json()["storage_problem"], "health reports it", timeout=20)
        problem = guarded.get("/health").json()["storage_problem"]
        assert problem.startswith("the disk of the data directory is read-only: make it writable again (the kernel's")
        assert str(guarded.data_dir) not in problem  # it needs no token
        for _ in range(2):
            text = refusal(guarded.post("/post-training/supervised-fine-tune", body), 507)
            assert text.startswith("the disk is read-only: ")
            assert text.endswith("; make it writable again (the kernel's log has the reason), then send it again")
        settings = ServiceSettings(data_dir=guarded.data_dir)
        [finding] = [*doctor._data_dir(settings), *doctor._own_files(settings)]
        assert (finding.level, "is on a disk that is read-only" in finding.found) == ("fail", True)
    poll(lambda: guarded.get("/health").json()["storage_problem"] is None, "health is well again", timeout=20)
    assert guarded.submit(SFT, body) == "later"
    assert "Traceback" not in guarded.log.read_text(), guarded.log_tail()


# --- A training meanwhile ---------------------------------------------------------------------------------------------


class Small(TrainingService):
    """A service with a data directory on a small disk, and a training that waits at its third step."""

    def begin(self, job_uuid: str = "trained") -> None:
        self.register(f"questions of {job_uuid}", QUESTIONS)
        self.arm("step-3", "hold")
        self.submit(SFT, sft(job_uuid, f"questions of {job_uuid}"))
        self.wait_taken("step-3")
        self.wait_state(job_uuid, "in_progress")

    def wait_ended(self, job_uuid: str) -> None:
        poll(lambda: not self.processes(job_uuid), f"the processes of {job_uuid} are gone", timeout=30)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    root = tmp_path_factory.mktemp("small")
    with tmpfs(root / "data", "size=60m"), running(Small(root, min_free_disk_mb=0)) as service:
        yield service


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trouble", SOME)
def test_a_cancel_ends_the_training_where_it_cannot_be_recorded_and_is_recorded_later(
    small: Small, trouble: str
) -> None:
    name = f"cancelled-{trouble}"
    small.begin(name)
    with TROUBLES[trouble](small.data_dir):
        answer = small.cancel(name)
        if trouble != "read-only":
            assert answer.status_code == 200, answer.text
        elif answer.status_code != 200:
            assert "repeat the cancel" in refusal(answer, 507)
        small.wait_ended(name)
    status = small.wait(name, "cancelled")
    assert len(status["resources_allocated"]["attempts"]) == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trouble", SOME)
def test_a_training_continues_meanwhile_and_its_job_completes_afterwards(small: Small, trouble: str) -> None:
    name = f"trained-{trouble}"
    small.begin(name)
    with TROUBLES[trouble](small.data_dir):
        rows = [*QUESTIONS, {"prompt": "one", "completion": trouble}]
        body = {"purpose": "post-training/messages", "source": {"type": "rows", "rows": rows}, "dataset_id": trouble}
        answer = small.post("/datasets", body)
        assert answer.status_code in (503, 507), answer.text
        assert small.state(name) == "in_progress"
        assert small.runs()
    small.go("step-3")
    small.wait(name, "completed")
    small.register(trouble, rows)


@pytest.mark.timeout(240)
def test_a_cancel_survives_a_service_that_is_killed_before_it_could_record_it(small: Small) -> None:
    small.begin("kept")
    with full(small.data_dir):
        assert small.cancel("kept").status_code == 200
        small.wait_ended("kept")
        small.kill()
    small.start()
    status = small.wait("kept", "cancelled")
    assert len(status["resources_allocated"]["attempts"]) == 1
