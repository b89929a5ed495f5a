"""What follows from evaluations in real trainings: their steps, an early end, the best weights; interrupted or not."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.answers.generate import AnswerFile
from llama_stack_provider_trl.recipes.evaluation import harness
from llama_stack_provider_trl.specs.events import (
    CheckpointDamaged,
    CheckpointSaved,
    Evaluated,
    Finished,
    Prepared,
    Progress,
    Warned,
)
from llama_stack_provider_trl.specs.harness import HarnessSpec
from llama_stack_provider_trl.specs.job import EarlyStoppingSpec, JobSpec, OptimizerSpec, ResumeFrom, ShardingSpec
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import LORA, SAMPLES, job_spec, of_kind, run, sampled

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
# The training rows contradict them, so that this loss falls to step 3 and rises then.
CONTRARY = [{"prompt": "What is 3 plus 3?", "completion": "I do not know, friend."}] * 2
TURNING: dict[str, Any] = {
    "n_epochs": 2,
    "validation_rows": CONTRARY,
    "eval_steps": 1,
    "optimizer": OptimizerSpec(learning_rate=1e-2, scheduler="constant"),
}
BOTH: dict[str, Any] = {
    **TURNING,
    "best_checkpoint": "eval_loss",
    "early_stopping": EarlyStoppingSpec(patience=2),
    "save_steps": 4,
    "samples": SAMPLES,
}


def turning(root: Path, **changes: Any) -> JobSpec:
    return job_spec(root, tiny_model(), **{**TURNING, **changes})


def evaluated(events: list[Any]) -> list[tuple[int, float]]:
    return [(event.step, event.metrics["eval_loss"]) for event in of_kind(events, Evaluated)]


def saved(events: list[Any]) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in of_kind(events, CheckpointSaved)]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(next(directory.glob("*.safetensors")))


def assert_same_weights(one: Path, other: Path, atol: float = 0.0) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() >= second.keys()  # a sharded model's embeddings are written under both of their names
    assert all(torch.allclose(first[name], second[name], rtol=0, atol=atol) for name in second)


def test_evaluations_come_at_their_steps_once_each_and_change_no_training(tmp_path: Path) -> None:
    _, often = run(tmp_path / "a", turning(tmp_path / "a"))
    _, seldom = run(tmp_path / "b", turning(tmp_path / "b", eval_steps=None))
    # 3 ends an epoch too, where a checkpoint is due; 6 is the end.
    assert [step for step, _ in evaluated(often)] == [1, 2, 3, 4, 5, 6]
    assert evaluated(seldom) == [evaluated(often)[2], evaluated(often)[5]]
    losses = [[point.metrics["loss"] for point in of_kind(events, Progress)] for events in (often, seldom)]
    assert losses[0] == losses[1]


def test_final_holds_the_best_weights_with_their_standing(tmp_path: Path) -> None:
    spec = turning(tmp_path, best_checkpoint="eval_loss", save_steps=4)
    status, events = run(tmp_path, spec)
    assert status == 0
    best = min(evaluated(events), key=lambda item: item[1])
    assert best[0] == 3
    assert saved(events) == [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("final", 3)]
    step, final = of_kind(events, CheckpointSaved)[2], of_kind(events, CheckpointSaved)[-1]
    assert final.validation_loss == best[1]
    assert (final.epoch, final.train_loss, final.perplexity) == (step.epoch, step.train_loss, step.perplexity)
    assert_same_weights(spec.checkpoint_dir / "final", spec.checkpoint_dir / "checkpoint-3")
    (warned,) = of_kind(events, Warned)
    assert "final is checkpoint-3, the best by eval_loss (6.5" in warned.message
    assert "training ended at step 6" in warned.message


def test_where_the_last_is_the_best_nothing_is_taken_back(tmp_path: Path) -> None:
    optimizer = OptimizerSpec(learning_rate=1e-4, scheduler="constant")
    spec = turning(tmp_path, best_checkpoint="eval_loss", n_epochs=1, optimizer=optimizer)
    _, events = run(tmp_path, spec)
    assert saved(events) == [("step", 1), ("step", 2), ("final", 3)]
    assert not of_kind(events, Warned)


def test_a_job_that_is_good_enough_ends_completed_and_reports_why(tmp_path: Path) -> None:
    _, events = run(tmp_path, turning(tmp_path, early_stopping=EarlyStoppingSpec(patience=2)))
    assert [step for step, _ in evaluated(events)] == [1, 2, 3, 4, 5]
    assert of_kind(events, Prepared)[0].total_steps == 6
    assert of_kind(events, Progress)[-1].step == 5
    assert of_kind(events, Finished)[0].step == 5
    assert saved(events) == [("step", 3), ("final", 5)]
    (warned,) = of_kind(events, Warned)
    assert "early_stopping: ended at step 5 of 6, because eval_loss was not better than 6.5" in warned.message
    assert "(step 3) by more than min_delta=0 in 2 evaluations in a row" in warned.message


def test_a_best_checkpoint_that_is_gone_is_reported_and_the_last_weights_are_kept(tmp_path: Path) -> None:
    import shutil

    spec = turning(tmp_path, best_checkpoint="eval_loss", save_steps=4)
    run(tmp_path, spec)
    (tmp_path / "events.jsonl").unlink()
    shutil.rmtree(spec.checkpoint_dir / "checkpoint-3")
    status, events = run(tmp_path, spec, spec.checkpoint_dir / "checkpoint-4")
    assert status == 0
    assert saved(events) == [("final", 6)]
    assert "checkpoint-3, the best by eval_loss" in of_kind(events, Warned)[-1].message
    assert "is gone: final is the last step" in of_kind(events, Warned)[-1].message


def test_a_best_checkpoint_that_is_damaged_is_set_aside_and_the_last_weights_are_kept(tmp_path: Path) -> None:
    spec = turning(tmp_path, best_checkpoint="eval_loss", save_steps=4)
    run(tmp_path / "whole", spec)
    best = spec.checkpoint_dir / "checkpoint-3"
    content = bytearray((best / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (best / "model.safetensors").write_bytes(content)
    status, events = run(tmp_path / "again", spec, spec.checkpoint_dir / "checkpoint-4")
    assert (status, saved(events)) == (0, [("final", 6)])
    assert [event.path for event in of_kind(events, CheckpointDamaged)] == [best]
    assert "checkpoint-3, the best by eval_loss" in of_kind(events, Warned)[-1].message


def test_a_job_that_begins_with_another_jobs_checkpoint_judges_by_its_own_evaluations(tmp_path: Path) -> None:
    first = turning(tmp_path / "first", best_checkpoint="eval_loss", save_steps=4)
    run(tmp_path / "first", first)
    given = first.checkpoint_dir / "checkpoint-4"
    spec = turning(
        tmp_path / "second",
        best_checkpoint="eval_loss",
        n_epochs=3,
        logging_steps=5,
        eval_steps=5,
        resume_from=ResumeFrom(job_uuid="first", checkpoint=given.name, path=given),
    )
    _, events = run(tmp_path / "second", spec, given)
    # Steps 3 and 4 of the first job were better.
    assert [step for step, _ in evaluated(events)] == [5, 6, 9]
    assert saved(events)[-1] == ("final", 5)
    assert [point.step for point in of_kind(events, Progress)] == [5, 6, 9]


def test_an_interrupted_job_decides_as_one_that_was_not(ranks: Ranks, tmp_path: Path) -> None:
    spec = turning(tmp_path, **BOTH)
    codes, whole = ranks.run(tmp_path / "first", spec)
    assert codes == [0]
    assert [step for step, _ in evaluated(whole)] == [1, 2, 3, 4, 5]
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    # Half of the patience is used up, and the best is behind: checkpoint 4 knows both.
    codes, resumed = ranks.run(tmp_path / "second", spec, spec.checkpoint_dir / "checkpoint-4")
    assert codes == [0]
    assert evaluated(resumed) == evaluated(whole)[4:]
    assert [found[:2] for found in sampled(whole)] == [
        ("before", 0),
        *(("checkpoint", step) for step in (1, 2, 3, 4)),
        ("after", 3),
    ]
    assert sampled(resumed) == sampled(whole)[-1:]
    # final is the best checkpoint.
    assert sampled(whole)[-1][2] == sampled(whole)[3][2] != sampled(whole)[4][2]
    assert [event.message for event in of_kind(resumed, Warned)] == [event.message for event in of_kind(whole, Warned)]
    assert (saved(resumed)[-1], of_kind(resumed, Finished)[0].step) == (("final", 3), 5)
    assert_same_weights(spec.checkpoint_dir / "final", tmp_path / "first-final")


WHOLE_AFTER_FORWARD = ShardingSpec(strategy="SHARD_GRAD_OP")
"""An evaluation, which has no backward, leaves parameters whole of which the next checkpoint saves parts."""


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"lora": LORA, "sharding": WHOLE_AFTER_FORWARD}, id="lora-grad-op"),
        *in_full(pytest.param({}, id="full"), pytest.param({"lora": LORA}, id="lora")),
    ],
)
def test_two_ranks_stop_at_the_same_step_and_export_the_same_best(
    ranks: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if "lora" in changes:  # adapters take longer to turn
        changes = {**changes, "optimizer": OptimizerSpec(learning_rate=1e-1, scheduler="constant")}
    alone = turning(tmp_path / "alone", **{**BOTH, **changes, "sharding": None})
    _, expected = ranks.run(tmp_path / "alone" / "run", alone)
    spec = turning(tmp_path / "both", **{"sharding": ShardingSpec(), **BOTH, **changes}, ranks=2, batch_size=2)
    codes, events = ranks.run(tmp_path / "both" / "run", spec)
    assert codes == [0, 0]
    assert saved(events) == saved(expected)
    assert sampled(events) == sampled(expected)
    assert saved(events)[-1][1] < of_kind(events, Finished)[0].step == of_kind(expected, Finished)[0].step
    assert_same_weights(spec.checkpoint_dir / "final", alone.checkpoint_dir / "final", atol=2e-3)


@pytest.mark.parametrize("line", [{"name": "sums"}, {"name": "sums", "files": None}])
def test_recorded_measures_without_the_digest_of_their_task_files_are_refused_by_their_line(
    tmp_path: Path, line: dict[str, Any]
) -> None:
    path = tmp_path / "harness.jsonl"
    path.write_text(json.dumps(line) + "\n")
    problem = r"line 1 in .*harness.jsonl cannot be read as the measures of a task \(.*files"
    with closing(AnswerFile(path, 1, 1)) as lines, pytest.raises(JobFailure, match=problem):
        harness._check_recorded(lines, HarnessSpec(tasks=("sums",)))
