"""The client of the training service, against one that is played on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import ssl
import subprocess
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from llama_stack_provider_trl.errors import JobNotFound, ServiceRefusal, ServiceUnreachable, TrlError
from llama_stack_provider_trl_remote import client
from llama_stack_provider_trl_remote.address import checked_url
from llama_stack_provider_trl_remote.client import PREFERENCE_OPTIMIZE, ServiceClient, Timeouts, job_path
from llama_stack_provider_trl_remote.config import TrlRemoteConfig
from llama_stack_provider_trl_remote.service.loading import load_settings
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.fake_service import FakeService, fake_service, status
from tests.tiny import REPOSITORY

STATUS = "GET /v1/post-training/job/status"
CANCEL = "POST /v1/post-training/job/cancel"


@pytest.fixture
def service() -> Iterator[FakeService]:
    with fake_service() as service:
        service.jobs["job"] = [status("job")]
        yield service


def call[Value](url: str, use: Callable[[ServiceClient], Awaitable[Value]], **options: Any) -> Value:
    """What one client gets that lives in an event loop of its own."""

    async def run() -> Value:
        return await use(ServiceClient(url, **{"pauses": (0, 0), **options}))

    return asyncio.run(run())


@pytest.mark.parametrize("trouble", ["drop", 502, 503, 504])
def test_what_can_be_repeated_is_repeated(service: FakeService, trouble: str | int) -> None:
    service.trouble = [trouble, trouble]
    assert call(service.url, lambda client: client.status("job"))["job_uuid"] == "job"
    assert service.seen[STATUS] == 3


def test_a_job_is_posted_again_because_its_name_makes_it_one_job(service: FakeService) -> None:
    service.trouble = ["drop", 503]
    answer = call(service.url, lambda client: client.submit(PREFERENCE_OPTIMIZE, {"job_uuid": "new"}))
    assert answer == {"job_uuid": "new"}
    assert service.seen[f"POST {PREFERENCE_OPTIMIZE}"] == 3


@pytest.mark.parametrize("trouble", ["drop", 503])
def test_a_cancel_is_never_sent_twice(service: FakeService, trouble: str | int) -> None:
    service.trouble = [trouble]
    with pytest.raises((ServiceUnreachable, ServiceRefusal)):
        call(service.url, lambda client: client.cancel("job"))
    assert service.seen[CANCEL] == 1


def test_it_gives_up_after_the_last_pause(service: FakeService) -> None:
    service.trouble = ["drop"] * 9
    with pytest.raises(ServiceUnreachable, match="broke off GET /v1/post-training/job/status"):
        call(service.url, lambda client: client.status("job"))
    # Three tries; aiohttp itself repeats a GET once when a connection is closed without an answer.
    assert 3 <= service.seen[STATUS] <= 6


def test_a_service_that_is_down_is_named_with_what_to_do() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ServiceUnreachable) as caught:
        call(url, lambda client: client.get("/v1/post-training/jobs"))
    assert isinstance(caught.value, ConnectionError)
    assert isinstance(caught.value, TrlError)
    for part in (
        f"at {url} accepts no connection",
        "refused",
        "./scripts/run-remote-fsdp-server.sh",
        "TRL_SERVICE_URL",
    ):
        assert part in str(caught.value)


def test_https_to_a_service_without_tls_is_named(service: FakeService) -> None:
    with pytest.raises(ServiceUnreachable) as caught:
        call(service.url.replace("http:", "https:"), lambda client: client.status("job"))
    message = str(caught.value)
    assert re.search(r"speaks no TLS \([a-z ]+\): name it with http://, or give it tls_cert and tls_key$", message)


def test_http_to_a_service_with_tls_is_named(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=head")
    made = ("openssl", "req", "-x509", *new, "-keyout", str(key), "-out", str(certificate))
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    message = asyncio.run(_called(answer, "http", context))
    assert "broke off GET /v1/health (" in message
    assert message.endswith("it may be restarting, or it may want https://")


def test_tls_that_comes_to_nothing_is_not_taken_for_no_tls() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"\x15\x03\x03\x00\x02\x02\x28")  # the alert handshake_failure
        writer.close()

    message = asyncio.run(_called(refuse, "https"))
    assert re.search(r"accepts no TLS connection \([a-z0-9 ]+\): compare the TLS settings of both machines$", message)


async def _called(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    scheme: str,
    tls: ssl.SSLContext | None = None,
) -> str:
    """A client's message about a server that answers so."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ServiceUnreachable) as caught:
            await ServiceClient(url, pauses=()).get("/v1/nodes")
        return str(caught.value)


def test_a_service_that_answered_over_http_does_not_want_https(service: FakeService) -> None:
    service.trouble = ["drop"] * 9
    with pytest.raises(ServiceUnreachable, match=r"it may be restarting$"):
        call(service.url, lambda client: client.status("job"))


def test_a_service_that_comes_back_between_two_tries_is_found() -> None:
    back: list[FakeService] = []
    first = FakeService()

    class Return(float):
        """A pause during which the service comes back."""

        def __le__(self, other: float) -> bool:  # asyncio.sleep asks whether there is anything to wait for
            back.append(FakeService(first.port))
            return True

    async def cancel_while_it_restarts(client: ServiceClient) -> None:
        await client.get("/v1/nodes")
        first.stop()
        await client.cancel("job")  # nothing of it is sent without a listener

    try:
        call(first.url, cancel_while_it_restarts, pauses=(Return(0),))
        assert back[0].seen[CANCEL] == 1
    finally:
        for service in back:
            service.stop()


def test_silence_is_not_waited_for_twice(service: FakeService) -> None:
    service.trouble = ["hang"]
    with pytest.raises(ServiceUnreachable, match=r"has not answered GET /v1/post-training/job/status within 0\.2 s"):
        call(service.url, lambda client: client.status("job"), timeouts=Timeouts(5, 0.2, 5))
    assert service.seen[STATUS] == 1


def test_a_job_whose_dataset_takes_long_to_check_is_posted_until_it_is_taken(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    service.trouble = ["hang", "hang"]
    timeouts = Timeouts(5, 0.2, 5, 30)
    body = {"job_uuid": "new"}
    assert call(service.url, lambda client: client.submit(PREFERENCE_OPTIMIZE, body), timeouts=timeouts) == body
    assert service.seen[f"POST {PREFERENCE_OPTIMIZE}"] == 3
    assert caplog.text.count("checking a large dataset takes long") == 2


def test_a_job_is_not_posted_forever(service: FakeService) -> None:
    service.trouble = ["hang"] * 9
    with pytest.raises(ServiceUnreachable, match="a repeated POST of a job is the same job"):
        call(service.url, lambda client: client.submit(PREFERENCE_OPTIMIZE, {}), timeouts=Timeouts(5, 0.5, 5, 0.95))
    assert service.seen[f"POST {PREFERENCE_OPTIMIZE}"] == 2


@pytest.mark.parametrize(
    ("answered", "shown"),
    [(400, 400), (404, 404), (409, 409), (413, 413), (507, 507), (401, 502), (403, 502), (500, 502)],
)
def test_errors_keep_the_services_sentence(service: FakeService, answered: int, shown: int) -> None:
    service.trouble = [answered]
    with pytest.raises(ServiceRefusal) as caught:
        call(service.url, lambda client: client.status("job"))
    assert (caught.value.status, caught.value.status_code) == (answered, shown)
    assert f"the sentence of a {answered}" in str(caught.value)
    # What is not the request's own fault names the service, too.
    assert (service.url in str(caught.value)) == (answered not in (400, 404, 409))
    of_token = f"{answered}. The token is TRL_SERVICE_TOKEN, in Llama Stack the `api_token` of remote::trl_remote"
    assert str(caught.value).endswith(of_token) == (answered in (401, 403))


def test_the_token_is_sent_to_the_service() -> None:
    with fake_service(token="s3cret") as service:
        service.jobs["job"] = [status("job")]
        assert call(service.url, lambda client: client.status("job"), token="s3cret")["job_uuid"] == "job"
        with pytest.raises(ServiceRefusal, match="answered 401"):
            call(service.url, lambda client: client.status("job"))


def test_a_redirect_is_not_followed(service: FakeService) -> None:
    service.trouble = ["move"]
    with pytest.raises(ServiceUnreachable, match="is something else"):
        call(service.url, lambda client: client.status("job"), token="s3cret")
    assert service.seen[STATUS] == 1


def test_a_blob_is_uploaded_in_pieces_and_whole_again_after_a_broken_connection(
    service: FakeService, tmp_path: Path
) -> None:
    content = b"x" * (24 << 20)
    digest = hashlib.sha256(content).hexdigest()
    file = tmp_path / "rows"
    file.write_bytes(content)
    del content
    service.trouble = ["drop"]

    async def upload(client: ServiceClient) -> tuple[bool, bool]:
        before = await client.has_blob(digest)
        await client.put_blob(digest, file)
        return before, await client.has_blob(digest)

    tracemalloc.start()
    try:
        assert call(service.url, upload) == (False, True)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert service.blobs == {digest: 24 << 20}


def test_a_body_that_is_too_large_is_refused_without_being_sent(service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(b"x" * (8 << 20))
    service.trouble = [413]
    with pytest.raises(ServiceRefusal, match="the sentence of a 413"):
        call(service.url, lambda client: client.put_blob("0" * 64, file))
    assert service.refused_unsent == 1


def test_one_client_serves_several_event_loops(service: FakeService) -> None:
    client = ServiceClient(service.url, pauses=())
    # As Llama Stack does it: the loop in which the provider was made is closed before the first request.
    for _ in range(2):
        assert asyncio.run(client.status("job"))["job_uuid"] == "job"
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        there = asyncio.run_coroutine_threadsafe(client.status("job"), loop)
        found = [asyncio.run(client.status("job"))["job_uuid"], there.result(60)["job_uuid"]]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert found == ["job", "job"]


@pytest.mark.parametrize("health", [{"status": "OK"}, [], "OK"])
def test_an_adapter_pointed_at_llama_stack_itself_is_refused(service: FakeService, health: Any) -> None:
    service.health = health
    with pytest.raises(ServiceUnreachable, match="is something else: GET /v1/health gives"):
        call(service.url, lambda client: client.get("/v1/post-training/jobs"))
    assert not service.seen


def test_a_path_that_the_other_side_does_not_know_is_no_missing_job(service: FakeService) -> None:
    with pytest.raises(ServiceUnreachable, match=r"is something else: /v1/elsewhere gives 404"):
        call(service.url, lambda client: client.get("/v1/elsewhere"))


def test_an_answer_that_is_no_json_is_named(service: FakeService) -> None:
    service.logs = ["a log"]
    with pytest.raises(ServiceUnreachable, match="answered text/plain where JSON was expected"):
        call(service.url, lambda client: client.get(job_path("job", "/logs")))


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "a?b", "a" * 129])
def test_a_name_that_no_job_can_have_is_not_found(name: str) -> None:
    with pytest.raises(JobNotFound):
        job_path(name, "/logs")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8322", "http://127.0.0.1:8322"),
        (" https://gpu.example/trl/ ", "https://gpu.example/trl"),
        ("http://[::1]:8322/v1", "http://[::1]:8322"),
    ],
)
def test_addresses_are_taken_as_people_write_them(given: str, expected: str) -> None:
    assert checked_url(given) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8322", "localhost", "http://", "ftp://x", "http://x:y", "http://x?a=b"])
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match=r"such as http://127\.0\.0\.1:8322"):
        checked_url(url)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="TRL_SERVICE_TOKEN") as caught:
        checked_url("http://me:s3cret@host:1")
    assert "s3cret" not in str(caught.value)


def test_the_adapter_leaves_the_services_keys_alone_and_hides_the_token() -> None:
    config = TrlRemoteConfig(url=None, api_token="s3cret", fsdp_config={"cpu_offload": True}, data_dir="/x")  # type: ignore
    assert config.url == "http://127.0.0.1:8322"
    assert "s3cret" not in f"{config!r} {config.model_dump_json()}"
    assert config.api_token is not None
    assert config.api_token.get_secret_value() == "s3cret"
    assert TrlRemoteConfig(api_token="").api_token is None  # type: ignore
    assert TrlRemoteConfig.model_validate({"token": "old"}).api_token is not None
    with pytest.raises(ValidationError, match="connect_timeout"):
        TrlRemoteConfig(connect_timeout=0)


def test_a_misspelled_key_of_the_adapter_is_refused_with_the_nearest_and_no_key_of_the_service_is() -> None:
    with pytest.raises(ValidationError, match="read_timout is not a setting; the nearest is 'read_timeout'"):
        TrlRemoteConfig.model_validate({"read_timout": 5})
    for name in ServiceSettings.model_fields:
        TrlRemoteConfig.model_validate({name: "1"} if name not in TrlRemoteConfig.model_fields else {})


def test_the_documentation_lists_every_key_of_the_adapter_and_the_shipped_file_has_them() -> None:
    text = (REPOSITORY / "docs" / "reference" / "remote.md").read_text()
    table = text.split("<!-- adapter -->")[1].split("<!-- /adapter")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(TrlRemoteConfig.model_fields)
    (provider,) = yaml.safe_load((REPOSITORY / "run_fsdp.yaml").read_text())["providers"]["post_training"]
    assert set(TrlRemoteConfig.model_fields) <= set(provider["config"])
    shown = {key: str(value) for key, value in provider["config"].items()}
    for key, default in re.findall(r"^\| `(\w+)` \| `([^`]+)`", table, flags=re.MULTILINE):
        assert default in shown[key]


def test_the_service_reads_the_shipped_file_as_well() -> None:
    """The shipped file serves both readers: neither finds a key in it that it would refuse."""
    settings, path = load_settings(REPOSITORY / "run_fsdp.yaml", {})
    assert path == REPOSITORY / "run_fsdp.yaml"
    assert settings.port == 8322


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system names the options otherwise")
def test_a_service_whose_machine_is_gone_is_missed_however_long_it_may_take_to_answer(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[int]] = []

    def watched(address: tuple[Any, ...]) -> socket.socket:
        made = make(address)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found.append([made.getsockopt(socket.IPPROTO_TCP, name) for name in names])
        return made

    make = client._watched_socket
    monkeypatch.setattr(client, "_watched_socket", watched)
    call(service.url, lambda made: made.status("job"))
    assert found
    assert all(idle + between * probes <= 30 for idle, between, probes in found)
