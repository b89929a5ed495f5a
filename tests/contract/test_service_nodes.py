"""Worker nodes on the training service: the reports and orders of their agents, with agents that run nothing."""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl.specs.events import CheckpointSaved, Finished, Paused, Prepared
from llama_stack_provider_trl.system.files import write_manifest
from llama_stack_provider_trl_remote.nodes.identity import versions
from tests.contract.fake_agent import FakeAgent, exited
from tests.contract.fake_agent import running as running_now
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal
from tests.contract.service_agents import NODE_TOKEN, STARTED, TOKEN, WORKER, lines
from tests.contract.service_agents import agents as agents
from tests.contract.service_agents import service as service
from tests.contract.stack import SFT, Json, poll

pytestmark = pytest.mark.contract


PREPARED = Prepared(total_steps=4, num_rows=8, trainable_parameters=1, total_parameters=1)


def submit(service: TrainingService, name: str, **resources: Any) -> str:
    options = {"resources": {**WORKER, **resources}, "retries": 0}
    return service.submit(SFT, sft(name, "questions"), provider_options=options)


def detail(service: TrainingService, job: str) -> str:
    return str(service.status(job)["resources_allocated"]["detail"])


def checkpoint(directory: Path, name: str = "checkpoint-2", size: int = 1000) -> Path:
    path = directory / name
    (path / "additional_chat_templates").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x" * size)
    (path / "additional_chat_templates" / "a.jinja").write_bytes(b"y" * 10)
    write_manifest(path)
    return path


def test_a_job_goes_to_a_worker_and_comes_back_with_all_that_it_made(
    service: TrainingService, agents: list[FakeAgent], tmp_path: Path
) -> None:
    a, _ = agents
    submit(service, "alone", nodes=1)
    order = a.wait_for("alone-1", "prepare")
    assert (order["node_rank"], order["nodes"], order["devices"], order["ranks"]) == (0, 1, ["cpu"], 1)
    assert Path(order["shared_mark"]).read_text() == "alone-1"
    blob = service.get(f"/blobs/{order['spec']['job']['data']['dataset']['sha256']}")
    assert [json.loads(line) for line in blob.text.splitlines()] == QUESTIONS
    a.run("alone-1")
    events = lines(STARTED, PREPARED)
    assert a.send_events("alone-1", 0, events).headers["Upload-Offset"] == str(len(events))
    service.wait_state("alone", "in_progress")
    a.send_log("alone-1", "rank-0.log", 0, b"step 1\n")
    assert service.get(f"{JOBS}/alone/logs").text == "step 1\n"
    place = a.ship("alone-1", checkpoint(tmp_path))
    assert place == service.data_dir.resolve() / "checkpoints" / "alone" / "checkpoint-2"
    final = a.ship("alone-1", checkpoint(tmp_path, "final"), "final")
    rest = lines(
        CheckpointSaved(kind="step", step=2, epoch=1, path=place, train_loss=2.0),
        CheckpointSaved(kind="final", step=4, epoch=1, path=final, train_loss=1.0),
        Finished(step=4),
    )
    assert a.send_events("alone-1", len(events), rest).ok
    a.report_task("alone-1", "run", "working", observation=exited(0))
    assert service.state("alone") == "in_progress"  # something may still come
    a.report_task("alone-1", "run", observation=exited(0), shipped=True)
    status = service.wait_state("alone", "completed")
    assert status["resources_allocated"]["device"] == "a/cpu"
    assert [Path(c["path"]).name for c in status["checkpoints"]] == ["checkpoint-2", "final"]
    assert (place.parent / "latest").read_text() == "checkpoint-2\n"
    assert a.wait_for("alone-1", "stop")
    refusal(a.send_events("alone-1", len(events) + len(rest), lines(STARTED)), 410)
    node = service.get("/nodes").json()["data"][1]
    assert (node["node"], node["jobs"], node["state"]) == ("a", {"cpu": "alone"}, "open")
    a.report_task("alone-1", "stop")
    assert service.get("/nodes").json()["data"][1]["jobs"] == {}


def test_two_nodes_move_on_together_and_learn_of_each_other(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, b = agents
    submit(service, "pair", nodes=2)
    assert [one.wait_for("pair-1", "prepare")["node_rank"] for one in agents] == [0, 1]
    a.report_task("pair-1", "prepare", port=29501)
    b.report_task("pair-1", "prepare", "working", detail="fetches rows")
    assert a.orders[0]["stage"] == "prepare"
    poll(lambda: "b: fetches rows" in detail(service, "pair"), "the job reports what it waits for", timeout=20)
    b.report_task("pair-1", "prepare", port=29502)
    at_a, at_b = (
        {"node": "a", "address": "10.0.0.2", "port": 29501},
        {"node": "b", "address": "10.0.0.3", "port": 29502},
    )
    order = a.wait_for("pair-1", "probe")
    assert (order["master"], order["peers"]) == (at_a, [at_b])
    order = b.wait_for("pair-1", "probe")
    assert (order["master"], order["peers"], order["spec"]["world_size"]) == (at_a, [at_a], 2)
    sentence = "node b cannot reach node a at 10.0.0.2 port 29501: open TCP ports 29500-29599"
    b.report_task("pair-1", "probe", "failed", error=sentence)
    for one in agents:
        assert one.wait_for("pair-1", "stop")
        one.report_task("pair-1", "stop")
    error = service.wait_state("pair", "failed")["resources_allocated"]["error"]
    assert error["reason"] == "launch_failed"
    assert sentence in error["message"]


def test_tokens_open_what_their_role_needs_and_no_more(service: TrainingService, agents: list[FakeAgent]) -> None:
    def call(token: str, method: str, path: str, **more: Any) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return requests.request(method, f"{service.url}/v1{path}", headers=headers, timeout=30, **more).status_code

    report = {**agents[0].report, "name": "c", "machine_id": "c"}
    own = agents[0].credential
    assert own
    for token, joins, lists, submits, cordons, reads in (
        (NODE_TOKEN, 200, 403, 403, 403, 403),
        (own, 403, 403, 403, 403, 403),
        ("users", 403, 200, 400, 403, 404),
        (TOKEN, 200, 200, 400, 204, 404),
    ):
        assert call(token, "POST", "/nodes", json=report) == joins
        assert call(token, "GET", "/nodes") == lists
        assert call(token, "GET", JOBS) == lists
        assert call(token, "POST", SFT, json={}) == submits
        assert call(token, "POST", "/nodes/a/cordon") == cordons
        assert call(token, "GET", f"{JOBS}/nope/checkpoints") == reads
        assert call(token, "GET", f"/blobs/{'0' * 64}") == reads
        sends = call(token, "POST", "/nodes/a/tasks/nope-1/events?offset=0", data=b"x\n")
        assert sends == (410 if token in (own, TOKEN) else 403)
        assert call(token, "DELETE", "/nodes/nope") == (403 if token != TOKEN else 404)
        assert call(token, "DELETE", f"{JOBS}/nope") == (403 if token != TOKEN else 404)
    assert service.delete("/nodes/c").status_code == 204
    nodes = {node["node"]: node["state"] for node in service.get("/nodes").json()["data"]}
    assert nodes == {"head": "open", "a": "cordoned", "b": "open"}
    assert service.post("/nodes/a/uncordon").status_code == 204
    assert service.get("/nodes").json()["data"][1]["state"] == "open"


@pytest.mark.parametrize(
    ("changes", "status", "expected"),
    [
        ({"versions": {}}, 409, "has llama_stack_provider_trl none, the service has"),
        ({"versions": {**versions(), "torch": "1.0"}}, 409, "'c' has torch 1.0, the service has 2."),
        ({"address": "127.0.0.1"}, 400, "other nodes cannot reach that"),
        ({"address": "::ffff:127.0.0.1"}, 400, "other nodes cannot reach that"),
        ({"address": "0.0.0.0"}, 400, "one of its network interfaces"),
        ({"address": "224.0.0.1"}, 400, "one of its network interfaces"),
        ({"address": "worker.local"}, 400, "give the literal IP address"),
        ({"versions": {**versions(), "trl": "1.0"}}, 409, "'c' has trl 1.0, the service has"),
        ({"versions": {**versions(), "specs": "0123"}}, 409, "node 'c' has another build of llama_stack_provider_trl"),
        ({"name": "a", "machine_id": "another"}, 409, "the node 'a' is there already: choose another name"),
        ({"name": "a/b"}, 400, "name"),
        ({"devices": []}, 400, "devices"),
    ],
)
def test_a_machine_that_cannot_run_head_agent_is_answered_with_the_reason(
    service: TrainingService, agents: list[FakeAgent], changes: Json, status: int, expected: str
) -> None:
    report = {**agents[0].report, "name": "c", "machine_id": "c", **changes}
    assert expected in refusal(service.post("/nodes", report), status)


def test_the_same_version_of_torch_may_be_built_for_another_device(
    service: TrainingService, agents: list[FakeAgent]
) -> None:
    ours = versions()
    agents[0].report["versions"] = {**ours, "torch": ours["torch"] + "+cu126"}
    assert agents[0].join().ok


def test_an_unknown_or_restarted_node_is_ordered_to_join(service: TrainingService, agents: list[FakeAgent]) -> None:
    agents[0].boot_id = "another"
    assert "join again" in refusal(agents[0].poll(), 409)
    agents[0].boot_id = agents[0].report["boot_id"]
    stranger = FakeAgent(service, "stranger")
    assert "join first" in refusal(stranger.poll(), 404)


def test_repeated_or_unordered_uploads_are_answered_with_the_offset(
    service: TrainingService, agents: list[FakeAgent], tmp_path: Path
) -> None:
    a, b = agents
    submit(service, "twice", nodes=1)
    a.run("twice-1")
    events = lines(STARTED, PREPARED)
    assert a.send_events("twice-1", 0, events).ok
    again = a.send_events("twice-1", 0, events)
    assert (again.status_code, again.headers["Upload-Offset"]) == (409, str(len(events)))
    assert "send whole lines" in refusal(a.send_events("twice-1", len(events), b"{"))

    def types() -> list[str]:
        return [one["event"]["type"] for one in service.get(f"{JOBS}/twice/events").json()["data"]]

    poll(lambda: types()[-1:] == ["prepared"], "the events are in the job database", timeout=20)
    assert types().count("prepared") == 1
    refusal(b.send_events("twice-1", len(events), events), 410)
    a.send_log("twice-1", "rank-0.log", 0, b"one\n")
    assert a.send_log("twice-1", "rank-0.log", 0, b"one\n").headers["Upload-Offset"] == "4"
    assert a.send_log("twice-1", "rank-0.log", 4000, b"much later\n").headers["Upload-Offset"] == "4011"
    log = service.get(f"{JOBS}/twice/logs").text
    assert log.startswith("one\n")
    assert "3996 bytes were left out" in log
    assert log.endswith("much later\n")
    assert "\0" not in log
    for name in ("passwd", "..%2Fspec.json", "spec.json"):
        refusal(a.send_log("twice-1", name, 0, b"x"), 404)

    whole = checkpoint(tmp_path, size=5000)
    assert "POST its report first" in refusal(a.send_file("twice-1", whole, "model.safetensors"), 404)
    assert set(a.ask("twice-1", whole).json()["missing"]) == {
        "manifest.json",
        "model.safetensors",
        "additional_chat_templates/a.jinja",
    }
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    refusal(a.send_file("twice-1", whole, "model.safetensors"), 404)  # another digest than was announced
    weights.write_bytes(b"x" * 5000)
    digest = hashlib.sha256(b"x" * 5000).hexdigest()
    url = f"{service.url}/v1/nodes/a/tasks/twice-1/checkpoints/checkpoint-2/files/model.safetensors"

    def put(data: bytes, offset: int) -> requests.Response:
        return service.session.put(url, data=data, params={"sha256": digest, "offset": offset}, timeout=30)

    assert put(b"x" * 2000, 0).headers["Upload-Offset"] == "2000"
    assert put(b"x" * 5000, 0).headers["Upload-Offset"] == "2000"  # the connection broke: what had come is kept
    assert "nothing was kept, send it again" in refusal(put(b"y" * 3000, 2000))
    assert "the file has 5000" in refusal(put(b"x" * 5001, 0))
    place = a.ship("twice-1", whole)
    assert (place / "model.safetensors").read_bytes() == b"x" * 5000
    assert a.ask("twice-1", whole).json() == {"missing": [], "path": str(place)}  # its answer was lost
    assert [path.name for path in place.parent.glob("*.tmp")] == []
    for name, kind in (("final", "step"), ("checkpoint-x", "step"), ("checkpoint-3", "final")):
        other = {"kind": kind, "files": []}
        refusal(service.post(f"/nodes/a/tasks/twice-1/checkpoints/{name}", other), 400)
    for path in ("../../escape", "/etc/passwd"):
        files = [{"path": name, "size": 1, "sha256": digest} for name in ("manifest.json", path)]
        answer = service.post("/nodes/a/tasks/twice-1/checkpoints/checkpoint-4", {"kind": "step", "files": files})
        assert "files.path" in refusal(answer)
    for wrong in (["a", "a"], ["a", "a/b"], ["a" * 300]):
        files = [{"path": name, "size": 1, "sha256": digest} for name in ("manifest.json", *wrong)]
        refusal(service.post("/nodes/a/tasks/twice-1/checkpoints/checkpoint-4", {"kind": "step", "files": files}), 400)


def test_an_event_counts_only_if_it_is_one_and_its_checkpoint_is_in_place(
    service: TrainingService, agents: list[FakeAgent], tmp_path: Path
) -> None:
    """A node's token must not open other directories than the job's."""
    a, _ = agents
    submit(service, "honest", nodes=1)
    a.run("honest-1")
    events = lines(STARTED, PREPARED)
    assert a.send_events("honest-1", 0, events).ok
    ours = service.data_dir.resolve() / "checkpoints" / "honest"
    precious = checkpoint(tmp_path)
    for path, kind, message in (
        (precious, "step", "a checkpoint of this job lies in"),
        (ours / ".." / "other" / "checkpoint-2", "step", "a checkpoint of this job lies in"),
        (ours / "checkpoint-2", "final", "a checkpoint of the kind final has another name"),
        (ours / "checkpoint-2", "step", "upload its files before its event"),
    ):
        event = CheckpointSaved(kind=kind, step=2, epoch=1, path=path, train_loss=2.0)  # type: ignore[arg-type]
        assert message in refusal(a.send_events("honest-1", len(events), lines(event)))
    assert "expected an event" in refusal(a.send_events("honest-1", len(events), b'{"type": "finished"}\n'))
    assert service.status("honest")["checkpoints"] == []
    for wrong in ({"observation": {"state": "asleep"}}, {"failed": {"type": "failed"}}):
        a.reports["honest-1"] = {"task_id": "honest-1", "stage": "run", "progress": "working", **wrong}
        assert "tasks of honest-1" in refusal(a.poll(), 400)
    a.reports.clear()


def test_a_checkpoint_that_is_announced_again_has_nothing_of_the_one_before(
    service: TrainingService, agents: list[FakeAgent], tmp_path: Path
) -> None:
    a, _ = agents
    submit(service, "again", nodes=1)
    a.run("again-1")
    first, second = checkpoint(tmp_path / "1"), checkpoint(tmp_path / "2")
    (first / "extra.txt").write_text("of the first")
    (second / "model.safetensors").write_bytes(b"z" * 1000)  # of the same size
    for one in (first, second):
        (one / "manifest.json").unlink()
        write_manifest(one)
    for name in a.ask("again-1", first).json()["missing"][:-1]:
        assert a.send_file("again-1", first, name).ok
    assert len(a.ask("again-1", second).json()["missing"]) == 3
    place = a.ship("again-1", second)
    assert (place / "model.safetensors").read_bytes() == b"z" * 1000
    assert not (place / "extra.txt").exists()


def test_a_file_whose_last_answer_was_lost_is_completed_by_asking_once_more(
    service: TrainingService, agents: list[FakeAgent], tmp_path: Path
) -> None:
    """The service was killed between the last byte and the file's place."""
    a, _ = agents
    submit(service, "lost", nodes=1)
    a.run("lost-1")
    whole = checkpoint(tmp_path)
    assert a.ask("lost-1", whole).ok
    staging = service.data_dir.resolve() / "checkpoints" / "lost" / "checkpoint-2.1.tmp"
    (staging / "parts").mkdir()
    (staging / "parts" / "model.safetensors").write_bytes(b"x" * 1000)
    again = a.send_file("lost-1", whole, "model.safetensors")
    assert (again.status_code, again.headers["Upload-Offset"]) == (409, "1000")
    assert a.send_file("lost-1", whole, "model.safetensors", offset=1000).ok
    assert "model.safetensors" not in a.ask("lost-1", whole).json()["missing"]
    assert a.ship("lost-1", whole).is_dir()


def test_a_name_is_one_agent_s_at_a_time_and_a_removed_one_ends(
    service: TrainingService, agents: list[FakeAgent]
) -> None:
    a, _ = agents
    twin = FakeAgent(service, "a", address="10.0.0.9", agent_id="another directory")
    assert "with a new data directory, stop its agent and start this one 15 s later" in refusal(twin.join(), 409)
    assert "join again" in refusal(twin.poll(), 409)
    assert a.poll().ok
    own = FakeAgent(service, "head", machine_id="another machine", address="10.0.0.9")
    assert "it is the service's own machine" in refusal(own.join(), 409)
    assert "cordon or drain it" in refusal(service.delete("/nodes/head"), 409)
    with ThreadPoolExecutor(1) as waiting:
        requested = waiting.submit(a.poll)  # nothing is new: it waits for its answer
        until_it_waits = time.monotonic() + 0.5
        while time.monotonic() < until_it_waits:
            assert not requested.done()
            time.sleep(0.05)
        assert service.delete("/nodes/a").status_code == 204
        assert "was removed" in refusal(requested.result(60), 410)
    assert "was removed" in refusal(a.poll(), 410)
    a.credential = None  # it is started again
    assert a.join().ok
    a.seen = 0
    assert a.poll().ok


def test_a_drained_node_hands_its_job_on_and_can_be_removed(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, b = agents
    submit(service, "moved", nodes=1)
    a.run("moved-1")
    assert a.send_events("moved-1", 0, lines(STARTED, PREPARED)).ok
    service.wait_state("moved", "in_progress")
    assert "drain it first" in refusal(service.delete("/nodes/a"), 409)
    assert service.post("/nodes/a/drain").status_code == 204
    a.wait_for("moved-1", "pause")
    assert a.send_events("moved-1", len(lines(STARTED, PREPARED)), lines(Paused(step=1))).ok
    a.report_task("moved-1", "pause", observation=exited(0), shipped=True)
    b.wait_for("moved-2", "prepare")
    a.wait_for("moved-1", "stop")
    a.forget("moved-1")
    assert service.status("moved")["resources_allocated"]["attempts"][0]["reason"] is None
    assert a.join().ok
    assert service.get("/nodes").json()["data"][1]["state"] == "draining"


def test_a_restart_of_the_service_changes_nothing_for_its_nodes(
    service: TrainingService, agents: list[FakeAgent]
) -> None:
    a, b = agents
    submit(service, "kept", nodes=2)
    for one in agents:
        one.report_task("kept-1", one.wait_for("kept-1", "prepare")["stage"], port=29500)
    for one in agents:
        one.report_task("kept-1", one.wait_for("kept-1", "probe")["stage"])
    for one in agents:
        one.wait_for("kept-1", "run")
        one.report_task("kept-1", "run", "working", observation=running_now())
    assert a.send_events("kept-1", 0, lines(STARTED, PREPARED)).ok
    service.kill()
    service.start()
    for one in agents:
        one.seen = 0
        assert one.poll().ok
        assert [(order["task_id"], order["stage"]) for order in one.orders] == [("kept-1", "run")]
    size = len(lines(STARTED, PREPARED))
    assert a.send_events("kept-1", size, lines(Finished(step=4))).ok
    b.report_task("kept-1", "run", observation=exited(0), shipped=True)
    a.report_task("kept-1", "run", observation=exited(0), shipped=True)
    assert service.wait_state("kept", "completed")["resources_allocated"]["device"] == "a/cpu,b/cpu"
