"""GRPO whose answers are graded by models: rewards, what goes wrong, several ranks, an attempt that continues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.trainer import grading_models
from llama_stack_provider_trl.recipes.trainer.grading_models import GradingModel
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Failed, Finished, Prepared, Progress, Warned
from llama_stack_provider_trl.specs.grading import grading
from llama_stack_provider_trl.specs.grading.asking import Question, Reply, Replying, form_of
from llama_stack_provider_trl.specs.grading.errors import GradingError, NotInTimeError
from llama_stack_provider_trl.specs.grading.graders import asking_of
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.specs.work import FurtherModel
from tests.process.checked_work import HAS_LETTER, SHORT, work
from tests.process.grpo_jobs import metric
from tests.process.learned import learned
from tests.process.on_policy_ranks import numbers, trained, weights_of
from tests.ranks import Ranks
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
SLOWER = OptimizerSpec(learning_rate=3e-3, scheduler="constant")
SAMPLING = {"max_completions_tokens": 12}
SCORE: dict[str, Any] = {
    **{"type": "score_model", "name": "score", "model": "the-judge", "range": [0, 2], "sampling_params": SAMPLING},
    "input": [{"role": "user", "content": "{{item.ask}}"}],
}
LABEL: dict[str, Any] = {
    **{"type": "label_model", "name": "label", "model": "the-judge", "labels": ["good", "bad"]},
    **{"passing_labels": ["good"], "input": [{"role": "user", "content": "{{item.ask}} {{item.mark}}"}]},
}
ANSWERED = {**SCORE, "input": [{"role": "user", "content": "{{sample.output_text}}"}]}
SCORES = {"The fox": "0.5", "A dog": '{"result": 7}', "It is": "What?"}
LABELS = {"The fox 1 1 1": "good", "A dog 2 2 2": "bad", "It is 3 3 3": "good or bad"}
ROWS = [
    {"prompt": f"Name a number above {n}.", "ask": ask, "mark": f"{n} {n} {n}", "wanted": "e"}
    for n, ask in enumerate(SCORES, start=1)
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> FurtherModel:
    """A model that has learned replies by heart."""
    replies = {}
    for grader, texts in ((SCORE, SCORES), (LABEL, LABELS)):
        form = form_of(AnswerCheck.model_validate({"type": "grader", "grader": grader}).grader)  # type: ignore[arg-type]
        replies |= {f"{ask}\n\n{form}": reply for ask, reply in texts.items()}
    root = tmp_path_factory.mktemp("judge")
    return FurtherModel(model=str(learned(root, replies, n_epochs=150, optimizer=SLOWER)))


def source(grader: dict[str, Any], judge: FurtherModel) -> RewardSource:
    check = AnswerCheck.model_validate({"type": "grader", "name": grader["name"], "grader": grader})
    assert check.grader is not None
    return RewardSource(name=grader["name"], check=check, grading=(judge,) * len(asking_of(check.grader)))


def spec_of(root: Path, *rewards: RewardSource, **changes: Any) -> JobSpec:
    method = GrpoSpec(rewards=rewards, num_generations=2, max_completion_length=4)
    fields = {"rows": ROWS, "batch_size": 3, "n_epochs": 2, "method": method, "save_steps": 1, "shuffle": False}
    return job_spec(root, tiny_model(), "grpo", **{**fields, **changes})


def test_answers_have_what_models_reply_and_errors_are_counted_and_named(tmp_path: Path, judge: FurtherModel) -> None:
    both = {
        "type": "multi",
        "name": "both",
        "graders": {"a": SCORE, "b": LABEL, "c": HAS_LETTER},
        "calculate_output": "10 * a + b + 0 * c",
    }
    spec = spec_of(tmp_path, *(source(one, judge) for one in (SCORE, LABEL, both)), batch_size=1)
    status, events = run(tmp_path, spec)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    expected = {
        "score": [0.5, 2.0, 0.0],  # 7 is beyond the range
        "label": [1.0, 0.0, 0.0],
        "both": [6.0, 20.0, 0.0],
    }
    for name, means in expected.items():
        assert metric(events, f"rewards/{name}/mean") == pytest.approx(means * 2), name
        assert [bool(one.metrics.get(f"rewards/{name}/errors")) for one in of_kind(events, Progress)] == [
            *([False, False, True] * 2)
        ]
    found = [event.message for event in of_kind(events, Warned) if "grader" in event.message]
    assert found[0].startswith(
        "the grader 'score' gives 2 answers no reward, which counts as 0; the first time: score: the model replied "
        "'What?': expected a number, as `result` of JSON or alone"
    )
    assert len(found) == 3
    assert of_kind(events, Prepared)[0].effective["grading_models"] == [judge.model]


def answer_dependent(root: Path, judge: FurtherModel, **changes: Any) -> JobSpec:
    """A job whose judge reads the answers."""
    both = {"type": "multi", "name": "all", "graders": {"a": ANSWERED, "b": HAS_LETTER}, "calculate_output": "a + b"}
    rewards = source(ANSWERED, judge), source(both, judge)
    fields = {
        "batch_size": 2,
        "n_epochs": 2,
        "save_steps": 1,
        "optimizer": OptimizerSpec(name="sgd", learning_rate=0.1),
    }
    return spec_of(root, *rewards, rows=[*ROWS, {**ROWS[0], "prompt": "Add them."}], **{**fields, **changes})


def test_two_ranks_grade_as_one_process_does_and_an_attempt_continues_exactly(
    tmp_path: Path, judge: FurtherModel, ranks: Ranks
) -> None:
    alone = answer_dependent(tmp_path / "alone", judge)
    expected = trained(ranks, tmp_path / "alone", alone)
    assert len({point["rewards/score/mean"] for point in numbers(expected)}) > 1  # some replies have numbers
    spec = answer_dependent(
        tmp_path / "two", judge, ranks=2, batch_size=1, sharding=ShardingSpec(strategy="FULL_SHARD")
    )
    found = trained(ranks, tmp_path / "two", spec)
    assert len(numbers(found)) == len(numbers(expected)) == 4
    for point, other in zip(numbers(found), numbers(expected), strict=True):
        assert point == pytest.approx(other, rel=1e-3, abs=1e-5)
    weights = weights_of(spec)
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    resumed = trained(ranks, tmp_path / "again", spec, spec.checkpoint_dir / "checkpoint-2")
    assert numbers(resumed) == numbers(found)[2:]
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(spec).items())


def test_equal_questions_are_asked_once_and_all_of_a_step_together(
    tmp_path: Path, judge: FurtherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def replies(self: GradingModel, questions: Any, *_: Any) -> list[Reply]:
        asked.append(len(questions))
        return [Reply("1", True) for _ in questions]

    monkeypatch.setattr(GradingModel, "replies", replies)
    spec = spec_of(tmp_path, source(SCORE, judge), batch_size=1, gradient_accumulation_steps=3)
    status, events = run(tmp_path, spec)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    assert asked == [3, 3]  # of two answers to each of three rows, in a step of each epoch
    assert metric(events, "rewards/score/mean") == [1.0, 1.0]


def test_a_model_replies_alone_as_with_others_and_random_numbers_follow_from_the_question(
    tmp_path: Path, judge: FurtherModel
) -> None:
    model = GradingModel(spec_of(tmp_path, source(SCORE, judge)), judge, torch.device("cpu"))
    questions = [
        (Question([{"role": "user", "content": text}], f"0/{text}"), 0)
        for text in ("a", "What is a dog?", "Add it, friend, and more.")
    ]
    for replying in (Replying(0.0, 1.0, 8), Replying(1.5, 0.9, 8)):
        together = model.replies(questions, replying, lambda: None)
        assert [model.replies([one], replying, lambda: None)[0] for one in questions] == together
    assert model.replies(questions, Replying(0.0, 1.0, 8), lambda: None) != together
    (late,) = model.replies(questions[:1], Replying(0.0, 1.0, 10**5), lambda: None)
    assert isinstance(late, GradingError)
    assert "which with 100000 of its reply are more than its" in late.sentence
    assert not [*model.warnings()]


def test_fewer_questions_are_answered_together_where_memory_is_short(
    tmp_path: Path, judge: FurtherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, answer = list[int](), grading_models.answer_ids

    def short(model: Any, prompts: list[Any], *arguments: Any, **fields: Any) -> Any:
        tried.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError
        return answer(model, prompts, *arguments, **fields)

    model = GradingModel(spec_of(tmp_path, source(SCORE, judge)), judge, torch.device("cpu"))
    questions = [(Question([{"role": "user", "content": f"Is it {n}?"}], str(n)), 0) for n in range(5)]
    expected = model.replies(questions, Replying(0.0, 1.0, 4), lambda: None)
    monkeypatch.setattr(grading_models, "answer_ids", short)
    assert model.replies(questions, Replying(0.0, 1.0, 4), lambda: None) == expected
    assert tried == [5, 2, 2, 1]


def test_messages_that_a_chat_template_leaves_out_are_named_once(tmp_path: Path, judge: FurtherModel) -> None:
    model = GradingModel(spec_of(tmp_path, source(SCORE, judge)), judge, torch.device("cpu"))
    model._chat.tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    turns = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Is it right?"}]
    for _ in range(2):
        model.replies([(Question(turns, "0"), 3)], Replying(0.0, 1.0, 2), lambda: None)
    (message,) = model.warnings()
    assert message.startswith(
        f"the grading model {judge.model}'s chat template leaves out turns of 2 of 2 questions (2 system), first in "
        "row 3"
    )
    model.replies([(Question(turns, "0"), 3)], Replying(0.0, 1.0, 2), lambda: None)
    assert not [*model.warnings()]


def test_the_memory_check_counts_a_grading_model_once_and_a_damaged_one_fails_the_job(
    tmp_path: Path, judge: FurtherModel
) -> None:
    with_judge, without = (
        estimate(spec_of(tmp_path, *rewards), Batch(6, 40), "cpu")
        for rewards in ((source(SCORE, judge), source(LABEL, judge)), (source(HAS_LETTER, judge),))
    )
    weights = load_file(judge.directory / "model.safetensors")
    assert with_judge.reference - without.reference == 4 * sum(weight.numel() for weight in weights.values())
    bad = tmp_path / "bad"
    shutil.copytree(judge.directory, bad)
    del weights["model.norm.weight"]
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    status, events = run(tmp_path, spec_of(tmp_path, source(SCORE, FurtherModel(model=str(bad)))))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_model")
    assert str(bad) in failed.message


def test_graders_that_are_too_late_are_counted_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> float:
        raise NotInTimeError("python_grader_runtime_error", "it has not ended in 10 s")

    monkeypatch.setattr(grading, "reward_of_source", late)
    check = AnswerCheck.model_validate({"type": "grader", "name": "short", "grader": SHORT})
    status, events = run(tmp_path, spec_of(tmp_path, RewardSource(name="short", check=check)))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    assert metric(events, "rewards/short/timed_out") == metric(events, "rewards/short/errors") == [1.0, 1.0]
    found = [event.message for event in of_kind(events, Warned) if "grader" in event.message]
    assert found[0] == (
        "the grader 'short' took more than 10 s for an answer, which counts as 0: simplify it. The metric "
        "rewards/short/timed_out has the share of such answers"
    )
    assert len(found) == 2  # with its first error
    evaluation = work(check.model_dump(exclude_unset=True), max_new_tokens=4)
    status, events = run(tmp_path / "e", job_spec(tmp_path / "e", tiny_model(), "sft", rows=ROWS[:2], work=evaluation))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    (result,) = [event.result for event in of_kind(events, Finished)]
    assert result is not None
    assert (result["timed_out"], result["graded"]["short"]["errors"]) == (2, 2)
    assert "2 checks took more than 10 s (graders) and count as failed: simplify them" in [
        event.message for event in of_kind(events, Warned)
    ]
