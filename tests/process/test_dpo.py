"""DPO beyond TRL's: losses, reference models, and log-probabilities of the reference that are computed once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.recipes.dpo import preference_loss
from llama_stack_provider_trl.recipes.events import Evaluated, Failed, Prepared, Progress
from llama_stack_provider_trl.recipes.spec import DpoSpec, JobSpec, OptimizerSpec, ShardingSpec
from tests.process.test_recipes import as_chat, logged_losses, plain_arguments
from tests.ranks import Ranks, forked_ranks
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
GLOBAL_BATCH = 4
TIMED = ("tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with forked_ranks() as ranks:
        yield ranks


def spec_of(root: Path, ranks: int = 1, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    """The same job for any number of ranks. 11 rows: the last batch of an epoch is not full."""
    fields: dict[str, Any] = {
        "ranks": ranks,
        "batch_size": GLOBAL_BATCH // ranks,
        "n_epochs": 2,
        "optimizer": OptimizerSpec(learning_rate=5e-3),
        "sharding": ShardingSpec(strategy=strategy) if ranks > 1 else None,
        "rows": DPO_ROWS[:11],
        "validation_rows": DPO_ROWS[:5],
    }
    return job_spec(root, changes.pop("model", None) or tiny_model(), "dpo", **{**fields, **changes})


def trained(ranks: Ranks, root: Path, spec: JobSpec, resume_from: Path | None = None) -> list[Any]:
    codes, events = ranks.run(root / "run", spec, resume_from)
    assert codes == [0] * spec.ranks, [event.message for event in of_kind(events, Failed)]
    return events


def numbers(events: list[Any]) -> list[dict[str, float]]:
    """Every metric point, without what the clock decides."""
    points = of_kind(events, Progress) + of_kind(events, Evaluated)
    return [{name: value for name, value in point.metrics.items() if name not in TIMED} for point in points]


def assert_same(found: list[Any], expected: list[Any], rel: float = 1e-4, abs: float = 1e-5) -> None:
    one, other = numbers(found), numbers(expected)
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=rel, abs=abs)


# --- losses -----------------------------------------------------------------------------------------------------------

KTO = DpoSpec(beta=0.1, loss_type="kto_pair")


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_kto_holds_each_completion_against_the_mean_of_the_other_half() -> None:
    logratios = torch.tensor([3.0, 5.0, -2.0, -6.0])  # chosen x 2, rejected x 2; their means: 4 and -4, which counts 0
    losses = preference_loss(logratios, torch.ones(4), KTO)
    expected = [
        (1 - sigmoid(0.1 * 3.0) + 1 - sigmoid(0.1 * (4.0 + 2.0))) / 2,
        (1 - sigmoid(0.1 * 5.0) + 1 - sigmoid(0.1 * (4.0 + 6.0))) / 2,
    ]
    assert losses.tolist() == pytest.approx(expected)


def test_the_mean_of_kto_has_a_gradient_as_in_the_first_releases() -> None:
    logratios = torch.tensor([3.0, 5.0, 2.0, 6.0], requires_grad=True)
    preference_loss(logratios, torch.ones(4), KTO).mean().backward()
    assert logratios.grad is not None

    def slope(margin: float) -> float:
        return -0.1 * sigmoid(margin) * (1 - sigmoid(margin)) / 4

    of_rejected = [slope(0.1 * (4 - 2)), slope(0.1 * (4 - 6))]
    chosen = [slope(0.1 * (own - 4)) + sum(of_rejected) / 2 for own in (3, 5)]
    assert logratios.grad[:2].tolist() == pytest.approx(chosen)


def test_reward_fields_shape_the_margins_of_kto() -> None:
    logratios = torch.tensor([30.0, 50.0, -20.0, -60.0])
    shaped = KTO.model_copy(update={"reward_scale": 2.0, "reward_clip": 5.0})
    clipped, free = 1 - sigmoid(5.0), 1 - sigmoid(0.2 * 20)
    logratios[0] = 20.0
    losses = preference_loss(logratios, torch.ones(4), shaped)
    assert losses.tolist() == pytest.approx([(free + clipped) / 2, clipped], rel=1e-4)


def test_a_filler_counts_in_no_mean_of_kto() -> None:
    alone = preference_loss(torch.tensor([3.0, 5.0, 2.0, 6.0]), torch.ones(4), KTO)
    filled = preference_loss(
        torch.tensor([3.0, 5.0, 0.0, 2.0, 6.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]), KTO
    )
    assert filled[:2].tolist() == pytest.approx(alone.tolist())


def test_smoothed_labels_give_the_losses_of_trl_called_directly(tmp_path: Path) -> None:
    """TRL 1.16 has no `sigmoid` with label smoothing any more; its `aot` is that loss where a batch is one pair."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(tiny_model(), dtype="float32"),
        args=DPOConfig(
            **{**plain_arguments(tmp_path), "per_device_train_batch_size": 1},
            loss_type=["aot"],
            label_smoothing=0.2,
            beta=0.3,
        ),
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
        train_dataset=Dataset.from_list([as_chat(row, "chosen", "rejected") for row in DPO_ROWS]),
    )
    trainer.train()
    smoothed = DpoSpec(beta=0.3, label_smoothing=0.2)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), "dpo", shuffle=False, batch_size=1, dpo=smoothed))
    losses = [event.metrics["loss"] for event in of_kind(events, Progress)]
    assert losses == pytest.approx(logged_losses(trainer), rel=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_two_ranks_take_the_means_of_kto_over_both(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    alone = trained(ranks, tmp_path / "one", spec_of(tmp_path / "one", dpo=KTO))
    together = trained(ranks, tmp_path / "two", spec_of(tmp_path / "two", 2, strategy, dpo=KTO))
    assert_same(together, alone)
    assert numbers(alone)[-1]["eval_loss"] < 0.49  # 0.5 before the first step


# --- reference models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharding", "tied"),
    [
        pytest.param(ShardingSpec(), False, id="untied"),
        pytest.param(ShardingSpec(strategy="SHARD_GRAD_OP"), True, id="tied-grad-op"),
        pytest.param(ShardingSpec(cpu_offload=True), True, id="offload"),
    ],
)
def test_a_sharded_reference_is_shared_out_per_block_and_changes_no_number(
    ranks: Ranks, tmp_path: Path, sharding: ShardingSpec, tied: bool
) -> None:
    model = tiny_model(tied=tied)
    alone = trained(ranks, tmp_path / "one", spec_of(tmp_path / "one", model=model))
    together = trained(ranks, tmp_path / "two", spec_of(tmp_path / "two", 2, sharding=sharding, model=model))
    assert_same(together, alone)
    reference = of_kind(together, Prepared)[0].effective["sharding"]["reference"]
    assert reference["units"] == (3 if tied else 4)  # two blocks, the root, and embeddings of their own
    assert set(reference["placements"]) == {"Shard(0)"}
    assert reference["local_elements"] <= 0.6 * reference["total_elements"]
