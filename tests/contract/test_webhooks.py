"""Webhooks of a real service: receivers on loopback, of which some are slow or hostile, and kills of the service."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from openai.types.webhooks import (
    FineTuningJobCancelledWebhookEvent,
    FineTuningJobFailedWebhookEvent,
    FineTuningJobSucceededWebhookEvent,
)

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.monitoring.webhooks import Delivery
from llama_stack_provider_trl.system.process import child_environment
from llama_stack_provider_trl_remote.openai import outgoing
from llama_stack_provider_trl_remote.openai.outgoing import PATIENCE, Undelivered, WebhookAddress, post
from llama_stack_provider_trl_remote.openai.webhooks import event_of, signed_headers
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.openai_settings import webhook_key
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.openai_files import CHATS, uploaded
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import poll
from tests.fake_trainer import fake_trainer
from tests.security.certificates import certificate
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]
Json = dict[str, Any]
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
NAME = "small"


class Receiver:
    """A web server: `/redirect` leads to `/stolen`, `/silent` gets no answer until the end, all others are accepted."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Json, bytes]] = []
        self.began: dict[str, float] = {}
        self.ended = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.began.setdefault(self.path, time.monotonic())
                receiver.received.append((self.path, dict(self.headers), body))
                if self.path == "/silent":
                    receiver.ended.wait(60)
                elif self.path == "/redirect":
                    self.send_response(307)
                    self.send_header("Location", "/stolen")
                    self.end_headers()
                else:
                    self.send_response(204)
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def at(self, path: str) -> list[tuple[Json, bytes]]:
        return [(headers, body) for one, headers, body in list(self.received) if one == path]

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def settings(root: Path, webhooks: list[Json]) -> Json:
    models = {NAME: {"model": str(tiny_model())}}
    return {"openai": {"models": models, "webhooks": webhooks}, "train_python": str(fake_trainer(root))}


def on_loopback(receiver: Receiver, path: str) -> Json:
    return {"url": receiver.url + path, "secret": SECRET, "networks": ["127.0.0.0/8"], "insecure": True}


def script(service: TrainingService) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/openai/v1", api_key="none")


def train(client: OpenAI, epochs: int = 1) -> str:
    file = uploaded(client, CHATS)
    return client.fine_tuning.jobs.create(model=NAME, training_file=file, hyperparameters={"n_epochs": epochs}).id


def test_receivers_are_told_and_those_that_are_slow_or_forbidden_delay_no_other(
    tmp_path: Path, receiver: Receiver
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    webhooks = [*(on_loopback(receiver, path) for path in ("/silent", "/redirect", "/private", "/jobs"))]
    webhooks[2] |= {"networks": []}
    webhooks[3] |= {"secret": None, "secret_file": str(secret)}
    with running_service(tmp_path, **settings(tmp_path, webhooks)) as service, script(service) as client:
        job = train(client)
        cancelled = train(client, epochs=50)
        client.fine_tuning.jobs.cancel(cancelled)
        poll(lambda: len(receiver.at("/jobs")) == 2, "both ends are told", timeout=20, pause=0.05)
        told = {}
        for headers, body in receiver.at("/jobs"):
            event: Any = client.webhooks.unwrap(body, headers, secret=SECRET)
            told[event.data.id] = event
            assert (event.id, event.object) == (headers["webhook-id"], "event")
            with pytest.raises(InvalidWebhookSignatureError):
                client.webhooks.unwrap(body + b" ", headers, secret=SECRET)
        assert {name: event.type for name, event in told.items()} == {
            job: "fine_tuning.job.succeeded",
            cancelled: "fine_tuning.job.cancelled",
        }
        assert told[job].created_at == client.fine_tuning.jobs.retrieve(job).finished_at
        poll(lambda: len(receiver.at("/redirect")) >= 2, "a redirect is tried again", timeout=20, pause=0.05)
        assert receiver.began["/jobs"] - receiver.began["/silent"] < PATIENCE
        assert receiver.at("/stolen") == receiver.at("/private") == []
        log = service.log.read_text()
        assert "answered 307: redirects are not followed" in log
        assert "leads to 127.0.0.1, which is not public" in log
        assert SECRET not in log


def test_a_kill_between_the_end_of_a_job_and_the_delivery_loses_nothing(tmp_path: Path, receiver: Receiver) -> None:
    webhook = on_loopback(receiver, "/survives")
    with running_service(tmp_path, **settings(tmp_path, [webhook])) as service, script(service) as client:
        service.arm("webhook-begun", "kill")
        job = train(client)
        poll(lambda: not service.runs(), "the service is killed before it sends", timeout=20, pause=0.05)
        assert receiver.at("/survives") == []
        service.arm("webhook-sent", "kill")
        service.launch()
        poll(lambda: not service.runs(), "it is killed before it knows of the answer", timeout=20, pause=0.05)
        assert len(receiver.at("/survives")) == 1
        service.start()
        poll(lambda: len(receiver.at("/survives")) == 2, "the event comes again", timeout=20, pause=0.05)
        assert {headers["webhook-id"] for headers, _ in receiver.at("/survives")} == {f"evt_{job[6:]}"}
        for headers, body in receiver.at("/survives"):
            event: Any = client.webhooks.unwrap(body, headers, secret=SECRET)
            assert (event.type, event.data.id) == ("fine_tuning.job.succeeded", job)
        counted = 'trl_webhooks_total{outcome="delivered"} 1.0'
        poll(lambda: counted in service.get("/metrics", prefix="").text, "it is counted", timeout=20)
        assert "trl_webhooks_waiting 0.0" in service.get("/metrics", prefix="").text


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (JobState.completed, FineTuningJobSucceededWebhookEvent),
        (JobState.failed, FineTuningJobFailedWebhookEvent),
        (JobState.cancelled, FineTuningJobCancelledWebhookEvent),
    ],
)
def test_each_event_is_one_of_the_sdk(state: JobState, kind: type) -> None:
    body = event_of(Delivery("https://hooks.example/", "ftjob-a", state, time.time(), 1, 0.0))
    headers = signed_headers(webhook_key(SECRET), "evt_a", int(time.time()), body)
    with OpenAI(base_url="http://127.0.0.1:9", api_key="none", webhook_secret=SECRET) as client:
        event = client.webhooks.unwrap(body, headers)
        assert isinstance(event, kind)
        stale = signed_headers(webhook_key(SECRET), "evt_a", int(time.time()) - 3600, body)
        with pytest.raises(InvalidWebhookSignatureError, match="too old"):
            client.webhooks.unwrap(body, stale)


@contextmanager
def answering(pieces: Iterable[bytes], pause: float, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port of a server that answers one call with these pieces, one after each pause."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with suppress(OSError):  # the client has closed the connection
            plain, _ = server.accept()
            with plain if context is None else context.wrap_socket(plain, server_side=True) as connection:
                connection.recv(1 << 16)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
        thread.join(10)
        assert not thread.is_alive()
    finally:
        server.close()


@pytest.mark.parametrize("status", [429, 500])
def test_a_receiver_that_is_asked_too_often_says_when_to_ask_again(status: int) -> None:
    pieces = (b"HTTP/1.1 %d No\r\nRetry-" % status, b"After: 17\r\n\r\nRetry-After: 5\r\n")
    with answering(pieces, 0.05) as port, pytest.raises(Undelivered, match=f"answered {status}") as refused:
        post(WebhookAddress.of(f"http://127.0.0.1:{port}/", ["127.0.0.1/32"]), {}, b"{}", patience=5)
    assert refused.value.retry_after == (17 if status == 429 else 0)


@pytest.mark.parametrize(
    ("pieces", "pause", "why"),
    [
        ((b"HTTP/1.1 ", *(b"2" for _ in range(100))), 0.05, "no answer within 0.5 s"),
        ((), 0.0, "closed the connection without an answer"),
        (repeat(b"x" * 4096), 0.0, "answered with no HTTP"),
        ((b"HTTP/1.1 500 Oops\r\n\r\n",), 0.0, "answered 500"),
        (chain([b"HTTP/1.1 200 OK\r\n\r\n"], repeat(b"x" * 4096)), 0.0, ""),
        (chain([b"HTTP/1.1 204\r\n"], repeat(b"x")), 0.05, ""),
    ],
    ids=["drips", "nothing", "no HTTP", "500", "an endless answer", "an endless head"],
)
def test_an_answer_takes_no_more_than_its_time_and_its_bytes(pieces: Iterable[bytes], pause: float, why: str) -> None:
    with answering(pieces, pause) as port:
        target = WebhookAddress.of(f"http://127.0.0.1:{port}/", ["127.0.0.1/32"])
        if why:
            with pytest.raises(Undelivered, match=why):
                post(target, {}, b"{}", patience=0.5)
        else:
            post(target, {}, b"{}", patience=0.5)


def test_the_connection_is_to_the_address_that_was_checked() -> None:
    asked = []

    def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    with answering([b"HTTP/1.1 200 OK\r\n\r\n"], 0.0) as port, socket.create_server(("127.0.0.2", port)) as private:
        private.settimeout(0)
        post(WebhookAddress.of(f"http://rebound.example:{port}/", ["127.0.0.1/32"]), {}, b"{}", resolve=resolve)
        with pytest.raises(BlockingIOError):
            private.accept()
    assert asked == ["rebound.example"]


def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, key = certificate(tmp_path, "hooks.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours, key)

    def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    for name, trusted, why in (
        ("hooks.example", True, ""),
        ("other.example", True, "certificate verify failed"),
        ("hooks.example", False, "certificate verify failed"),
    ):
        trusting = ssl.create_default_context(cafile=ours if trusted else None)
        monkeypatch.setattr(outgoing, "_tls", lambda trusting=trusting: trusting)
        with answering([b"HTTP/1.1 200 OK\r\n\r\n"], 0.0, context) as port:
            target = WebhookAddress.of(f"https://{name}:{port}/", ["127.0.0.1/32"])
            if why:
                with pytest.raises(Undelivered, match=why):
                    post(target, {}, b"{}", resolve=resolve)
            else:
                post(target, {}, b"{}", resolve=resolve)


def test_trainings_see_neither_the_file_nor_the_variable_of_a_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    webhook = {"url": "https://hooks.example/", "secret_file": str(secret)}
    values = {"data_dir": str(tmp_path / "data"), "device": "cpu", "openai": {"webhooks": [webhook]}}
    service = Service(ServiceSettings.model_validate(values))
    try:
        assert secret in service.isolation.files or not service.isolation.how
    finally:
        service.close()
    assert "TRL_WEBHOOK_SECRET" not in child_environment({"TRL_WEBHOOK_SECRET": SECRET}, {})
