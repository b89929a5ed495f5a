"""Webhooks: what is recorded with the end of a job, when it is tried again, and where it may go."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.openai.outgoing import Undelivered, WebhookAddress, post, retry_after
from llama_stack_provider_trl_remote.openai.webhooks import (
    LONGEST_PAUSE,
    LONGEST_WAIT,
    MOST_TRIES,
    Receiver,
    Try,
    WebhookSender,
    receivers_of,
    wait_after,
)
from llama_stack_provider_trl_remote.service import context, server
from llama_stack_provider_trl_remote.service.loading import load_settings
from llama_stack_provider_trl_remote.service.settings import ServiceSettings, SettingsError
from tests.fakes import FakeClock, job_spec

URL, OTHER = "https://hooks.example/jobs?key=hush", "https://other.example/"
SECRET = "whsec_" + "QUJD" * 8
ENDED = {JobState.completed, JobState.failed, JobState.cancelled}


class World:
    """A store with two receivers, of which `refusing` do not accept anything."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock()
        self.store = Store(root / "jobs.sqlite3", self.clock)
        self.store.webhooks.configure({URL: ENDED, OTHER: {JobState.failed}})
        self.sent: list[tuple[str, Mapping[str, str], Any]] = []
        self.refuses, self.asks = False, 0.0
        self.receiver = Receiver(URL, WebhookAddress.of(URL), b"key")
        self.other = Receiver(OTHER, WebhookAddress.of(OTHER), b"key")
        self.webhooks = WebhookSender(self.store, [self.receiver, self.other], self.clock, self.send)

    def send(self, target: WebhookAddress, headers: Mapping[str, str], body: bytes) -> None:
        self.sent.append((target.host, headers, json.loads(body)))
        if self.refuses:
            raise Undelivered("it answered 500", self.asks)

    def end(self, name: str, state: JobState = JobState.completed, **metadata: str) -> None:
        self.clock.advance(1)
        self.store.add_job(job_spec(name, metadata=metadata or {"openai": "{}"}), "digest")
        assert self.store.launch(name, 1, "cpu", Path("/run") / name)
        if state is JobState.cancelled:
            assert self.store.transition(name, 1, JobState.launching, JobState.cancelling)
        source = JobState.cancelling if state is JobState.cancelled else JobState.in_progress
        if source is JobState.in_progress:
            with self.store.database.transaction() as execute:
                execute("note_started", {"job_uuid": name, "attempt": 1, "time": self.clock()})
        assert self.store.transition(name, 1, source, state)

    def deliver(self, receiver: Receiver | None = None) -> list[str]:
        """Names of the jobs of tries that are due."""
        before = len(self.sent)
        while self.webhooks.deliver(receiver or self.receiver) is not Try.none_due:
            pass
        return [body["data"]["id"] for _, _, body in self.sent[before:]]

    def serve(self, waits: int) -> list[float]:
        """The seconds that a receiver's thread waits before each of its turns."""
        stopping = self.webhooks._stopping = Pauses(self.clock, waits)  # type: ignore[assignment]
        self.webhooks._serve(self.receiver)
        return stopping.seconds

    def counted(self, outcome: str) -> float:
        return self.store.totals.all().get("webhooks", {}).get((outcome,), 0.0)


class Pauses:
    """In place of the event that ends the threads, after so many waits; the clock goes on in each."""

    def __init__(self, clock: FakeClock, most: int) -> None:
        self.clock, self.most = clock, most
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        self.seconds.append(seconds)
        return len(self.seconds) > self.most


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


def test_each_end_of_a_job_of_this_api_is_told_once_in_their_order(world: World) -> None:
    for name, state in (("ftjob-b", JobState.completed), ("ftjob-c", JobState.failed), ("ftjob-a", JobState.cancelled)):
        world.end(name, state)
    world.end("sft-1", team="a")
    world.store.delete("ftjob-b")
    assert world.store.webhooks.waiting() == 4
    assert world.deliver() == ["ftjob-b", "ftjob-c", "ftjob-a"]
    assert [body["type"] for _, _, body in world.sent] == [
        f"fine_tuning.job.{state}" for state in ("succeeded", "failed", "cancelled")
    ]
    assert world.sent[0][2] == {
        "id": "evt_b",
        "object": "event",
        "created_at": int(world.clock()) - 3,
        "type": "fine_tuning.job.succeeded",
        "data": {"id": "ftjob-b"},
    }
    assert world.deliver() == []
    assert world.deliver(world.other) == ["ftjob-c"]
    assert (world.counted("delivered"), world.store.webhooks.waiting()) == (4, 0)


def test_a_try_is_repeated_ever_later_with_the_same_id_until_it_is_given_up(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.refuses = True
    world.end("ftjob-a")
    began = world.clock()
    times = []
    for _ in range(MOST_TRIES):
        assert world.deliver() == ["ftjob-a"]
        times.append(world.clock())
        world.clock.advance(wait_after(len(times)) - 0.5)
        assert world.deliver() == []
        world.clock.advance(0.5)
    assert [later - time for time, later in itertools.pairwise(times[:5])] == [1, 2, 4, 8]
    assert max(later - time for time, later in itertools.pairwise(times)) == LONGEST_WAIT
    assert times[-1] - began == pytest.approx(72 * 3600, rel=0.01)
    assert (world.counted("given_up"), world.store.webhooks.waiting()) == (1, 0)
    assert {headers["webhook-id"] for _, headers, _ in world.sent} == {"evt_a"}
    assert len({headers["webhook-timestamp"] for _, headers, _ in world.sent}) == MOST_TRIES
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert f"given up after {MOST_TRIES} tries: it answered 500" in caplog.text
    assert "hush" not in caplog.text


def test_new_events_do_not_wait_behind_one_that_is_refused(world: World) -> None:
    world.refuses = True
    world.end("ftjob-a")
    assert world.deliver() == ["ftjob-a"]
    world.refuses = False
    world.end("ftjob-b")
    assert world.deliver() == ["ftjob-b", "ftjob-a"]


def test_a_receiver_that_is_down_is_called_ever_more_rarely_however_many_events_are_due(world: World) -> None:
    for number in range(12):
        world.end(f"ftjob-{number}")
    world.refuses = True
    assert world.serve(9) == [0, 1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert len(world.sent) == 9
    world.refuses = False
    assert world.serve(5) == [0] * 6
    assert len(world.sent) == 9 + 5


def test_a_receiver_that_asks_for_time_gets_it_for_all_of_its_events(world: World) -> None:
    world.asks, world.refuses = 50.0, True
    world.end("ftjob-a")
    assert world.deliver() == ["ftjob-a"]
    world.asks = 10 * LONGEST_WAIT  # as long as may be
    world.end("ftjob-b", JobState.failed)
    world.clock.advance(48.5)
    assert world.deliver() == []
    assert world.deliver(world.other) == ["ftjob-b"]
    world.clock.advance(0.5)
    assert world.deliver() == ["ftjob-b"]
    world.asks, world.refuses = 0.0, False
    world.clock.advance(LONGEST_WAIT - 1)
    assert world.deliver() == []
    world.clock.advance(1)
    assert world.deliver() == ["ftjob-a", "ftjob-b"]


def test_what_a_receiver_asks_for_outlasts_the_service(world: World) -> None:
    world.asks, world.refuses = 50.0, True
    world.end("ftjob-a")
    assert world.deliver() == ["ftjob-a"]
    world.webhooks = WebhookSender(world.store, [world.receiver], world.clock, world.send)
    world.clock.advance(49)
    assert world.deliver() == []
    world.clock.advance(1)
    assert world.deliver() == ["ftjob-a"]


def test_what_a_receiver_asks_for_holds_for_all_of_its_events_after_a_restart(world: World) -> None:
    world.asks, world.refuses = 50.0, True
    world.end("ftjob-a", JobState.failed)
    world.end("ftjob-b")
    assert world.webhooks.deliver(world.receiver) is Try.undelivered
    world.webhooks = WebhookSender(world.store, [world.receiver, world.other], world.clock, world.send)
    world.end("ftjob-c")
    world.clock.advance(48)
    assert world.deliver() == []
    world.refuses = False
    assert world.deliver(world.other) == ["ftjob-a"]
    world.clock.advance(1)
    assert world.deliver() == ["ftjob-b", "ftjob-c", "ftjob-a"]


def test_an_event_that_is_accepted_ends_what_a_receiver_has_asked_for(world: World) -> None:
    """Else a clock that is set back would bring the time back."""
    world.asks, world.refuses = 50.0, True
    world.end("ftjob-a")
    assert world.deliver() == ["ftjob-a"]
    world.refuses = False
    world.clock.advance(50)
    assert world.deliver() == ["ftjob-a"]
    world.clock.advance(-20)
    world.end("ftjob-b")
    assert world.deliver() == ["ftjob-b"]


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        *((b"Retry-After: 120", 120), (b"retry-after:\t7 ", 7), (b"Retry-After: " + b"9" * 18, 1e18)),
        *((b"Retry-After: Thu, 01 Jan 1970 00:10:00 GMT", 600), (b"Retry-After: Thu, 01 Jan 1970 00:00:00 GMT", 0)),
        *((b"Retry-After: -5", 0), (b"Retry-After: soon", 0), (b"Retry-After: 1.5", 0), (b"X-Retry-After: 5", 0)),
        *((b"Retry-After: " + b"9" * 30, 0), (b"Retry-After: Thu, 99 Jan 1970 00:10:00 GMT", 0), (b"A: b", 0)),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(line: bytes, seconds: float) -> None:
    assert retry_after(b"HTTP/1.1 429 Slow\r\nA: b\r\n" + line + b"\r\nC: d", 0.0) == seconds
    assert retry_after(b"HTTP/1.1 429 Slow\r\n" + line, 0.0) == seconds


def test_an_unforeseen_error_is_logged_and_ends_no_thread(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.end("ftjob-a")
    begin = world.store.webhooks.begin

    def fails(*values: Any) -> Any:
        monkeypatch.setattr(world.store.webhooks, "begin", begin)
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(world.store.webhooks, "begin", fails)
    assert world.serve(2) == [0, 30, 0]
    assert "unforeseen" in caplog.text
    assert len(world.sent) == 1
    assert "hush" not in caplog.text


def test_nothing_waits_for_hours_after_the_clock_was_set_back(world: World) -> None:
    world.refuses = True
    world.end("ftjob-a")
    assert world.deliver() == ["ftjob-a"]
    world.clock.advance(-10 * LONGEST_WAIT)
    assert world.deliver() == ["ftjob-a"]


def test_an_address_that_is_removed_gets_nothing_and_a_new_one_what_ends_from_now_on(world: World) -> None:
    world.end("ftjob-a", JobState.failed)
    assert world.store.webhooks.configure({URL: ENDED, OTHER: {JobState.failed}}) == 0
    assert world.store.webhooks.configure({OTHER: ENDED}) == 1
    assert world.counted("given_up") == 1
    assert world.store.webhooks.configure({OTHER: ENDED, URL: {JobState.completed}}) == 0
    world.end("ftjob-b")
    assert world.deliver() == ["ftjob-b"]
    assert world.deliver(world.other) == ["ftjob-a", "ftjob-b"]


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        *((public, True) for public in ("93.184.215.14", "2606:2800:21f:cb07::1", "::ffff:93.184.215.14")),
        *((local, False) for local in ("127.0.0.1", "::1", "0.0.0.0", "::", "169.254.169.254", "fe80::1%eth0")),
        *((private, False) for private in ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd00::1")),
        *((mapped, False) for mapped in ("::ffff:127.0.0.1", "::ffff:10.1.2.3", "::127.0.0.1", "64:ff9b::a01:203")),
        *((tunnel, False) for tunnel in ("2002:a01:203::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2")),
        *((group, False) for group in ("224.0.0.1", "ff02::1", "255.255.255.255", "192.0.2.1", "2001:db8::1")),
    ],
)
def test_only_public_addresses_are_called_unless_their_network_is_named(address: str, is_public: bool) -> None:
    assert WebhookAddress.of(URL).admits(address) is is_public
    assert WebhookAddress.of(URL, ["10.1.0.0/16", "fd00::/8"]).admits("::ffff:10.1.2.3")
    assert not WebhookAddress.of(URL, ["10.1.0.0/16"]).admits("10.2.0.1")


def test_a_name_that_leads_to_private_addresses_only_is_called_nowhere() -> None:
    def resolve(host: str, port: int, **more: Any) -> list[tuple[Any, ...]]:
        return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.1", "10.0.0.1")]

    with pytest.raises(Undelivered, match=r"leads to 10\.0\.0\.1, 127\.0\.0\.1, which is not public: `networks`"):
        post(WebhookAddress.of(URL), {}, b"", resolve=resolve)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"url": "http://hooks.example/"}, "use https, or set insecure: true"),
        ({"url": "ftp://hooks.example/"}, "expected an address such as https://"),
        ({"url": "https://user:hush@hooks.example/"}, "expected an address such as https://"),
        ({"url": "https://hooks.example/a b"}, "expected an address such as https://"),
        ({"url": "https:///path"}, "expected an address such as https://"),
        ({"url": "https://hooks.example:99999/"}, "expected an address such as https://"),
        ({"secret": "hush-hush"}, "expected whsec_ and 24 to 64 random bytes as base64"),
        ({"secret": "whsec_hush"}, "expected whsec_ and 24 to 64 random bytes as base64"),
        ({"secret": None}, "set secret or secret_file"),
        ({"secret_file": "/hush"}, "set secret or secret_file"),
        ({"events": ["batch.completed"]}, "fine_tuning.job.succeeded"),
        ({"networks": ["10.1.2.3/16"]}, "expected a network such as 10.1.0.0/16"),
    ],
)
def test_a_webhook_that_cannot_be_used_is_refused_without_its_secret(changes: dict[str, Any], expected: str) -> None:
    webhook = {"url": URL.replace("hush", "h"), "secret": SECRET, **changes}
    with pytest.raises(SettingsError) as refused:
        load_settings(None, {}, openai={"webhooks": [webhook]})
    assert expected in str(refused.value)
    assert "hush" not in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("block", [[{"secret": SECRET}], {"webhook": [{"secret": SECRET}]}, {"webhooks": SECRET}])
def test_a_secret_in_the_wrong_place_is_not_repeated(block: Any) -> None:
    with pytest.raises(SettingsError, match=r"openai") as refused:
        load_settings(None, {}, openai=block)
    assert SECRET not in str(refused.value)


def test_the_secret_of_a_file_is_read_where_only_its_owner_can(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    settings = ServiceSettings.model_validate({"openai": {"webhooks": [{"url": URL, "secret_file": str(path)}]}})
    path.chmod(0o644)
    with pytest.raises(SettingsError, match=r"openai\.webhooks\.0\.secret_file: .* has mode 0644"):
        receivers_of(settings.openai.webhooks)
    path.chmod(0o600)
    (receiver,) = receivers_of(settings.openai.webhooks)
    assert (receiver.key, receiver.target.path) == (b"ABC" * 8, "/jobs?key=hush")
    assert SECRET not in repr(settings)


def test_a_start_that_fails_gives_up_no_delivery(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.end("ftjob-a")
    webhook = {"url": OTHER, "secret_file": str(tmp_path / "gone")}
    values = {"data_dir": str(tmp_path), "device": "cpu", "port": 0, "openai": {"webhooks": [webhook]}}
    settings = ServiceSettings.model_validate(values)
    world.store.close()
    with server.listen(settings) as listener, pytest.raises(SettingsError, match=r"secret_file"):
        asyncio.run(server._serve(settings, None, listener))
    with monkeypatch.context() as patch:
        patch.setattr(context, "check_interpreter", lambda _: None)
        service = context.Service(settings)  # whose start may fail, too
    service.close()
    assert world.store.webhooks.waiting() == 1
