"""A token stores no more rows than it may, by whatever call, and gets the space back by deleting."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl_remote.service.datasets.quotas import UPLOADS
from tests.contract.service import refusal
from tests.contract.stack import poll
from tests.security.guarded import TOKENS, Guarded, guarded_service

pytestmark = pytest.mark.contract
HALF = 1 << 19


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("quotas"), max_stored_mb=1) as service:
        yield service


def row(size: int, letter: str) -> dict[str, str]:
    return {"prompt": letter * (size - 40), "completion": "y"}


def put(service: Guarded, size: int, letter: str, announce: bool = True) -> tuple[requests.Response, str]:
    """Upload one row of about this size with the token of a client."""
    data = json.dumps(row(size, letter)).encode()
    digest = hashlib.sha256(data).hexdigest()
    body: Any = data if announce else iter([data[: size // 2], data[size // 2 :]])
    url, headers = f"{service.url}/v1/blobs/{digest}", {"Authorization": f"Bearer {TOKENS['submit']}"}
    return requests.put(url, data=body, headers=headers, timeout=60), digest


def register(service: Guarded, name: str, source: dict[str, Any]) -> requests.Response:
    body = {"dataset_id": name, "purpose": "post-training/messages", "source": source}
    headers = {"Authorization": f"Bearer {TOKENS['submit']}"}
    return requests.post(f"{service.url}/v1/datasets", json=body, headers=headers, timeout=60)


def delete(service: Guarded, name: str) -> None:
    headers = {"Authorization": f"Bearer {TOKENS['submit']}"}
    assert requests.delete(f"{service.url}/v1/datasets/{name}", headers=headers, timeout=60).status_code == 204


def stored(service: Guarded) -> set[str]:
    return {path.stem for path in (service.data_dir / "datasets").glob("*.jsonl")}


@pytest.mark.parametrize("announce", [True, False])
def test_a_token_stores_no_more_rows_than_it_may_by_any_call_and_deleting_frees_them(
    service: Guarded, announce: bool
) -> None:
    before: set[str] = stored(service)
    answer, digest = put(service, HALF, "a", announce)
    assert answer.status_code == 201
    assert register(service, "uploaded", {"type": "blob", "sha256": digest}).status_code == 200
    assert register(service, "again", {"type": "blob", "sha256": digest}).status_code == 200
    for size in (HALF + (1 << 12), 8 << 20):
        answer, _ = put(service, size, "b", announce)
        assert "max_stored_mb allows 1: delete datasets" in refusal(answer, 507)
    for rows in ([row(HALF + (1 << 12), "c")], [row(1 << 18, letter) for letter in "def"]):
        answer = register(service, "rows", {"type": "rows", "rows": rows})
        assert "max_stored_mb allows 1" in refusal(answer, 507)
    taken = register(service, "uploaded", {"type": "rows", "rows": [row(1 << 18, "t")]})
    assert "exists already" in refusal(taken, 409)
    assert stored(service) == {*before, digest}
    delete(service, "uploaded")
    assert "max_stored_mb" in refusal(put(service, HALF + (1 << 12), "b", announce)[0], 507)
    delete(service, "again")
    assert stored(service) == before
    assert register(service, "rows", {"type": "rows", "rows": [row(HALF + (1 << 12), "c")]}).status_code == 200
    delete(service, "rows")
    assert stored(service) == before


def test_rows_of_another_token_do_not_count(service: Guarded) -> None:
    answer, digest = put(service, (1 << 20) - (4 << 10), "g")
    assert answer.status_code == 201
    assert service.put_blob([{"prompt": "of the admin", "completion": "z" * HALF}])[0].status_code == 201
    assert register(service, "most", {"type": "blob", "sha256": digest}).status_code == 200
    delete(service, "most")


def test_no_path_of_the_rows_is_left_uncounted(service: Guarded, tmp_path: Path) -> None:
    """Rows that are stored already count for the token that sends them, too."""
    rows = [{"prompt": "of both", "completion": "h" * (400 << 10)}]
    _, digest = service.put_blob(rows)
    data = (service.data_dir / "datasets" / f"{digest}.jsonl").read_bytes()
    headers = {"Authorization": f"Bearer {TOKENS['submit']}"}
    answer = requests.put(f"{service.url}/v1/blobs/{digest}", data=data, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert "max_stored_mb" in refusal(put(service, 700 << 10, "i")[0], 507)


def test_a_token_has_no_more_uploads_under_way_than_it_may_whatever_has_arrived_of_them(service: Guarded) -> None:
    url = f"/v1/blobs/{'0' * 64}"
    head = f"PUT {url} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKENS['submit']}\r\n"

    def another(role: str) -> requests.Response:
        headers = {"Authorization": f"Bearer {TOKENS[role]}"}
        return requests.put(service.url + url, data=b"of another digest", headers=headers, timeout=60)

    with ExitStack() as stack:

        def refused_beside_another() -> tuple[requests.Response] | None:  # a response of 429 is false
            # One more at each turn: the service refuses what arrives while the upload below is under way itself.
            upload = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            upload.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
            answer = another("submit")
            return (answer,) if answer.status_code == 429 else None

        (refused,) = poll(refused_beside_another, "all uploads are under way", timeout=20)
        assert f"has {UPLOADS} uploads of rows under way" in refusal(refused, 429)
        assert int(refused.headers["Retry-After"]) > 0
        assert "digest of the body" in refusal(another("admin"), 400)
    poll(lambda: another("submit").status_code == 400, "an upload has ended", timeout=20)
