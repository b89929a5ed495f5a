"""Periodic averaging: workers train on their own rows, meet every so many steps, and resume exactly where they met."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.recipes.build import load_data
from llama_stack_provider_trl.recipes.model.loading import load_tokenizer
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Evaluated,
    Failed,
    NullEventWriter,
    Prepared,
    Progress,
)
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from tests.ranks import Ranks, forked_ranks
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
AVERAGING = AveragingSpec(interval=3)
ROWS = [
    {"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}." + " Really." * (n % 3)}
    for n in range(24)
]
"""Six steps of four rows; of several lengths, so that a mean over the tokens of all workers would be another one."""


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.VARIABLE, str(directory))
        yield directory


@pytest.fixture(scope="module")
def ranks(armed: Path) -> Iterator[Ranks]:
    with forked_ranks() as ranks:
        yield ranks


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


def trained(ranks: Ranks, run_dir: Path, spec: JobSpec, resume_from: Path | None = None, **how: Any) -> list[Any]:
    codes, events = ranks.run(run_dir, spec, resume_from, **how)
    assert set(codes) == {0}, [event.message for event in of_kind(events, Failed)]
    return events


def final_weights(spec: JobSpec) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(spec.checkpoint_dir / "final", dtype=torch.float32).state_dict())


def by_hand(spec: JobSpec, steps: int, workers: int = 2) -> dict[str, torch.Tensor]:
    """The weights after so many steps, written out with torch alone."""
    averaging = spec.averaging
    assert averaging
    rows = load_data(spec, load_tokenizer(spec.source), NullEventWriter()).train
    models = [AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32) for _ in range(workers)]
    make = torch.optim.SGD if spec.optimizer.name == "sgd" else torch.optim.AdamW
    optimizers = [make(model.parameters(), lr=spec.optimizer.learning_rate, weight_decay=0.0) for model in models]
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
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.max_grad_norm)
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
        pytest.param(AVERAGING.model_copy(update={"interval": 4, "nesterov": False}), {}, id="momentum-short-end"),
        pytest.param(PLAIN, {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9}, id="mean-of-sgd"),
    ],
)
def test_two_workers_train_what_is_written_out(
    ranks: Ranks, tmp_path: Path, averaging: AveragingSpec, optimizer: dict[str, Any]
) -> None:
    changes = OptimizerSpec(**{"learning_rate": 5e-3, "scheduler": "constant", **optimizer})
    spec = spec_of(tmp_path, averaging=averaging, optimizer=changes, group_by_length=False)
    events = trained(ranks, tmp_path / "run", spec)
    expected = by_hand(spec, 6)
    untrained = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32).state_dict()
    for name, weight in final_weights(spec).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=2e-5)
        assert not torch.equal(weight, untrained[name]) or "norm" in name
    assert len(of_kind(events, Progress)) == 6
