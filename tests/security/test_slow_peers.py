"""Peers that send or read almost nothing: their requests end, and no caller keeps the others from the service."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest
import requests

from llama_stack_provider_trl_remote.service.http.acceptor import raise_descriptor_limit
from tests.contract.service import running
from tests.contract.stack import poll
from tests.required import in_full
from tests.security.guarded import KNOWN, NODE, TOKENS, Guarded, documented_roles, guarded_service, without_version

pytestmark = [pytest.mark.contract, pytest.mark.timeout(180)]

MOST = 60
"""Connections of the service at a time."""
SLOW = 200
HTTP_METHODS = ("get", "head", "put", "post", "delete")


class Hurried(Guarded):
    """A service with short deadlines: `tests.security.hurried`."""

    module = "tests.security.hurried"
    is_forked = forks = False


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    raise_descriptor_limit()  # of the test: it is the peer of every connection
    with guarded_service(tmp_path_factory.mktemp("slow"), max_connections=MOST) as found:
        yield found


def head(method: str, path: str, token: str | None = None, **headers: str) -> bytes:
    given = {"Host": "localhost", **({} if token is None else {"Authorization": f"Bearer {token}"})}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "\r\n".join([f"{method} {path} HTTP/1.1", *map(": ".join, given.items()), "\r\n"]).encode()


def slow_body(method: str, path: str, token: str | None = None, kind: str = "application/json") -> bytes:
    """The head of a request, and the first byte of its body."""
    own = {} if kind == "application/json" else {"Origin": "http://localhost"}
    return head(method, path, token, Content_Type=kind, Content_Length="1000", **own) + b"{"


@contextmanager
def flood(service: Guarded, sent: list[bytes]) -> Iterator[list[socket.socket]]:
    """One connection for each beginning of a request."""
    with ExitStack() as stack:
        found = []
        for _ in sent:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", service.port))
            found.append(one)
        for one, part in zip(found, sent, strict=True):
            poll(lambda one=one, part=part: written(one, part), "the beginning of a request is sent", timeout=20)
        yield found


def written(one: socket.socket, part: bytes) -> bool:
    try:
        return one.send(part) == len(part)
    except BlockingIOError:
        return False
    except OSError:  # not connected yet, or closed already
        return is_closed(one)


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError as error:
        return not isinstance(error, BlockingIOError) and error.errno != 107


def answer(one: socket.socket, timeout: float = 20) -> bytes:
    """All that comes until the connection is closed."""
    one.settimeout(timeout)
    found = b""
    try:
        while piece := one.recv(1 << 16):
            found += piece
    except ConnectionError:
        pass
    return found


def others_are_answered(service: Guarded) -> None:
    """Each on a connection of its own: a health check, a node's poll, and a call of the admin."""
    node = {"Authorization": f"Bearer {service.credentials[NODE]}"}
    admin = {"Authorization": f"Bearer {TOKENS['admin']}"}
    report = {"boot_id": f"boot of {NODE}", "tasks": [], "seen": -1}
    calls = {
        "health": partial(requests.get, f"{service.url}/v1/health"),
        "a node's poll": partial(requests.post, f"{service.url}/v1/nodes/{NODE}/poll", json=report, headers=node),
        "the admin": partial(requests.get, f"{service.url}/v1/tokens", headers=admin),
    }
    for name, call in calls.items():
        assert call(timeout=10).status_code == 200, name


FLOODS = {
    "slow bodies to /login without a token": slow_body("POST", "/login", kind="application/x-www-form-urlencoded"),
    "slow bodies without a token to a route that needs one": slow_body("POST", "/v1/datasets"),
    "slow heads": head("GET", "/v1/health")[:-2],
    "slow bodies of one submit token": slow_body("POST", "/v1/datasets", TOKENS["submit"]),
    "slow uploads of one submit token": slow_body("PUT", f"/v1/blobs/{'0' * 64}", TOKENS["submit"]),
    "slow bodies of the join token": slow_body("POST", "/v1/nodes", TOKENS["node"]),
}


@pytest.mark.parametrize("sent", FLOODS.values(), ids=FLOODS)
def test_others_are_answered_beside(service: Guarded, sent: bytes) -> None:
    with flood(service, [sent] * SLOW) as slow:
        for _ in range(4):  # at first while the flood itself is still being accepted
            others_are_answered(service)
        assert not all(map(is_closed, slow)), "they were answered when the flood was over"


def test_a_caller_with_few_requests_keeps_them_beside_a_flood_of_another(service: Guarded) -> None:
    body = b'{"job_uuid": "nothing-of-that-name"}'
    kind, path = "application/json", "/v1/post-training/job/cancel"
    begun = head("POST", path, TOKENS["admin"], Content_Type=kind, Content_Length=str(len(body))) + body[:5]
    of_submit = [FLOODS["slow bodies of one submit token"]] * SLOW
    with flood(service, [begun]) as (of_the_admin,), flood(service, of_submit) as slow:
        poll(lambda: sum(map(is_closed, slow)) >= SLOW - MOST, "requests of the flood are closed", timeout=10)
        of_the_admin.settimeout(10)
        of_the_admin.sendall(body[5:])
        assert of_the_admin.recv(1 << 16).startswith(b"HTTP/1.1 404")


def test_a_request_that_ends_for_want_of_connections_is_answered_with_a_time_to_send_it_again(service: Guarded) -> None:
    with flood(service, [FLOODS["slow bodies of one submit token"]] * SLOW) as slow:
        refused = answer(slow[0])
    assert refused.startswith(b"HTTP/1.1 503"), refused
    assert b"retry-after: 5" in refused
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["detail"].startswith("the service has no connection left")


# Each route, with short deadlines


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with running(Hurried(tmp_path_factory.mktemp("hurried"))) as service:
        yield service


@pytest.mark.parametrize("role", [None, "admin", *in_full("submit", "node")])
def test_a_body_of_a_byte_now_and_then_ends_on_every_route(hurried: Guarded, role: str | None) -> None:
    """Whether the route takes bodies or not, and whether it refuses the caller or not."""
    token = None if role is None else TOKENS[role]
    routes = routes_of(hurried)
    with flood(hurried, [slow_body(method, path, token, kind) for method, path, kind in routes]) as found:
        left = dict(zip(routes, found, strict=True))
        begun, answers = time.monotonic(), {}
        while left and time.monotonic() - begun < 12:
            for route, one in list(left.items()):
                answers[route] = answers.get(route, b"") + received(one)
                with suppress(OSError):
                    one.send(b" ")
                if is_closed(one):
                    del left[route]
            time.sleep(0.3)
    assert not left, f"still open: {sorted(left)}"
    too_slow = [route for route, found in answers.items() if found.startswith(b"HTTP/1.1 408")]
    assert len(too_slow) > (0 if role is None else 5), answers


@pytest.mark.parametrize("sent", [head("GET", "/v1/health")[:-2], b"GET"], ids=["without its end", "three bytes"])
def test_a_head_that_does_not_come_to_its_end_is_answered_and_ended(hurried: Guarded, sent: bytes) -> None:
    with flood(hurried, [sent]) as (one,):
        assert answer(one).startswith(b"HTTP/1.1 408")


def received(one: socket.socket) -> bytes:
    try:
        return one.recv(1 << 16)
    except OSError:
        return b""


def routes_of(service: Guarded) -> list[tuple[str, str, str]]:
    """(method, path, content type) of every route: those of the OpenAPI document, and the pages."""
    described = [(method, path) for path, calls in service.document()["paths"].items() for method in calls]
    api = [(method.upper(), path) for method, path in described if method in HTTP_METHODS]
    pages = documented_roles().keys() - {(method, without_version(path)) for method, path in api}
    return [
        *((method, path.format(**KNOWN), "application/json") for method, path in api),
        *((method, path.format(**KNOWN), "application/x-www-form-urlencoded") for method, path in sorted(pages)),
    ]
