"""What is requested of Ray's Jobs API, and what its answers mean; its dashboard is played."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from llama_stack_provider_trl_remote.nodes.pools.base import AgentStart, Given, PoolOrder, PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.nodes.pools.ray_dashboard import sender
from llama_stack_provider_trl_remote.nodes.pools.ray_jobs import RayAnswer, RayJobs
from llama_stack_provider_trl_remote.nodes.pools.ray_pool import RayPool

ORDER = PoolOrder("abc", ("ray-abc-0", "ray-abc-1"), "trl-abc")


class Dashboard:
    """Ray's Jobs API."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs = ""
        self.fails: RayAnswer | None = None
        self.called: list[tuple[str, str]] = []

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None) -> RayAnswer:
        self.called.append((method, path))
        if self.fails is not None:
            return self.fails
        name, _, what = path.removeprefix("/api/jobs/").partition("/")
        if not name:
            assert body is not None
            self.jobs[body["submission_id"]] = {"status": "PENDING", "message": "queued", **body}
            return RayAnswer(200, json.dumps({"submission_id": body["submission_id"]}))
        if name not in self.jobs:
            return RayAnswer(404, f"Job {name} does not exist")
        if what == "stop":
            self.jobs[name]["status"] = "STOPPED"
            return RayAnswer(200, '{"stopped": true}')
        return RayAnswer(200, json.dumps({"logs": self.logs} if what == "logs" else self.jobs[name]))


@pytest.fixture
def dashboard() -> Dashboard:
    return Dashboard()


@pytest.fixture
def pool(dashboard: Dashboard) -> RayPool:
    agent = AgentStart("http://10.0.0.1:8322", "/etc/trl token", labels={"rack": "7's"})
    jobs = RayJobs("http://10.0.0.5:8265", dashboard)
    return RayPool(jobs, agent, "/opt/ray env/python", {"CPU": 8.0, "GPU": 2.0})


def test_an_order_is_one_ray_job_however_often_it_is_requested(pool: RayPool, dashboard: Dashboard) -> None:
    assert pool.choose("abc", 2, []) == "trl-abc"
    assert pool.observe(ORDER).given is Given.nothing
    pool.request(ORDER)
    pool.request(ORDER)
    assert dashboard.called.count(("POST", "/api/jobs/")) == 1
    python, dash, _, text = shlex.split(dashboard.jobs["trl-abc"]["entrypoint"])
    assert (python, dash) == ("/opt/ray env/python", "-m")
    assert json.loads(text) == {
        "names": ["ray-abc-0", "ray-abc-1"],
        "bundle": {"CPU": 8.0, "GPU": 2.0},
        "service_url": "http://10.0.0.1:8322",
        "token_file": "/etc/trl token",
        "data_dir": "~/.llama/trl-pool",
        "labels": {"rack": "7's"},
    }


def test_states_of_the_ray_job_are_what_the_pool_has_given(pool: RayPool, dashboard: Dashboard) -> None:
    pool.request(ORDER)
    assert pool.observe(ORDER) == (Given.pending, "Ray job trl-abc is PENDING: queued")
    dashboard.jobs["trl-abc"]["status"] = "RUNNING"
    dashboard.logs = "2026 INFO of Ray\ntrl: Ray has no 2 machines with 8 CPU each free yet\n"
    assert pool.observe(ORDER) == (Given.pending, "Ray has no 2 machines with 8 CPU each free yet")
    dashboard.logs += "trl: agents started\n"
    assert pool.observe(ORDER).given is Given.all
    dashboard.jobs["trl-abc"]["status"] = "FAILED"
    dashboard.logs += "trl: ray-abc-0: its machine or its process is gone (ActorDiedError)\nRay's own line\n"
    gone = "ray-abc-0: its machine or its process is gone (ActorDiedError)"
    assert pool.observe(ORDER) == (Given.nothing, f"Ray job trl-abc: FAILED: {gone}")
    dashboard.logs = "No module named llama_stack_provider_trl_remote\n"
    assert pool.observe(ORDER).message.endswith("FAILED: No module named llama_stack_provider_trl_remote")


def test_a_release_stops_the_ray_job_once(pool: RayPool, dashboard: Dashboard) -> None:
    pool.release(ORDER)
    assert ("POST", "/api/jobs/trl-abc/stop") not in dashboard.called
    pool.request(ORDER)
    pool.release(ORDER)
    pool.release(ORDER)
    assert dashboard.called.count(("POST", "/api/jobs/trl-abc/stop")) == 1
    assert pool.observe(ORDER).given is Given.nothing


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (RayAnswer(401, ""), PoolUnavailable, "refuses the token .401.: set or correct auth_token_file"),
        (RayAnswer(500, "Traceback\n boom"), PoolUnavailable, "answered 500: Traceback boom"),
        (RayAnswer(307, ""), PoolUnavailable, "answered 307"),
        (RayAnswer(400, "bad entrypoint"), PoolRefusal, "answered 400: bad entrypoint"),
        (RayAnswer(200, "<html>"), PoolUnavailable, "not of Ray's Jobs API: address must be its dashboard's"),
    ],
)
def test_what_ray_cannot_do_is_one_sentence(
    pool: RayPool, dashboard: Dashboard, answer: RayAnswer, error: type[Exception], message: str
) -> None:
    dashboard.fails = answer
    with pytest.raises(error, match=message):
        pool.request(ORDER)


def test_a_request_that_crossed_another_of_the_same_order_is_accepted() -> None:
    def crossed(method: str, path: str, body: Mapping[str, Any] | None) -> RayAnswer:
        return (
            RayAnswer(404, "") if method == "GET" else RayAnswer(400, "Job with submission_id trl-abc already exists")
        )

    agent = AgentStart("http://10.0.0.1:8322", "/etc/trl-token")
    RayPool(RayJobs("http://10.0.0.5:8265", crossed), agent, "python3", {"CPU": 1.0}).request(ORDER)


class Handler(BaseHTTPRequestHandler):
    """Answers with what it was sent."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        sent = {"method": self.command, "token": self.headers["Authorization"], "body": self.rfile.read(size).decode()}
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(json.dumps(sent).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_calls_carry_the_cluster_s_token_and_follow_no_redirect(address: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    send = sender(address, token)
    sent = json.loads(send("POST", "/api/jobs/", {"a": 1}).text)
    assert sent == {"method": "POST", "token": "Bearer secret", "body": '{"a": 1}'}
    assert json.loads(send("POST", "/stop", None).text)["body"] == "{}"
    assert json.loads(sender(address, None)("GET", "/x", None).text)["token"] is None
    assert send("GET", "/moved", None).status == 302
    token.unlink()
    with pytest.raises(PoolUnavailable, match=r"auth_token_file .* cannot be read: No such file"):
        send("GET", "/x", None)


def test_an_address_at_which_nothing_listens_is_one_sentence() -> None:
    with pytest.raises(PoolUnavailable, match=r"Ray at http://127.0.0.1:9 cannot be reached \(Connection refused\)"):
        sender("http://127.0.0.1:9", None)("GET", "/api/jobs/x", None)
