"""The proposer of Bayesian searches with Optuna itself: what it finds, and that equal questions have equal answers."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.supervision.proposer_process import ProposerProcess
from llama_stack_provider_trl.proposer import propose
from llama_stack_provider_trl.requests.trial_values import ValuedTrial, answered_values, drawn_values, question
from llama_stack_provider_trl.specs.search import SearchSpec
from tests.contract.stack import poll
from tests.required import lacking

pytestmark = pytest.mark.process
LR, RANK, KIND = "lr", "rank", "kind"
SPACE = {LR: {"min": 1e-6, "max": 1e-1, "log": True}, RANK: {"min": 1, "max": 128}, KIND: [None, "a", {"b": [1]}]}


@pytest.fixture(autouse=True)
def installed() -> None:
    if find_spec("optuna") is None:
        lacking("Optuna is not installed: the extra `search`")


def search(**changes: Any) -> SearchSpec:
    fields = {"method": "bayesian", "parameters": SPACE, "trials": 30, "seed": 3, "objective": "eval_loss"}
    return SearchSpec.model_validate({**fields, "direction": "minimize", **changes})


def loss(values: dict[str, Any]) -> float:
    """The lowest, 0, is at lr 1e-3, rank 40 and kind a."""
    return (math.log10(values[LR]) + 3) ** 2 + ((values[RANK] - 40) / 40) ** 2 + (values[KIND] != "a")


def searched(spec: SearchSpec, sign: float = 1.0) -> list[ValuedTrial]:
    found: list[ValuedTrial] = []
    while (number := len(found) + 1) <= spec.trials:
        values = drawn_values(spec, number, number)
        if values is None:
            answer = json.dumps(propose(question(spec, found, 1, seed=number)))
            values = answered_values(spec, answer.encode(), 1)
        objective = None if number == 4 else sign * loss(values[0])  # one failed
        found.append(ValuedTrial(values[0], objective))
    return found


def test_what_is_proposed_is_better_than_what_was_drawn_and_follows_from_the_seed() -> None:
    for spec, sign in ((search(), 1.0), (search(direction="maximize"), -1.0)):
        found = searched(spec, sign)
        losses = [math.inf if one.objective is None else sign * one.objective for one in found]
        assert min(losses[10:]) < min(losses[:10]) / 2, losses
        assert sorted(losses[20:])[5] < sorted(losses[:10])[5]  # not only by luck
        assert all(1e-6 <= one.values[LR] <= 1e-1 and one.values[RANK] in range(1, 129) for one in found)
    assert searched(search(trials=15)) == searched(search(trials=15)) != searched(search(trials=15, seed=4))


def test_a_process_answers_as_the_function_does_for_a_whole_generation() -> None:
    spec = search(parallel=3)
    drawn = drawn_values(spec, 1, 10)
    assert drawn is not None
    posed = question(spec, [ValuedTrial(values, loss(values)) for values in drawn], 3, seed=2**32 - 1)
    process = ProposerProcess(json.dumps(posed).encode())
    answer = poll(process.answer, "the proposer answers", timeout=60, pause=0.05)
    assert answer is not None
    values = answered_values(spec, answer, 3)
    assert values == answered_values(spec, json.dumps(propose(posed)).encode(), 3)
    assert len({json.dumps(one) for one in values}) == 3  # trials that train at once are not the same one


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ValueError('no such space')", "it ended with 1: ValueError: no such space"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it ended with -9: without a message"),
        ("import time; time.sleep(60)", "it has not answered within 1 s"),
    ],
)
def test_a_process_that_fails_or_takes_too_long_is_ended_and_reports_it(program: str, message: str) -> None:
    process = ProposerProcess(b"{}", (sys.executable, "-c", program), seconds=1.0 if "sleep" in program else 60.0)

    def refused() -> str:
        try:
            return "" if process.answer() is None else "answered"
        except ValueError as error:
            return str(error)

    assert poll(refused, "it is over", timeout=60, pause=0.05) == message
    assert process._process.poll() is not None
