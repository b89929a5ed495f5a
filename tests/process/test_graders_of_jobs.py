"""Graders in jobs: they raise the rewards of GRPO, measure answers, and cannot harm a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Evaluated, Failed, Finished, Warned
from llama_stack_provider_trl.specs.grading import isolated
from llama_stack_provider_trl.specs.grading.errors import GradingError
from llama_stack_provider_trl.specs.grading.isolated import reward_of_source
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.system.limited import Limited
from tests.process.checked_work import HAS_LETTER, SHORT, work
from tests.process.grpo_jobs import metric, toy
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
BOTH = {"type": "multi", "name": "both", "graders": {"a": HAS_LETTER, "b": SHORT}, "calculate_output": "a + 0 * b"}
BAD = {**HAS_LETTER, "name": "bad", "input": "{{sample.output_json.x}}"}
COUNTS = """frame = __import__('collections')._sys._getframe()
    while frame:
        for found in [*frame.f_locals.values()]:
            if type(found).__name__ == 'mmap': found[:8] = (1 << 62).to_bytes(8, 'little')
        frame = frame.f_back
    random._os._exit(0)"""
"""Writes the count of its values, which the keeper reports."""
ROWS = [{"prompt": f"Name a number above {number}.", "wanted": "e"} for number in range(8)]


def source(grader: dict[str, Any], weight: float = 1.0) -> RewardSource:
    check = AnswerCheck.model_validate({"type": "grader", "name": grader["name"], "grader": grader})
    return RewardSource(name=grader["name"], weight=weight, check=check)


def test_20_steps_raise_the_reward_of_a_grader(tmp_path: Path) -> None:
    rewards = (source(HAS_LETTER), source(BAD))
    method = GrpoSpec(rewards=rewards, num_generations=16, max_completion_length=4, beta=0.01)
    status, events = run(tmp_path, toy(tmp_path, method, rows=ROWS))
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    found = metric(events, "rewards/letter/mean")
    assert len(found) == 20
    assert sum(found[-5:]) > sum(found[:5]) + 1.0  # of 5
    # An answer without a reward counts as 0, and is told once.
    assert set(metric(events, "rewards/bad/mean")) == {0.0}
    assert set(metric(events, "rewards/bad/errors")) == {1.0}
    (message,) = [event.message for event in of_kind(events, Warned) if "grader" in event.message]
    assert message.startswith(
        "the grader 'bad' gives 32 answers no reward, which counts as 0; the first time: bad: sample"
    )


def test_an_evaluation_measures_the_rewards_of_graders(tmp_path: Path) -> None:
    checks = [{"type": "grader", "name": one["name"], "grader": one} for one in (BOTH, SHORT, BAD)]
    checks[1]["at_least"] = 0.9
    spec = job_spec(tmp_path, tiny_model(), "sft", rows=ROWS[:2], work=work(*checks, max_new_tokens=4))
    status, events = run(tmp_path, spec)
    assert status == 0, [event.message for event in of_kind(events, Failed)]
    result = of_kind(events, Finished)[0].result
    assert result is not None
    assert result["checks"]["short"] == 1.0
    assert result["graded"]["short"] == {"mean_reward": pytest.approx(0.9), "errors": 0, "first_error": None}
    assert (result["graded"]["bad"]["mean_reward"], result["graded"]["bad"]["errors"]) == (0.0, 2)
    assert of_kind(events, Evaluated)[0].metrics["eval_reward_short"] == pytest.approx(0.9)
    lines = [json.loads(line) for line in Path(result["answers"]["path"]).read_text().splitlines()]
    assert [line["graded"]["short"] for line in lines] == [{"reward": 0.9, "error": None}] * 2


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 1 / 0", "line 4: ZeroDivisionError: division by zero"),
        ("return float('nan')", "grade returned nan, expected a finite number"),
        ("return True", "grade returned bool, expected a float"),
        ("return '1'", "grade returned str, expected a float"),
        ("raise SystemExit(3)", "line 4: SystemExit: 3"),
        ("return len(open('/etc/hostname').read())", "PermissionError"),
        ("return random._os.fork()", "PermissionError"),
        ("return random._os.kill(random._os.getppid(), 0)", "line 4:"),
        ("return random._os.write(2, b'x')", "PermissionError"),
        ("import socket\n    return 1.0", "ImportError: line 4: it imports 'socket'"),
        ("return __import__('socket').socket().fileno()", "line 4:"),
        ("x = []\n    while True: x.append('a' * 10**6)", "it takes more than 1 s or 512 MiB, or has crashed"),
        ("while True: pass", "it takes more than 1 s or 512 MiB, or has crashed"),
        ("return (", "SyntaxError"),
        ("random._os._exit(0)", "damaged its result|has crashed"),
        (COUNTS, "has crashed"),
    ],
)
def test_a_source_can_do_nothing_but_compute(body: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "LIMITS", Limited(seconds=1, memory=512 << 20))
    with pytest.raises(GradingError, match=problem):
        reward_of_source(f"import random\n\ndef grade(sample, item):\n    {body}\n", {"output_text": "hi"}, {"a": 1})


def test_a_source_computes_with_its_arguments() -> None:
    source = "import re\ndef grade(sample, item):\n    print(1)\n    return len(sample['output_text']) + item['a']"
    assert reward_of_source(source, {"output_text": "hi"}, {"a": 0.5}) == 2.5
