"""Agents of a service on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from llama_stack_provider_trl.specs.events import Started
from tests.contract.fake_agent import FakeAgent
from tests.contract.payloads import QUESTIONS
from tests.contract.service import JOBS, TrainingService, running
from tests.tiny import CACHE

TOKEN, NODE_TOKEN = "operator", "agents"


WORKER = {"labels": {"kind": "worker"}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("service")
    tokens = [{"token": "users", "role": "submit"}]
    service = TrainingService(
        root,
        host="0.0.0.0",
        insecure=True,
        model_roots=[str(CACHE)],
        api_token=TOKEN,
        node_token=NODE_TOKEN,
        tokens=tokens,
        node_name="head",
    )
    service.session.headers["Authorization"] = f"Bearer {TOKEN}"
    with running(service):
        service.register("questions", QUESTIONS)
        yield service


@pytest.fixture
def agents(service: TrainingService) -> Iterator[list[FakeAgent]]:
    """Two workers, which are gone after the test."""
    found = [agent(service, "a", 2), agent(service, "b", 3)]
    yield found
    for one in found:
        forget(service, one)


def agent(service: TrainingService, name: str, number: int, **report: Any) -> FakeAgent:
    one = FakeAgent(service, name, NODE_TOKEN, address=f"10.0.0.{number}", **{**WORKER, **report})
    answer = one.join().json()
    assert answer == {"node": name, "head": "head", "version": answer["version"], "credential": one.credential}
    return one


def forget(service: TrainingService, one: FakeAgent) -> None:
    """Every order that it received is done."""
    for job in service.get("/nodes").json()["data"]:
        for name in job["jobs"].values() if job["node"] == one.name else ():
            service.post(f"{JOBS}/{name}/cancel")
    one.reports.clear()
    one.seen = 0
    while one.poll().ok and one.orders:
        pass
    assert service.delete(f"/nodes/{one.name}").status_code == 204


def lines(*events: BaseModel) -> bytes:
    return b"".join(event.model_dump_json().encode() + b"\n" for event in events)


STARTED = Started(pid=1, device="cpu", versions={})
