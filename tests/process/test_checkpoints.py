"""Step checkpoints: written while training continues, read by other numbers of ranks, and found out when damaged."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import session
from llama_stack_provider_trl.recipes.checkpoint import export as exporting
from llama_stack_provider_trl.recipes.checkpoint import optimizer_state, random_state, shards
from llama_stack_provider_trl.recipes.checkpoint import step as checkpoints
from llama_stack_provider_trl.recipes.data.sampling import BatchPlan, EpochSampler
from llama_stack_provider_trl.recipes.trainer.metrics import TrainingMetrics
from llama_stack_provider_trl.recipes.trainer.step_checkpoints import StepCheckpoints
from llama_stack_provider_trl.specs.events import (
    CheckpointDamaged,
    CheckpointSaved,
    Event,
    EventWriter,
    Failed,
    Finished,
    NullEventWriter,
    Prepared,
    Progress,
    Reason,
    Warned,
    iter_events,
)
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.system.files import LATEST, MANIFEST, damage, is_whole, write_manifest
from tests.ranks import Ranks, trained
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, losses, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
ROWS = {"sft": SFT_ROWS[:11], "dpo": DPO_ROWS[:11]}  # with 4 a step, the third of an epoch is short


def spec_of(
    root: Path, algorithm: str = "sft", world: int = 1, strategy: str = "FULL_SHARD", **changes: Any
) -> JobSpec:
    """Four rows a step; six steps in two epochs, a checkpoint every two."""
    fields = {
        "ranks": world,
        "sharding": ShardingSpec(strategy=strategy),  # of one rank nothing comes of it
        "batch_size": 4 // world,
        "n_epochs": 2,
        "save_steps": 2,
        "rows": ROWS[algorithm],
        "optimizer": OptimizerSpec(learning_rate=5e-3, warmup_steps=2),
        "num_threads": 1,
    }
    return job_spec(root, tiny_model(tied=algorithm == "sft"), algorithm, **{**fields, **changes})


Whole = Callable[[str], tuple[JobSpec, list[Event]]]
KINDS: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft-sharded": {"world": 2},
    "sft-ddp": {"world": 2, "strategy": "NO_SHARD"},
    "sft-lora-sharded": {"world": 2, "lora": LORA},
    "sft-sgd-sharded": {"world": 2, "optimizer": OptimizerSpec(name="sgd", learning_rate=5e-2, weight_decay=0.1)},
    "dpo-sharded": {"algorithm": "dpo", "world": 2, "batch_size": 1, "gradient_accumulation_steps": 2},
    "dpo-lora-ddp": {"algorithm": "dpo", "world": 2, "strategy": "NO_SHARD", "lora": LORA},
}


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A job of a kind that nothing disturbed, trained once for all tests."""

    @cache
    def train(kind: str) -> tuple[JobSpec, list[Event]]:
        root = tmp_path_factory.mktemp(kind)
        spec = spec_of(root, **KINDS[kind])
        return spec, trained(ranks, root / "run", spec)

    return train


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("sft-sharded", 3, "FULL_SHARD"),
        *in_full(  # tests/matrix continues such jobs on one rank, and on two
            ("sft-ddp", 2, "FULL_SHARD"),
            ("sft-sgd-sharded", 1, "FULL_SHARD"),
            ("dpo-sharded", 3, "FULL_SHARD"),
            ("sft-sharded", 1, "FULL_SHARD"),
            ("sft", 2, "FULL_SHARD"),
            ("sft-lora-sharded", 1, "FULL_SHARD"),
            ("dpo-lora-ddp", 3, "FULL_SHARD"),
        ),
    ],
)
def test_other_ranks_continue_with_the_next_unseen_row(
    ranks: Ranks, whole: Whole, tmp_path: Path, kind: str, world: int, strategy: str
) -> None:
    """From the middle of an epoch over a short step into the next; where rows do not come out even, with fillers."""
    spec, undisturbed = whole(kind)
    there = spec.model_copy(
        update={"sharding": ShardingSpec(strategy=strategy), "checkpoint_dir": tmp_path / "checkpoints"}
    )
    resumed = trained(ranks, tmp_path / "run", there, spec.checkpoint_dir / "checkpoint-2", world_size=world)
    (prepared,) = of_kind(resumed, Prepared)
    assert (prepared.start_step, prepared.total_steps) == (2, 6)
    assert prepared.effective["global_batch_size"] == 4
    assert losses(resumed) == pytest.approx(losses(undisturbed)[2:], rel=1e-3)
    tokens = [of_kind(events, Progress)[-1].tokens_seen for events in (undisturbed, resumed)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["sft-sharded", *in_full("sft-ddp")])
def test_a_checkpoint_is_a_model_that_transformers_loads_whatever_number_of_ranks_wrote_it(
    whole: Whole, kind: str
) -> None:
    (alone, _), (spec, _) = whole("sft"), whole(kind)
    for step in (2, 4):
        expected = AutoModelForCausalLM.from_pretrained(alone.checkpoint_dir / f"checkpoint-{step}").state_dict()
        found = AutoModelForCausalLM.from_pretrained(spec.checkpoint_dir / f"checkpoint-{step}").state_dict()
        assert all(torch.allclose(found[name], expected[name], atol=1e-3) for name in expected)
        assert found.keys() == expected.keys()
    assert (spec.checkpoint_dir / LATEST).read_text() == "checkpoint-4\n"


def test_a_sharded_checkpoint_of_an_adapter_is_one_that_peft_loads(whole: Whole) -> None:
    spec, _ = whole("sft-lora-sharded")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(spec.source.model), spec.checkpoint_dir / "checkpoint-4"
    )
    assert any(weight.abs().sum() > 0 for name, weight in adapted.named_parameters() if "lora_B" in name)


def flip_a_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("world", "harm", "victim"),
    [
        (1, cut, "optimizer/state.safetensors"),
        (2, flip_a_byte, "optimizer/state.safetensors"),
        *in_full((1, flip_a_byte, "model.safetensors"), (1, Path.unlink, "model.safetensors")),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(
    ranks: Ranks, whole: Whole, tmp_path: Path, world: int, harm: Callable[[Path], None], victim: str
) -> None:
    spec, undisturbed = whole("sft" if world == 1 else "sft-sharded")
    here = copied(spec, tmp_path)
    older, newer = (here.checkpoint_dir / f"checkpoint-{step}" for step in (2, 4))
    harm(newer / victim)
    assert (is_whole(newer), damage(newer) is None) == (harm is flip_a_byte, False)
    events = trained(ranks, tmp_path / "run", here, newer, fall_back_to=(older,))
    (damaged,) = of_kind(events, CheckpointDamaged)
    assert damaged.path == newer
    assert victim in damaged.message
    (prepared,) = of_kind(events, Prepared)
    assert (prepared.start_step, prepared.resumed_from) == (2, older)
    assert losses(events) == losses(undisturbed)[2:]
    assert damage(newer) is None  # saved again, after the damaged one was set aside
    assert (here.checkpoint_dir / "checkpoint-4.stale-1").is_dir()


def test_where_every_checkpoint_is_damaged_the_job_begins_again(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    spec, undisturbed = whole("sft")
    here = copied(spec, tmp_path)
    (here.checkpoint_dir / "checkpoint-4" / MANIFEST).write_text("{")
    events = trained(ranks, tmp_path / "run", here, here.checkpoint_dir / "checkpoint-4")
    assert of_kind(events, Prepared)[0].start_step == 0
    assert losses(events) == losses(undisturbed)


def test_a_checkpoint_whose_manifest_has_no_digests_is_used(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    spec, _ = whole("sft")
    here = copied(spec, tmp_path)
    (here.checkpoint_dir / "checkpoint-4" / MANIFEST).unlink()
    write_manifest(here.checkpoint_dir / "checkpoint-4")
    events = trained(ranks, tmp_path / "run", here, here.checkpoint_dir / "checkpoint-4")
    assert of_kind(events, Prepared)[0].start_step == 4


def copied(spec: JobSpec, root: Path) -> JobSpec:
    """The same job with a copy of its step checkpoints to spoil."""
    target = root / "checkpoints"
    for path in spec.checkpoint_dir.glob("checkpoint-?"):
        shutil.copytree(path, target / path.name)
    return spec.model_copy(update={"checkpoint_dir": target})


def test_training_continues_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(
    armed: Path, whole: Whole, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path)
    (armed / "saving-2").write_text("delay 2.5")
    status, events = run(tmp_path / "run", spec)
    assert status == 0
    order = [(type(event), event.step) for event in events if isinstance(event, (Progress, CheckpointSaved))]
    assert order.index((Progress, 4)) < order.index((CheckpointSaved, 2)) < order.index((Progress, 5))
    saved = [event for event in of_kind(events, CheckpointSaved) if event.kind == "step"]
    means = [sum(losses(events)[at : at + 2]) / 2 for at in (0, 2)]
    assert [(event.step, event.epoch) for event in saved] == [(2, 1), (4, 2)]
    assert [event.train_loss for event in saved] == pytest.approx(means)
    assert "raise save_steps" in of_kind(events, Warned)[-1].message
    # What it holds is of its own step, though training continued.
    undisturbed, _ = whole("sft")
    files = [job.checkpoint_dir / "checkpoint-2" / "model.safetensors" for job in (spec, undisturbed)]
    one, other = map(load_file, files)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_disk_that_fills_up_in_the_background_fails_the_job_and_leaves_nothing(armed: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (armed / "saving-4").write_text("full")
    status, events = run(tmp_path / "run", spec)
    assert status == 1
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.disk_full
    assert [event.step for event in of_kind(events, CheckpointSaved)] == [2]
    assert sorted(path.name for path in spec.checkpoint_dir.iterdir()) == ["checkpoint-2", LATEST]


def test_a_disk_that_fills_up_under_two_ranks_is_reported_by_the_one_that_found_it(
    ranks: Ranks, armed: Path, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, world=2)
    (armed / "saving-4").write_text("full")
    codes, events = ranks.run(tmp_path / "run", spec)
    assert codes == [1, 1]
    assert of_kind(events, Failed)[0].reason is Reason.disk_full
    assert sorted(path.name for path in spec.checkpoint_dir.iterdir()) == ["checkpoint-2", LATEST]


def test_a_failed_save_is_reported_before_its_leftovers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpoints.Saver(spec_of(tmp_path), torch.device("cpu"), NullEventWriter())
    removing, text = threading.Event(), threading.Event()

    def remove(*args: Any, **kwargs: Any) -> None:
        removing.set()
        text.wait(10)

    def fill_up(*args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", remove)
    monkeypatch.setattr(saver, "_write", fill_up)
    model: Any = torch.nn.Linear(2, 2)
    tokenizer: Any = None
    optimizer = torch.optim.SGD(model.parameters())
    saver.save(model, optimizer, tokenizer, {}, tmp_path / ".saving" / "checkpoint-2", print)
    assert removing.wait(10)
    threading.Timer(0.1, text.set).start()
    with pytest.raises(OSError, match="the disk is full"):
        saver.check()


@pytest.mark.parametrize(
    ("uploads", "polls"),
    [([None], 0), (["0"] * 10, 10), (["2", "2", "1", "0", "room"], 4), (["1", *"0" * 10], 11)],
    ids=["nothing leaves it", "all has left it", "room is made", "too little room is made"],
)
def test_a_full_disk_is_waited_for_while_checkpoints_leave_it(
    uploads: list[str | None], polls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, file = spec_of(tmp_path, min_free_bytes=1), tmp_path / "uploads"
    slept: list[float] = []
    alive: list[int] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) < len(uploads):
            file.write_text(str(uploads[len(slept)]))

    if uploads[0] is not None:
        file.write_text(uploads[0])
    monkeypatch.setattr(checkpoints.time, "sleep", sleep)
    monkeypatch.setattr(
        checkpoints, "free_bytes", lambda path: 2 if file.exists() and file.read_text() == "room" else 1
    )
    writer = EventWriter(tmp_path / "events")
    monkeypatch.setattr(writer, "heartbeat", lambda: alive.append(len(slept)))
    if uploads[-1] == "room":
        checkpoints.need_space(spec, 1, file, writer)
    else:
        with pytest.raises(OSError, match="must stay free"):
            checkpoints.need_space(spec, 1, file, writer)
    writer.close()
    assert len(slept) == polls
    assert alive == list(range(polls))  # who waits does not hang
    warned = of_kind(iter_events(tmp_path / "events"), Warned)
    assert [event.message.rpartition(": ")[2] for event in warned] == [
        f"training waits until {uploads[0]} checkpoints have been uploaded; raise save_steps"
        for _ in range(uploads[0] in ("1", "2"))
    ]


def test_whatever_a_training_writes_waits_for_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[Path, set[str]]] = []
    spec = spec_of(tmp_path)

    def need(spec: JobSpec, num_bytes: int, uploads: Path, writer: EventWriter) -> None:
        assert num_bytes
        writer.heartbeat()
        requested.append((uploads, {path.name for path in spec.checkpoint_dir.iterdir()} - {LATEST}))

    monkeypatch.setattr(session, "need_space", need)
    assert run(tmp_path / "run", spec)[0] == 0
    assert {uploads for uploads, _ in requested} == {tmp_path / "run" / "uploads"}
    there: list[set[str]] = [set(), set(), {"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"}]
    assert [before for _, before in requested] == there  # to begin with, then each checkpoint, then the export


@pytest.mark.parametrize(
    ("where", "kept"),
    [(None, []), (checkpoints, ["checkpoint-2", LATEST]), (exporting, ["checkpoint-2", "checkpoint-4", LATEST])],
    ids=["before", "step", "export"],
)
def test_an_attempt_whose_fencing_token_is_gone_writes_nothing_more(
    where: Any, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off on a disk that machines share, while another attempt continues."""
    spec = spec_of(tmp_path)
    spec.checkpoint_dir.mkdir()
    mark = spec.checkpoint_dir / ".shared"
    mark.write_text("job-1" if where else "job-2")
    staged: list[str] = []

    def written(directory: Path, *digests: Any) -> None:
        staged.append(directory.relative_to(spec.checkpoint_dir).parts[0])
        if len(staged) == 2 or where is exporting:
            mark.unlink()
        write_manifest(directory, *digests)

    monkeypatch.setattr(where or checkpoints, "write_manifest", written)
    status, events = run(tmp_path / "run", spec, turn=mark)
    assert status == 1
    failed = of_kind(events, Failed)[0]
    assert (failed.reason, "the service has abandoned this attempt, job-1" in failed.message) == (
        Reason.node_lost,
        True,
    )
    left = {path.name for path in spec.checkpoint_dir.iterdir()} - {mark.name}
    assert sorted(left) == kept
    assert all(name.endswith(".1.tmp") for name in staged)  # no other attempt's
    assert bool(staged) is bool(where)  # a checkpoint that would not count is not begun


def test_a_training_that_fails_beside_a_checkpoint_lets_it_be_completed(armed: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (armed / "saving-2").write_text("delay 0.5")
    (armed / "step-3").write_text("error")
    status, events = run(tmp_path / "run", spec)
    assert status == 1
    assert [type(event) for event in events[-2:]] == [CheckpointSaved, Failed]
    assert damage(spec.checkpoint_dir / "checkpoint-2") is None
    assert not (spec.checkpoint_dir / ".saving").exists()


def test_two_ranks_killed_in_the_background_continue_from_what_was_announced(
    ranks: Ranks, armed: Path, whole: Whole, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, world=2)
    (armed / "saving-4").write_text("kill")
    codes, events = ranks.run(tmp_path / "first", spec)
    assert codes[0] == -9
    assert not of_kind(events, Finished)
    assert [event.step for event in of_kind(events, CheckpointSaved)] == [2]
    resumed = trained(ranks, tmp_path / "second", spec, spec.checkpoint_dir / "checkpoint-2")
    assert losses(resumed) == losses(whole("sft-sharded")[1])[2:]


def test_the_loss_scaling_of_a_job_in_fp16_is_left_out_in_another_dtype(whole: Whole, tmp_path: Path) -> None:
    spec = copied(whole("sft")[0], tmp_path)
    checkpoint = spec.checkpoint_dir / "checkpoint-4"
    (checkpoint / "scaler.json").write_text(json.dumps(torch.amp.GradScaler("cpu").state_dict()))
    status, events = run(tmp_path / "run", spec, checkpoint)
    assert status == 0
    assert of_kind(events, Prepared)[0].start_step == 4


@pytest.mark.parametrize(
    "of",
    [
        lambda weights: torch.optim.Adafactor(weights, lr=0.1),  # moments of other shapes than their weights
        lambda weights: torch.optim.Adam(weights, amsgrad=True, betas=(0.8, 0.9)),
        lambda weights: torch.optim.SGD(weights, momentum=0.9),
    ],
    ids=["adafactor", "adam", "sgd"],
)
def test_the_state_of_any_optimizer_by_weights_is_read_as_it_was(
    of: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    def model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, dtype=torch.float32))
        return layers, of(layers.parameters())

    def step(layers: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layers(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    (first, saved), (second, restored) = model(1), model(1)
    for _ in range(3):
        step(first, saved)
    saved.state[next(first.parameters())]["note"] = 7  # a value that is no tensor
    state = optimizer_state.state_of(first, saved)
    (tmp_path / optimizer_state.TENSORS).parent.mkdir()
    shards.reserve(tmp_path / optimizer_state.TENSORS, state.tensors)
    shards.fill(tmp_path / optimizer_state.TENSORS, shards.parts_of(state.tensors))
    (tmp_path / optimizer_state.VALUES).write_text(state.document)
    second.load_state_dict(first.state_dict())
    optimizer_state.restore(second, restored, optimizer_state.read_optimizer(tmp_path), tmp_path)
    assert restored.param_groups[0].keys() == saved.param_groups[0].keys()
    assert [type(value) for value in restored.param_groups[0].values()] == [
        type(value) for value in saved.param_groups[0].values()
    ]
    assert restored.state[next(second.parameters())]["note"] == 7
    for layers, optimizer in ((first, saved), (second, restored)):
        step(layers, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_random_numbers_continue_where_they_were_saved() -> None:
    def numbers() -> list[Any]:
        return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()]

    numbers()
    saved = json.loads(json.dumps(random_state.capture(torch.device("cpu"))))
    expected = numbers()
    random_state.restore(saved, torch.device("cpu"))
    assert numbers() == expected


def test_rows_of_another_step_are_refused(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    spec, _ = whole("sft")
    other = spec.changed(batch_size=2, checkpoint_dir=tmp_path / "checkpoints")
    codes, events = ranks.run(tmp_path / "run", other, spec.checkpoint_dir / "checkpoint-2")
    assert codes == [1]
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "= 4" in failed.message


def test_a_checkpoint_beyond_the_end_of_the_job_is_refused(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    spec, _ = whole("sft")
    short = spec.changed(n_epochs=1, checkpoint_dir=tmp_path / "checkpoints")
    codes, events = ranks.run(tmp_path / "run", short, spec.checkpoint_dir / "checkpoint-4")
    assert codes == [1]
    (failed,) = of_kind(events, Failed)
    assert failed.reason is Reason.invalid_request
    assert "raise n_epochs" in failed.message


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_rows_of_a_step_are_put_into_batches_by_length(world_size: int) -> None:
    lengths = [(7 * row) % 20 for row in range(20)]
    batch_plan = BatchPlan.of(7, 2, world_size)
    arguments: dict[str, Any] = {"shuffle": True, "seed": 3, "batch_plan": batch_plan}
    arguments["multiple_of"] = batch_plan.batch_size * world_size
    found = list(EpochSampler(20, None, **arguments, lengths=lengths))
    plain, slots = list(EpochSampler(20, None, **arguments)), batch_plan.slots_per_step
    assert found != plain
    for start in range(0, len(plain), slots):
        step, expected = found[start : start + slots], plain[start : start + slots]
        assert sorted(step) == sorted(expected)
        rows = [lengths[row] for row in step if row != 20]
        assert rows == sorted(rows, reverse=True)
        assert [row == 20 for row in step] == [row == 20 for row in expected]  # fillers are the last ones


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_step_takes_the_same_rows_under_every_batch_plan(world_size: int, batch_size: int) -> None:
    batch_plan = BatchPlan.of(6, batch_size, world_size)
    together = batch_plan.batch_size * world_size
    sampler = EpochSampler(20, None, shuffle=True, seed=3, multiple_of=together, batch_plan=batch_plan)
    sampler.set_epoch(1)
    plain = EpochSampler(20, None, shuffle=True, seed=3)
    plain.set_epoch(1)
    expected, found = list(plain), list(sampler)
    assert len(sampler) == len(found)
    slots = batch_plan.slots_per_step
    for step in range(4):
        rows = [row for row in found[step * slots : (step + 1) * slots] if row != 20]
        assert rows == expected[step * 6 : (step + 1) * 6]
        assert sampler.rows_of_step(4 + step) == len(rows)
    assert len(found) == 3 * slots + -(-2 // together) * together  # an epoch's last step takes no more than it must
    assert sampler.position(4 + 2) == (1, 12)
    assert batch_plan.accumulation_steps * together == slots >= 6


def test_a_resumed_job_counts_more_tokens_than_a_float32_can(tmp_path: Path) -> None:
    trained = 2**24
    state = {"num_tokens": float(trained), "rows_per_step": 2}
    (tmp_path / "recipe_state.json").write_text(json.dumps(state))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    trainer: Any = SimpleNamespace(
        num_tokens=0,
        outer=None,
        batch_plan=SimpleNamespace(rows_per_step=2),
        spec=SimpleNamespace(resume_from=None),
        notes={},
        _chooses_gradient_sync=False,
    )
    assert StepCheckpoints.restore(trainer, tmp_path) == 7
    for _ in range(3):
        TrainingMetrics.add_tokens(trainer, torch.tensor(1))
    assert float(trainer.num_tokens) == trained + 3


def test_a_checkpoint_of_other_rows_per_step_is_refused_with_what_they_are_the_product_of(tmp_path: Path) -> None:
    (tmp_path / "recipe_state.json").write_text(json.dumps({"num_tokens": 0.0, "rows_per_step": 2}))
    trainer: Any = SimpleNamespace(batch_plan=SimpleNamespace(rows_per_step=3))
    with pytest.raises(JobFailure, match=r"takes 3: choose .* x ranks / context_parallel_size = 2"):
        StepCheckpoints.restore(trainer, tmp_path)
