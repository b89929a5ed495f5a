"""Methods that train on answers of the model, on several ranks: they answer and train what one process does, whatever
each of them has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.specs.events import Failed, Prepared
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import VllmSpec, VllmSync
from tests.played_vllm import REAL, played_vllm, saved
from tests.process import distillation_jobs, gold_jobs
from tests.process.on_policy_ranks import (
    METHOD,
    ROWS,
    Alone,
    assert_equal_and_continued,
    assert_same,
    numbers,
    spec_of,
    trained,
    trained_alone,
    weights_of,
)
from tests.ranks import Ranks
from tests.required import in_full
from tests.training import LORA, SAMPLES, of_kind, sampled

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800 if REAL else 300)]
ALL_GATHER = "distributed." + next(  # the name that FSDP2 uses, from torch 2.12 on and before
    name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(torch.distributed, name)
)


def distillation(root: Path, ranks: int, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    root.mkdir(parents=True, exist_ok=True)
    teacher = distillation_jobs.teacher_model(root / "teacher")
    fields = {"max_completion_length": 6, "beta": 0.5, "temperature": 0.9, **changes.pop("method", {})}
    method = distillation_jobs.method_of(teacher, **fields)
    return spec_of(root, ranks, strategy, **changes).changed(method=method)


def gold(root: Path, ranks: int, strategy: str = "FULL_SHARD", **changes: Any) -> JobSpec:
    root.mkdir(parents=True, exist_ok=True)
    method = gold_jobs.method_of(gold_jobs.teacher_model(root / "teacher"), hybrid=True, skip_end=False)
    return spec_of(root, ranks, strategy, **changes).changed(method=method)


JOBS: dict[str, Callable[..., JobSpec]] = {"grpo": spec_of, "distillation": distillation, "gold": gold}
"""The same job for any number of ranks: the last step of an epoch leaves a rank fillers only."""


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Alone]:
    return {name: trained_alone(ranks, tmp_path_factory, make) for name, make in JOBS.items()}


@pytest.mark.parametrize(
    ("name", "lora", "strategy"),
    [
        ("grpo", None, "FULL_SHARD"),
        *in_full(
            ("distillation", LORA, "FULL_SHARD"),
            *(("grpo", LORA, strategy) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")),
            ("grpo", None, "NO_SHARD"),
            *(("distillation", *rest) for rest in ((LORA, "NO_SHARD"), (None, "FULL_SHARD"), (None, "NO_SHARD"))),
            *(("gold", lora, strategy) for lora in (None, LORA) for strategy in ("FULL_SHARD", "NO_SHARD")),
        ),
    ],
)
def test_two_ranks_give_the_answers_and_weights_of_one_process_and_continue_exactly(
    ranks: Ranks, alone: dict[str, Alone], tmp_path: Path, name: str, lora: LoraSpec | None, strategy: str
) -> None:
    single, expected = alone[name](lora)
    if name == "grpo":
        assert any(abs(point["reward_std"]) > 0.1 for point in numbers(expected))
    else:
        assert any(point["loss"] > 0.01 for point in numbers(expected))
    together = JOBS[name](tmp_path / "together", 2, strategy, lora=lora)
    assert_equal_and_continued(ranks, tmp_path, together, expected, single)


@pytest.mark.parametrize(
    ("lora", "sync", "strategy", "place", "vllms"),
    [
        (LORA, "adapter", "FULL_SHARD", {}, 2),
        (None, "weights", "FULL_SHARD", {"mode": "server"}, 1),
        *in_full(
            (None, "weights", "NO_SHARD", {"tensor_parallel_size": 2}, 1),
            (None, "weights", "FULL_SHARD", {}, 2),
            (LORA, "adapter", "NO_SHARD", {"mode": "server", "tensor_parallel_size": 2}, 1),
            (LORA, "weights", "FULL_SHARD", {"tensor_parallel_size": 2}, 1),
        ),
    ],
)
def test_two_ranks_have_the_answers_of_one_process_however_many_vllms_give_them(
    ranks: Ranks,
    tmp_path: Path,
    lora: LoraSpec | None,
    sync: VllmSync,
    strategy: str,
    place: dict[str, Any],
    vllms: int,
) -> None:
    (tmp_path / "plays.json").write_text(json.dumps({"loads": "loads.jsonl"}))
    own = VllmSpec(python=Path(REAL) if REAL else played_vllm(tmp_path, torch=True), sync=sync)
    vllm = own.model_copy(update=place)
    changes: dict[str, Any] = {"lora": lora, "n_epochs": 1}
    together = spec_of(tmp_path / "two", 2, strategy, **changes, method=METHOD.model_copy(update={"vllm": vllm}))
    if REAL:  # its kernels for the CPU need larger heads
        together = together.changed(model=saved(tmp_path / "llama", tied=False), max_seq_length=128)
    found = trained(ranks, tmp_path / "two", together)
    assert max(point["sampling/sampling_logp_difference/max"] for point in numbers(found)) < 1e-5
    if REAL:  # which does not promise the same numbers for a row beside others
        return
    loads = [json.loads(line) for line in (tmp_path / "loads.jsonl").read_text().splitlines()]
    assert [devices for devices, *_ in loads] == [vllm.tensor_parallel_size] * vllms
    alone = spec_of(tmp_path / "alone", 1, **changes, method=METHOD.model_copy(update={"vllm": own}))
    assert_same(found, together, trained(ranks, tmp_path / "alone", alone), alone)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"method": METHOD.model_copy(update={"loss_type": "grpo", "scale_rewards": "batch"})}),
        ("gold", {}),
        *in_full(
            ("grpo", {"method": METHOD.model_copy(update={"scale_rewards": "none"})}),
            *(("distillation", {"method": {"beta": beta}}) for beta in (0.0, 1.0)),
        ),
    ],
)
def test_given_answers_have_the_losses_of_one_process(
    ranks: Ranks, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    found = {}
    for number in (1, 3):  # of three ranks one has fillers only, of the last row of an epoch two
        root = tmp_path / str(number)
        fields = {"batch_size": 4, "gradient_accumulation_steps": 1, "sharding": ShardingSpec(), **changes}
        spec, given = JOBS[name](root, 1, **fields), "tests.process.on_policy_ranks.give_answers"
        codes, events = ranks.run(root / "run", spec, world_size=number, before=given)
        assert codes == [0] * number, [event.message for event in of_kind(events, Failed)]
        found[number] = spec, events
    if name == "gold":
        assert all(point["loss"] > 0.01 for point in numbers(found[1][1]))
    assert_same(found[3][1], found[3][0], found[1][1], found[1][0])


@pytest.mark.parametrize("lora", [LORA, *in_full(None)])
def test_blocks_are_gathered_once_for_all_tokens_where_the_whole_model_fits(
    ranks: Ranks, tmp_path: Path, lora: LoraSpec | None
) -> None:
    found = {}
    for kept in (False, True):
        root = tmp_path / str(kept)
        spec = spec_of(root, 2, lora=lora, n_epochs=1, samples=SAMPLES)
        events = trained(ranks, root, spec, estimates=kept, counted=ALL_GATHER)
        effective = of_kind(events, Prepared)[0].effective
        assert effective["answer_weights"] == ("kept" if kept else "per_token")
        calls = len((root / "run" / "calls").read_text().splitlines())
        found[kept] = numbers(events), sampled(events), weights_of(spec), calls
    for one, other in zip(found[False][:2], found[True][:2], strict=True):
        assert one == other
    assert all(torch.equal(weight, found[False][2][name]) for name, weight in found[True][2].items())
    assert found[True][3] < found[False][3] / 2


def test_a_rank_that_the_first_one_waits_for_shows_its_progress(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, 2, n_epochs=1, rows=ROWS[:4], gradient_accumulation_steps=1, save_steps=100)
    trained(ranks, tmp_path, spec, before="tests.process.on_policy_ranks.count_heartbeats")
    answered, rewarded = map(int, (spec.checkpoint_dir / "heartbeats-1").read_text().split())
    assert 1 <= answered <= METHOD.max_completion_length
    assert rewarded > answered
