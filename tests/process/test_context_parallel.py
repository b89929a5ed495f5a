"""Context parallelism: ranks that share rows train what one rank trains, to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan, EpochSampler
from llama_stack_provider_trl.recipes.fast.batches import collate_rows
from llama_stack_provider_trl.recipes.fast.context_parallel import collate_share
from llama_stack_provider_trl.recipes.fast.support import with_batches
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.specs.events import Prepared
from llama_stack_provider_trl.specs.job import JobSpec
from tests.process.rank_numbers import GLOBAL_BATCH, ROWS, numbers, spec_of, trained
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_decoder, tiny_model
from tests.training import LORA, SAMPLES, of_kind, sampled

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

LONG_ROWS = {"gradient_checkpointing": True, "keep_attention": "always", "tile_mlp": "always"}
ONE_KEY_HEAD = {"num_key_value_heads": 1}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


def shared(root: Path, ranks: int, size: int, strategy: str, **changes: Any) -> JobSpec:
    """The job of `alone` on groups of `size` ranks."""
    sizes = {"batch_size": GLOBAL_BATCH * size // ranks, "context_parallel_size": size}
    return spec_of(root, "sft", ranks, strategy, **{**sizes, **changes})


def weights(spec: JobSpec) -> dict[str, torch.Tensor]:
    (file,) = (spec.checkpoint_dir / "final").glob("*.safetensors")
    return load_file(file)


def assert_equal(one: tuple[JobSpec, list[Any]], other: tuple[JobSpec, list[Any]], begin: int = 0) -> None:
    found, expected = numbers(one[1]), numbers(other[1])[begin:]
    assert len(found) == len(expected) > 0
    for of_one, of_other in zip(found, expected, strict=True):
        # Trainer logs the epoch; the counts are equal, not near.
        assert of_one == pytest.approx(of_other, rel=1e-5, abs=1e-5)
        assert of_one.get("num_tokens") == of_other.get("num_tokens")
    ours, theirs = weights(one[0]), weights(other[0])
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5


@pytest.mark.parametrize(
    ("ranks_of_job", "strategy", "changes"),
    [
        pytest.param(2, "NO_SHARD", {"samples": SAMPLES}, id="ddp"),
        pytest.param(2, "FULL_SHARD", {"lora": LORA, "fuse_lora": "always", **LONG_ROWS}, id="lora"),
        pytest.param(4, "FULL_SHARD", {"model": ("qwen3", ONE_KEY_HEAD), "batch_size": 1}, id="two-groups"),
        pytest.param(2, "FULL_SHARD", {"packed": True, "max_seq_length": 96, "model": ("qwen2", WINDOW)}, id="packed"),
        *in_full(pytest.param(2, "FULL_SHARD", {}, id="all-weights")),
    ],
)
def test_ranks_that_share_rows_train_what_one_rank_trains(
    ranks: Ranks, tmp_path: Path, ranks_of_job: int, strategy: str, changes: dict[str, Any]
) -> None:
    model = changes.get("model")
    given = {
        "validation_rows": ROWS["sft"][:5],
        **changes,
        "model": tiny_decoder(model[0], **model[1]) if model else tiny_model(),
    }
    batch_size = given.pop("batch_size", None)
    alone = spec_of(tmp_path / "one", "sft", 1, **given)
    more = {"batch_size": batch_size, "gradient_accumulation_steps": 2} if batch_size else {}
    together = shared(tmp_path / "two", ranks_of_job, 2, strategy, **given, **more)
    assert together.rows_per_step == alone.rows_per_step == GLOBAL_BATCH
    expected = trained(ranks, tmp_path / "one", alone)
    found = trained(ranks, tmp_path / "two", together)
    assert_equal((together, found), (alone, expected))
    assert sampled(found) == sampled(expected)
    of_one, of_two = (of_kind(events, Prepared)[0] for events in (expected, found))
    assert of_two.num_rows == of_one.num_rows == 11
    assert of_two.effective["attention"] == f"{of_one.effective['attention']}_across_ranks"


@pytest.mark.parametrize("lora", [None, LORA], ids=["all-weights", "lora"])
def test_a_checkpoint_continues_on_other_ranks_and_groups(ranks: Ranks, tmp_path: Path, lora: Any) -> None:
    """From one rank to a group of two to two ranks with rows of their own, in the second epoch."""
    given = {"save_steps": 2, "lora": lora, "gradient_accumulation_steps": 2, "batch_size": 2}
    alone = spec_of(tmp_path / "one", "sft", 1, **given)
    expected = alone, trained(ranks, tmp_path / "one", alone)
    together = shared(tmp_path / "two", 2, 2, "FULL_SHARD", **given)
    events = trained(ranks, tmp_path / "two", together, alone.checkpoint_dir / "checkpoint-2")
    assert of_kind(events, Prepared)[0].start_step == 2
    assert_equal((together, events), expected, 2)
    apart = spec_of(tmp_path / "three", "sft", 2, "NO_SHARD", **{**given, "batch_size": 1})
    events = trained(ranks, tmp_path / "three", apart, together.checkpoint_dir / "checkpoint-4")
    assert_equal((apart, events), expected, 4)


def test_shares_of_a_batch_have_each_token_and_each_label_once() -> None:
    rows = [{"input_ids": [*range(10, 10 + size)], "labels": [-100, *range(11, 10 + size)]} for size in (5, 1, 9)]
    whole = collate_rows(rows)
    shares = [collate_share(3, position, rows) for position in range(3)]
    length = shares[0]["input_ids"].shape[1]
    assert [share["input_ids"].shape[1] for share in shares] == [length] * 3
    tokens = whole["input_ids"].shape[1]
    assert 0 <= 3 * length - tokens < 3
    for name in ("input_ids", "position_ids"):
        together = torch.cat([share[name] for share in shares], dim=1)
        assert together[:, :tokens].equal(whole[name])
    scored = [at + number * length for number, share in enumerate(shares) for at in share["scored"].tolist()]
    labels = torch.cat([share["shift_labels"] for share in shares], dim=1)
    assert scored == whole["scored"].tolist()
    assert labels.equal(whole["shift_labels"])
    assert all(sum(share["layout"].sizes()) == 3 * length for share in shares)
    assert sum(int(share["num_tokens"]) for share in shares) == int(whole["num_tokens"])
    # A share in which nothing is scored has a placeholder without a label.
    lonely = collate_share(2, 1, [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, -100, -100, -100]}])
    assert (lonely["scored"].tolist(), lonely["labels"].tolist()) == ([0], [[-100]])


def test_ranks_of_a_group_take_the_batches_of_one_rank() -> None:
    plan = BatchPlan.of(4, 2, 4, 2)
    assert (plan.groups, plan.accumulation_steps, plan.with_batches_of(1).accumulation_steps) == (2, 1, 2)
    sampler = EpochSampler(5, None, shuffle=False, seed=0, multiple_of=4, batch_plan=plan, repeated=(2, 2))
    assert list(sampler) == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 5, 5, 5, 5]
    assert len(sampler) == 16


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (("llama", {}), {"padding_free": False}, "context_parallel_size 2 needs batches without .* padding_free is fa"),
        (("llama", {}), {"attn_implementation": "eager"}, "attn_implementation is 'eager'. Leave it out"),
        (("gemma", {}), {}, "proven for llama, qwen2, qwen3, and this model is a gemma"),
        (
            ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
            {},
            "divides the heads of attention, and this model has 3",
        ),
    ],
)
def test_models_and_batches_that_cannot_be_shared_are_refused(
    tmp_path: Path, model: tuple[str, dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    spec = shared(tmp_path, 2, 2, "NO_SHARD", model=tiny_decoder(model[0], **model[1]), **changes)
    with pytest.raises(JobFailure, match=message):
        with_batches(spec)


def test_the_estimate_divides_activations_by_the_ranks_that_share_rows(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "sft", 4, "FULL_SHARD")
    batch = Batch(1, 2048, ((0, (2048,)),), 2048)
    one, two, four = (
        estimate(spec.changed(context_parallel_size=size), batch, "cpu").activations for size in (1, 2, 4)
    )
    assert 0.5 * one < two < 0.75 * one
    assert two > four > 0.25 * one
