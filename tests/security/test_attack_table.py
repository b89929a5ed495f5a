"""The attack table: every route of the OpenAPI document x every caller x every way to write its path; in CI every pair
of these three.

docs/reference/service.md lists who may call which route; a route without a row there fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.security.access import GuardedRoute
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.required import FULL
from tests.security.guarded import (
    BODIES,
    HIDDEN,
    HTTP_METHODS,
    KNOWN,
    NODE,
    QUERIES,
    TOKENS,
    Answer,
    Guarded,
    Raw,
    documented_roles,
    guarded_service,
    without_version,
)

pytestmark = pytest.mark.contract

NODES = {"own": "itself", "task": "with a current task"}
"""Mark in the documented table -> what the document requires of a node."""
ROLES = ("metrics", "read", "submit", "node", "admin")
FORM = ("control character", "Invalid HTTP request", "dot segment")
"""The message of a 400 that was decided on the form of the request alone, before its caller and its handler."""


def dots(path: str) -> str:
    """Reach the path by way of the one route that needs no token."""
    return f"/v1/health/%2e%2e{path.removeprefix('/v1')}"


PATHS: dict[str, Callable[[str], str]] = {
    "plain": lambda path: path,
    "trailing %0A": lambda path: f"{path}%0A",
    "trailing %0D%0A": lambda path: f"{path}%0D%0A",
    "trailing %00": lambda path: f"{path}%00",
    "%0A after the version": lambda path: path.replace("/", "%0A/", 2).removeprefix("%0A"),
    "inserted %2e%2e": dots,
    "trailing %2e%2e": lambda path: f"{path}/x/%2e%2e",
    "double-encoded %252e": lambda path: dots(path).replace("%2e", "%252e"),
    "plain dots": lambda path: dots(path).replace("%2e", "."),
    "leading //": lambda path: f"/{path}",
    "inner //": lambda path: path[:1] + path[1:].replace("/", "//", 1),
    "trailing slash": lambda path: f"{path}/",
    ";x": lambda path: f"{path};x",
    ";x after the version": lambda path: path[:1] + path[1:].replace("/", ";x/", 1),
    "encoded slash": lambda path: path[:1] + path[1:].replace("/", "%2F", 1),
    "encoded letter": lambda path: f"{path[:-1]}%{ord(path[-1]):02x}",
    "another case": lambda path: path.upper(),
    "a line separator": lambda path: f"{path}%E2%80%A8",
    "invalid UTF-8": lambda path: f"{path}%C0%AE",
    "encoded question mark": lambda path: f"{path}%3Fx",
    "a fragment": lambda path: f"{path}%23x",
    "absolute form": lambda path: f"http://127.0.0.1{path}",
}
CONTROL = ("trailing %0A", "trailing %0D%0A", "trailing %00", "%0A after the version", "a line separator")
"""Ways with characters that are not printed: a HEAD is refused for them without a sentence."""
METHODS: dict[str, Callable[[str], str]] = {
    "lower-case method": str.lower,
    "capitalized method": str.capitalize,
    "another method": lambda _: "PATCH",
}


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    roles: frozenset[str]
    """As the document has them; empty: anyone."""
    node: str = ""
    """What the document requires of a node besides its role."""

    @property
    def call(self) -> str:
        return f"{self.method} {without_version(self.path)}"

    @property
    def is_twin(self) -> bool:
        """Whether it leads to the same handler as a call below /v1, which CI tries each way to write."""
        return self.path.startswith(("/v1alpha/", "/v1beta/"))


@dataclass(frozen=True)
class CallerCase:
    name: str
    role: str | None
    token: str | None
    node: str | None = None
    """The node whose own credential the token is."""


def callers(service: Guarded) -> list[CallerCase]:
    known = [CallerCase(f"a client with the role {role}", role, TOKENS[role]) for role in ROLES]
    of_nodes = [
        CallerCase(f"the node {name} with its own credential", "node", token, name)
        for name, token in service.credentials.items()
    ]
    return [CallerCase("nobody", None, None), CallerCase("a wrong token", None, "wrong"), *known, *of_nodes]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("attacked")) as service:
        yield service


@pytest.fixture
def raw(service: Guarded) -> Iterator[Raw]:
    with closing(Raw(service.port)) as raw:
        yield raw


@pytest.fixture(scope="module")
def routes(service: Guarded) -> list[Route]:
    found = [
        Route(method.upper(), path, frozenset(operation["x-roles"]), operation.get("x-node", ""))
        for path, operations in service.document()["paths"].items()
        for method, operation in operations.items()
        if method in HTTP_METHODS
    ]
    return [*found, *(Route(method, path, roles) for (method, path), roles in HIDDEN.items())]


def test_each_route_has_a_row_in_the_documented_table_and_the_roles_of_it(routes: list[Route]) -> None:
    documented = {call: (roles_of(marks), NODES.get(marks["node"], "")) for call, marks in documented_roles().items()}
    served = {(route.method, without_version(route.path)): (route.roles, route.node) for route in routes}
    assert documented == served


def test_no_route_of_the_application_is_missing_from_the_documented_table() -> None:
    settings = ServiceSettings.model_validate({"api_token": "a"})
    app = make_app(MagicMock(settings=settings, node_name="head", node_token="n"))
    unguarded = [route for route in app.routes if not isinstance(route, GuardedRoute)]
    assert not unguarded, "access.GuardedRoute enforces no roles on it"
    served = {
        (method, without_version(route.path_format))
        for route in app.routes
        if isinstance(route, GuardedRoute)
        for method in route.methods
    }
    assert served == set(documented_roles())


@pytest.mark.timeout(300)
def test_no_caller_gets_past_the_roles_of_a_route_however_its_path_is_written(
    service: Guarded, routes: list[Route], raw: Raw
) -> None:
    """First the callers that a route refuses: nothing of it may change. Then those that it takes, who must get
    through, since a service that refuses every caller would pass otherwise."""
    before = service.contents()
    holes, tried = [], 0
    for turn, route in enumerate(routes):
        refused = [caller for caller in callers(service) if not may(caller, route)]
        for at, caller in enumerate(refused):
            for number, (how, method, target) in enumerate(attacks(route)):
                if not FULL and how != "plain" and (route.is_twin or (number + turn) % len(refused) != at):
                    continue
                answer = send(raw, route, caller, method, target)
                tried += 1
                if not is_refused(answer, caller, how):
                    holes.append(f"{route.call} as {caller.name}, {how} ({method} {target}): {shown(answer)}")
    assert not holes, "\n".join(holes)
    assert tried > 20 * sum(not route.is_twin for route in routes)
    assert service.contents() == before

    reader, *others = sorted(callers(service), key=lambda caller: caller.role != "read")
    blocked = blocked_calls(raw, routes, [reader])
    assert service.contents() == before, "a caller that only reads has changed something"
    blocked += blocked_calls(raw, routes, others)
    assert not blocked, "\n".join(blocked)


def blocked_calls(raw: Raw, routes: list[Route], callers: list[CallerCase]) -> list[str]:
    """The calls that these callers may make, and do not get through with."""
    blocked = []
    for route in ordered(routes):
        for caller in callers:
            if not may(caller, route):
                continue
            query = f"?{QUERIES[route.call]}" if route.call in QUERIES else ""
            answer = send(raw, route, caller, route.method, PATHS["plain"](filled(route.path)) + query)
            if answer.status in (401, 403, 405) or answer.status >= 500 or is_unrouted(answer):
                blocked.append(f"{route.call} as {caller.name}: {shown(answer)}")
    return blocked


def test_a_caller_with_access_to_a_route_finds_no_error_of_the_service_behind_another_way_to_write_it(
    service: Guarded, routes: list[Route], raw: Raw
) -> None:
    errors = []
    for turn, route in enumerate(route for route in ordered(routes) if FULL or not route.is_twin):
        admin = CallerCase("the admin", "admin", TOKENS["admin"])
        for how, method, target in list(attacks(route))[0 if FULL else turn % 3 :: 1 if FULL else 3]:  # in turn
            answer = send(raw, route, admin, method, target)
            if answer.status >= 500:
                errors.append(f"{route.call}, {how} ({method} {target}): {shown(answer)}")
    assert not errors, "\n".join(errors)


def roles_of(marks: dict[str, str]) -> frozenset[str]:
    """Of a row; a route that anyone may call declares none."""
    if marks["no token"] == "yes":
        return frozenset()
    also = {"metrics"} if "metrics" in marks["read"] else set()
    return frozenset(role for role in ROLES if marks.get(role, "-") != "-") | also


def may(caller: CallerCase, route: Route) -> bool:
    """Whether a caller may call a route; no node has a task here."""
    if not route.roles:
        return True
    if caller.role != "node":
        return caller.role in route.roles
    mark = documented_roles()[route.method, without_version(route.path)]["node"]
    if mark == "own":
        return caller.node == NODE
    return mark == "join" and caller.node is None  # the body of a join names a node of its own


def attacks(route: Route) -> Iterator[tuple[str, str, str]]:
    """(how, method, target), with a good query."""
    query = f"?{QUERIES[route.call]}" if route.call in QUERIES else ""
    path = filled(route.path)
    for how, write in PATHS.items():
        yield how, route.method, write(path) + query
    for how, change in METHODS.items():
        yield how, change(route.method), path + query


def filled(path: str) -> str:
    known = {**KNOWN, "job_uuid": "ended"} if "/checkpoints" in path else KNOWN
    return path.format(**known)


def ordered(routes: list[Route]) -> list[Route]:
    """What deletes comes last."""
    return sorted(routes, key=lambda route: route.method == "DELETE")


def send(raw: Raw, route: Route, caller: CallerCase, method: str, target: str) -> Answer:
    body = BODIES.get(route.call)
    data = None if body is None else json.dumps(body).encode()
    if data is None and route.method in ("PUT", "POST"):
        data = b"{}" if route.method == "POST" else b"x"
    kind = "application/json" if route.method == "POST" else "application/octet-stream"
    return raw.send(method, target, caller.token, data, Content_Type=kind)


def is_refused(answer: Answer, caller: CallerCase, how: str) -> bool:
    """Whether an answer is one that no handler gave."""
    if caller.role is None and answer.status == 429:  # an address that guesses tokens is slowed
        return True
    if how == "plain":
        return answer.status == (401 if caller.role is None else 403)
    if answer.status == 400:
        return any(text in answer.body.decode() for text in FORM) or (not answer.body and how in CONTROL)
    return answer.status in (401, 403, 405) or is_unrouted(answer)


def is_unrouted(answer: Answer) -> bool:
    """The framework's own words: no handler has looked."""
    return answer.status == 404 and answer.body in (b'{"detail":"Not Found"}', b"")


def shown(answer: Answer) -> str:
    return f"{answer.status} {answer.body[:200]!r}"
