"""Metrics that are read a step later: the same numbers, events, checkpoints and ends as of those read in their step."""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer
from trl.models.activation_offloading import OffloadActivations

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import session
from llama_stack_provider_trl.recipes.trainer import later_metrics
from llama_stack_provider_trl.recipes.trainer.base import RecipeTrainer
from llama_stack_provider_trl.recipes.trainer.callbacks import Decision, JobCallback
from llama_stack_provider_trl.recipes.trainer.later_metrics import DeviceClock, LaterMetrics, why_in_step
from llama_stack_provider_trl.recipes.trainer.sft import SftRecipe
from llama_stack_provider_trl.recipes.trainer.trl_patches import OVERRIDDEN
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.evaluations import EarlyStoppingTracker
from llama_stack_provider_trl.specs.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Reason,
    Warned,
)
from llama_stack_provider_trl.specs.job import EarlyStoppingSpec, JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import CpoSpec, KtoSpec, OrpoSpec
from tests.process.rank_numbers import spec_of
from tests.process.supervised import GRPO, UNPAIRED
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SFT_ROWS, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

TIMED = ("seconds", "per_second", "memory", "runtime")
IN_STEP, LATER = "never", "always"
SMALL: dict[str, Any] = {"n_epochs": 2, "batch_size": 2, "rows": SFT_ROWS[:8]}
"""Four steps in each of two epochs."""
JOBS: dict[str, dict[str, Any]] = {
    "sft": {"eval_steps": 3, "validation_rows": SFT_ROWS[:3], "gradient_accumulation_steps": 2, "n_epochs": 4},
    "sft-rarely": {"logging_steps": 3, "save_steps": 5},
    "dpo-lora": {"algorithm": "dpo", "lora": LORA, "rows": DPO_ROWS[:8], "save_steps": 3},
    "kto": {"algorithm": "kto", "rows": UNPAIRED[:8], "method": KtoSpec(), "save_steps": 3},
    "orpo": {"algorithm": "orpo", "rows": DPO_ROWS[:8], "method": OrpoSpec(), "save_steps": 3},
    "cpo-lora": {"algorithm": "cpo", "lora": LORA, "rows": DPO_ROWS[:8], "method": CpoSpec(), "save_steps": 3},
}


def small_job(root: Path, read: str, **changes: Any) -> JobSpec:
    given = {**SMALL, **changes}
    return job_spec(root, tiny_model(), given.pop("algorithm", "sft"), read_metrics_later=read, **given)


def untimed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not any(part in name for part in TIMED)}


def story(events: list[Event]) -> list[tuple[Any, ...]]:
    """What an attempt reports, in its order; checkpoints, which a thread reports, behind the rest."""
    points = [
        (type(event).__name__, event.step, event.epoch, untimed(event.metrics), getattr(event, "tokens_seen", None))
        if isinstance(event, Progress | Evaluated)
        else (type(event).__name__, getattr(event, "step", None), getattr(event, "message", None))
        for event in events
        if isinstance(event, Progress | Evaluated | Warned | Paused | Failed | Finished)
    ]
    saved = [
        (event.kind, event.step, event.epoch, event.train_loss, event.validation_loss)
        for event in of_kind(events, CheckpointSaved)
    ]
    return points + saved


def files(spec: JobSpec) -> dict[str, Any]:
    """What a job leaves of its checkpoints: bytes, and of the state what no clock decides."""
    found: dict[str, Any] = {}
    for path in sorted(spec.checkpoint_dir.glob("*/*")):
        name = str(path.relative_to(spec.checkpoint_dir))
        if path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            del state["log_history"]  # with the times of evaluations; after a resume also that of its checkpoint
            found[name] = state
        elif path.suffix == ".safetensors" or path.name in ("recipe_state.json", "scheduler.json"):
            found[name] = path.read_bytes()
    return found


def both(root: Path, **changes: Any) -> list[Event]:
    """Events of a job whose metrics are read later, which are those of one whose metrics are not."""
    told, left = {}, {}
    for read in (IN_STEP, LATER):
        spec = small_job(root / read, read, **changes)
        _, events = run(root / read, spec)
        effective = of_kind(events, Prepared)[0].effective
        assert effective.get("metrics_read") == (None if read == IN_STEP else "a step later")
        told[read], left[read] = story(events), files(spec)
    assert told[LATER] == told[IN_STEP]
    assert left[LATER] == left[IN_STEP]
    return events


@contextmanager
def holding(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Steps whose metrics are read later."""
    held: list[int] = []
    hold = LaterMetrics._hold

    def noted(self: LaterMetrics, *args: Any) -> Any:
        held.append(self.state.global_step)
        return hold(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LaterMetrics, "_hold", noted)
        yield held


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        # Not those before an evaluation, a save and the end. Two epochs are as many steps as without accumulation.
        ("sft", [1, 2, 4, 5, 7]),
        ("dpo-lora", [1, 2, 4, 5, 7]),
        ("kto", [1, 2, 4, 5, 7]),
        *in_full(
            ("sft-rarely", [3, 6]),
            ("orpo", [1, 2, 4, 5, 7]),
            ("cpo-lora", [1, 2, 4, 5, 7]),
        ),
    ],
)
def test_what_is_read_later_is_what_the_step_had(
    kind: str, held: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, metrics, the order of events, checkpoints with their state, and the result."""
    with holding(monkeypatch) as found:
        events = both(tmp_path, **JOBS[kind])
    assert found == held
    assert [event.step for event in of_kind(events, Progress)] == ([3, 5, 6, 8] if "rarely" in kind else [*range(1, 9)])


def test_two_ranks_read_later_what_they_had_in_their_step(ranks: Ranks, tmp_path: Path) -> None:
    told, left = [], []
    for read in (IN_STEP, LATER):
        spec = spec_of(tmp_path / read, "sft", 2, read_metrics_later=read, save_steps=4)
        codes, events = ranks.run(tmp_path / read / "run", spec)
        assert codes == [0, 0], [event.message for event in of_kind(events, Failed)]
        assert of_kind(events, Prepared)[0].effective.get("metrics_read") == (
            None if read == IN_STEP else "a step later"
        )
        assert all(len(point.rank_memory_bytes or ()) == 2 for point in of_kind(events, Progress))
        told.append(story(events))
        left.append(files(spec))
    assert told[1] == told[0]
    assert left[1] == left[0]


# --- the four guarantees of docs/explanation/gpu.md -------------------------------------------------------------------


@pytest.mark.parametrize("save_steps", [None, 1], ids=["between saves", "at a save"])
def test_a_loss_that_is_no_number_ends_the_job_at_its_step_before_that_is_saved(
    save_steps: int | None, tmp_path: Path
) -> None:
    ruinous = OptimizerSpec(learning_rate=1e38, max_grad_norm=0.0)
    events = both(tmp_path, optimizer=ruinous, save_steps=save_steps)
    (failed,) = of_kind(events, Failed)
    step = of_kind(events, Progress)[-1].step
    assert failed.reason is Reason.diverged
    assert f"at step {step}," in failed.message
    assert [event.step for event in of_kind(events, CheckpointSaved)] == [*range(1, step if save_steps else 1)]


def test_a_step_that_fails_because_the_one_before_had_no_numbers_has_that_as_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = SftRecipe.compute_loss

    def checked(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            raise RuntimeError("CUDA error: device-side assert triggered")
        loss = compute(self, model, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 2 else loss

    monkeypatch.setattr(SftRecipe, "compute_loss", checked)
    (failed,) = of_kind(both(tmp_path), Failed)
    assert "loss became nan at step 3" in failed.message


def test_a_resumed_attempt_repeats_no_metric_and_skips_none(tmp_path: Path) -> None:
    spec = small_job(tmp_path, LATER, save_steps=3)
    _, whole = run(tmp_path / "whole", spec)
    left = files(spec)
    status, events = run(tmp_path / "again", spec, spec.checkpoint_dir / "checkpoint-3")
    assert status == 0
    assert [entry for entry in story(events) if entry[0] == "Progress"] == [
        entry for entry in story(whole) if entry[0] == "Progress" and entry[1] > 3
    ]
    assert files(spec) == left


def test_early_stopping_and_a_pause_end_training_after_the_step_that_they_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyStoppingTracker, "should_stop", lambda self, metrics, step: step == 4)
    monkeypatch.setattr(EarlyStoppingTracker, "stop_message", lambda *_: "ended at step 4")
    stopped = {"eval_steps": 2, "early_stopping": EarlyStoppingSpec(patience=2), "validation_rows": SFT_ROWS[:2]}
    events = both(tmp_path / "stopped", **stopped)
    assert (of_kind(events, Progress)[-1].step, of_kind(events, Finished)[0].step) == (4, 4)

    def decide(self: JobCallback) -> Decision:
        step = self.trainer.state.global_step
        return Decision.stop if step == 3 else Decision.save if step == 2 else Decision.proceed

    monkeypatch.setattr(JobCallback, "decide", decide)
    events = both(tmp_path / "paused")
    assert (of_kind(events, Progress)[-1].step, of_kind(events, Paused)[0].step) == (3, 3)
    assert [event.step for event in of_kind(events, CheckpointSaved)] == [2, 3]


class PlayedEvent:
    """A point in the queue of a GPU that has computed it when it is waited for; `queued_for` seconds after."""

    now = 0.0
    done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = max(PlayedEvent.now, PlayedEvent.done)

    def synchronize(self) -> None:
        PlayedEvent.now = max(PlayedEvent.now, self.at)

    def elapsed_time(self, other: PlayedEvent) -> float:
        return 1000 * (other.at - self.at)


def test_the_time_of_a_step_is_the_one_at_which_the_device_had_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python queues in half a second what a GPU computes in two, or is late by five seconds."""
    monkeypatch.setattr(torch.cuda, "Event", PlayedEvent)
    monkeypatch.setattr(later_metrics.time, "perf_counter", lambda: PlayedEvent.now)
    monkeypatch.setattr(PlayedEvent, "now", 100.0)
    monkeypatch.setattr(PlayedEvent, "done", 100.0)
    clock = DeviceClock(torch.device("cuda"))
    callback: Any = object.__new__(JobCallback)
    callback.trainer, callback._tokens, callback._parallel = SimpleNamespace(clock=clock), 0.0, None
    callback._busy_since = None

    def queue_step() -> Any:
        PlayedEvent.now += 0.5
        PlayedEvent.done = max(PlayedEvent.now, PlayedEvent.done) + 2.0
        return clock.mark()

    callback.on_step_begin(None, None, None)
    first = queue_step()
    found = []
    for number, late in enumerate((0.0, 5.0, 0.0, 0.0), start=1):
        second = queue_step()
        PlayedEvent.now += late
        tokens = {"num_tokens": 100.0 * number}
        found.append(callback._tokens_per_second(tokens, clock.time_of(first)))
        first = second
    assert found == [40.0, 50.0, 50.0, 25.0]  # the GPU had nothing to do for two seconds
    first.synchronize()
    assert clock.now() == first.at  # a step that is read in its step


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("no memory"), JobFailure(Reason.rank_failed, "a test")])
def test_a_failure_of_the_next_step_follows_the_metrics_of_the_one_before(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = SftRecipe.compute_loss

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            raise error
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(SftRecipe, "compute_loss", failing)
    events = both(tmp_path)
    assert [event.step for event in of_kind(events, Progress)] == [1, 2]
    assert of_kind(events, Failed)[0].reason is (
        Reason.out_of_memory if isinstance(error, MemoryError) else Reason.rank_failed
    )


# --- where Python waits -----------------------------------------------------------------------------------------------


ON_THE_CPU = {
    "get_batch_samples": "collates rows, which are in CPU memory",
    "_are_alike": "of the head that GPUs do not have",
}
"""What waits for no GPU, by the function that it is in."""


class Waits(TorchDispatchMode):
    """Counts what would wait for a device, by the function that it is in."""

    OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.OPERATORS:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        names, frame = [], sys._getframe(1).f_back
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        known = ("read_metrics", "_maybe_log_save_evaluate", *ON_THE_CPU)
        self.found[next((name for name in known if name in names), " < ".join(names[:6]))] += 1


def waits_of(root: Path, read: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Counter[str]:
    """Where Python waits from the begin of the second step to the end of the last but one."""
    waits = Waits()

    class Watched(JobCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step == 1:
                waits.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == state.max_steps:
                waits.__exit__(None, None, None)
            super().on_step_end(args, state, control, **kwargs)

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if waits in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
                waits.note()
            return method(self, *args, **kwargs)

        return noted

    with monkeypatch.context() as patch:
        patch.setattr(session, "JobCallback", Watched)
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
        status, _ = run(root, small_job(root, read, n_epochs=1, **changes))
    assert status == 0
    return waits.found


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 1, "gradient_accumulation_steps": 2}, {"algorithm": "dpo", "rows": DPO_ROWS[:8]}],
    ids=["sft", "dpo"],
)
def test_nothing_in_a_step_waits_for_the_device_but_the_read_behind_the_next_forward(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step = waits_of(tmp_path / "in-step", IN_STEP, monkeypatch, **changes)
    later = waits_of(tmp_path / "later", LATER, monkeypatch, **changes)
    assert set(in_step) - set(ON_THE_CPU) == {"_maybe_log_save_evaluate"}
    assert set(later) - set(ON_THE_CPU) == {"read_metrics"}


# --- where it is off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "device", "may"),
    [
        ("auto", "cpu", False),
        ("auto", "mps", False),
        ("auto", "cuda:1", True),
        ("never", "cuda", False),
        ("always", "cpu", True),
    ],
)
def test_metrics_are_read_later_by_themselves_on_gpus(read: str, device: str, may: bool, tmp_path: Path) -> None:
    assert job_spec(tmp_path, tmp_path, read_metrics_later=read).may_read_later(device) is may


def test_a_model_that_answers_prompts_has_its_metrics_read_in_their_step_and_the_record_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for read in (IN_STEP, LATER):
        changes = {"algorithm": "grpo", "rows": SFT_ROWS[:4], "method": GRPO, "n_epochs": 1}
        with holding(monkeypatch) as held:
            status, events = run(tmp_path / read, small_job(tmp_path / read, read, **changes))
        assert (status, held) == (0, [])
        told.append(story(events))
    why = of_kind(events, Prepared)[0].effective["metrics_read"]
    assert why == f"in their step: {why_in_step(small_job(tmp_path, LATER, algorithm='grpo', method=GRPO))}"
    assert told[1] == told[0]
    averaging = job_spec(tmp_path, tmp_path, averaging=AveragingSpec(interval=2), ranks=2)
    assert "workers with weights of their own" in why_in_step(averaging)


def test_metrics_are_read_in_their_step_where_activation_offloading_waits_in_each(tmp_path: Path) -> None:
    offloading = job_spec(tmp_path, tmp_path, activation_offloading=True)
    assert why_in_step(offloading) == "enable_activation_offloading waits for the device in every micro step"
    assert not why_in_step(offloading.changed(activation_offloading=False))
    assert "synchronize()" in inspect.getsource(OffloadActivations.__exit__), "TRL waits no more: read them later"


# --- What is overridden -----------------------------------------------------------------------------------------------


def test_every_private_method_of_trainer_that_is_overridden_is_required_of_its_release() -> None:
    ours = [one for one in RecipeTrainer.__mro__ if one.__module__.startswith("llama_stack_provider_trl.")]
    overridden = {name for one in ours for name in vars(one) if hasattr(Trainer, name) and callable(vars(one)[name])}
    assert {name for name in overridden if name[0] == "_" != name[1]} == set(OVERRIDDEN)
