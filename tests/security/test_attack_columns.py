"""The attack table's further columns: each route of the service x what it takes (`columns.py`).

Names with control characters, names of our own files, many streams, and work that counts for its caller. Callers and
paths are in test_attack_table.py, slow bodies in test_slow_peers.py.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests

from llama_stack_provider_trl.system.data_dir import DATABASE, OWN
from tests.contract.payloads import QUESTIONS
from tests.contract.service import JOBS, ndjson
from tests.contract.stack import Json, poll
from tests.required import FULL
from tests.security.columns import KEY, PATHS, TAKES, Leaf, body_schema, leaves, with_text
from tests.security.dashboard_browser import Browser
from tests.security.generate import PAGES
from tests.security.guarded import (
    BODIES,
    KNOWN,
    MULTIPART,
    QUERIES,
    TOKENS,
    Answer,
    Guarded,
    Raw,
    documented_roles,
    guarded_service,
    without_version,
)
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

CONTROL = {"a terminal's escape": "a\x1b[2Jb", "a line break": "a\nb", "a change of direction": "a\u202eb"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    # Thousands of requests of one caller, none of which may be refused for their number.
    with guarded_service(tmp_path_factory.mktemp("columns"), check_cpu_seconds=10**6) as service:
        yield service


@pytest.fixture
def raw(service: Guarded) -> Iterator[Raw]:
    with closing(Raw(service.port)) as raw:
        yield raw


def test_each_route_has_a_row() -> None:
    assert TAKES.keys() == documented_roles().keys(), "state in columns.py what a route takes"


# Names


def test_no_name_with_characters_that_are_not_printed_is_taken_by_any_route(service: Guarded, raw: Raw) -> None:
    taken, tried = [], 0
    for turn, (call, path, leaf) in enumerate(named_fields(service.document())):
        for what, text in in_turn(turn, *CONTROL.items()):
            tried += 1
            answer = send(raw, call, path, with_text(new_body(call, tried), leaf, text))
            if not is_refused(answer):
                taken.append(f"{call} {'.'.join(map(str, leaf))}: {what}: {answer.status} {answer.body[:200]!r}")
    assert tried > (200 if FULL else 66)
    assert not taken, "\n".join(taken)


def is_refused(answer: Answer) -> bool:
    """Whether a request was refused for what is in it."""
    return 400 <= answer.status < 500 and answer.status != 429


def named_fields(document: Json) -> Iterator[tuple[str, str, Leaf]]:
    """Each text of a body that is a name: its route, and where it is."""
    seen = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            call = method.upper(), without_version(path)
            schema = body_schema(operation)
            if schema is None or call in seen:
                continue
            seen.add(call)
            row = TAKES[call]
            for leaf in dict.fromkeys(leaves(document, schema)):
                is_text = bool(row.texts & set(leaf)) or (row.any_keys and leaf[-1] == KEY)
                if not is_text:
                    yield " ".join(call), path, leaf


def new_body(call: str, number: int) -> Any:
    """A good body that is not yet known to the service."""
    body: Json = json.loads(json.dumps(BODIES.get(call, {})))
    for name in ("job_uuid", "dataset_id", "name"):
        if name in body and (call, name) not in NAMES_OF_OTHERS:
            body[name] = f"new-{number}"
    return body


NAMES_OF_OTHERS = {
    ("POST /post-training/job/cancel", "job_uuid"),
    *((f"POST /post-training/{name}", "dataset_id") for name in ("generate", "evaluate")),
}
"""Fields of good bodies that name what is there already."""


FORMS = {"/new": "/new", "/new/check": "/new", "/data/tokens": "/data/tokens"}
"""Form whose fields name things -> the page that it is on. Those of the others are a token and a path of ours."""
GOOD_FORM = {"model": str(tiny_model()), "dataset": "questions", "epochs": "1", "batch_size": "1", "lora_rank": "8"}
ASKED = [{"role": "user", "content": "a"}]
GOOD_PLAYGROUND = {
    "request": json.dumps({"model": "ft:gone", "messages": ASKED, "stream": True}),
    "vote": json.dumps({"dataset_id": "votes", "messages": ASKED, "chosen": "b", "rejected": "c"}),
}


def test_no_form_takes_a_name_with_characters_that_are_not_printed(service: Guarded) -> None:
    browser = Browser(service)
    assert browser.login("submit").status_code == 303
    taken, tried = [], 0
    for path, page in FORMS.items():
        controls = re.findall(r"<(?:input|select|textarea)[^>]*>", browser.get(page).text)
        named = {re.findall(r' name="(\w+)"', one)[0] for one in controls if 'type="checkbox"' not in one}
        good = {**GOOD_FORM, "form_token": browser.form_token()}
        for number, field in enumerate(sorted(named - {"form_token"} - TAKES["POST", path].texts)):
            for what, text in in_turn(number, *CONTROL.items()):
                tried += 1
                answer = browser.send(path, **{**good, "job": f"form-{tried}", field: text})
                if not 400 <= answer.status_code < 500:
                    taken.append(f"{path} {field}: {what}: {answer.status_code}")
    assert tried > (20 if FULL else 10)
    assert not taken, "\n".join(taken)
    assert browser.send("/new", **{**good, "job": "form"}).status_code == 303, "without them it is taken"


def send(raw: Raw, call: str, path: str, body: Any, token: str = TOKENS["admin"]) -> Answer:
    method = call.split()[0]
    data = None if body is None else json.dumps(body).encode()
    return raw.send(method, path.format(**KNOWN), token, data, Content_Type="application/json")


# Files of our own


def test_no_request_names_a_file_of_ours(service: Guarded, raw: Raw) -> None:
    """As the directory of a job that is called as the file is, and as what a job reads."""
    document, files = service.document(), [*own_paths(service.data_dir), *coming_paths(service.data_dir)]
    assert {"jobs.sqlite3", "sessions.json", "audit", "logs/service.log"} <= set(files)
    holes, number = [], 0
    calls = list(directories(document))
    for at, own in enumerate(files):
        directory, _, name = own.rpartition("/")
        # All calls resolve their directory by one function: each file on one of them, and each form on every call.
        for turn, (call, path, leaf) in in_turn(at, *enumerate(calls)):
            for given in in_turn(turn + at // len(calls), *forms_of(service.data_dir, directory)):
                number += 1
                body = {**new_body(call, number), "job_uuid": name}
                answer = send(raw, call, path, with_text(body, leaf, given))
                if answer.status < 400:
                    taken = where(service, name)
                    if not taken.is_relative_to(service.data_dir / "checkpoints"):
                        holes.append(f"{call} {leaf[-1]}: {given!r}, {name!r}: {taken}")
                    service.post(f"{JOBS}/{name}/cancel")
                    service.delete(f"{JOBS}/{name}")
                elif answer.status >= 500:
                    holes.append(f"{call} {leaf[-1]}: {given!r}, {name!r}: {answer.status} {answer.body[:200]!r}")
    for call, path, leaf in read_paths(document):
        for own in ("jobs.sqlite3", "sessions.json", "audit", "logs/service.log"):
            number += 1
            answer = send(raw, call, path, with_text(new_body(call, number), leaf, str(service.data_dir / own)))
            if not is_refused(answer):
                holes.append(f"{call} {leaf[-1]}: {own!r}: {answer.status} {answer.body[:200]!r}")
    assert number > (100 if FULL else 40)
    assert not holes, "\n".join(holes)


def forms_of(data_dir: Path, directory: str) -> tuple[str, str, str]:
    """Ways to name a directory of the data directory as that of a job's results."""
    return directory or ".", f"../{directory}", str(data_dir / directory)


def test_no_route_serves_a_file_of_ours_under_any_of_its_parameters(service: Guarded, raw: Raw) -> None:
    files = own_paths(service.data_dir)
    first = {own: (service.data_dir / own).read_bytes()[:64] for own in files if (service.data_dir / own).is_file()}
    holes, tried = [], 0
    for turn, (path, operations) in enumerate(service.document()["paths"].items()):
        for parameter in re.findall(r"{(\w+)}", path):
            if "get" not in operations or not path.startswith("/v1/"):
                continue
            for at, (own, content) in enumerate(first.items()):
                for given in in_turn(turn + at, own, f"../../../../{own}", str(service.data_dir / own)):
                    tried += 1
                    target = path.format(**{**KNOWN, "job_uuid": "ended", parameter: quote(given, safe="")})
                    answer = raw.send("GET", target, TOKENS["admin"], None)
                    if answer.status >= 500 or (len(content) > 8 and content in answer.body):
                        holes.append(f"{target}: {answer.status} {answer.body[:100]!r}")
    assert tried > (500 if FULL else 160)
    assert not holes, "\n".join(holes)


def test_a_service_writes_no_file_that_its_table_does_not_have_and_starts_again_after_the_attacks(
    service: Guarded,
) -> None:
    unknown = [own for own in own_paths(service.data_dir) if not is_known(service.data_dir, own)]
    assert not unknown, "give it a row in system/data_dir.py"
    service.stop()
    service.start()
    assert service.get("/health").json()["supervising"]
    assert service.get(f"{JOBS}/ended/status").status_code == 200


INSIDE = ("checkpoints", "jobs", "tokens", "reference", "preflights", "trackers", "llama-stack")
"""Directories of the data directory with contents that the table leaves to their owners."""


def in_turn[Way](number: int, *given: Way) -> tuple[Way, ...]:
    """Of several ways to attack all, and in CI one of them in turn."""
    return given if FULL else (given[number % len(given)],)


def own_paths(data_dir: Path) -> list[str]:
    """Everything in the data directory that is the service's own, down to the files of its directories."""
    found = (path.relative_to(data_dir) for path in data_dir.rglob("*"))
    return sorted(str(path) for path in found if len(path.parts) == 1 or path.parts[0] not in INSIDE)


def coming_paths(data_dir: Path) -> set[str]:
    """What a service makes later: files of its table that are not there yet, and the next of those that are counted."""
    own = own_paths(data_dir)
    literal = {f"{one.directory}/{one.name.pattern}".lstrip("/").replace("\\", "") for one in OWN}
    named = {path for path in literal if not set(path) & set("*+?()[]|")}
    counted = {re.sub(r"\d(?=\D*$)", "9", path) for path in own if re.search(r"\d", path)}
    return (named | counted | {f"{path}.1" for path in own}) - {*own, "checkpoints"}


def is_known(data_dir: Path, own: str) -> bool:
    directory, _, name = own.rpartition("/")
    kind = "directory" if (data_dir / own).is_dir() else "file"
    return any(one.directory == directory and one.kind == kind and one.name.fullmatch(name) for one in OWN)


def fields_named(document: Json, names: frozenset[str]) -> Iterator[tuple[str, str, Leaf]]:
    for call, path, leaf in named_fields(document):
        if leaf[-1] in names:
            yield call, path, leaf


def directories(document: Json) -> Iterator[tuple[str, str, Leaf]]:
    found = fields_named(document, frozenset({"checkpoint_dir"}))
    return ((call, path, leaf) for call, path, leaf in found if not call.endswith(("/preflight", "/preview")))


def read_paths(document: Json) -> Iterator[tuple[str, str, Leaf]]:
    found = fields_named(document, PATHS - {"checkpoint_dir"})
    return ((call, path, leaf) for call, path, leaf in found if "/nodes" not in call)  # the model of a device


def where(service: Guarded, job_uuid: str) -> Path:
    """The directory that a job writes its results to."""
    with closing(sqlite3.connect(f"file:{service.data_dir / DATABASE}?mode=ro", uri=True)) as database:
        (spec,) = database.execute("SELECT spec FROM jobs WHERE job_uuid = ?", (job_uuid,)).fetchone()
    return Path(json.loads(spec)["checkpoint_dir"])


# Streams


def test_streams_are_those_of_the_table(service: Guarded) -> None:
    streams = set()
    for path, operations in service.document()["paths"].items():
        if "get" in operations and path.startswith("/v1/"):
            with stream(service, path) as answer:
                if answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                    streams.add(("GET", without_version(path)))
    assert streams == {call for call, row in TAKES.items() if row.streams}


def stream(service: Guarded, path: str) -> requests.Response:
    target = path.format(**{**KNOWN, "job_uuid": "waiting"})
    query = {"job": "waiting"} if path.endswith("/post-training/events") else {"job_uuid": "waiting"}
    headers = {"Authorization": f"Bearer {TOKENS['admin']}", "Accept": "text/event-stream"}
    return requests.get(service.url + target, params=query, headers=headers, stream=True, timeout=30)


# Work


def test_work_that_a_request_orders_counts_for_its_caller_on_the_routes_of_the_table(tmp_path: Path) -> None:
    """Of a caller whose CPU time is used up, these routes are refused, and no others."""
    refused = set()
    with guarded_service(tmp_path, check_cpu_seconds=1e-6) as service, closing(Raw(service.port)) as raw:
        browser = Browser(service)
        assert browser.login("admin").status_code == 303
        check = {"type": "regex", "pattern": "(" * 8 + "a" + ")+" * 8}
        poll(
            lambda: raw_evaluation(raw, check).status == 429,
            "the CPU seconds of the admin's checks are used up",
            timeout=30,
        )
        for call in sorted(TAKES, key=lambda call: call[0] == "DELETE" or call[1].endswith("/delete")):
            answer = called(raw, browser, *call)
            if answer.status == 429:
                assert int(answer.headers["Retry-After"]) >= 1
                refused.add(call)
            assert answer.status < 500, (call, answer)
    assert refused == {call for call, row in TAKES.items() if row.work}


def raw_evaluation(raw: Raw, check: Json) -> Answer:
    body = {**BODIES["POST /post-training/evaluate"], "checks": [check, {"type": "regex", "pattern": "("}]}
    return send(raw, "POST /post-training/evaluate", "/v1/post-training/evaluate", body)


def called(raw: Raw, browser: Browser, method: str, path: str) -> Answer:
    """The answer of a route to a good request of the admin."""
    known = {**KNOWN, "job_uuid": "ended"} if "/checkpoints" in path else KNOWN
    target = path.format(**known)
    query = f"?{QUERIES[f'{method} {path}']}" if f"{method} {path}" in QUERIES else ""
    if ("GET", path) in PAGES or (method, path) in PAGES:
        good = GOOD_PLAYGROUND if path.startswith("/playground") else {**GOOD_FORM, "job": "of-a-form"}
        fields = {**good, "form_token": browser.form_token()}
        found = browser.get(target + query) if method == "GET" else browser.send(target, **fields)
        if path == "/logout":
            browser.login("admin")
        return Answer(found.status_code, found.content, found.headers)
    call = f"{method} {path}"
    body = json.dumps(BODIES.get(call, {})).encode() if method == "POST" else ndjson(QUESTIONS)
    kind = "application/octet-stream" if call in RAW_BODIES or method == "PUT" else "application/json"
    if call in MULTIPART:
        body, kind = MULTIPART[call]
    prefix = "" if (method, path) in PAGES or path.startswith("/openai/") else "/v1"
    with_body = body if method in ("POST", "PUT") else None
    return raw.send(method, prefix + target + query, TOKENS["admin"], with_body, Content_Type=kind)


RAW_BODIES = {"POST /nodes/{name}/tasks/{task_id}/events"}
