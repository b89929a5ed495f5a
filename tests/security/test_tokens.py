"""Created tokens: stored as hashes, expiring, limited, refused once revoked, on running answers too."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl.errors import LimitReached, ServiceRefusal
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.store.tokens import PREFIX, TokenLimits, TokenRecord, Tokens, digest
from llama_stack_provider_trl.system.process import FileLock
from llama_stack_provider_trl_remote.adapter import TrlRemotePostTraining
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.config import TrlRemoteConfig
from llama_stack_provider_trl_remote.service.http.errors import Conflict, NotFound
from llama_stack_provider_trl_remote.service.security.access import Caller, Refused
from llama_stack_provider_trl_remote.service.security.auth import AnyOf, ConfiguredTokens
from llama_stack_provider_trl_remote.service.security.limits import FAILURES_PER_SECOND, Bucket, Failures
from llama_stack_provider_trl_remote.service.security.tokens import CreatedTokens
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running_service
from tests.contract.stack import SFT
from tests.fakes import FakeClock, job_spec

OPERATOR, SUBMITTER = "operator-secret", "submitter-secret"


class World:
    """Created tokens on a stopped clock."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock()
        self.path = root / "jobs.db"
        self.store = Store(self.path, self.clock)
        self.settings = ServiceSettings.model_validate({"api_token": "a", "tokens": [{"token": "s", "name": "ci"}]})
        self.tokens = self.started()

    def started(self) -> CreatedTokens:
        """As after a restart of the service."""
        created = CreatedTokens(Tokens(self.store, self.clock), self.settings, self.clock)
        created._note_use = lambda known: None  # type: ignore[method-assign]  # it needs an event loop
        return created


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


def test_the_database_holds_the_hash_of_a_token_and_not_the_token(world: World) -> None:
    token, record = world.tokens.create("laptop", "submit", "operator")
    assert token.startswith(PREFIX)
    assert len(token) == len(PREFIX) + 43, "256 bits"
    assert record.sha256 == digest(token)
    world.store.close()
    stored = b"".join(path.read_bytes() for path in world.path.parent.iterdir() if path.is_file())
    assert record.sha256.encode() in stored
    assert token.encode() not in stored
    assert token not in repr(record)


def test_a_token_is_known_until_it_is_revoked_and_after_a_restart_too(world: World) -> None:
    token, _ = world.tokens.create("laptop", "node", "operator", limits=TokenLimits(3, 2.0, ("low",)))
    again = world.started()
    for tokens in (world.tokens, again):
        caller = tokens(token)
        assert caller is not None
        assert (caller.role, caller.name, caller.limits) == ("node", "laptop", TokenLimits(3, 2.0, ("low",)))
        assert caller.still_valid()
    again.revoke("laptop")
    assert again(token) is None
    assert not caller.still_valid()
    assert world.started()(token) is None
    with pytest.raises(NotFound, match="there is no token 'laptop'"):
        again.revoke("laptop")


def test_a_token_created_again_under_a_revoked_name_does_not_revive_the_old_one(world: World) -> None:
    old, _ = world.tokens.create("laptop", "submit", "operator")
    caller = world.tokens(old)
    world.tokens.revoke("laptop")
    new, _ = world.tokens.create("laptop", "submit", "operator")
    assert caller is not None
    assert not caller.still_valid()
    assert world.tokens(old) is None
    assert world.tokens(new) is not None


def test_a_token_that_is_revoked_while_it_is_being_created_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember, revoked = world.tokens._remember, threading.Event()

    def revoke() -> None:
        world.tokens.revoke("laptop")
        revoked.set()

    revoking = threading.Thread(target=revoke)

    def remember_late(record: TokenRecord) -> None:
        revoking.start()
        revoked.wait(0.5)
        remember(record)

    monkeypatch.setattr(world.tokens, "_remember", remember_late)
    token, _ = world.tokens.create("laptop", "submit", "operator")
    revoking.join()
    assert world.tokens(token) is None
    assert not world.tokens.all()


def test_a_token_expires(world: World) -> None:
    token, _ = world.tokens.create("brief", "submit", "operator", expires_in=60)
    caller = world.tokens(token)
    assert caller is not None
    world.clock.advance(59.9)
    assert caller.still_valid()
    world.clock.advance(0.1)
    assert not caller.still_valid()
    assert world.tokens(token) is None
    with pytest.raises(Conflict, match="there is a token 'brief' already: revoke it first"):
        world.tokens.create("brief", "submit", "operator")


@pytest.mark.parametrize(
    ("name", "setting"), [("operator", "api_token, TRL_SERVICE_TOKEN"), ("ci", r"tokens\.0"), ("local", None)]
)
def test_a_configured_token_is_neither_revoked_nor_shadowed(world: World, name: str, setting: str | None) -> None:
    with pytest.raises(Conflict, match="belongs to a token of the service's configuration"):
        world.tokens.create(name, "submit", "operator")
    if setting is not None:
        with pytest.raises(Conflict, match=rf"is configured \({setting}\): remove it there"):
            world.tokens.revoke(name)


def test_configured_tokens_come_first_and_created_ones_count_beside_them(world: World) -> None:
    token, _ = world.tokens.create("laptop", "submit", "operator")
    authenticate = AnyOf(ConfiguredTokens(world.settings), world.tokens)
    callers = [authenticate(given) for given in ("a", "s", token, "nonsense", "")]
    assert [caller and (caller.role, caller.name) for caller in callers] == [
        ("admin", "operator"),
        ("submit", "ci"),
        ("submit", "laptop"),
        None,
        None,
    ]


@pytest.mark.parametrize("names", [["ci", "ci"], ["operator"], ["configured-2"]])
def test_names_of_configured_tokens_are_distinct_and_not_reserved(names: list[str]) -> None:
    tokens = [{"token": f"t{number}", "name": name} for number, name in enumerate(names)]
    with pytest.raises(ValueError, match=r"reserved|a name of its own"):
        ServiceSettings.model_validate({"tokens": tokens})


def test_a_bucket_allows_its_rate_and_a_burst_of_twice_that() -> None:
    clock = FakeClock()
    bucket = Bucket(5.0, clock=clock)
    assert [bucket.take() for _ in range(10)] == [0.0] * 10
    assert bucket.take() == pytest.approx(0.2)
    clock.advance(1.0)
    assert [bucket.take() > 0 for _ in range(6)] == [False] * 5 + [True]


def test_a_caller_over_its_rate_is_refused_with_the_seconds_to_wait() -> None:
    caller = Caller("submit", "ci", bucket=Bucket(0.5, clock=FakeClock()))
    caller.take_request()
    with pytest.raises(
        Refused, match=r"'ci' is limited to 0\.5 requests per second: send this one again in 2 s"
    ) as found:
        caller.take_request()
    assert (found.value.status_code, found.value.headers) == (429, {"Retry-After": "2"})


def test_an_address_that_guesses_may_only_use_tokens_that_it_used_before() -> None:
    clock = FakeClock()
    failures = Failures(clock)
    failures.note("10.0.0.7", "good", accepted=True)
    for number in range(int(FAILURES_PER_SECOND)):
        assert failures.may_try("10.0.0.7", f"guess-{number}")
        failures.note("10.0.0.7", f"guess-{number}", accepted=False)
    assert not failures.may_try("10.0.0.7", "also good")
    assert failures.may_try("10.0.0.7", "good")
    assert failures.may_try("10.0.0.8", "also good")
    clock.advance(0.1)
    assert failures.may_try("10.0.0.7", "also good")


def test_an_ipv6_host_does_not_escape_by_another_address_of_its_network() -> None:
    failures = Failures(FakeClock())
    for number in range(int(FAILURES_PER_SECOND)):
        failures.note(f"2001:db8::{number:x}", "guess", accepted=False)
    assert not failures.may_try("2001:db8::ffff", "guess")
    assert failures.may_try("2001:db8:0:1::1", "guess")


def test_jobs_that_wait_are_limited_by_creator_and_pausing_one_is_no_way_around(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")

    def add(name: str, by: str = "ci") -> bool:
        return store.add_job(job_spec(name, checkpoint_dir=Path("/out") / name), "digest", (), (), by, 2)

    assert add("a")
    assert add("b")
    store.request_pause("b")
    with pytest.raises(LimitReached, match=r"the token 'ci' has 2 waiting jobs, and max_queued_jobs allows no more"):
        add("c")
    assert store.names() == ["a", "b"]
    assert not add("a"), "a repeated request is the same job, whatever the limit"
    assert add("c", by="laptop")
    store.transition("a", 0, JobState.scheduled, JobState.cancelled)
    assert add("d")
    assert store.get("d").created_by == "ci"
    store.close()


# --- A service --------------------------------------------------------------------------------------------------------

contract = pytest.mark.contract


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """Nothing trains, since the device is locked by us; the job `blocker` waits for it, and all others for that job."""
    root = tmp_path_factory.mktemp("service")
    (root / "locks").mkdir()
    device = FileLock(root / "locks" / "cpu.lock")
    assert device.acquire("test_tokens.py")
    tokens = [{"token": SUBMITTER, "name": "ci", "max_queued_jobs": 1, "priorities": ["low", "normal"]}]
    with running_service(root, api_token=OPERATOR, tokens=tokens) as service:
        service.session.headers["Authorization"] = f"Bearer {OPERATOR}"
        service.submit(SFT, sft("blocker", service.register("questions", QUESTIONS)))
        service.wait_state("blocker", "launching")
        yield service
    device.release()


def created(service: TrainingService, name: str, **more: Any) -> dict[str, str]:
    """The headers that send a new token."""
    answer = service.post("/tokens", {"name": name, **more})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Cache-Control"] == "no-store"
    return {"Authorization": f"Bearer {answer.json()['token']}"}


@contract
def test_a_created_token_opens_what_its_role_may_until_it_is_revoked(service: TrainingService) -> None:
    mine = created(service, "laptop", role="submit")
    assert service.get(JOBS, headers=mine).status_code == 200
    assert "role admin" in refusal(service.get("/tokens", headers=mine), 403)
    assert "role admin" in refusal(service.post("/tokens", {"name": "more"}, headers=mine), 403)
    assert service.delete("/tokens/laptop").status_code == 204
    assert "expired or was revoked" in refusal(service.get(JOBS, headers=mine), 401)
    assert "there is no token 'laptop'" in refusal(service.delete("/tokens/laptop"), 404)


@contract
def test_a_token_of_the_role_read_sees_jobs_by_every_client_and_changes_none(
    service: TrainingService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "this call needs a token with the role submit or admin, yours has the role read"
    monkeypatch.setenv("TRL_SERVICE_URL", service.url)
    monkeypatch.setenv("TRL_SERVICE_TOKEN", OPERATOR)
    assert main(["tokens", "create", "dana", "--role", "read", "--json"]) == 0
    created_row = json.loads(capsys.readouterr().out)
    assert created_row["role"] == "read"
    monkeypatch.setenv("TRL_SERVICE_TOKEN", created_row["token"])
    assert main(["jobs", "show", "blocker"]) == 0
    assert main(["jobs", "cancel", "blocker"]) == 1
    assert sentence in capsys.readouterr().err

    adapter = TrlRemotePostTraining(TrlRemoteConfig(url=service.url, api_token=created_row["token"]), {})
    assert "blocker" in [job.job_uuid for job in asyncio.run(adapter.get_training_jobs()).data]
    assert asyncio.run(adapter.get_training_job_status("blocker")).job_uuid == "blocker"
    with pytest.raises(ServiceRefusal, match=sentence):
        asyncio.run(adapter.cancel_training_job("blocker"))
    assert service.state("blocker") == "launching"
    assert service.delete("/tokens/dana").status_code == 204


@contract
@pytest.mark.parametrize("path", ["events", "download"])
def test_a_running_answer_ends_within_seconds_of_its_tokens_revocation(service: TrainingService, path: str) -> None:
    mine = created(service, f"runs-{path}")
    ended = threading.Event()
    url = f"{service.url}/v1{JOBS}/blocker/events"
    if path == "download":
        # Large enough not to fit into the buffers of the two sockets; the client reads none of it for a while.
        _, sha256 = service.put_blob(b'{"prompt": "a", "completion": "b"}\n' * 2_000_000)
        url = f"{service.url}/v1/blobs/{sha256}"
    answer = requests.get(url, headers={**mine, "Accept": "text/event-stream"}, stream=True, timeout=30)
    assert answer.status_code == 200

    def read() -> None:
        time.sleep(2.0 if path == "download" else 0.0)
        try:
            complete = sum(map(len, answer.iter_content(1 << 16))) == int(answer.headers.get("Content-Length", -1))
        except requests.RequestException:
            complete = False
        if not complete:
            ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert not ended.wait(1.2), "it ended by itself"
    assert service.delete(f"/tokens/runs-{path}").status_code == 204
    assert ended.wait(5.0), "it continues with a revoked token"
    reader.join()
    answer.close()


@contract
def test_a_stream_ends_when_its_token_expires(service: TrainingService) -> None:
    mine = created(service, "brief", expires_in=1.5)
    headers = {**mine, "Accept": "text/event-stream"}
    with requests.get(f"{service.url}/v1{JOBS}/blocker/events", headers=headers, stream=True, timeout=10) as answer:
        assert answer.status_code == 200
        assert b"event: end" not in b"".join(answer.iter_content(None))
    assert "expired or was revoked" in refusal(service.get(JOBS, headers=mine), 401)


@contract
def test_tokens_outlive_a_killed_service_and_revoked_ones_stay_revoked(service: TrainingService) -> None:
    stays, goes = created(service, "stays", role="admin"), created(service, "goes")
    assert service.delete("/tokens/goes", headers=stays).status_code == 204
    service.kill()
    service.start()
    assert service.get(JOBS, headers=goes).status_code == 401
    rows = {row["name"]: row for row in service.get("/tokens", headers=stays).json()["data"]}
    assert "goes" not in rows
    assert (rows["stays"]["role"], rows["stays"]["source"]) == ("admin", "created")
    assert (rows["stays"]["created_by"], rows["operator"]["source"]) == ("operator", "api_token, TRL_SERVICE_TOKEN")
    assert rows["stays"]["last_used_at"] is not None
    assert "token" not in rows["stays"]
    assert "sha256" not in rows["stays"]


@contract
def test_jobs_and_datasets_name_their_creator(service: TrainingService) -> None:
    mine = created(service, "author")
    body = {
        "dataset_id": "authored",
        "purpose": "post-training/messages",
        "source": {"type": "rows", "rows": QUESTIONS},
    }
    assert service.post("/datasets", body, headers=mine).json()["metadata"]["created_by"] == "author"
    body["metadata"] = {"created_by": "another caller"}
    body["dataset_id"] = "forged"
    assert service.post("/datasets", body, headers=mine).json()["metadata"]["created_by"] == "author"
    assert service.post(SFT, sft("authored", "authored"), headers=mine).status_code == 200
    assert service.status("authored")["resources_allocated"]["created_by"] == "author"
    rows = {row["job_uuid"]: row for row in service.get(JOBS, full="true").json()["data"]}
    assert (rows["authored"]["created_by"], rows["blocker"]["created_by"]) == ("author", "operator")


@contract
def test_waiting_jobs_and_priorities_of_a_token_are_limited(service: TrainingService) -> None:
    for mine, name in (
        ({"Authorization": f"Bearer {SUBMITTER}"}, "ci"),
        (created(service, "made", max_queued_jobs=1, priorities=["low", "normal"]), "made"),
    ):
        high = service.post(SFT, sft(f"{name}-high", "questions"), headers=mine, options={"priority": "high"})
        assert f"provider_options.priority='high' is not supported: the token '{name}' may use low, normal" in refusal(
            high
        )
        first = sft(f"{name}-1", "questions")
        assert service.post(SFT, first, headers=mine).status_code == 200
        assert service.post(SFT, first, headers=mine).status_code == 200, "the same job again"
        second = service.post(SFT, sft(f"{name}-2", "questions"), headers=mine)
        assert f"the token '{name}' has 1 waiting jobs" in refusal(second, 429)
        assert int(second.headers["Retry-After"]) > 0
        assert service.post(f"{JOBS}/{name}-1/cancel", headers=mine).status_code == 200
        assert service.post(SFT, sft(f"{name}-2", "questions"), headers=mine).status_code == 200


@contract
def test_requests_of_a_token_are_limited_and_of_others_not(service: TrainingService) -> None:
    mine = created(service, "slow", requests_per_second=2)
    answers = [service.get(JOBS, headers=mine) for _ in range(30)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 10
    assert "limited to 2 requests per second" in refusal(refused[0], 429)
    assert int(refused[0].headers["Retry-After"]) >= 1
    assert service.get(JOBS).status_code == 200


@contract
def test_guessing_from_an_address_is_slowed_and_known_callers_there_continue(service: TrainingService) -> None:
    assert service.get(JOBS).status_code == 200
    deadline = time.monotonic() + 20
    statuses: list[int] = []
    with requests.Session() as session:
        while 429 not in statuses and time.monotonic() < deadline:
            headers = {"Authorization": f"Bearer guess-{len(statuses)}"}
            answer = session.get(f"{service.url}/v1{JOBS}", headers=headers, timeout=30)
            statuses.append(answer.status_code)
    assert set(statuses) == {401, 429}
    assert "too many wrong tokens came from this address" in answer.json()["detail"]
    assert answer.headers["Retry-After"] == "1"
    assert service.get(JOBS).status_code == 200
    assert requests.get(f"{service.url}/v1/health", headers=headers, timeout=30).status_code == 200


@contract
@pytest.mark.parametrize(
    "body",
    [
        {"name": "a/b"},
        {"name": "a\n"},
        {"name": "x" * 65},
        {"name": "x", "role": "king"},
        {"name": "x", "expires_in": 0},
        {"name": "x", "expires_in": 1e12},
        {"name": "x", "max_queued_jobs": "5"},
        {"name": "x", "max_queued_jobs": 0},
        {"name": "x", "requests_per_second": -1},
        {"name": "x", "priorities": []},
        {"name": "x", "priorities": ["urgent"]},
        {"name": "x", "token": "chosen"},
        {},
    ],
)
def test_what_a_token_cannot_be_is_refused(service: TrainingService, body: dict[str, Any]) -> None:
    refusal(service.post("/tokens", body))
    assert not [row for row in service.get("/tokens").json()["data"] if row["name"] == body.get("name")]


@contract
def test_trl_remote_creates_lists_and_revokes(service: TrainingService) -> None:
    environ = {**os.environ, "TRL_SERVICE_URL": service.url, "TRL_SERVICE_TOKEN": OPERATOR}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "tokens", *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    limits = ("--expires", "30d", "--max-queued-jobs", "4", "--requests-per-second", "50", "--priorities", "low,normal")
    made = run("create", "shell", *limits)
    assert (made.returncode, made.stdout[:4], made.stdout.count("\n")) == (0, PREFIX, 1)
    assert "requires no token" not in made.stderr
    assert service.get(JOBS, headers={"Authorization": f"Bearer {made.stdout.strip()}"}).status_code == 200
    listed = next(line for line in run("list").stdout.splitlines() if line.startswith("shell "))
    assert "jobs=4 requests/s=50.0 priorities=low,normal" in listed
    assert made.stdout.strip() not in run("list", "--json").stdout
    assert run("revoke", "shell").stdout == "shell is revoked\n"
    assert "is configured (api_token" in run("revoke", "operator").stderr


@contract
def test_without_a_configured_token_a_created_one_locks_no_caller_out(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        answer = service.post("/tokens", {"name": "early"})
        assert (answer.status_code, answer.json()["required"]) == (201, False)
        assert service.get("/tokens").json()["data"][0]["created_by"] == "local"
        command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "tokens", "create", "second"]
        environ = {**os.environ, "TRL_SERVICE_URL": service.url}
        made = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
        assert "this service requires no token yet" in made.stderr
