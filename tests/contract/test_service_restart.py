"""The training service restarts while a job trains: the job continues, and clients that watch it miss nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
import requests

from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, running_service
from tests.contract.stack import SFT, poll

pytestmark = pytest.mark.contract

WATCHERS = 50
HOLD = "step-25"
EPOCHS = 10
"""Of four steps each."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running_service(tmp_path_factory.mktemp("service"), save_steps=20) as service:
        yield service


class Watcher(threading.Thread):
    """Reads the stream of a job, and begins again behind the last event whenever it breaks off."""

    def __init__(self, service: TrainingService, job: str) -> None:
        super().__init__(daemon=True)
        self.url = f"{service.url}/v1{JOBS}/{job}/events"
        self.seen: list[tuple[str, str]] = []
        self.connections = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            headers = {"Accept": "text/event-stream"}
            if self.seen:
                headers["Last-Event-ID"] = self.seen[-1][0]
            try:
                with requests.get(self.url, headers=headers, stream=True, timeout=30) as answer:
                    if answer.status_code == 200:
                        self.connections += 1
                        self.read(answer)
            except requests.RequestException:
                time.sleep(0.1)

    def read(self, answer: requests.Response) -> None:
        name = ""
        for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            elif line == "event: end":
                self.ended = True
                return
            elif line.startswith("data: "):
                self.seen.append((name, line.removeprefix("data: ")))


@pytest.fixture
def watchers(service: TrainingService) -> Iterator[list[Watcher]]:
    """They end with the test, also where it fails: 50 that looked for a service that is gone took half a core."""
    made = [Watcher(service, "watched") for _ in range(WATCHERS)]
    yield made
    for watcher in made:
        watcher.ended = True


def test_fifty_watchers_see_every_event_once_and_in_order_across_a_kill_and_a_stop(
    service: TrainingService, watchers: list[Watcher]
) -> None:
    service.register("questions", QUESTIONS)
    body = sft("watched", "questions")
    body["training_config"]["n_epochs"] = EPOCHS
    waiting = sft("waiting", "questions")
    service.arm(HOLD, "hold")
    service.submit(SFT, body)
    service.submit(SFT, waiting)
    for watcher in watchers:
        watcher.start()
    poll(lambda: (service.root / "faults" / f"{HOLD}.taken").exists(), "the training holds", timeout=60)
    poll(lambda: all(watcher.seen for watcher in watchers), "every watcher sees events", timeout=20)
    assert service.rss_mib() < 90

    service.kill()
    service.start()
    assert "1 training, 1 waiting (resumed)" in service.log.read_text()
    poll(lambda: all(watcher.connections == 2 for watcher in watchers), "every watcher is back", timeout=20)
    service.stop()  # in order, with streams open and a training under way
    message = service.log.read_text()
    assert "1 training continues" in message
    assert "exceeded" not in message, "a stream kept the service from stopping"
    service.start()
    assert service.post(f"{JOBS}/waiting/cancel").status_code == 200
    (service.root / "faults" / f"{HOLD}.go").touch()

    service.wait("watched", "completed")
    for watcher in watchers:
        watcher.join(20)
    whole = service.get(f"{JOBS}/watched/events", limit=10_000).json()["data"]
    expected = [(line["id"], line["event"]) for line in whole]
    steps = [event["step"] for _, event in expected if event["type"] == "progress"]
    assert steps == list(range(1, EPOCHS * 4 + 1))
    for watcher in watchers:
        assert watcher.ended
        assert [(name, json.loads(data)) for name, data in watcher.seen] == expected
    assert service.status("watched")["resources_allocated"]["attempt"] == 1
