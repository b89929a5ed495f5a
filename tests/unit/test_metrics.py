"""`GET /metrics`: what is counted, over restarts and deletions, and what the Grafana dashboard asks for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import CheckpointSaved, Event, Prepared, Progress, Reason, Started
from llama_stack_provider_trl.specs.schema import schema_digest
from llama_stack_provider_trl_remote.service.cluster.membership import Cluster
from llama_stack_provider_trl_remote.service.cluster.presence import Presence
from llama_stack_provider_trl_remote.service.metrics.latencies import Latencies
from llama_stack_provider_trl_remote.service.metrics.registry import Latency, Metrics
from llama_stack_provider_trl_remote.service.security.access import ROUTE
from llama_stack_provider_trl_remote.wire import SILENCE, SPECS, NodeReport
from tests.fakes import FakeClock, job_spec
from tests.tiny import REPOSITORY

STARTED = Started(pid=1, device="cpu", versions={})
GPUS = [{"name": "cuda:0", "uuid": "GPU-a"}, {"name": "cuda:1", "uuid": "GPU-b"}]
DASHBOARDS = sorted((REPOSITORY / "deploy" / "grafana").glob("*.json"))
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus gives to every series."""


class World:
    """The store, the nodes and the metrics of a service; `restart` is a new process on the same data."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, FakeClock()
        self.restart()

    def restart(self) -> None:
        self.store = Store(self.root / "jobs.sqlite3", self.clock)
        self.presence = Presence(self.clock, "head")
        self.metrics = Metrics(
            self.store, Cluster(self.store, self.presence, "head", "machine", ["cpu"], 2), self.clock
        )

    def text(self) -> str:
        self.clock.advance(2)
        return self.metrics.render("")[0].decode()

    def samples(self) -> Mapping[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, frozenset(labels.items())))

    def of(self, name: str, label: str) -> dict[str, float]:
        """Values of a metric by one of its labels; those that are not 0."""
        found = {dict(labels)[label]: value for (one, labels), value in self.samples().items() if one == name}
        return {key: value for key, value in found.items() if value}

    def jobs_with_series(self) -> set[str]:
        return {value for _, labels in self.samples() for name, value in labels if name == "job_uuid"}

    def launch(self, job_uuid: str, attempt: int = 1, places: str = "cpu", **changes: Any) -> None:
        self.store.add_job(job_spec(job_uuid, **changes), "digest")
        assert self.store.launch(job_uuid, attempt, places, Path("/run") / job_uuid / str(attempt))
        self.report(job_uuid, STARTED, attempt=attempt, end=10)

    def report(self, job_uuid: str, *events: Event, attempt: int = 1, end: int) -> None:
        assert self.store.apply_events(job_uuid, attempt, events, end)

    def finish(self, job_uuid: str, state: JobState = JobState.completed, reason: Reason | None = None) -> None:
        attempt = self.store.get(job_uuid).attempt
        assert self.store.transition(job_uuid, attempt, JobState.in_progress, state, reason, "message")

    def join(self, name: str, specs: str = "") -> None:
        report = NodeReport.model_validate(
            {
                **{"name": name, "machine_id": name, "boot_id": "1", "address": "10.0.0.2", "cpus": 4},
                **{"memory_bytes": 1, "disk_free_bytes": 1, "versions": {SPECS: specs or schema_digest()}},
                "devices": GPUS,
            }
        )
        self.store.nodes.join(name, name, "1", report.model_dump_json())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


def step(number: int, tokens: int | None = None, **metrics: float) -> Progress:
    values = {"loss": 1.0 / number, "tokens_per_second": 50.0, **metrics}
    memory = {"peak_memory_bytes": 4096, "rank_memory_bytes": (2048, 1024), "rank_peak_memory_bytes": (4096, 3072)}
    return Progress(step=number, epoch=0.5, metrics=values, tokens_seen=tokens, **memory)


def prepared(start: int = 0, tokens: int | None = None) -> Prepared:
    counts = {"num_rows": 4, "trainable_parameters": 1, "total_parameters": 1}
    return Prepared(total_steps=8, start_step=start, tokens_seen=tokens, **counts)


def saved(seconds: float, kind: Any = "step") -> CheckpointSaved:
    return CheckpointSaved(kind=kind, step=1, epoch=1, path=Path("/c/1"), train_loss=1.0, write_seconds=seconds)


def busy(world: World) -> None:
    """A job in every kind of state, with everything that has a metric."""
    for name in ("waits", "ends", "fails", "runs"):
        world.store.add_job(job_spec(name), "digest")
    world.clock.advance(20)
    world.launch("ends")
    world.report("ends", prepared(), step(1, 100), saved(0.3), saved(40.0, "final"), end=20)
    world.finish("ends")
    world.launch("fails", algorithm="sft")
    world.finish("fails", JobState.failed, Reason.out_of_memory)
    world.launch("dpo", algorithm="dpo")
    world.report("dpo", step(1, 7), end=20)
    world.store.request_cancel("dpo")
    world.store.transition("dpo", 1, JobState.cancelling, JobState.cancelled)
    world.launch("runs")
    world.report("runs", prepared(), step(3, 250), end=20)
    world.join("worker")
    world.store.webhooks.configure({"https://hooks.example/": {JobState.cancelled}})
    for name in ("told", "untold"):
        world.store.add_job(job_spec(name, metadata={"openai": "{}"}), "digest")
        world.store.request_cancel(name)
        world.store.delete(name)
    due = world.store.webhooks.next("https://hooks.example/")
    assert due
    begun = world.store.webhooks.begin(due, 0.0)
    assert begun
    world.store.webhooks.end(begun, "delivered")


def test_jobs_are_counted_by_state_and_those_that_ended_by_why(world: World) -> None:
    busy(world)
    assert world.of("trl_jobs", "state") == dict.fromkeys(
        ("scheduled", "completed", "failed", "cancelled", "in_progress"), 1.0
    )
    assert world.value("trl_jobs", state="paused") == 0
    for algorithm, outcome, reason in (
        ("sft", "completed", ""),
        ("sft", "failed", "out_of_memory"),
        ("dpo", "cancelled", ""),
    ):
        labels = {"algorithm": algorithm, "outcome": outcome, "reason": reason}
        assert world.value("trl_jobs_finished_total", **labels) == 1, labels
    assert world.of("trl_attempts_total", "reason") == {"completed": 1, "out_of_memory": 1, "cancelled": 1}
    assert world.of("trl_tokens_total", "algorithm") == {"sft": 350, "dpo": 7}


def test_waits_and_writes_are_histograms(world: World) -> None:
    busy(world)
    waited = world.of("trl_job_queue_wait_seconds_bucket", "le")
    assert (waited["1.0"], waited["15.0"], waited["60.0"], waited["+Inf"]) == (1, 1, 4, 4)
    assert world.value("trl_job_queue_wait_seconds_count") == 4
    assert world.value("trl_job_queue_wait_seconds_sum") == 60
    assert world.value("trl_checkpoint_write_seconds_bucket", kind="step", le="0.25") == 0
    assert world.value("trl_checkpoint_write_seconds_bucket", kind="step", le="0.5") == 1
    assert world.value("trl_checkpoint_write_seconds_sum", kind="final") == 40


def test_no_counter_goes_back_or_counts_twice_when_the_service_is_killed_and_jobs_are_deleted(world: World) -> None:
    busy(world)
    before = {key: value for key, value in world.samples().items() if is_counter(key[0])}
    world.restart()  # without having closed anything
    assert not world.store.apply_events("runs", 1, [step(3, 250), saved(1.0)], 20)  # read again after the kill
    assert {key: value for key, value in world.samples().items() if is_counter(key[0])} == before
    for name in ("ends", "fails", "dpo"):
        world.store.delete(name)
    assert {key: value for key, value in world.samples().items() if is_counter(key[0])} == before
    assert world.value("trl_jobs", state="completed") == 0


def is_counter(name: str) -> bool:
    return name.startswith("trl_") and name.endswith(("_total", "_bucket", "_sum", "_count"))


def test_a_step_that_is_done_again_has_its_tokens_counted_once(world: World) -> None:
    world.launch("job")
    world.report("job", prepared(), step(1, 100), step(2, 200), step(3, 300), end=20)
    job = world.store.get("job")
    assert world.store.retry(job, Reason.rank_failed, "rank 0 ended", 0.0)
    world.launch("job", attempt=2)
    world.report("job", prepared(2, 200), step(3, 300), attempt=2, end=20)
    assert world.of("trl_tokens_total", "algorithm") == {"sft": 300}
    world.report("job", step(4, 410), attempt=2, end=30)
    assert world.of("trl_tokens_total", "algorithm") == {"sft": 410}
    assert world.of("trl_attempts_total", "reason") == {"rank_failed": 1}
    assert world.value("trl_job_queue_wait_seconds_count") == 1


def test_tokens_of_the_job_whose_checkpoint_a_job_begins_with_count_there_alone(world: World) -> None:
    world.launch("second")
    world.report("second", prepared(5, 1000), step(6, 1100), end=20)
    assert world.of("trl_tokens_total", "algorithm") == {"sft": 100}


def test_the_series_of_a_job_vanish_when_it_ends(world: World) -> None:
    busy(world)
    assert world.jobs_with_series() == {"runs"}
    labels = {"job_uuid": "runs"}
    shown = {name: world.value(f"trl_job_{name}", **labels) for name in ("step", "planned_steps", "loss", "epochs")}
    assert shown == {"step": 3, "planned_steps": 8, "loss": pytest.approx(1 / 3), "epochs": 0.5}
    assert world.value("trl_job_tokens_per_second", **labels) == 50
    assert world.of("trl_job_memory_bytes", "rank") == {"0": 2048, "1": 1024}
    assert world.of("trl_job_peak_memory_bytes", "rank") == {"0": 4096, "1": 3072}
    world.finish("runs")
    assert world.jobs_with_series() == set()


def test_nodes_and_devices_are_counted_by_what_they_can_do(world: World) -> None:
    for name in ("works", "rests", "old", "gone"):
        world.join(name, specs="another" if name == "old" else "")
        world.presence.note_call(name)
    world.store.nodes.set_mode("rests", "cordoned")
    world.launch("job", places="works/cuda:1")
    for _ in range(int(SILENCE) + 2):
        world.clock.advance(1)
        assert world.presence.silence("gone")  # a service that reads nothing for seconds was stopped itself
        for name in ("works", "rests", "old"):
            world.presence.note_call(name)
    assert world.of("trl_nodes", "state") == {"open": 2, "cordoned": 1, "other_build": 1, "absent": 1}
    assert world.of("trl_devices", "state") == {"free": 2, "used": 1, "closed": 6}
    device = {"node": "works", "device": "cuda:1", "UUID": "GPU-b"}
    assert world.value("trl_device_info", **device) == 1
    assert world.value("trl_device_info", node="head", device="cpu", UUID="") == 1
    assert world.value("trl_job_device_info", job_uuid="job", **device) == 1


def test_scrapes_within_a_second_cost_one_and_both_formats_are_parsed(world: World) -> None:
    text, content_type = world.metrics.render("text/plain")
    assert content_type.startswith("text/plain; version=")
    world.store.add_job(job_spec('a "quoted"\nname\\'), "digest")
    assert world.metrics.render("text/plain")[0] == text
    world.clock.advance(1.5)
    assert world.metrics.render("text/plain")[0] != text
    assert world.store.launch('a "quoted"\nname\\', 1, "cpu", Path("/run"))
    text, content_type = world.metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics_families(text.decode())}
    assert {"trl_jobs", "trl_attempts", "trl_http_request_duration_seconds"} <= names
    assert world.jobs_with_series() == {'a "quoted"\nname\\'}


@pytest.mark.parametrize(
    ("route", "method", "status", "labels"),
    [
        ("/v1/health", "GET", 200, ("/v1/health", "GET", "2xx")),
        (None, "GET", 404, ("none", "GET", "4xx")),
        ("/v1/health", "BREW", 405, ("/v1/health", "other", "4xx")),
    ],
)
def test_latencies_have_few_labels_whatever_is_called(
    route: str | None, method: str, status: int, labels: tuple[str, ...]
) -> None:
    latencies = Latencies()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if route is not None:
            scope[ROUTE] = route
        await send({"type": "http.response.start", "status": status})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"", "more_body": True})

    async def send(message: Message) -> None: ...

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": method, "path": "/anything"}
    asyncio.run(Latency(app, latencies)(scope, receive, send))
    assert [(found.labels, found.counts[-1]) for found in latencies.read()] == [(labels, 1)]


def test_a_scrape_counts_how_many_calls_waited_at_most_how_long(world: World) -> None:
    labels = ("/v1/health", "GET", "2xx")
    for seconds in (0.001, 0.005, 0.03, 99.0):
        world.metrics.latencies.observe(labels, seconds)
    name, named = "trl_http_request_duration_seconds", dict(zip(("route", "method", "status"), labels, strict=True))
    found = {
        bound: world.value(f"{name}_bucket", **named, le=bound) for bound in ("0.005", "0.025", "0.05", "10.0", "+Inf")
    }
    assert found == {"0.005": 2, "0.025": 2, "0.05": 3, "10.0": 3, "+Inf": 4}
    assert (world.value(f"{name}_count", **named), world.value(f"{name}_sum", **named)) == (4, pytest.approx(99.036))


# What the docs and the Grafana dashboard name


def test_the_docs_list_each_metric_with_its_type_and_labels(world: World) -> None:
    busy(world)
    world.metrics.latencies.observe(("/v1/health", "GET", "2xx"), 0.01)
    served = {}
    for family in text_string_to_metric_families(world.text()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name.startswith("trl_"):
            served[name] = (family.type, labels)
    page = (REPOSITORY / "docs" / "how-to" / "monitoring.md").read_text()
    table = page.split("<!-- metrics -->")[1].split("<!-- /metrics -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`trl_" in line]
    assert {cells[0].strip("`"): (cells[1], set(re.findall(r"`(\w+)`", cells[2]))) for cells in rows} == served


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_names_only_metrics_and_labels_that_exist(world: World, path: Path) -> None:
    busy(world)
    known: dict[str, set[str]] = {}
    for name, labels in world.samples():
        known.setdefault(name, set()).update(dict(labels))
    known["trl_http_request_duration_seconds_bucket"] = {"route", "method", "status", "le"}
    dashboard = json.loads(path.read_text())
    expressions = list(queries(dashboard))
    assert len(expressions) > 10
    for expression in expressions:
        assert (wrong := unknown(expression, known)) == [], f"{expression}: {wrong}"


def test_a_dashboard_with_a_wrong_name_would_be_found() -> None:
    known = {"trl_jobs": {"state"}}
    assert unknown("sum by (state) (trl_jobs)", known) == []
    assert unknown("sum(trl_job)", known) == ["trl_job"]
    assert unknown('sum by (reason) (trl_jobs{state="x"})', known) == ["reason"]
    assert unknown('trl_jobs{outcome="x"}', known) == ["outcome"]


def queries(node: Any) -> Iterator[str]:
    """The PromQL of a dashboard, its variables included."""
    if isinstance(node, dict):
        for key in ("expr", "definition"):
            if isinstance(node.get(key), str):
                yield node[key]
        yield from (found for value in node.values() for found in queries(value))
    elif isinstance(node, list):
        yield from (found for value in node for found in queries(value))


def unknown(expression: str, known: Mapping[str, set[str]]) -> list[str]:
    """Metrics and labels that an expression names and that are not known."""
    without_texts = re.sub(r'"[^"]*"', '""', expression)
    metrics = re.findall(r"\b(?:trl|process|DCGM)_\w+", without_texts)
    wrong = [name for name in metrics if name not in known and not name.startswith(("process_", "DCGM_"))]
    labels = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", without_texts)
    for grouped in re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", without_texts):
        labels += [label.strip() for label in grouped.split(",") if label.strip()]
    if call := re.match(r"label_values\((\w+),\s*(\w+)\)", without_texts):
        labels.append(call[2])
    allowed = OF_PROMETHEUS.union(*(known.get(name, set()) for name in metrics))
    return [*wrong, *(label for label in labels if label not in allowed)]
