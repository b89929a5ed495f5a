"""Polls of a node: how many a second are answered, and what each may report."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from llama_stack_provider_trl_remote.service.cluster.poll_order import POLLS_AT_ONCE, POLLS_PER_SECOND, PollOrder
from llama_stack_provider_trl_remote.wire import MOST_DEVICES
from tests.contract.fake_agent import FakeAgent
from tests.contract.service import TrainingService
from tests.fakes import FakeClock

MANY = 5 * int(POLLS_AT_ONCE)
pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    service = TrainingService(tmp_path_factory.mktemp("polls"))
    service.start()
    yield service
    service.stop()


def test_a_node_that_polls_too_often_is_refused_until_a_stated_time_and_others_are_not(
    service: TrainingService,
) -> None:
    often, other = FakeAgent(service, "often"), FakeAgent(service, "other")
    for agent in (often, other):
        assert agent.join().ok
    body = {"boot_id": often.boot_id, "seen": -1}  # answered at once
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: often.call("POST", "/nodes/often/poll", json=body), range(MANY)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert "node 'often' polls too often" in refused.text
    other.seen = -1
    assert other.poll().status_code == 200


def test_a_poll_reports_no_more_devices_than_a_machine_has(service: TrainingService) -> None:
    agent = FakeAgent(service, "many")
    assert agent.join().ok
    load = {"cpu_percent": 1, "memory_used_bytes": 1, "disk_free_bytes": 1}
    for number, status in ((MOST_DEVICES, 200), (MOST_DEVICES + 1, 400)):
        devices = [{"name": f"cuda:{index}"} for index in range(number)]
        body = {"boot_id": agent.boot_id, "seen": -1, "load": {**load, "devices": devices}}
        assert agent.call("POST", "/nodes/many/poll", json=body).status_code == status


def test_what_an_agent_needs_is_never_refused() -> None:
    clock = FakeClock()
    polls = PollOrder(clock)
    for _ in range(6000):
        clock.advance(1 / 20)
        assert polls.take("a") == 0
    for _ in range(int(POLLS_AT_ONCE) - 1):
        assert polls.take("a") == 0
    assert 0 < polls.take("a") <= 1 / POLLS_PER_SECOND


def test_the_rates_of_made_up_names_take_no_memory() -> None:
    polls = PollOrder(FakeClock())
    for number in range(10_000):
        polls.take(f"node-{number}")
    assert len(polls._rates) < 5000
