"""Each node has a credential of its own: it acts for that node only, is replaced, and is revoked with the node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.contract.fake_agent import FakeAgent
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running
from tests.contract.stack import SFT, Json

pytestmark = pytest.mark.contract

TOKEN, JOIN_TOKEN = "the operator's", "the one that joins"
WORKER = {"labels": {"kind": "worker"}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("service")
    service = TrainingService(root, api_token=TOKEN, node_token=JOIN_TOKEN, node_name="head")
    service.session.headers["Authorization"] = f"Bearer {TOKEN}"
    with running(service):
        service.register("questions", QUESTIONS)
        yield service


@pytest.fixture
def agents(service: TrainingService) -> Iterator[list[FakeAgent]]:
    """Two nodes, `a` with a job."""
    found = [
        FakeAgent(service, name, JOIN_TOKEN, address=f"10.0.0.{number}", agent_id=f"agent of {name}", **WORKER)
        for number, name in enumerate("ab", 2)
    ]
    for one in found:
        assert one.join().ok
        assert one.poll().ok
    yield found
    for one in found:
        for job in service.get("/nodes").json()["data"]:
            for name in job["jobs"].values() if job["node"] == one.name else ():
                service.post(f"{JOBS}/{name}/cancel")
        one.reports.clear()
        one.seen = 0
        while one.poll().ok and one.orders:
            pass
        assert service.delete(f"/nodes/{one.name}").status_code in (204, 404)


def give_job(service: TrainingService, agent: FakeAgent, name: str) -> Json:
    """Have a job run on a node; returns its order."""
    options = {"resources": {**WORKER, "nodes": 1}, "retries": 0}
    service.submit(SFT, sft(name, "questions"), provider_options=options)
    return agent.run(f"{name}-1")


def another(one: FakeAgent, name: str, **changes: Any) -> FakeAgent:
    """An agent with the join token that reports the same machine, but for some changes."""
    found = FakeAgent(one.service, name, JOIN_TOKEN)
    found.report = {**one.report, "name": name, **changes}
    found.boot_id = found.report["boot_id"]
    return found


def calls_as(name: str, task_id: str, report: Json) -> list[tuple[str, str, Json]]:
    """Every call by which an agent acts for a node."""
    task = f"/nodes/{name}/tasks/{task_id}"
    own = {"boot_id": report["boot_id"], "agent_id": report["agent_id"]}
    return [
        ("POST", "/nodes", {"json": report}),
        ("POST", f"/nodes/{name}/poll", {"json": {**own, "tasks": [], "seen": -1}}),
        ("POST", f"{task}/events?offset=0", {"data": b""}),
        ("PUT", f"{task}/logs/rank-0.log?offset=0", {"data": b"x"}),
        ("POST", f"{task}/checkpoints/checkpoint-2", {"json": {"kind": "step", "files": []}}),
        ("PUT", f"{task}/checkpoints/checkpoint-2/files/a?offset=0&sha256={'0' * 64}", {"data": b"x"}),
    ]


def test_a_node_does_not_act_as_another_one(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, b = agents
    give_job(service, a, "own")
    for method, path, request in calls_as("a", "own-1", a.report):
        answer = b.call(method, path, **request)
        assert "is another node's" in refusal(answer, 403), path
    a.seen = 0
    assert a.poll().ok


def test_the_join_token_joins_and_does_nothing_else(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, _ = agents
    order = give_job(service, a, "join-only")
    stranger = FakeAgent(service, "stranger", JOIN_TOKEN)
    for method, path, request in calls_as("a", "join-only-1", a.report)[1:]:
        assert "join first" in refusal(stranger.call(method, path, **request), 403), path
    rows = order["spec"]["job"]["data"]["dataset"]["sha256"]
    for path in ("/nodes", f"/blobs/{rows}", f"{JOBS}/join-only/checkpoints", f"{JOBS}/join-only/checkpoints/final"):
        refusal(stranger.call("GET", path), 403)
    assert stranger.call("GET", "/health").ok


def test_a_node_reads_what_its_own_tasks_need(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, b = agents
    order = give_job(service, a, "reads")
    rows = f"/blobs/{order['spec']['job']['data']['dataset']['sha256']}"
    checkpoints = f"{JOBS}/reads/checkpoints"
    files = (f"{checkpoints}/final", f"{checkpoints}/final/files/config.json")
    assert [a.call("GET", path).status_code for path in (rows, checkpoints, *files)] == [200, 200, 404, 404]
    assert [b.call("GET", path).status_code for path in (rows, checkpoints, *files)] == [403] * 4
    service.post(f"{JOBS}/reads/cancel")
    a.wait_for("reads-1", "stop")
    assert [a.call("GET", path).status_code for path in (rows, checkpoints, *files)] == [403] * 4


def test_no_refusal_shows_an_id_of_another_machine(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, _ = agents
    secrets = [a.report["machine_id"], a.report["boot_id"], a.report["agent_id"]]
    for changes in ({"machine_id": "m2"}, {"boot_id": "b2"}, {"agent_id": "a2"}):
        found = refusal(another(a, "a", **changes).join(), 409)
        assert "the node 'a' is there already" in found
        assert not [one for one in [*secrets, *changes.values()] if one in found], found
    a.boot_id = "another boot"
    found = refusal(a.poll(), 409)
    a.boot_id = a.report["boot_id"]
    assert "join again" in found
    assert not [one for one in secrets if one in found]


def test_a_removed_node_is_refused_with_its_next_call_also_by_a_service_that_was_started_again(
    service: TrainingService, agents: list[FakeAgent]
) -> None:
    a, b = agents
    assert service.delete("/nodes/a").status_code == 204
    for method, path, request in calls_as("a", "none-1", a.report):
        assert "was removed" in refusal(a.call(method, path, **request), 410), path
    service.kill()
    service.start()
    assert "was removed" in refusal(a.poll(), 410)
    b.seen = 0
    assert b.poll().ok
    a.credential = None
    assert a.join().ok
    assert a.poll().ok


def test_a_credential_is_kept_as_a_hash_and_shown_once(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, _ = agents
    assert a.credential
    assert len(a.credential) >= 43
    kept = [path for path in service.root.rglob("*") if path.is_file()]
    assert service.data_dir / "jobs.sqlite3" in kept
    assert not [path for path in kept if a.credential.encode() in path.read_bytes()]
    for path in ("/nodes", "/health"):
        assert a.credential not in service.get(path).text


def test_a_report_is_bounded(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, _ = agents
    for changes in (
        {"machine_id": "m" * 300},
        {"boot_id": "b" * 300},
        {"agent_id": "a" * 300},
        {"labels": {str(number): "x" for number in range(100)}},
        {"labels": {"x": "y" * 1000}},
        {"models": [f"org/{number}" for number in range(5000)]},
        {"models": ["m" * 1000]},
        {"versions": {**a.report["versions"], **{str(number): "1" for number in range(100)}}},
        {"devices": [{"name": f"cuda:{number}"} for number in range(1000)]},
        {"devices": [{"name": "cpu,head/cuda:0"}]},
        {"cpus": 10**30},
    ):
        refusal(another(a, "c", **changes).join(), 400)
    task = {"task_id": "none-1", "stage": "run", "progress": "working"}
    for wrong in ({"detail": "x" * 100_000}, {"error": "x" * 100_000}, {"task_id": "x" * 1000}):
        a.reports, a.seen = {"none-1": {**task, **wrong}}, -1
        refusal(a.poll(), 400)
    observation = {"state": "running", "stacks": "x" * (1 << 20)}
    a.reports = {"none-1": {**task, "observation": observation}}
    refusal(a.poll(), 400)
    a.reports = {}


def test_a_service_without_tokens_takes_agents_and_their_credentials(tmp_path: Path) -> None:
    with running(TrainingService(tmp_path)) as service:
        agent = FakeAgent(service, "a", "any token", address="127.0.0.1")
        assert agent.join().ok
        assert agent.credential
        assert agent.poll().ok
        unknown = requests.get(f"{service.url}/v1/nodes", headers={"Authorization": "Bearer unknown"}, timeout=10)
        assert unknown.status_code == 200
