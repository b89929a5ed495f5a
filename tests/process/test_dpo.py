"""DPO beyond TRL's: losses, reference models, and log-probabilities of the reference that are computed once."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llama_stack_provider_trl.recipes.data.prepare import read_examples, tokenize_dpo
from llama_stack_provider_trl.recipes.session import train_attempt
from llama_stack_provider_trl.recipes.trainer import reference_cache
from llama_stack_provider_trl.recipes.trainer.dpo import preference_loss
from llama_stack_provider_trl.recipes.trainer.reference import Precomputation
from llama_stack_provider_trl.recipes.trainer.reference_cache import KEEP_SECONDS, LogProbCache
from llama_stack_provider_trl.specs.events import (
    Evaluated,
    EventWriter,
    Failed,
    Paused,
    Prepared,
    Progress,
    Reason,
    iter_events,
)
from llama_stack_provider_trl.specs.job import AttemptSpec, DpoSpec, JobSpec, OptimizerSpec, ReferenceSpec, ShardingSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.system.files import RunDir, put_rows
from tests.process.plain_trl import DORA, as_chat, logged_losses, plain_arguments
from tests.process.rank_numbers import numbers, trained
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, job_spec, of_kind, reference_to, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
GLOBAL_BATCH = 4


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


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """What one process that asks the reference at every step makes of a job, trained once for all tests."""
    known: dict[str, list[Any]] = {}

    def train(**changes: Any) -> list[Any]:
        if repr(changes) not in known:
            root = tmp_path_factory.mktemp("alone")
            known[repr(changes)] = trained(ranks, root, spec_of(root, **changes))
        return known[repr(changes)]

    return train


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
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(tiny_model(), dtype="float32"),
        args=DPOConfig(
            **plain_arguments(tmp_path, per_device_train_batch_size=1),
            loss_type=["aot"],
            label_smoothing=0.2,
            beta=0.3,
        ),
        processing_class=AutoTokenizer.from_pretrained(tiny_model()),
        train_dataset=Dataset.from_list([as_chat(row, "chosen", "rejected") for row in DPO_ROWS]),
    )
    trainer.train()
    smoothed = DpoSpec(beta=0.3, label_smoothing=0.2)
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), "dpo", shuffle=False, batch_size=1, method=smoothed))
    losses = [event.metrics["loss"] for event in of_kind(events, Progress)]
    assert losses == pytest.approx(logged_losses(trainer), rel=1e-4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", *in_full("NO_SHARD")])
def test_two_ranks_take_the_means_of_kto_over_both(
    ranks: Ranks, alone: Callable[..., list[Any]], tmp_path: Path, strategy: str
) -> None:
    expected = alone(method=KTO)
    assert_same(trained(ranks, tmp_path, spec_of(tmp_path, 2, strategy, method=KTO)), expected)
    assert numbers(expected)[-1]["eval_loss"] < 0.49  # 0.5 before the first step


# --- reference models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharding", "tied"),
    [
        pytest.param(ShardingSpec(cpu_offload=True), False, id="untied-offload"),
        *in_full(
            pytest.param(ShardingSpec(), False, id="untied"),
            pytest.param(ShardingSpec(strategy="SHARD_GRAD_OP"), True, id="tied-grad-op"),
        ),
    ],
)
def test_a_reference_is_sharded_per_block_and_changes_no_number(
    ranks: Ranks, alone: Callable[..., list[Any]], tmp_path: Path, sharding: ShardingSpec, tied: bool
) -> None:
    model = tiny_model(tied=tied)
    together = trained(ranks, tmp_path, spec_of(tmp_path, 2, sharding=sharding, model=model))
    assert_same(together, alone(model=model))
    reference = of_kind(together, Prepared)[0].effective["sharding"]["reference"]
    assert reference["units"] == (3 if tied else 4)  # two blocks, the root, and embeddings of their own
    assert set(reference["placements"]) == {"Shard(0)"}
    assert reference["local_elements"] <= 0.6 * reference["total_elements"]


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same tokenizer and other weights."""
    path = tmp_path_factory.mktemp("another") / "model"
    shutil.copytree(tiny_model(), path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    model.save_pretrained(path)
    return path


def log_probs(model: Path, rows: list[dict[str, str]]) -> list[tuple[float, float]]:
    """What a model computes for each pair's completions, (chosen, rejected), by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scored = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    dataset, _ = tokenize_dpo(read_examples(dataset_of(rows), "dpo"), tokenizer, 1024).collect()
    return [
        tuple(completion_log_prob(scored, row["prompt_ids"], row[side]) for side in ("chosen_ids", "rejected_ids"))
        for row in dataset
    ]


def completion_log_prob(model: Any, prompt: list[int], completion: list[int]) -> float:
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        found = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    return float(found[-len(completion) :].sum())


def dataset_of(rows: list[dict[str, str]]) -> Path:
    return put_rows(Path(tempfile.mkdtemp()), rows).path


def reference_of(event: Progress | Evaluated, beta: float = 0.1) -> tuple[float, float]:
    """The reference's log-probabilities of a step's pairs, means over them, from the metrics."""
    prefix = "eval_" if isinstance(event, Evaluated) else ""
    chosen, rejected = (
        event.metrics[f"{prefix}logps/{side}"] - event.metrics[f"{prefix}rewards/{side}"] / beta
        for side in ("chosen", "rejected")
    )
    return chosen, rejected


def means(values: list[tuple[float, float]]) -> tuple[float, float]:
    chosen, rejected = zip(*values, strict=True)
    return sum(chosen) / len(values), sum(rejected) / len(values)


REFERENCES = [
    pytest.param(2, "FULL_SHARD", None, False, id="full-sharded-another"),
    pytest.param(2, "FULL_SHARD", DORA, True, id="dora-sharded-base"),
    *in_full(
        pytest.param(1, "", None, False, id="full-another"),
        pytest.param(1, "", LORA, False, id="lora-another"),
        pytest.param(1, "", DORA, True, id="dora-base"),
        pytest.param(2, "NO_SHARD", LORA, True, id="lora-ddp-base"),
    ),
]


@pytest.mark.parametrize(("world", "strategy", "lora", "is_base"), REFERENCES)
def test_at_every_step_the_reference_gives_what_its_model_gives(
    ranks: Ranks, another: Path, tmp_path: Path, world: int, strategy: str, lora: Any, is_base: bool
) -> None:
    dpo = DpoSpec(reference=ReferenceSpec() if is_base else reference_to(another))
    spec = spec_of(
        tmp_path, world, strategy, method=dpo, lora=lora, shuffle=False, rows=DPO_ROWS, validation_rows=DPO_ROWS[4:8]
    )
    events = trained(ranks, tmp_path, spec)
    expected = log_probs(tiny_model() if is_base else another, DPO_ROWS)
    steps = of_kind(events, Progress)
    assert len(steps) == 6
    for number, step in enumerate(steps):
        first = number % 3 * GLOBAL_BATCH
        assert reference_of(step) == pytest.approx(means(expected[first : first + GLOBAL_BATCH]), rel=1e-4)
    assert reference_of(of_kind(events, Evaluated)[-1]) == pytest.approx(means(expected[4:8]), rel=1e-4)
    # The policy has moved: a reference that moved along would be seen above.
    assert abs(steps[-1].metrics["rewards/margins"]) > 0.1


def test_a_reference_with_other_tokens_is_refused_before_training(another: Path, tmp_path: Path) -> None:
    for name in ("renumbered", "short"):
        shutil.copytree(another, tmp_path / name)
    tokenizer = json.loads((another / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "renumbered" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((another / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    weights = load_file(another / "model.safetensors")
    cut = {name: value[:20].clone() if len(value) == config["vocab_size"] else value for name, value in weights.items()}
    save_file(cut, tmp_path / "short" / "model.safetensors", {"format": "pt"})
    for name, problem in (("renumbered", "2 tokens have another number"), ("short", "embeddings for 20 tokens")):
        dpo = DpoSpec(reference=reference_to(str(tmp_path / name)))
        _, events = run(tmp_path / "run" / name, job_spec(tmp_path / "job" / name, tiny_model(), "dpo", method=dpo))
        (failed,) = of_kind(events, Failed)
        assert failed.reason is Reason.invalid_model
        assert problem in failed.message
        assert str(tmp_path / name) in failed.message


# --- log-probabilities that are computed once -------------------------------------------------------------------------


def once(root: Path, model: Path | None = None) -> DpoSpec:
    source = None if model is None else ModelSource(model=str(model))
    return DpoSpec(reference=ReferenceSpec(precompute=True, cache=root / "reference", source=source))


def of_reference(events: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(events, Prepared)[0].effective["reference"]
    return found


def assert_same_reference(found: list[Any], expected: list[Any], rel: float) -> None:
    kinds = (Progress, Evaluated)
    one, other = (
        [reference_of(event) for kind in kinds for event in of_kind(each, kind)] for each in (found, expected)
    )
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=rel)


ONCE = [
    pytest.param(2, "FULL_SHARD", None, id="full-sharded"),
    *in_full(
        pytest.param(1, "", LORA, id="lora"),  # test_adapter_bases.py
        pytest.param(2, "NO_SHARD", None, id="full-ddp"),
        pytest.param(2, "FULL_SHARD", LORA, id="lora-sharded"),
    ),
]


@pytest.mark.parametrize(("world", "strategy", "lora"), ONCE)
def test_a_precomputed_reference_gives_what_it_gives_at_every_step(
    ranks: Ranks, alone: Callable[..., list[Any]], tmp_path: Path, world: int, strategy: str, lora: Any
) -> None:
    expected = alone(model=tiny_model(), lora=lora) if lora else alone(model=tiny_model())
    spec = spec_of(tmp_path, world, strategy, lora=lora, method=once(tmp_path))
    events = trained(ranks, tmp_path, spec)
    assert_same_reference(events, expected, rel=1e-5)
    assert_same(events, expected, rel=1e-3, abs=1e-4)
    assert of_reference(events)["train_dataset"] == of_reference(events)["validation_dataset"] == "computed"
    if strategy == "FULL_SHARD":
        assert of_reference(events)["sharding"]["units"] == 3
    # One process resumes what two have computed, and the other way round: the rows are the same.
    other = spec_of(tmp_path / "again", 3 - world, "FULL_SHARD", lora=lora, method=spec.method)
    again = trained(ranks, tmp_path / "again", other)
    assert of_reference(again)["train_dataset"] == of_reference(again)["validation_dataset"] == "cache"
    assert_same(again, expected, rel=1e-3, abs=1e-4)


def test_without_a_second_model_full_training_starts_at_log_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.compiler, "set_stance")  # imports the compiler, which is for compiled blocks alone
    _, events = run(tmp_path, job_spec(tmp_path, tiny_model(), "dpo", method=once(tmp_path)))
    assert of_kind(events, Progress)[0].metrics["loss"] == pytest.approx(math.log(2), rel=1e-5)


def test_a_job_that_continues_takes_the_answers_from_the_cache_and_gives_the_same_weights(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, method=once(tmp_path), save_steps=2)
    _, whole = run(tmp_path / "whole", spec)
    weights = (spec.checkpoint_dir / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(spec.checkpoint_dir / "final")
    _, resumed = run(tmp_path / "resumed", spec, resume_from=spec.checkpoint_dir / "checkpoint-4")
    assert of_kind(resumed, Prepared)[0].start_step == 4
    assert of_reference(resumed)["train_dataset"] == "cache"
    points = {event.step: event.metrics["loss"] for event in of_kind(whole, Progress)}
    assert [event.metrics["loss"] for event in of_kind(resumed, Progress)] == [points[5], points[6]]
    assert (spec.checkpoint_dir / "final" / "model.safetensors").read_bytes() == weights


def test_answers_are_reused_only_where_everything_that_decides_them_is_the_same(another: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)

    def sources(name: str, **changes: Any) -> tuple[str, str]:
        fields = {
            "model": model,
            "method": once(tmp_path),
            "validation_rows": DPO_ROWS[:5],
            **changes,
        }
        _, events = run(tmp_path / name, job_spec(tmp_path / name, fields.pop("model"), "dpo", **fields))
        return of_reference(events)["train_dataset"], of_reference(events)["validation_dataset"]

    assert sources("first") == ("computed", "computed")
    assert sources("another-loss", method=once(tmp_path).model_copy(update={"loss_type": "ipo"})) == ("cache", "cache")
    assert sources("another-order", seed=3, batch_size=2, n_epochs=2) == ("cache", "cache")
    assert sources("fewer-rows", rows=DPO_ROWS[:8]) == ("computed", "cache")
    assert sources("shorter", max_seq_length=32) == ("computed", "computed")
    assert sources("bf16", dtype="bf16") == ("computed", "computed")
    assert sources("another-model", method=once(tmp_path, another)) == ("computed", "computed")
    # The same content elsewhere is the same model; other content in the same place is another.
    shutil.copytree(model, tmp_path / "copied")
    (tmp_path / "copied" / "notes.json").touch()
    assert sources("copy", model=tmp_path / "copied") == ("cache", "cache")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert sources("replaced", method=once(tmp_path)) == ("computed", "computed")


def test_a_damaged_cache_file_is_computed_again(tmp_path: Path) -> None:
    cache = LogProbCache(tmp_path / "reference", lambda: None)
    values = torch.rand(3, 2)
    assert cache.store("key", values)
    path = tmp_path / "reference" / "key.safetensors"
    whole = path.read_bytes()
    found = cache.find("key", 3)
    assert found is not None
    assert torch.equal(found, values)
    assert cache.find("key", 4) is None
    assert cache.find("no-such-key", 3) is None
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:50], b""):
        path.write_bytes(damaged)
        assert cache.find("key", 3) is None


def test_the_cache_removes_old_entries_and_the_oldest_beyond_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LogProbCache(tmp_path, lambda: None)
    now = time.time()
    for name, age in (("old", KEEP_SECONDS + 60), ("used", 3600), ("fresh", 60)):
        cache.store(name, torch.rand(100, 2))
        os.utime(tmp_path / f"{name}.safetensors", (now - age, now - age))
    cache.store("new", torch.rand(100, 2))
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["fresh", "new", "used"]
    monkeypatch.setattr(reference_cache, "KEEP_BYTES", 2000)
    cache.find("used", 100)  # used again: newer than `fresh` from now on
    cache.store("newest", torch.rand(100, 2))
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["newest", "used"]


def test_a_cache_that_cannot_be_written_costs_the_next_job_a_pass_and_not_this_one_its_life(tmp_path: Path) -> None:
    (tmp_path / "reference").write_text("no directory")
    status, events = run(tmp_path, job_spec(tmp_path, tiny_model(), "dpo", method=once(tmp_path)))
    assert status == 0
    assert of_reference(events)["train_dataset"] == "computed, not kept"


def test_scoring_the_reference_sends_heartbeats_and_a_pause_ends_it_at_the_next_batch(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model(), "dpo", method=once(tmp_path), batch_size=2)
    (tmp_path / "run").mkdir()
    paths = RunDir(tmp_path / "run")

    class Pausing(EventWriter):
        heartbeats = 0

        def heartbeat(self) -> None:
            super().heartbeat()
            self.heartbeats += 1
            if "_score" in {frame.name for frame in traceback.extract_stack()}:
                requested.append(self.heartbeats)
                if len(requested) == 2:
                    paths.control.write_text("{}")

    requested: list[int] = []
    writer = Pausing(paths.events)
    train_attempt(AttemptSpec(job=spec, attempt=1, run_dir=paths.root), writer)
    writer.close()
    assert len(requested) == 2  # of six batches
    events = list(iter_events(paths.events))
    assert isinstance(events[-1], Paused)
    assert events[-1].step == 0
    assert not of_kind(events, Prepared)
    assert not list((tmp_path / "reference").glob("*.safetensors"))


def cache_key(root: Path, **changes: Any) -> str:
    """The key of a row under a reference that is a directory."""
    model = root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    dpo = DpoSpec(reference=ReferenceSpec(precompute=True))
    spec = job_spec(root, model, "dpo", method=dpo, **changes)
    config = SimpleNamespace(_attn_implementation="sdpa")
    trainer = SimpleNamespace(
        spec=spec,
        model=SimpleNamespace(dtype=torch.float32, config=config),
        args=SimpleNamespace(device=torch.device("cpu")),
        float8="not used",
    )
    row = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4]}
    scores = Precomputation(trainer, lambda: None, lambda: False)
    found = scores._key(LogProbCache(root / "cache", lambda: None), Dataset.from_list([row]), 1)
    assert found is not None
    return found


def test_log_probs_under_autocast_are_not_those_of_sharded_units_in_half_precision(tmp_path: Path) -> None:
    sharding = ShardingSpec()
    for dtype in ("bf16", "fp16"):
        assert cache_key(tmp_path, dtype=dtype) != cache_key(tmp_path, dtype=dtype, ranks=2, sharding=sharding)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_where_nothing_is_rounded_otherwise_sharding_shares_the_cache(tmp_path: Path, strategy: Any) -> None:
    sharding = ShardingSpec(strategy=strategy)
    dtype = "fp32" if strategy == "FULL_SHARD" else "bf16"
    assert cache_key(tmp_path, dtype=dtype) == cache_key(tmp_path, dtype=dtype, ranks=2, sharding=sharding)


def test_the_number_of_ranks_that_shard_does_not_count(tmp_path: Path) -> None:
    two, four = (cache_key(tmp_path, dtype="bf16", ranks=ranks, sharding=ShardingSpec()) for ranks in (2, 4))
    assert two == four
