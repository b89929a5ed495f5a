"""Pages of other origins call nothing, and no answer of the service loads anything of another site."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.pages.rendering import POLICY
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.service import TrainingService
from tests.fakes import fake_context
from tests.security.guarded import KNOWN, TOKENS, Guarded, documented_roles, guarded_service, without_version

OWN = "localhost:8322"


def status(host: str = OWN, method: str = "GET", scheme: str = "http", **headers: str) -> int:
    """Of a call to a service without tokens, which listens on loopback; 0: it got past the checks of origins."""
    settings = ServiceSettings.model_validate({"allowed_hosts": ["trl.example"]})
    found: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        found.append(message.get("status", 0))

    given = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        **{"type": "http", "method": method, "path": "/v1/health", "query_string": b"", "scheme": scheme},
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    try:
        asyncio.run(make_app(fake_context(settings))(scope, receive, send))
    except AttributeError:  # the handler, which has no service here
        return 0
    return 0 if found[0] == 500 else found[0]


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "http://localhost", "https://localhost:8322", "http://127.0.0.1:8322", "null", ""),
        *(
            "http://localhost:8322.evil.example",
            "http://user@localhost:8322",
            "http://localhost:8322/",
            "localhost:8322",
        ),
        *(
            "http://localhost:x",
            "http://[",
            "ftp://localhost:8322",
            "localhost:8322",
            "http://trl.example",
            "https://trl.example",
        ),
    ],
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    assert {status(method=method, origin=origin) for method in ("GET", "POST", "DELETE", "OPTIONS")} == {403}


@pytest.mark.parametrize(
    ("host", "scheme", "origin"),
    [
        (OWN, "http", "http://localhost:8322"),
        (OWN, "http", "HTTP://LOCALHOST:8322"),
        (OWN, "https", "https://localhost:8322"),
        ("[::1]:8322", "http", "http://[::1]:8322"),
        ("trl.example", "http", "http://trl.example"),
        ("trl.example:80", "http", "http://trl.example"),
        ("trl.example", "http", "https://trl.example"),
        ("trl.example:443", "https", "https://trl.example"),
        ("trl.example:8443", "http", "https://trl.example:8443"),
    ],
)
def test_the_services_own_page_is_served_with_tls_of_its_own_or_of_a_proxy(host: str, scheme: str, origin: str) -> None:
    assert status(host, scheme=scheme, origin=origin) == 0
    assert status(host, scheme=scheme, origin=origin, sec_fetch_site="same-origin") == 0


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
def test_a_page_elsewhere_may_link_here_and_nothing_else(site: str) -> None:
    assert status(sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="document") == 0
    assert status(sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe") == 403
    assert status(sec_fetch_site=site, sec_fetch_mode="no-cors", sec_fetch_dest="image") == 403
    assert status(sec_fetch_site=site) == 403
    assert status(method="POST", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="document") == 403
    assert status(sec_fetch_site="none", sec_fetch_mode="navigate", sec_fetch_dest="document") == 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("origins")) as service:
        yield service


@pytest.mark.contract
@pytest.mark.parametrize("role", [None, "submit", "admin"])
def test_every_answer_has_a_policy_and_no_page_names_another_site(service: Guarded, role: str | None) -> None:
    headers = {} if role is None else {"Authorization": f"Bearer {TOKENS[role]}"}
    described = {(method.upper(), path) for path, calls in service.document()["paths"].items() for method in calls}
    pages = documented_roles().keys() - {(method, without_version(path)) for method, path in described}
    html = 0
    for method, path in sorted(described | pages | {("GET", "/nodes"), ("GET", "/nowhere")}):
        if method != "GET":
            continue
        url = service.url + path.format(**{**KNOWN, "job_uuid": "ended"})
        found = requests.get(url, headers=headers, timeout=30)
        assert found.headers["X-Content-Type-Options"] == "nosniff", path
        policy = found.headers["Content-Security-Policy"]
        if found.headers.get("Content-Type", "").startswith("text/html"):
            html += 1
            assert policy == POLICY, path
            assert not re.findall(r"""(?:src|href|action)=["']?(?:[a-z]+:)?//[^"'> ]*""", found.text), path
            assert not re.findall(r"<script(?![^>]*(?:\ssrc=| type=.application/json))", found.text), path
        else:
            assert policy == "default-src 'none'; frame-ancestors 'none'", path
    assert html > 8


@pytest.mark.contract
def test_the_page_of_calls_shows_every_call_with_no_script_of_others(service: Guarded) -> None:
    admin = {"Authorization": f"Bearer {TOKENS['admin']}"}
    text = requests.get(f"{service.url}/docs", headers=admin, timeout=30).text
    assert all('src="/static/' in script for script in re.findall(r"<script[^>]*>", text))
    missing = [
        f"{method.upper()} {path}"
        for path, calls in service.document()["paths"].items()
        for method in calls
        if f"<code>{method.upper()} {path}</code>" not in text
    ]
    assert missing == []


@pytest.mark.contract
def test_a_page_on_another_port_cancels_nothing_on_a_service_without_tokens(tmp_path_factory: Any) -> None:
    from tests.contract.service import running

    with running(TrainingService(tmp_path_factory.mktemp("open"))) as service:
        url = f"{service.url}/v1/post-training/jobs/any/pause"
        for headers in (
            {"Origin": "http://localhost:3000"},
            {"Origin": "http://127.0.0.1:3000"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            assert requests.post(url, headers=headers, timeout=10).status_code == 403, headers
        assert requests.post(url, headers={"Origin": service.url}, timeout=10).status_code == 404
        assert requests.post(url, timeout=10).status_code == 404
