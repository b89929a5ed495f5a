"""A client that keeps cookies as a browser does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import requests

from tests.contract.stored_jobs import add_hostile
from tests.security.guarded import TOKENS, Guarded, guarded_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("dashboard")
    with guarded_service(root) as service:
        add_hostile(service.data_dir)
        yield service


@dataclass
class Browser:
    """What a browser does: keeps cookies, names its origin, follows redirects."""

    service: Guarded

    def __post_init__(self) -> None:
        self.session = requests.Session()

    def get(self, path: str, **headers: str) -> requests.Response:
        return self.session.get(self.service.url + path, headers=headers, timeout=30)

    def send(self, path: str, origin: str | None = "", **fields: str) -> requests.Response:
        headers = {} if origin is None else {"Origin": origin or self.service.url}
        return self.session.post(self.service.url + path, fields, headers=headers, timeout=30, allow_redirects=False)

    def login(self, role: str, back: str = "/") -> requests.Response:
        return self.send("/login", token=TOKENS[role], back=back)

    def form_token(self, path: str = "/") -> str:
        found = re.search(r'name="form_token" value="(\w+)"', self.get(path).text)
        assert found
        return found[1]
