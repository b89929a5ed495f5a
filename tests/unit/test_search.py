"""Searches from request to record: their trials, refusals by name, and what becomes of them in the store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict, LimitReached
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.inputs.bases import find_base
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.submission import Submitter
from llama_stack_provider_trl.requests.bases import NamedModel
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.search import MOST_TRIALS, resolve_search
from llama_stack_provider_trl.requests.settings import Request
from llama_stack_provider_trl.specs.averaging import AveragingSpec
from llama_stack_provider_trl.specs.events import CheckpointSaved, Evaluated, Finished, Paused
from llama_stack_provider_trl.specs.job import DpoSpec
from tests.unit.search_world import HALVING, LR, RANK, World, prepared, sft, trials_of

GRID = {"method": "grid", "parameters": {LR: [1e-4, 1e-3], RANK: [4, 8, 16]}}


def grid_of(path: str, *values: Any) -> dict[str, Any]:
    return {"method": "grid", "parameters": {path: list(values)}}


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, {}])
def test_nothing_is_no_search(nothing: Any) -> None:
    assert resolve_search(sft(nothing), ProviderOptions()) is None


def test_a_grid_has_every_combination_in_the_order_of_its_values() -> None:
    found = trials_of(GRID)
    assert found == [{LR: lr, RANK: rank} for lr in (1e-4, 1e-3) for rank in (4, 8, 16)]


def test_each_trial_is_a_request_of_its_own_with_its_values_in_place() -> None:
    search = {"method": "grid", "parameters": {LR: {"values": [1e-3]}, "provider_options.lora_dropout": [0.1, 0.2]}}
    found = resolve_search(sft(search), ProviderOptions(lora_dropout=0.5, keep_last=2))
    assert found is not None
    second = found.trials[1]
    assert (second.request.job_uuid, second.request.hyperparam_search_config) == ("s-trial-2", None)
    assert second.request.training_config.optimizer_config.lr == 1e-3  # type: ignore[union-attr]
    assert (second.options.lora_dropout, second.options.keep_last) == (0.2, 2)


def test_draws_follow_from_the_seed_and_stay_in_their_ranges() -> None:
    ranges = {LR: {"min": 1e-5, "max": 1e-2, "log": True}, RANK: {"min": 4, "max": 64}, "model": ["a/b", "c/d"]}
    ranges |= {
        "provider_options.lora_dropout": {"min": 0.0, "max": 0.5},
        "algorithm_config.alpha": {"min": 1, "max": 4, "log": True},
    }
    search = {"method": "random", "trials": 200, "seed": 7, "parameters": ranges}
    found = trials_of(search)
    assert found == trials_of(search) != trials_of({**search, "seed": 8})
    rates = [one[LR] for one in found]
    assert 1e-5 <= min(rates) < 2e-5
    assert 5e-3 < max(rates) <= 1e-2
    assert 60 < sum(rate < math.sqrt(1e-5 * 1e-2) for rate in rates) < 140  # by the logarithm
    assert {type(one[RANK]) for one in found} == {int}
    assert (min(one[RANK] for one in found), max(one[RANK] for one in found)) == (4, 64)
    assert {one["algorithm_config.alpha"] for one in found} == {1, 2, 3, 4}
    assert {one["model"] for one in found} == {"a/b", "c/d"}
    assert 0.0 <= min(one["provider_options.lora_dropout"] for one in found) < 0.1


# --- refusals ---------------------------------------------------------------------------------------------------------

PARAMETERS = "hyperparam_search_config.parameters."


@pytest.mark.parametrize(
    ("search", "field", "hint"),
    [
        ({"parameters": {LR: [1]}}, "hyperparam_search_config.method", "required"),
        ({"method": "grid"}, "hyperparam_search_config.parameters", "required"),
        ({"method": "grid", "parameters": {}}, "hyperparam_search_config.parameters", "at least 1"),
        ({**GRID, "method": "annealing"}, "hyperparam_search_config.method", "expected one of grid, random, bayesian"),
        ({**GRID, "budget": 3}, "hyperparam_search_config.budget", "no such field: leave it out"),
        ({**GRID, "seed": 1}, "hyperparam_search_config.seed", "a grid draws nothing"),
        ({**GRID, "trials": 5}, "hyperparam_search_config.trials", "6 combinations"),
        ({"method": "random", "parameters": {LR: [1]}}, "hyperparam_search_config.trials", "needs their number"),
        ({"method": "random", "parameters": {LR: [1]}, "trials": 10**4}, "hyperparam_search_config.trials", "256"),
        ({"method": "grid", "parameters": {LR: list(range(1, MOST_TRIALS + 2))}}, PARAMETERS[:-1], "257 combinations"),
        ({"method": "grid", "parameters": {LR: {"min": 1, "max": 2}}}, PARAMETERS + LR, "a grid needs a list"),
        ({"method": "grid", "parameters": {LR: 1e-3}}, PARAMETERS + LR, "send a list of values"),
        ({"method": "grid", "parameters": {LR: []}}, PARAMETERS + LR + ".values", "at least 1"),
        ({"method": "grid", "parameters": {LR: [1, 1]}}, PARAMETERS + LR, "1 is there twice"),
        ({"method": "grid", "parameters": {LR: {"values": [1], "max": 2}}}, PARAMETERS + LR, "exclude each other"),
        ({"method": "grid", "parameters": {LR: {"step": 1}}}, PARAMETERS + LR + ".step", "there is no such field"),
        ({"method": "random", "trials": 2, "parameters": {LR: {"min": 1}}}, PARAMETERS + LR, "both `min` and `max`"),
        ({"method": "random", "trials": 2, "parameters": {LR: {"min": 2, "max": 1}}}, PARAMETERS + LR, "below `max`"),
        (
            {"method": "random", "trials": 2, "parameters": {LR: {"min": 0, "max": 1, "log": True}}},
            *(PARAMETERS + LR, "`min` above 0"),
        ),
        (
            {"method": "random", "trials": 2, "parameters": {LR: {"min": 0.0, "max": math.inf}}},
            PARAMETERS + LR + ".max",
            "finite",
        ),
        (
            {"method": "random", "trials": 2, "parameters": {LR: {"min": 1, "max": 10**400, "log": True}}},
            *(PARAMETERS + LR + ".max", "a number of at most 1e+15"),
        ),
        (
            {"method": "random", "trials": 2, "parameters": {LR: {"min": 1e-300, "max": 1, "log": True}}},
            *(PARAMETERS + LR + ".min", "at least 1e-15"),
        ),
        (
            {"method": "grid", "parameters": {"provider_options.evaluate": [{"dataset_id": "rows"}]}},
            *(PARAMETERS + "provider_options.evaluate", "all trials have the same"),
        ),
        ({"method": "grid", "parameters": {"job_uuid": ["a"]}}, PARAMETERS + "job_uuid", "all trials have the same"),
        ({"method": "grid", "parameters": {"logger_config.wandb": [True]}}, PARAMETERS + "logger_config.wandb", "same"),
        (
            {"method": "grid", "parameters": {"provider_options.priority": ["critical"]}},
            *(PARAMETERS + "provider_options.priority", "all trials have the same"),
        ),
        (
            {"method": "grid", "parameters": {"hyperparam_search_config.method": ["grid"]}},
            *(PARAMETERS + "hyperparam_search_config.method", "all trials have the same"),
        ),
        (
            {"method": "grid", "parameters": {"algorithm_config": [{}], RANK: [4]}},
            *(PARAMETERS + RANK, "'algorithm_config', of which it is a part"),
        ),
        ({"method": "grid", "parameters": {"model.name": ["a"]}}, PARAMETERS + "model.name", "`model` is a value"),
        ({"method": "grid", "parameters": {"a..b": [1]}}, PARAMETERS + "a..b", "no path of a field"),
        ({**GRID, "direction": "up"}, "hyperparam_search_config.direction", "minimize"),
        ({**GRID, "pruning": {"method": "median"}}, "hyperparam_search_config.pruning.method", "successive_halving"),
        ({**GRID, "pruning": {**HALVING, "eta": 1}}, "hyperparam_search_config.pruning.eta", "greater than"),
        ({**GRID, "pruning": {**HALVING, "fraction": 0.1}}, "hyperparam_search_config.pruning.fraction", "one of them"),
        ({"method": "grid", "parameters": {LR: [-1.0]}}, LR, "greater than 0 (trial 1 of the search: lr=-1.0)"),
        ({"method": "grid", "parameters": {LR: ["high"]}}, LR, "valid number"),
    ],
)
def test_a_search_that_cannot_be_done_is_refused_by_name(search: Any, field: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        trials_of(search)
    assert refused.value.field == field
    assert hint in str(refused.value)


def test_an_option_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options.dropout=0.1 .*no such option.*trial 1 of the search"):
        trials_of({"method": "grid", "parameters": {"provider_options.dropout": [0.1]}})


def test_the_trials_of_a_search_repeat_no_more_text_than_is_stored_for_it() -> None:
    """200 kB with 256 trials took 100 MB of the job database, which no submit token can delete."""
    search = {"method": "random", "trials": 256, "parameters": {LR: {"min": 1e-5, "max": 1e-3}}}
    options = ProviderOptions(chat_template="{{ messages }}" * 9000)
    with pytest.raises(InvalidRequest, match=r"trials=256 .*: each trial stores a request of 126\d\d\d characters"):
        trials_of(search, options)
    assert len(trials_of({**search, "trials": 100}, options)) == 100


def test_a_search_does_not_begin_with_a_step_checkpoint_of_another_job() -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options.resume_from='other' .*job:NAME/checkpoint-N"):
        trials_of(GRID, ProviderOptions(resume_from="other"))


# --- submission -------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


RATES = {"method": "grid", "parameters": {LR: [1e-5, 1e-4, 1e-3]}}


@pytest.mark.parametrize(
    ("request_", "field", "hint"),
    [
        (
            sft(grid_of(LR + "r", 1)),
            LR + "r",
            "did you mean `lr`",
        ),
        (
            sft(grid_of("algorithm_config.rang", 1)),
            "algorithm_config.rang",
            "the fields are",
        ),
        (
            sft(grid_of("training_config.dtype", "fp32", "fp8")),
            "training_config.dtype",
            "trial 2",
        ),
        (
            sft({**GRID, "objective": "bleu"}),
            "hyperparam_search_config.objective",
            "no evaluation of this job yields it",
        ),
        (
            sft(GRID, training_config={"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2}}),
            *("hyperparam_search_config.objective", "nothing is evaluated"),
        ),
        (
            sft(grid_of("training_config.data_config.validation_dataset_id", "v", None)),
            *("hyperparam_search_config.objective", "trial 2 of the search"),
        ),
        (sft(GRID, job_uuid="x" * 119), "job_uuid", "use at most 118 characters"),
        (
            PreferenceOptimizeRequest.model_validate(
                {**sft({**GRID, "objective": "eval_mean_token_accuracy"}).model_dump(exclude_unset=True)}
            ),
            *("algorithm_config.rank", "trial 1"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_trial_is_checked_as_a_request_of_its_own(world: World, request_: Request, field: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        world.submit(request_)
    assert refused.value.field == field
    assert hint in str(refused.value)
    assert world.store.names() == []


def test_trials_whose_workers_have_weights_of_their_own_are_not_pruned(world: World) -> None:
    found = resolve_search(sft({**RATES, "pruning": HALVING}), ProviderOptions())
    assert found is not None
    world.submit(sft(None))
    averaging = AveragingSpec(interval=4)
    spec = world.store.get("s").spec.changed(averaging=averaging)
    with pytest.raises(InvalidRequest, match=r"hyperparam_search_config.pruning=.*common weights only"):
        found.trial_spec(found.trials[0], spec, spec)


def test_trials_that_are_evaluated_in_different_ways_are_not_compared(world: World) -> None:
    found = resolve_search(sft(RATES), ProviderOptions())
    assert found is not None
    world.submit(sft(None))
    spec = world.store.get("s").spec
    assert spec.data.validation is not None
    assert found.trial_spec(found.trials[0], spec, spec) == spec
    with pytest.raises(InvalidRequest, match=r"objective=.*trial 1 trains dpo and this one sft"):
        found.trial_spec(found.trials[0], spec, spec.changed(method=DpoSpec()))
    other = spec.data.validation.model_copy(update={"sha256": "f" * 64})
    with pytest.raises(InvalidRequest, match=r"objective=.*evaluated on different rows"):
        found.trial_spec(found.trials[0], spec, spec.changed(validation=other))


def test_a_search_and_its_trials_are_stored_together_and_once(world: World) -> None:
    assert world.submit(sft(RATES))
    assert not world.submit(sft(RATES))
    assert world.store.names() == ["s", "s-trial-1", "s-trial-2", "s-trial-3"]
    assert sorted(world.reads) == ["held-out", "rows"]  # of all trials
    assert (world.state(), world.state(1)) == (JobState.in_progress, JobState.scheduled)
    assert [world.store.get(f"s-trial-{n}").spec.train.optimizer.learning_rate for n in (1, 2, 3)] == [1e-5, 1e-4, 1e-3]
    with pytest.raises(JobConflict, match="made from a different request"):
        world.submit(sft(GRID))


def test_a_search_names_the_settings_that_its_trials_differ_in(world: World) -> None:
    world.submit(
        sft({**GRID, "parameters": {LR: [1e-4, 1e-3], RANK: [4], "provider_options.lora_dropout": [0.1, 0.2]}})
    )
    search = world.store.get("s").spec.search
    assert search is not None
    assert search.settings == ("lora.dropout", "optimizer.learning_rate"), "a rank of which there is one is the same"


def test_a_name_that_a_trial_needs_and_another_job_has_is_a_conflict_and_stores_nothing(world: World) -> None:
    world.submit(sft(None, job_uuid="s-trial-2"))
    with pytest.raises(JobConflict, match="'s-trial-2' exists already"):
        world.submit(sft(RATES))
    assert world.store.names() == ["s-trial-2"]


def test_trials_count_as_waiting_jobs_of_their_owner(world: World) -> None:
    with pytest.raises(LimitReached):
        world.submit(sft(RATES), Submitter("alice", 2))
    assert world.store.names() == []
    assert world.submit(sft(RATES), Submitter("alice", 3))
    assert world.store.get("s-trial-3").created_by == "alice"


def test_rows_are_split_once_for_all_trials(world: World) -> None:
    data = {"dataset_id": "rows", "batch_size": 2, "train_split_percentage": 0.5}
    world.submit(sft(RATES, training_config={"n_epochs": 1, "data_config": data}))
    parts = {
        (job.spec.data.dataset.sha256, job.spec.data.validation and job.spec.data.validation.sha256)
        for job in world.store.list()
    }
    assert len(parts) == 1


# --- what becomes of it -----------------------------------------------------------------------------------------------


def test_a_search_holds_no_device_and_its_trials_run_as_other_jobs(world: World) -> None:
    world.submit(sft(RATES))
    world.tick()
    assert world.launcher.started == ["s-trial-1-1"]
    assert world.shown()["resources_allocated"]["detail"] == "0 of 3 trials have ended"
    assert world.store.active_run_dirs() == {world.store.get("s-trial-1").run_dir}


def test_the_best_trial_is_the_result(world: World) -> None:
    world.submit(sft(RATES))
    for number, loss in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        saved = world.store.get(f"s-trial-{number}").spec.checkpoint_dir / "final"
        world.run(
            number,
            prepared(),
            Evaluated(step=8, epoch=1.0, metrics={"eval_loss": loss}),
            CheckpointSaved(
                path=saved, kind="final", step=8, epoch=1, train_loss=1.0, validation_loss=loss, perplexity=2.0
            ),
            Finished(step=8),
        )
    shown = world.shown()
    assert shown["status"] == "completed"
    assert [one["path"] for one in shown["checkpoints"]] == [
        str(world.store.get("s-trial-2").spec.checkpoint_dir / "final")
    ]
    table = shown["resources_allocated"]["search"]
    assert table["best"] == {"job_uuid": "s-trial-2", "value": 1.0, "values": {LR: 1e-4}}
    assert [(one["number"], one["state"], one["value"]) for one in table["trials"]] == [
        *((1, "completed", 3.0), (2, "completed", 1.0), (3, "completed", 2.0)),
    ]
    assert world.shown("s-trial-3")["resources_allocated"]["trial"] == {
        **{"search": "s", "number": 3, "values": {LR: 1e-3}, "pruned": None}
    }
    named = find_base(NamedModel("model", "job:s", "next"), world.store)
    assert named is not None
    assert named.spec.job_uuid == "s-trial-2"


def test_losers_end_at_a_rung_and_winners_continue_from_there_whichever_process_decides(world: World) -> None:
    world.submit(sft({**RATES, "pruning": HALVING}))
    for number, loss in [(1, 3.0), (2, 1.0)]:
        world.to_rung(number, loss)
        assert world.state(number) is JobState.paused
        world.restart()
        with pytest.raises(JobConflict, match="waits for the others to be compared at step 2: wait, or cancel it"):
            world.store.request_resume(f"s-trial-{number}")
    assert "where the trials of its search are compared" in world.store.get("s-trial-1").detail
    world.to_rung(3, 2.0)
    assert [world.state(number) for number in (1, 2, 3)] == [
        *(JobState.cancelled, JobState.launching, JobState.cancelled),
    ]
    assert world.store.get("s-trial-3").message == "pruned at step 2: eval_loss 2, cut 1"
    world.restart()
    world.run(2, prepared(2), Evaluated(step=4, epoch=1.0, metrics={"eval_loss": 0.9}), Paused(step=4))
    world.run(2, prepared(4), Evaluated(step=8, epoch=1.0, metrics={"eval_loss": 0.5}), Finished(step=8))
    assert (world.state(), world.store.get("s-trial-2").attempt) == (JobState.completed, 3)
    assert world.store.get("s-trial-2").retries_used == 0


def test_a_cancel_of_a_search_cancels_its_trials(world: World) -> None:
    world.submit(sft(RATES))
    world.tick()
    world.store.request_cancel("s")
    assert world.state() is JobState.cancelling
    for _ in range(3):
        world.tick()
    assert [world.state(number) for number in (None, 1, 2, 3)] == [JobState.cancelled] * 4
    assert world.store.get("s-trial-3").message == "its search s was cancelled"


def test_a_search_cannot_be_paused(world: World) -> None:
    world.submit(sft(RATES))
    with pytest.raises(JobConflict, match="is a search"):
        world.store.request_pause("s")


def test_a_job_cannot_begin_with_a_search_that_has_not_completed(world: World) -> None:
    world.submit(sft(RATES))
    with pytest.raises(InvalidRequest, match="its best trial is known once it has completed"):
        world.submit(sft(None, job_uuid="next", model="job:s"))


def test_a_search_is_deleted_with_its_trials_and_no_trial_without_it(world: World) -> None:
    world.submit(sft(RATES))
    with pytest.raises(JobConflict, match="is in_progress"):
        world.store.delete("s")
    world.store.request_cancel("s")
    for _ in range(3):
        world.tick()
    with pytest.raises(JobConflict, match="is a trial of the search 's'"):
        world.store.delete("s-trial-1")
    aside: list[JobRecord] = []
    world.store.delete("s", aside.append)
    assert [job.job_uuid for job in aside] == ["s", "s-trial-1", "s-trial-2", "s-trial-3"]
    assert world.store.names() == []
    assert world.submit(sft(RATES))
