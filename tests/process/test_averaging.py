"""Periodic averaging: workers train on their own rows, meet every so many steps, and resume exactly where they met."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.build import load_data
from llama_stack_provider_trl.recipes.checkpoint import optimizer_state, shards
from llama_stack_provider_trl.recipes.distributed.workers import Workers
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.model.loading import load_tokenizer
from llama_stack_provider_trl.recipes.trainer import averaging as recipe
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Evaluated,
    NullEventWriter,
    Prepared,
    Progress,
)
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.ranks import Ranks, trained
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, job_spec, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
AVERAGING = AveragingSpec(interval=3)
ROWS = [
    {"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}." + " Really." * (n % 3)}
    for n in range(24)
]
"""Six steps of four rows; of several lengths, so that a mean over the tokens of all workers would be another one."""


def spec_of(root: Path, algorithm: str = "sft", *, world: int = 2, **changes: Any) -> JobSpec:
    """Six steps of four rows on two workers, which meet after the third and the sixth."""
    fields: dict[str, Any] = {
        "ranks": world,
        "sharding": ShardingSpec(strategy="NO_SHARD"),
        "averaging": AVERAGING,
        "batch_size": 4 // world,
        "shuffle": False,
        "rows": ROWS if algorithm == "sft" else DPO_ROWS * 2,
        "optimizer": OptimizerSpec(learning_rate=5e-3, scheduler="constant"),
        "num_threads": 1,
    }
    return job_spec(root, tiny_model(), algorithm, **{**fields, **changes})


def numbers(events: list[Any]) -> list[dict[str, float]]:
    """Every metric point with its step, without what the clock decides."""
    timed = ("tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    points = [*of_kind(events, Progress), *of_kind(events, Evaluated)]
    return [{"step": point.step, **{k: v for k, v in point.metrics.items() if k not in timed}} for point in points]


def final_weights(spec: JobSpec) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(spec.checkpoint_dir / "final", dtype=torch.float32).state_dict())


def by_hand(spec: JobSpec, steps: int, workers: int = 2) -> dict[str, torch.Tensor]:
    """The weights after so many steps, written out with torch alone."""
    averaging = spec.train.averaging
    assert averaging
    rows = load_data(spec, load_tokenizer(spec.source), NullEventWriter(), spec.rows_per_step).train
    models = [AutoModelForCausalLM.from_pretrained(spec.source.model, dtype=torch.float32) for _ in range(workers)]
    make = torch.optim.SGD if spec.train.optimizer.name == "sgd" else torch.optim.AdamW
    optimizers = [make(model.parameters(), lr=spec.train.optimizer.learning_rate, weight_decay=0.0) for model in models]
    common = [weight.detach().clone() for weight in models[0].parameters()]
    momentum = [torch.zeros_like(weight) for weight in common]
    for step in range(steps):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            first = step * 4 + worker * 4 // workers
            own = [rows[row] for row in range(first, first + 4 // workers)]
            total, count = torch.zeros(()), 0
            for row in own:
                labels = torch.tensor(row["labels"][1:])
                logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
                total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                count += int((labels != -100).sum())
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec.train.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % averaging.interval and step + 1 < steps:
            continue
        with torch.no_grad():
            for number, (weight, velocity) in enumerate(zip(common, momentum, strict=True)):
                found = [list(model.parameters())[number] for model in models]
                gradient = weight - sum(found) / workers
                velocity.copy_(averaging.outer_momentum * velocity + gradient)
                ahead = gradient + averaging.outer_momentum * velocity if averaging.nesterov else velocity
                weight -= averaging.outer_learning_rate * ahead
                for one in found:
                    one.copy_(weight)
    return dict(models[0].state_dict())


PLAIN = AveragingSpec(interval=1, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False)


@pytest.mark.parametrize(
    ("averaging", "optimizer"),
    [
        pytest.param(AVERAGING, {}, id="nesterov-adamw"),
        *in_full(
            pytest.param(AVERAGING.model_copy(update={"interval": 4, "nesterov": False}), {}, id="momentum-short-end"),
            pytest.param(PLAIN, {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9}, id="mean-of-sgd"),
        ),
    ],
)
def test_two_workers_train_what_is_written_out(
    ranks: Ranks, tmp_path: Path, averaging: AveragingSpec, optimizer: dict[str, Any]
) -> None:
    changes = OptimizerSpec(**{"learning_rate": 5e-3, "scheduler": "constant", **optimizer})
    # The kernels of the model itself: AdamW turns the rounding of a gradient that is nearly 0 into a step.
    spec = spec_of(tmp_path, averaging=averaging, optimizer=changes, group_by_length=False, padding_free=False)
    events = trained(ranks, tmp_path / "run", spec)
    expected = by_hand(spec, 6)
    untrained = AutoModelForCausalLM.from_pretrained(spec.source.model, dtype=torch.float32).state_dict()
    for name, weight in final_weights(spec).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=2e-5)
        assert not torch.equal(weight, untrained[name]) or "norm" in name
    assert len(of_kind(events, Progress)) == 6


def test_the_steps_continue_exactly_where_a_killed_job_last_met(ranks: Ranks, armed: Path, tmp_path: Path) -> None:
    """Killed with SIGKILL between two averages: the interval is trained again, and every later number is the same."""
    changes = {"save_steps": 3, "validation_rows": ROWS[:5], "n_epochs": 2, "shuffle": True, "logging_steps": 3}
    whole = spec_of(tmp_path / "whole", **changes)
    undisturbed = trained(ranks, tmp_path / "whole" / "run", whole)
    spec = spec_of(tmp_path / "killed", **changes)
    (armed / "step-11").write_text("kill")
    codes, events = ranks.run(tmp_path / "killed" / "run", spec)
    assert -signal.SIGKILL in codes
    saved = of_kind(events, CheckpointSaved)
    assert [one.step for one in saved] in ([3, 6], [3, 6, 9])  # the third may still be written
    files = {str(path.relative_to(saved[-1].path)) for path in saved[-1].path.rglob("*.safetensors")}
    assert files == {"model.safetensors"} | {f"optimizer/{name}.safetensors" for name in ("state", "worker-1", "outer")}
    resumed = trained(ranks, tmp_path / "killed" / "again", spec, saved[-1].path)
    expected, found = final_weights(whole), final_weights(spec)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert numbers(resumed) == [point for point in numbers(undisturbed) if point["step"] > saved[-1].step]
    tokens = [point.tokens_seen for point in of_kind(undisturbed, Progress)]
    assert [point.tokens_seen for point in of_kind(resumed, Progress)] == tokens[len(saved) :]


def test_a_lost_worker_costs_its_interval_and_the_others_continue(ranks: Ranks, tmp_path: Path) -> None:
    """Three workers resume what four began: the same rows, each once; one worker resumes what three left."""
    spec = spec_of(tmp_path, world=4, save_steps=3, n_epochs=2)
    begun = trained(ranks, tmp_path / "run", spec)
    first, second, *_ = of_kind(begun, CheckpointSaved)
    events = trained(ranks, tmp_path / "three", spec, first.path, world_size=3)
    (prepared,) = of_kind(events, Prepared)
    assert (prepared.start_step, prepared.effective["averaging"]["workers"]) == (3, 3)
    assert of_kind(events, Progress)[-1].tokens_seen == of_kind(begun, Progress)[-1].tokens_seen
    alone = trained(ranks, tmp_path / "one", spec, second.path, world_size=1)
    for one in (begun, events, alone):
        losses = [point.metrics["loss"] for point in of_kind(one, Progress)]
        assert losses[-1] < losses[0]
        assert of_kind(one, Progress)[-1].step == 12


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("dpo", {"lora": LORA}), *in_full(("sft", {"lora": LORA, "group_by_length": True}))],
)
def test_adapters_and_preferences_are_averaged_too(
    ranks: Ranks, tmp_path: Path, algorithm: str, changes: dict[str, Any]
) -> None:
    spec = spec_of(tmp_path, algorithm, logging_steps=3, **changes)
    events = trained(ranks, tmp_path / "run", spec)
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["averaging"] == {"workers": 2, **AVERAGING.model_dump()}
    assert prepared.effective["group_by_length"].startswith("not used: ")
    points = of_kind(events, Progress)
    assert [point.step for point in points] == [3, 6]
    # Of two workers each sends the whole difference once: a half to reduce it, a half to spread the mean.
    assert [point.metrics["exchanged_bytes"] for point in points] == [4 * prepared.trainable_parameters] * 2
    assert points[1].metrics["loss"] < points[0].metrics["loss"]


def test_nodes_are_workers_whose_ranks_shard_the_model(ranks: Ranks, tmp_path: Path) -> None:
    """Two nodes with two FSDP2 ranks each train what two ranks with the whole model do, and resume exactly."""
    changes = {"group_by_length": False, "save_steps": 3, "logging_steps": 3, "validation_rows": ROWS[:5]}
    whole = spec_of(tmp_path / "whole", **changes)
    expected = trained(ranks, tmp_path / "whole" / "run", whole)
    hybrid = ShardingSpec(strategy="HYBRID_SHARD")
    spec = spec_of(tmp_path / "nodes", world=4, sharding=hybrid, **changes)
    events = trained(ranks, tmp_path / "nodes" / "run", spec, per_node=2)
    (prepared,) = of_kind(events, Prepared)
    assert prepared.effective["averaging"]["workers"] == 2
    assert prepared.effective["sharding"]["sharded_parameters"] > 0
    for name, weight in final_weights(spec).items():
        torch.testing.assert_close(weight, final_weights(whole)[name], rtol=1e-3, atol=1e-4)
    for one, other in zip(of_kind(events, Evaluated), of_kind(expected, Evaluated), strict=True):
        assert one.metrics["eval_loss"] == pytest.approx(other.metrics["eval_loss"], rel=1e-3)
    (saved,) = (one for one in of_kind(events, CheckpointSaved) if one.kind == "step")
    again = spec.model_copy(update={"checkpoint_dir": tmp_path / "again"})
    trained(ranks, tmp_path / "nodes" / "again", again, saved.path, per_node=2)
    for name, weight in final_weights(again).items():
        assert torch.equal(weight, final_weights(spec)[name])


def test_the_memory_estimate_has_common_weights_and_momentum_and_no_buckets(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, optimizer=OptimizerSpec(learning_rate=1e-3, name="sgd"))
    batch = Batch(2, 32)
    apart, every = (estimate(one, batch, "cpu") for one in (spec, spec.changed(averaging=None)))
    weights = AutoModelForCausalLM.from_pretrained(spec.source.model).num_parameters()
    assert apart.optimizer - every.optimizer == 8 * weights
    assert every.gradients - apart.gradients == 4 * weights, "DDP's buckets"
    assert apart.checkpoint_copy - every.checkpoint_copy == 4 * weights


# --- the outer step alone ---------------------------------------------------------------------------------------------


def weights_of(*values: float) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((2, 3), value) for number, value in enumerate(values)}


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_the_outer_step_is_sgd_with_momentum_on_what_an_interval_changed(momentum: float, nesterov: bool) -> None:
    spec = AveragingSpec(interval=1, outer_learning_rate=0.7, outer_momentum=momentum, nesterov=nesterov)
    weights = weights_of(1.0, -2.0)
    outer = recipe.OuterOptimizer(spec, weights, Workers(1))
    common = [weight.clone().requires_grad_() for weight in weights.values()]
    reference = torch.optim.SGD(common, lr=0.7, momentum=momentum, nesterov=nesterov)
    for interval in range(3):
        for number, (weight, one) in enumerate(zip(weights.values(), common, strict=True)):
            weight += 0.1 * (interval + 1) * (-1) ** number  # what the worker trained
            one.grad = one.detach() - weight
        reference.step()
        outer.step()
        for weight, one in zip(weights.values(), common, strict=True):
            torch.testing.assert_close(weight, one.detach())


def test_a_rate_of_one_without_momentum_is_the_plain_mean() -> None:
    weights = weights_of(1.0)
    spec = AveragingSpec(interval=1, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False)
    outer = recipe.OuterOptimizer(spec, weights, Workers(1))
    weights["layer.0"] -= 0.25
    outer.step()
    assert torch.equal(weights["layer.0"], torch.full((2, 3), 0.75))


def test_weights_are_reduced_in_buckets_and_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "BUCKET", 7)
    spec = AveragingSpec(interval=1, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False)
    weights = {**weights_of(1.0, 2.0, 3.0), "large": torch.full((10,), 4.0), "bias": torch.tensor([5.0])}
    outer = recipe.OuterOptimizer(spec, weights, Workers(1))
    for weight in weights.values():
        weight.mul_(2)
    outer.step()
    assert [weight.flatten()[0].item() for weight in weights.values()] == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_momentum_is_read_from_a_checkpoint_and_absent_in_one_of_another_job(tmp_path: Path) -> None:
    spec = AveragingSpec(interval=1)
    assert not recipe.OuterOptimizer(spec, weights_of(1.0), Workers(1), tmp_path).momentum["layer.0"].any()
    path = tmp_path / optimizer_state.OUTER
    path.parent.mkdir()
    shards.reserve(path, weights_of(0.5))
    shards.fill(path, shards.parts_of(weights_of(0.5)))
    read = recipe.OuterOptimizer(spec, weights_of(1.0), Workers(1), tmp_path).momentum
    assert torch.equal(read["layer.0"], torch.full((2, 3), 0.5))
    with pytest.raises(JobFailure, match=r"outer\.safetensors is not what a checkpoint of this job holds"):
        recipe.OuterOptimizer(spec, {"other": torch.zeros(2, 3)}, Workers(1), tmp_path)
