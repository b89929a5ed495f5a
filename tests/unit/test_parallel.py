"""The estimate of whether training on several nodes helps, and `trl-remote nodes advise`."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.parallel import Exchange, advise, verdict_after
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.client import ServiceClient
from llama_stack_provider_trl_remote.plots.points import PlotPoint
from llama_stack_provider_trl_remote.service.http.node_bodies import NodeRow
from tests.tiny import REPOSITORY

HUNDRED_M = 97_800_000
DDP = Exchange(nodes=2, trainable=HUNDRED_M, total=HUNDRED_M)


def exchange(strategy: Any = "NO_SHARD", **changes: Any) -> Exchange:
    return Exchange(**{"nodes": 2, "trainable": HUNDRED_M, "total": HUNDRED_M, "strategy": strategy, **changes})


@pytest.mark.parametrize(("strategy", "measured"), [("NO_SHARD", 782), ("FULL_SHARD", 1507), ("SHARD_GRAD_OP", 1176)])
def test_the_bytes_are_those_that_were_measured(strategy: str, measured: int) -> None:
    """benchmarks/RESULTS.md, two ranks against one process: MB a step on loopback, of both ranks."""
    assert 2 * exchange(strategy).bytes_per_node / 1e6 == pytest.approx(measured, rel=0.06)


def test_bytes_grow_with_nodes_accumulation_and_a_reference_and_shrink_with_adapters() -> None:
    assert exchange(nodes=4).bytes_per_node == pytest.approx(1.5 * DDP.bytes_per_node)
    assert exchange(ranks_per_node=2).bytes_per_node == pytest.approx(1.5 * DDP.bytes_per_node)
    assert exchange(trainable=HUNDRED_M // 100).bytes_per_node == pytest.approx(DDP.bytes_per_node / 100)
    assert exchange(micro_steps=4).bytes_per_node == DDP.bytes_per_node, "DDP reduces once a step"
    parts, whole = (exchange("FULL_SHARD", micro_steps=4, keeps_whole_gradients=keeps) for keeps in (False, True))
    assert parts.bytes_per_node == 4 * exchange("FULL_SHARD").bytes_per_node > whole.bytes_per_node
    assert exchange("FULL_SHARD", reference=HUNDRED_M).bytes_per_node > exchange("FULL_SHARD").bytes_per_node
    hybrid = exchange("HYBRID_SHARD", ranks_per_node=8)
    assert hybrid.bytes_per_node == DDP.bytes_per_node, "only copies of parts are reduced across nodes"
    assert exchange("FULL_SHARD", on_cpu=False).bytes_per_node < exchange("FULL_SHARD").bytes_per_node


def test_parallel_helps_over_a_fast_link() -> None:
    found = advise(DDP, 10.0, 10_000)
    assert found.helps
    assert found.speedup == pytest.approx(2.0, abs=0.1)
    assert found.reason.startswith("parallel will help: 2 nodes train 2.0")


def test_parallel_does_not_help_over_10_mbit_per_s() -> None:
    found = advise(DDP, 10.0, 10)
    assert not found.helps
    assert found.step_seconds == pytest.approx(10 + 313 - 3.3, rel=0.005)
    assert found.reason == (
        "parallel will not help: 2 nodes train 0.06 times as many rows per second as one; a step takes 10.00 s on one; "
        "each node exchanges 391 MB in it, which takes 312.96 s at 10 Mbit/s"
    )


def test_parallel_does_not_help_on_one_machine() -> None:
    found = advise(exchange(machines=1), 10.0, 10_000)
    assert not found.helps
    assert found.reason.endswith("they are on one machine, and share the same cores")
    assert advise(exchange(machines=1, on_cpu=False), 10.0, 10_000).helps, "GPUs are not shared"
    assert advise(exchange(nodes=4, machines=2), 10.0, 10_000).speedup == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@pytest.mark.parametrize("mbit_per_s", [10, 100, 1000])
def test_a_measured_step_leads_back_to_the_step_on_one_node(strategy: str, mbit_per_s: float) -> None:
    one = exchange(strategy)
    step = one.step_seconds(5.0, mbit_per_s)
    assert one.alone(step, mbit_per_s) == pytest.approx(5.0)
    assert verdict_after(one, step, mbit_per_s).speedup == pytest.approx(2 * 5.0 / step)


def test_a_link_that_was_measured_too_slow_gives_no_negative_time() -> None:
    assert exchange("FULL_SHARD").alone(1.0, 1.0) == 0.0
    assert not verdict_after(DDP, 1.0, 1.0).helps


def test_a_job_is_judged_once_after_its_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="recipes import it")
    from llama_stack_provider_trl.recipes.trainer.parallel import STEPS, ParallelCheck

    now = iter(float(second) for second in range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    check = ParallelCheck(10.0)
    ends = []
    for _ in range(STEPS + 3):
        check.begin_step()
        ends.append(check.end_step())
    assert [number for number, end in enumerate(ends, 1) if end] == [STEPS]
    assert check.speedup is None
    assert not check.conclude(DDP).helps
    assert check.speedup == 0.0


def advice(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["nodes", "advise", *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_command_gives_the_verdict_as_its_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "97.8M", "--sharding", "NO_SHARD", "--step-seconds", "10"]
    code, printed = advice(capsys, *words, "--mbit-per-s", "10")
    assert (code, printed.startswith("parallel will not help: 2 nodes train 0.06 times")) == (1, True)
    code, printed = advice(capsys, *words, "--mbit-per-s", "10000", "--json")
    assert (code, json.loads(printed)["helps"]) == (0, True)
    code, printed = advice(capsys, *words, "--machines", "1")
    assert (code, "share the same cores" in printed) == (1, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--accumulation", "4"], exchange("FULL_SHARD", micro_steps=4, keeps_whole_gradients=True)),
        (["--accumulation", "4", "--gradient-sync", "micro_step"], exchange("FULL_SHARD", micro_steps=4)),
        (["--ranks-per-node", "8", "--sharding", "HYBRID_SHARD"], exchange("HYBRID_SHARD", ranks_per_node=8)),
        (["--ranks-per-node", "4"], exchange("FULL_SHARD", ranks_per_node=4)),
        (["--reference"], exchange("FULL_SHARD", reference=HUNDRED_M)),
        (["--averaging-interval", "50", "--sharding", "NO_SHARD"], exchange(interval=50)),
        (["--trainable", "20M"], exchange("FULL_SHARD", trainable=20_000_000)),
        (["--trainable", "1.1M", "--sharding", "NO_SHARD"], exchange(trainable=1_100_000)),
        (["--trainable", "20000000"], exchange("FULL_SHARD", trainable=20_000_000)),
    ],
)
def test_the_command_counts_bytes_by_the_rules_of_a_job(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: Exchange
) -> None:
    link = ["--model", "97.8M", "--step-seconds", "10", "--mbit-per-s", "100", "--json"]
    _, printed = advice(capsys, *link, *words)
    assert json.loads(printed)["bytes_per_node"] == round(expected.bytes_per_node)


@pytest.mark.parametrize("text", ["many", "1.5", "20m", "0K"])
def test_a_number_of_parameters_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["nodes", "advise", "--model", "1M", "--step-seconds", "1", "--trainable", text])
    assert f"argument --trainable: {text.removesuffix('K')} is not" in capsys.readouterr().err


def test_parameters_are_counted_from_the_files_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"shape": [3, 5]}, "b": {"shape": [2]}}).encode()
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").touch()
    (snapshot / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for model in (str(snapshot), "org/name"):
        code, printed = advice(capsys, "--model", model, "--step-seconds", "1", "--mbit-per-s", "10", "--json")
        assert (code, json.loads(printed)["bytes_per_node"]) == (0, 2 * 17 * 4)
    (snapshot / "model.safetensors").write_bytes(b"no")
    code, printed = advice(capsys, "--model", str(snapshot), "--step-seconds", "1", "--mbit-per-s", "10")
    assert (code, "it is no safetensors file" in printed) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "org/none"], "expected a directory, an id in this machine's cache, or a number"),
        (["--trainable", "1M"], "--model is missing"),
        (["--model", "1M"], "--mbit-per-s is missing"),
        (["--model", "1M", "--mbit-per-s", "10", "--trainable", "1.5M"], "the model has 1000000 parameters"),
        (["--model", "1M", "--mbit-per-s", "10", "--sharding", "HYBRID_SHARD"], "name --ranks-per-node"),
        (["--model", "1M", "--mbit-per-s", "10", "--machines", "3"], "expected at most --nodes, 2"),
        (["--model", "1M", "--mbit-per-s", "10", "--trainable", "1000001"], "the model has 1000000 parameters"),
    ],
)
def test_what_no_advice_can_be_given_for_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    link = [] if "1M" in words else ["--mbit-per-s", "10"]
    code, printed = advice(capsys, "--step-seconds", "1", *words, *link)
    assert (code, printed.count("\n")) == (1, 1)
    assert message in printed


def node_row(name: str, machine: str, **more: Any) -> NodeRow:
    known = {"jobs": {}, "memory_bytes": 8 << 30, "memory_available_bytes": None, "disk_free_bytes": 0, "state": "open"}
    return NodeRow.model_validate(
        {"node": name, "machine": machine, "agent": True, "devices": ["cpu"], **known, **more}
    )


def trained(
    monkeypatch: pytest.MonkeyPatch, device: str, link: float | None, machines: str = "", **config: Any
) -> dict[str, Any]:
    """A job of the service with a step of 10 seconds. Returns the record of its recipe.

    Args:
        machines: the machine of each agent, one letter each; those with a capital one have the label rack=7. `g` has
            GPUs only, `s` one core, `w` the model.
    """
    effective: dict[str, Any] = {"gradient_sync": None, "sharding": None}
    recipe = {"total_parameters": HUNDRED_M, "trainable_parameters": HUNDRED_M, "effective": effective}
    own = {"gradient_accumulation_steps": 1, "ranks": 1, "dtype": "fp32", "recipe": recipe, **config}
    found = {"device": device, "progress": {"link_mbit_per_s": link}, "effective_config": own}

    async def status(client: ServiceClient, job_uuid: str) -> dict[str, Any]:
        return {"resources_allocated": found}

    async def points(client: ServiceClient, job_uuid: str) -> list[PlotPoint]:
        times = {1: 0.0, 2: 10.0, 4: 30.0, 5: 400.0}  # the last one after a pause
        return [PlotPoint("train", step, 1.0, at, {}) for step, at in times.items()]

    async def nodes(client: ServiceClient, path: str) -> dict[str, Any]:
        assert path == "/v1/nodes"
        head = node_row("head", "head", cpus=4).model_copy(update={"agent": False, "head": True})
        rows = [
            node_row(
                f"node-{number}",
                machine,
                devices=["cuda:0"] if machine == "g" else ["cpu"],
                cpus=1 if machine == "s" else 4,
                labels={"rack": "7"} if machine.isupper() else {},
                models=["org/base"] if machine == "w" else [],
            )
            for number, machine in enumerate(machines)
        ]
        return {"data": [row.model_dump(mode="json") for row in (head, *rows)]}

    monkeypatch.setattr(ServiceClient, "status", status)
    monkeypatch.setattr(ServiceClient, "get_all", nodes)
    monkeypatch.setattr("llama_stack_provider_trl_remote.cli.advise.fetch_points", points)
    return recipe


def of_job(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(advice(capsys, "--job", "j", "--json", *words)[1])
    return found


def test_the_rules_and_the_steps_of_a_job_on_one_node_are_used_and_options_override_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"strategy": "FULL_SHARD"}
    recipe = trained(monkeypatch, "cpu", None, sharding=full, ranks=2, gradient_accumulation_steps=4)
    recipe["effective"] |= {"gradient_sync": "micro_step", "sharding": {"reference": {"parts": 2}}}
    expected = exchange("FULL_SHARD", ranks_per_node=2, micro_steps=4, reference=HUNDRED_M)
    found = of_job(capsys, "--mbit-per-s", "1000")
    assert found["bytes_per_node"] == round(expected.bytes_per_node)
    assert found["step_seconds"] == round(expected.step_seconds(10.0, 1000), 3)
    once = replace(expected, keeps_whole_gradients=True, reference=0, nodes=3)
    found = of_job(
        capsys,
        *("--mbit-per-s", "1000", "--gradient-sync", "step", "--no-reference", "--nodes", "3", "--step-seconds", "5"),
    )
    assert found["bytes_per_node"] == round(once.bytes_per_node)
    assert found["step_seconds"] == round(once.step_seconds(5.0, 1000), 3)
    recipe |= {"trainable_parameters": 1_100_000}
    smaller = replace(expected, trainable=1_100_000, total=5_000_000, reference=5_000_000)
    found = of_job(capsys, "--mbit-per-s", "1000", "--model", "5M")
    assert found["bytes_per_node"] == round(smaller.bytes_per_node)
    code, printed = advice(capsys, "--job", "j")
    assert (code, "--mbit-per-s is missing" in printed) == (1, True)


def test_the_link_and_the_steps_of_a_job_over_several_nodes_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {"resources": {"nodes": 2}, "ranks": 2, "averaging": None, "sharding": {"strategy": "NO_SHARD"}}
    trained(monkeypatch, "cpu,b/cpu", 1000.0, **two)
    found = of_job(capsys)
    assert (found["mbit_per_s"], found["bytes_per_node"]) == (1000.0, round(DDP.bytes_per_node))
    assert found["step_seconds"] == 10.0, "as it was measured"
    assert of_job(capsys, "--mbit-per-s", "10")["step_seconds"] > 100
    trained(monkeypatch, "cpu,b/cpu", 1000.0, **{**two, "averaging": {"interval": 50}})
    assert of_job(capsys)["bytes_per_node"] == round(exchange(interval=50).bytes_per_node)
    trained(monkeypatch, "cuda:0,b/cuda:0", None, **two)
    code, printed = advice(capsys, "--job", "j", "--mbit-per-s", "10")
    assert (code, "--step-seconds is missing" in printed) == (1, True)
    recipe = trained(monkeypatch, "cpu", None)
    recipe.clear()
    code, printed = advice(capsys, "--job", "j", "--mbit-per-s", "10")
    assert (code, "it has not trained" in printed) == (1, True)


@pytest.mark.parametrize(
    ("machines", "words", "expected"),
    [
        ("mm", [], 1),
        ("mmo", [], None),
        ("m", [], None),  # jobs wait for a second machine
        ("mmoo", ["--nodes", "4"], 2),
        ("mm", ["--machines", "2"], 2),
        ("mm", ["--gpus"], None),  # which agents of one machine do not share
        ("MMo", [], 1),
    ],
)
def test_agents_that_share_a_machine_are_counted_as_the_placement_counts_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machines: str,
    words: list[str],
    expected: int | None,
) -> None:
    labels = {"rack": "7"} if machines[0].isupper() else {}
    trained(monkeypatch, "cpu", None, machines, sharding={"strategy": "NO_SHARD"}, resources={"labels": labels})
    found = of_job(capsys, "--mbit-per-s", "10000", *words)
    counted = exchange(nodes=4 if "4" in words else 2, machines=expected, on_cpu="--gpus" not in words)
    assert found["step_seconds"] == round(counted.step_seconds(10.0, 10_000), 3)
    if expected == 1:
        assert found["reason"].endswith("they are on one machine, and share the same cores")


@pytest.mark.parametrize(
    ("machines", "resources", "expected"),
    [
        ("mmg", {}, 1),
        ("mms", {"cpus": 2}, 1),
        ("mms", {"reserve_cpus": 2}, 1),
        ("mms", {}, None),
        ("mm", {"memory_gb": 9}, None),  # no machine serves it: it waits for two
        ("wwm", {"model_present": True}, 1),
        ("wwm", {}, None),
    ],
)
def test_only_machines_that_could_serve_the_job_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machines: str,
    resources: dict[str, Any],
    expected: int | None,
) -> None:
    trained(
        monkeypatch, "cpu", None, machines, sharding={"strategy": "NO_SHARD"}, resources=resources, model="org/base"
    )
    found = of_job(capsys, "--mbit-per-s", "10000")
    assert found["step_seconds"] == round(exchange(machines=expected).step_seconds(10.0, 10_000), 3)


def test_the_documented_advice_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text().partition("## Will it help")[2]
    command, _, printed = page.partition("$ trl-remote ")[2].partition("```")[0].partition("\n")
    assert main(command.split()) == 1
    assert capsys.readouterr().out == printed
