"""What a head may order of a node: code of models, and processes, only as far as the node's own operator agrees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl_remote.nodes.consent import NoConsent, check_consent
from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.start import worker_settings
from llama_stack_provider_trl_remote.wire import StageProgress
from tests.fake_head import FakeHead
from tests.orders import order, spec
from tests.unit.agent_world import World

PINNED = {"model": "org/odd", "revision": "a1b2", "trust_remote_code": True}
ADAPTER = {**PINNED, "use": "continue"}
JUDGE = {"job_uuid": "judge", "checkpoint": "final", "source": {"model": "/service/checkpoints/judge/final"}}
SAME = {"type": "exact", "expected": "a"}
ANSWERING = {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 1, "checks": []}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A node; no thread is waited for, since its clock runs on with every sleep."""

    async def at_once[Value](work: Callable[..., Value], *arguments: Any) -> Value:
        await asyncio.sleep(0)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    return World(tmp_path)


@pytest.mark.parametrize(
    "job",
    [
        PINNED,
        {**PINNED, "trust_remote_code": "yes"},
        {"model": "/models/odd", "trust_remote_code": True},
        {"method": {"algorithm": "dpo", "reference": {"source": PINNED}}},
        {"method": {"algorithm": "distillation", "reference": {"source": PINNED}}},
        {"work": {"kind": "evaluate", "members": [{**PINNED, "weight": 1.0}]}},
        {"work": {"kind": "evaluate", "members": [{"model": "org/base", "weight": 1.0, "adapter": ADAPTER}]}},
        {"work": {"kind": "evaluate", "answers": {**ANSWERING, "judges": [PINNED]}}},
        {"method": {"algorithm": "grpo", "rewards": [{"name": "graded", "check": SAME, "grading": [PINNED]}]}},
        # Of a reward model that is not there yet, this one's configuration gives the sizes.
        {"method": {"algorithm": "grpo", "rewards": [{"name": "judge", "model": {**JUDGE, "trained_from": PINNED}}]}},
    ],
)
def test_code_of_a_model_that_the_node_s_operator_has_not_named_is_not_run(job: dict[str, Any]) -> None:
    with pytest.raises(NoConsent, match=r"has not agreed to that: .* --trust-remote-code, TRL_NODE_TRUST_REMOTE_CODE"):
        check_consent(order(spec=spec(job=job)), (), 4)


@pytest.mark.parametrize(
    ("trusted", "job", "agreed"),
    [
        ("org/odd@a1b2", PINNED, True),
        ("org/odd@a1b2", {**PINNED, "revision": "c3d4"}, False),
        ("org/odd@a1b2", {**PINNED, "revision": None}, False),
        ("org/odd@a1b2", {**PINNED, "model": "org/other"}, False),
        ("/models/odd", {"model": "/models/odd", "trust_remote_code": True}, True),
        ("/models/odd", {"model": "/models/x/../odd", "trust_remote_code": True}, True),
        ("/models/odd", {"model": "/models/odd/below", "trust_remote_code": True}, False),
        ("/models/odd", {"model": "models/odd", "trust_remote_code": True}, False),
    ],
)
def test_an_operator_agrees_to_one_model_at_one_revision(trusted: str, job: dict[str, Any], agreed: bool) -> None:
    ordered = order(spec=spec(job=job))
    if agreed:
        check_consent(ordered, (trusted,), 4)
    else:
        with pytest.raises(NoConsent, match="has not agreed"):
            check_consent(ordered, (trusted,), 4)


def test_every_field_of_a_job_that_asks_for_code_has_the_name_that_is_looked_for() -> None:
    """A field with another name would not be found in an order."""
    schema = JobSpec.model_json_schema()
    fields = {name for part in [schema, *schema["$defs"].values()] for name in part.get("properties", {})}
    assert {name for name in fields if "trust" in name or "code" in name} == {"trust_remote_code"}


@pytest.mark.parametrize(
    ("ranks", "devices", "cpus", "refused"),
    [
        (1024, ("cpu",), 4, "starts 1024 processes here, and this node has 4 CPU cores"),
        (5, ("cpu",), 4, "at most 4"),
        (4, ("cpu",), 4, ""),
        (0, ("cpu",), 4, "starts 0 processes"),
        (-1, ("cpu",), 4, "starts -1 processes"),
        (8, ("cuda:0", "cuda:1"), 64, "this node has 2 GPUs of the order"),
        (2, ("cuda:0", "cuda:1"), 1, ""),
        (3, ("cpu:0", "cpu:1"), 2, "at most 2"),
    ],
)
def test_a_node_starts_no_more_processes_than_it_has_cores_or_gpus(
    ranks: int, devices: tuple[str, ...], cpus: int, refused: str
) -> None:
    ordered = order(ranks=ranks, devices=devices)
    if not refused:
        check_consent(ordered, (), cpus)
        return
    with pytest.raises(NoConsent, match=refused):
        check_consent(ordered, (), cpus)


@pytest.mark.parametrize("changes", [{"spec": spec(job=PINNED)}, {"ranks": 1024}])
def test_a_node_reports_what_it_refuses_for_good_and_makes_nothing(world: World, changes: dict[str, Any]) -> None:
    async def play(head: FakeHead) -> None:
        head.order(order(**changes))
        await head.until(head.report)
        report = head.report()
        assert report is not None
        assert (report.progress, report.lasting) == (StageProgress.failed, True)  # the job continues on other nodes
        assert "this node" in report.error

    world.run(play)
    assert not world.launcher.started
    assert not list((world.data_dir / "jobs").iterdir())


def test_a_node_runs_the_code_that_its_operator_has_named(world: World) -> None:
    world.trusted = ("org/odd@a1b2",)

    async def play(head: FakeHead) -> None:
        head.order(world.order(job=PINNED))
        await head.until(lambda: world.launcher.started)

    world.run(play)


PYTHON = {"type": "python", "name": "own", "source": "def grade(sample, item): return 1.0"}
GRADED = {"type": "grader", "grader": {"type": "multi", "name": "m", "graders": {"a": PYTHON}, "calculate_output": "a"}}


@pytest.mark.parametrize(
    "job",
    [
        {"method": {"algorithm": "grpo", "rewards": [{"name": "own", "check": GRADED}]}},
        {"work": {"kind": "evaluate", "answers": {**ANSWERING, "checks": [GRADED]}}},
    ],
)
def test_source_of_graders_runs_where_the_nodes_operator_agrees(job: dict[str, Any]) -> None:
    ordered = order(spec=spec(job=job))
    with pytest.raises(
        NoConsent, match=r"the source of the grader 'm', .* --python-graders, TRL_NODE_PYTHON_GRADERS=on"
    ):
        check_consent(ordered, (), 4)
    check_consent(ordered, (), 4, python_graders=True)


def test_an_order_that_asks_for_code_later_changes_nothing(world: World) -> None:
    async def play(head: FakeHead) -> None:
        head.order(world.order())
        await head.until(lambda: world.launcher.started)
        head.order(world.order(job=PINNED))
        await head.until(lambda: (report := head.report()) and report.observation is not None)

    world.run(play)
    assert '"trust_remote_code": true' not in (world.run_dir / "spec.json").read_text()


def test_the_list_of_a_node_is_its_own() -> None:
    environ = {"TRL_SERVICE_NODE_TOKEN": "secret", "TRL_NODE_ADDRESS": "192.0.2.2"}
    url = "http://192.0.2.1:8322"
    assert worker_settings(url, environ, device="cpu").trust_remote_code == ()
    environ["TRL_NODE_TRUST_REMOTE_CODE"] = "org/odd@a1b2, /models/odd"
    assert worker_settings(url, environ, device="cpu").trust_remote_code == ("org/odd@a1b2", "/models/odd")
    given = worker_settings(url, environ, device="cpu", trust_remote_code=["~/odd"])
    assert given.trust_remote_code == ("~/odd",)
    assert not given.python_graders
    assert worker_settings(url, environ, device="cpu", python_graders=True).python_graders
    environ["TRL_NODE_PYTHON_GRADERS"] = "on"
    assert worker_settings(url, environ, device="cpu").python_graders
    with pytest.raises(NodeError, match="neither an absolute directory nor ORG/NAME@REVISION"):
        worker_settings(url, environ, device="cpu", trust_remote_code=["org/odd"])
