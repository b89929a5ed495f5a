"""What the points of a training show to be wrong: rules on points alone, and the status that has their sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.training_signs import Watched, WatchedPoint, signs_of
from llama_stack_provider_trl.jobs.store.reader import read_watched
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.evaluations import LossWatch
from llama_stack_provider_trl.specs.events import Evaluated, Event, Prepared, Progress
from llama_stack_provider_trl.specs.job import OptimizerSpec
from llama_stack_provider_trl.specs.methods import CustomSpec, DistillationSpec, GrpoSpec, ReferenceSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.stack.responses import status_response
from tests.fakes import job_spec

GRPO = GrpoSpec(rewards=(RewardSource(name="short", function="short"),))


def points(begin: int, values: Iterable[Mapping[str, float]]) -> list[WatchedPoint]:
    return [WatchedPoint(step, dict(one)) for step, one in enumerate(values, begin)]


def curve(name: str, begin: float, end: float, count: int = 20, **more: float) -> list[dict[str, float]]:
    """Points on a line from one value to another."""
    return [{name: begin + (end - begin) * number / (count - 1), **more} for number in range(count)]


def signs(watched: Watched, total_steps: int | None = 1000, **changes: Any) -> list[str]:
    return signs_of(job_spec(optimizer=OptimizerSpec(learning_rate=1e-3), **changes), watched, total_steps)


def test_a_training_that_learns_has_no_sign() -> None:
    first, last = points(1, curve("loss", 3, 2.5, grad_norm=0.5)), points(81, curve("loss", 1.5, 1, learning_rate=1e-3))
    held_out = points(20, [{"eval_loss": value} for value in (2.0, 1.5, 1.2)])
    assert signs(Watched(first, last, held_out, last[-5:])) == []
    assert signs(Watched()) == []


@pytest.mark.parametrize(
    ("shares", "warned"),
    [([1.0] * 10, True), ([1.0] * 9 + [0.5], True), ([1.0] * 8 + [0.5] * 2, False), ([1.0] * 9, False)],
)
def test_steps_without_a_reward_signal(shares: list[float], warned: bool) -> None:
    last = points(1, [{"loss": 0.0, "frac_reward_zero_std": share} for share in shares])
    found = signs(Watched(last, last), method=GRPO)
    assert [one.startswith("no reward signal") for one in found] == [True] * warned


@pytest.mark.parametrize(
    ("begin", "end", "warned"),
    [(2.0, 2.0, True), (2.0, 2.4, True), (2.0, 1.9, False)],
)
def test_a_loss_that_does_not_fall(begin: float, end: float, warned: bool) -> None:
    watched = Watched(points(1, curve("loss", begin, begin)), points(81, curve("loss", end, end, learning_rate=1e-3)))
    assert [one.startswith("the loss does not fall") for one in signs(watched)] == [True] * warned
    custom = CustomSpec(algorithm="custom_rows", type="own", package="own", version="1")
    teacher = DistillationSpec(reference=ReferenceSpec(source=ModelSource(model="teacher")))
    for method in (GRPO, teacher, custom):  # their loss need not tell of progress
        assert signs(watched, method=method) == []
    assert signs(Watched(watched.first, points(15, curve("loss", 2, 2)))) == []  # too early: the same points
    rising = [{"loss": 2.0, "learning_rate": 1e-5 * number} for number in range(1, 21)]
    assert signs(Watched(watched.first, points(81, rising))) == []  # the warmup


def test_an_evaluation_that_rises_while_the_training_loss_falls() -> None:
    at_best, last = points(16, curve("loss", 2.0, 2.0, 5)), points(81, curve("loss", 1.0, 0.5))
    first = points(1, curve("loss", 4, 3))
    held_out = points(20, [{"eval_loss": value} for value in (1.5, 1.2, 1.3, 1.4)])
    (found,) = signs(Watched(first, last, held_out, at_best))
    assert "lowest at step 21 (1.2)" in found
    assert "set best_checkpoint" in found
    assert "set best_checkpoint" not in signs(Watched(first, last, held_out, at_best), best_checkpoint="eval_loss")[0]
    assert signs(Watched(first, last, held_out[:3], at_best)) == []  # one worse evaluation is noise
    assert signs(Watched(first, points(81, curve("loss", 2.5, 2.5, 20)), held_out, at_best)) == []  # both rise
    nothing_left = points(20, [{"eval_loss": value} for value in (0.0, 6.8e-9, 6.8e-9)])
    learned = points(16, curve("loss", 1e-7, 1e-7, 5)), points(81, curve("loss", 1e-8, 1e-8))
    assert signs(Watched(first, learned[1], nothing_left, learned[0])) == []  # a difference that is no difference


FALLS = [5.0 - 0.1 * number for number in range(50)]


@pytest.mark.parametrize(
    ("losses", "warned_at"),
    [
        ([*FALLS, *[1e-8] * 100, *[4.0] * 15, *[1e-8] * 50, *[4.0] * 30], [160]),  # once, though it comes back
        ([*FALLS, *[1e-8] * 100, *[4.0] * 9, *[1e-8] * 50], []),  # hard rows
        ([*[2.0] * 30, *[0.5, 1.4] * 60], []),  # noise
        ([*[2.0] * 30, *[30.0] * 30], [40]),
        ([*FALLS, *[1e-8] * 100, *[1e-3] * 100], []),  # next to nothing
        ([*[-5.0] * 30, *[5.0] * 30], []),  # a loss that may be negative has no multiples
    ],
)
def test_a_loss_that_blows_up_is_reported_once(losses: list[float], warned_at: list[int]) -> None:
    watch, unwatched = LossWatch(job_spec()), LossWatch(job_spec(method=GRPO))
    found = {step: text for step, loss in enumerate(losses, 1) if (text := watch.problem(step, loss))}
    assert [*found] == warned_at
    assert all(text.startswith("the loss has blown up: around step") for text in found.values())
    assert not any(unwatched.problem(step, loss) for step, loss in enumerate(losses, 1))


def test_a_gradient_that_is_always_clipped() -> None:
    first, norms = points(1, curve("loss", 3, 2)), [*range(2, 21)]
    last = points(81, [{"loss": 1.0, "grad_norm": norm} for norm in (1.5, *norms)])
    (found,) = signs(Watched(first, last))
    assert "clipped at each of the last 20 logged points" in found
    assert "is above 5, 5 times max_grad_norm=1." in found
    for healthy in ((0.9, *norms), [4.9] * 20):  # one within the clip; all a little above it
        last = points(81, [{"loss": 1.0, "grad_norm": norm} for norm in healthy])
        assert signs(Watched(first, last)) == []
    unclipped = job_spec(optimizer=OptimizerSpec(learning_rate=1e-3, max_grad_norm=0))
    assert signs_of(unclipped, Watched(first, points(81, [{"grad_norm": 9.0}] * 20)), None) == []


def test_a_learning_rate_of_0() -> None:
    flat = [{"loss": 2.0, "learning_rate": 1e-9}] * 20
    watched = Watched(points(1, flat), points(81, flat))
    (found,) = signs(watched)  # and not that the loss does not fall, which follows from it
    assert found.startswith("the learning rate is below 1e-06")
    assert [one.partition(":")[0] for one in signs(watched, 105)] == ["the loss does not fall"]  # a schedule ends at 0


def test_the_status_has_the_signs_of_the_points_that_are_stored(store: Store) -> None:
    spec = job_spec("flat")
    store.add_job(spec, "digest", ["submitted so"])
    store.launch("flat", 1, "cpu", spec.checkpoint_dir)
    events: list[Event] = [
        Prepared(total_steps=300, num_rows=1, trainable_parameters=1, total_parameters=1),
        *(Progress(step=step, epoch=0, metrics={"loss": 2.0}, peak_memory_bytes=1) for step in range(1, 201)),
        *(Evaluated(step=step, epoch=0, metrics={"eval_loss": 2.0 + step}) for step in (100, 150, 200)),
    ]
    store.apply_events("flat", 1, events, 10)
    watched = read_watched(store, "flat")
    assert [one.step for one in watched.first] == [*range(1, 21)]
    assert [one.step for one in watched.last] == [*range(181, 201)]
    assert [one.step for one in watched.evaluations] == [100, 150, 200]
    assert [one.step for one in watched.at_best] == [*range(96, 101)]
    found = status_response(store.get("flat"), [], watched=watched).resources_allocated["warnings"]
    assert [one.partition(":")[0] for one in found] == ["submitted so", "the loss does not fall"]
    assert store.database.select("select_last_evaluations", {"job_uuid": "flat", "limit": 1})[0]["step"] == 200
