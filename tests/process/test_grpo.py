"""GRPO: its losses are those of TRL's own trainer on given answers, and it learns, resumes and fails as it should.

CI compares two losses in few steps; `TRL_TESTS=full` compares every one for 20 steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.trainer import rewards
from llama_stack_provider_trl.recipes.trainer.grpo import GrpoRecipe
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, passes
from llama_stack_provider_trl.specs.events import CheckpointSaved, Failed, Prepared, Progress, RolledOut, Warned
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from tests.process.grpo_jobs import DIGITS, LETTER, MORE, STEPS, given_answers, metric, spec_of, toy, trl_history
from tests.required import FULL
from tests.training import LORA, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
CASES: dict[str, dict[str, Any]] = {
    "dapo-kl": {"loss_type": "dapo", "beta": 0.3, "temperature": 0.8},
    "grpo-batch": {"loss_type": "grpo", "scale_rewards": "batch"},
    "grpo-unscaled": {"loss_type": "grpo", "scale_rewards": "none", "beta": 0.1},
}
SOME = [*CASES] if FULL else ["dapo-kl", "grpo-batch"]


@pytest.mark.parametrize("name", SOME)
def test_given_answers_have_the_losses_of_trl_called_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method = GrpoSpec(rewards=(DIGITS, LETTER), num_generations=4, max_completion_length=8, **CASES[name])
    expected = trl_history(tmp_path, method)
    monkeypatch.setattr(
        GrpoRecipe, "answer", lambda self, prompts, rows: given_answers(prompts, self._grpo.num_generations)
    )
    assert len(expected) == STEPS
    tokens = []
    for padding_free in (True, False):
        root = tmp_path / str(padding_free)
        changes = {"batch_size": 1, "gradient_accumulation_steps": 2, "shuffle": False, "padding_free": padding_free}
        status, events = run(root, spec_of(root, method, **changes))
        assert status == 0, [event.message for event in of_kind(events, Failed)]
        uses_rows = of_kind(events, Prepared)[0].effective["attention"].startswith("rows_in_one_sequence")
        assert uses_rows is padding_free
        # The gradient too: TRL's `kl` is a mean of the micro batches' means.
        for metric_name in ("loss", "grad_norm", "reward", "completions/mean_length"):
            found = metric(events, metric_name)
            assert found == pytest.approx([entry[metric_name] for entry in expected], rel=1e-4, abs=1e-6), metric_name
        assert any(abs(value) > 1e-3 for value in metric(events, "grad_norm"))
        tokens.append([event.tokens_seen for event in of_kind(events, Progress)])
    assert tokens[0] == tokens[1]


def test_20_steps_raise_a_reward_and_a_job_that_continues_gives_the_same_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = toy(tmp_path)
    status, events = run(tmp_path, spec, estimates=True)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    found = metric(events, "reward")
    assert len(found) == 20
    assert sum(found[-5:]) > sum(found[:5]) + 0.75  # of 2.5
    assert {"kl", "rewards/letter/mean", "completions/mean_length", "completions/clipped_ratio"} <= of_kind(
        events, Progress
    )[0].metrics.keys()
    rollouts = of_kind(events, RolledOut)
    assert [one.step for one in rollouts] == [*range(1, 21)]
    weights = {source.name: source.weight for source in spec.method.rewards}
    for answer in (answer for one in rollouts for answer in one.answers):
        assert answer.reward == pytest.approx(sum(weights[name] * value for name, value in answer.rewards.items()))
    assert {turn.role for one in rollouts for turn in one.prompt} == {"user"}
    for one in rollouts:
        assert len(one.answers) + one.further_answers == spec.method.num_generations
        by_reward = sorted(one.answers, key=lambda answer: answer.reward)
        assert by_reward == sorted(by_reward, key=lambda answer: answer.advantage)
    effective = of_kind(events, Prepared)[0].effective
    assert effective["padding_free"] == "used"
    assert effective["memory"]["fits"]
    final = spec.checkpoint_dir / "final"
    assert AutoModelForCausalLM.from_pretrained(final).config.model_type == "llama"
    saved = (final / "model.safetensors").read_bytes()
    final.rename(tmp_path / "first-final")
    resumed = run(tmp_path / "resumed", spec, spec.checkpoint_dir / "checkpoint-10")[1]
    for name in ("loss", "reward", "kl", "completions/mean_length"):
        assert metric(resumed, name) == metric(events, name)[10:], name
    again = [one.model_copy(update={"time": 0.0}) for one in of_kind(resumed, RolledOut)]
    assert again == [one.model_copy(update={"time": 0.0}) for one in rollouts[10:]]
    assert (final / "model.safetensors").read_bytes() == saved


PLUGIN = """
def length(prompts, completions, rows):
    assert prompts[0][-1]["role"] == "user" and "answer" in rows[0]
    return [len(completion) / 10 for completion in completions]

def changing(prompts, completions, rows):
    for prompt, row in zip(prompts, rows):
        prompt[-1]["content"] += "!"
        row["seen"].append(1)
    completions.clear()
    return [len(row["seen"]) for row in rows]

def unchanged(prompts, completions, rows):
    return [len(row["seen"]) + prompt[-1]["content"].count("!") + (completion is None)
            for prompt, completion, row in zip(prompts, completions, rows, strict=True)]

def broken(prompts, completions, rows):
    raise LookupError("no judge today")

def short(prompts, completions, rows):
    return [1.0]

def not_a_number(prompts, completions, rows):
    return [float("nan")] * len(completions)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with reward functions, as pip installs it: a module, and the metadata with its entry points."""
    site = tmp_path / "site"
    metadata = site / "toy_rewards-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "toy_rewards.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-rewards\nVersion: 1.0\n")
    names = ("length", "changing", "unchanged", "broken", "short", "not_a_number")
    points = "".join(f"{name} = toy_rewards:{name}\n" for name in names)
    (metadata / "entry_points.txt").write_text(f"[llama_stack_provider_trl.rewards]\n{points}")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "toy_rewards", raising=False)


def of_function(name: str) -> GrpoSpec:
    source = RewardSource(name=name, function=name, weight=2.0)
    return GrpoSpec(rewards=(source, DIGITS), num_generations=2, max_completion_length=4)


@pytest.mark.usefixtures("plugin")
def test_a_function_of_an_installed_package_rewards_adapters(tmp_path: Path) -> None:
    rows = [{**row, "answer": "7"} for row in MORE[:2]]
    status, events = run(tmp_path, toy(tmp_path, of_function("length"), rows=rows, n_epochs=1, lora=LORA))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    (values,) = [event.metrics for event in of_kind(events, Progress)]
    dropping = toy(
        tmp_path, of_function("length"), rows=rows, n_epochs=1, lora=LORA.model_copy(update={"dropout": 0.5})
    )
    (dropped,) = [event.metrics for event in of_kind(run(tmp_path / "dropping", dropping)[1], Progress)]
    assert dropped["rewards/length/mean"] == values["rewards/length/mean"]  # answers are given without dropout
    assert dropped["grad_norm"] != values["grad_norm"]
    assert values["rewards/length/mean"] > 0
    assert of_kind(events, Prepared)[0].effective["reward_functions"] == {"length": "toy-rewards 1.0"}
    assert values["reward"] == pytest.approx(2 * values["rewards/length/mean"] + values["rewards/regex/mean"])
    assert of_kind(events, CheckpointSaved)[-1].kind == "final"


@pytest.mark.usefixtures("plugin")
def test_what_a_function_changes_no_other_one_and_no_later_step_reads(tmp_path: Path) -> None:
    sources = tuple(RewardSource(name=name, function=name) for name in ("changing", "unchanged"))
    method = GrpoSpec(rewards=sources, num_generations=2, max_completion_length=4)
    rows = [{**row, "seen": [], "tags": {"of": "row"}} for row in MORE[:2]]
    status, events = run(tmp_path, toy(tmp_path, method, rows=rows, n_epochs=2))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    assert metric(events, "rewards/changing/mean") == [1.0, 1.0]
    assert metric(events, "rewards/unchanged/mean") == [0.0, 0.0]


@pytest.mark.usefixtures("plugin")
def test_another_version_of_a_reward_function_is_reported(tmp_path: Path) -> None:
    source = RewardSource(name="length", function="length", package="toy-rewards 0.9")
    method = GrpoSpec(rewards=(source,), num_generations=2, max_completion_length=4)
    rows = [{**row, "answer": "7"} for row in MORE[:2]]
    events = run(tmp_path, toy(tmp_path, method, rows=rows, n_epochs=1))[1]
    (message,) = [event.message for event in of_kind(events, Warned) if "reward function" in event.message]
    assert "is of toy-rewards 1.0 here, and of toy-rewards 0.9 where the request was checked" in message


def test_a_check_that_takes_too_long_counts_as_failed_and_is_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_passes(check: AnswerCheck, answer: str, reference: Any) -> bool:
        if check.name == "slow":
            raise TimeoutError
        return passes(check, answer, reference)

    monkeypatch.setattr(rewards, "passes", slow_passes)
    slow = RewardSource(name="slow", check=AnswerCheck(type="regex", name="slow", pattern=".*"))
    method = GrpoSpec(rewards=(slow, LETTER), num_generations=2, max_completion_length=20)
    status, events = run(tmp_path, toy(tmp_path, method, rows=MORE[:2], n_epochs=2))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    (message,) = [event.message for event in of_kind(events, Warned) if "the check" in event.message]
    assert message.startswith("the check 'slow' took more than 1 s for an answer, which counts as failed")
    assert metric(events, "rewards/slow/mean") == [0.0, 0.0]
    assert metric(events, "rewards/slow/timed_out") == [1.0, 1.0]
    assert "rewards/letter/timed_out" not in of_kind(events, Progress)[0].metrics


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "the reward function 'broken' raised LookupError: no judge today"),
        ("short", "the reward function 'short' returned 1 rewards for 4 completions"),
        ("not_a_number", "the reward function 'not_a_number' returned nan as a reward"),
        ("absent", "the reward function 'absent' cannot be used by the environment that trains"),
    ],
)
def test_a_function_that_cannot_reward_fails_the_job_with_one_sentence(tmp_path: Path, name: str, message: str) -> None:
    status, events = run(tmp_path, toy(tmp_path, of_function(name), rows=MORE[:2], n_epochs=1))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "launch_failed" if name == "absent" else "invalid_request")
    assert failed.message.startswith(message)
