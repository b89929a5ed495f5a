"""Reward models of other jobs as GRPO's rewards: which jobs can be named, and what that keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict
from llama_stack_provider_trl.jobs.inputs.of_methods import with_reward_models
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.methods import RewardSpec
from tests.unit.based_jobs import LORA, ROWS, add, complete, request

REWARD = {"method": RewardSpec(), "max_seq_length": 512, "truncation_side": "left"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", devices=("cpu",), max_nodes=2)


def spec_of(model: str, store: Store | None, settings: Settings, name: str = "next", **options: Any) -> JobSpec:
    config = {"type": "grpo", "rewards": [{"model": model, "weight": 0.5}]}
    given = ProviderOptions.parse(options)
    resolution = resolve(request("org/policy", "dpo", name, algorithm_config=config), given, settings)
    fields = with_reward_models(resolution.fields, store)
    return JobSpec.of(**{**fields, "dataset": ROWS, "validation": None})


def test_a_job_comes_after_those_whose_reward_models_it_uses_and_keeps_their_checkpoints(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    add(store, "a", tmp_path)
    judge = add(store, "judge", tmp_path, **REWARD, lora=LORA, made_by=BaseJob(job_uuid="a", checkpoint="final"))
    spec = spec_of("job:judge", store, settings, after=["a"])
    assert spec.after == ("judge", "a")
    (model,) = spec.method.reward_models
    assert (model.own.directory, model.is_adapter) == (judge.checkpoint_dir / "final", True)
    assert (model.base, model.max_seq_length, model.truncation_side) == (judge.source, 512, "left")
    assert [(job.job_uuid, job.checkpoint) for job in spec.jobs_read] == [("judge", "final"), ("a", "final")]
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.bases == ()  # the model that it trains is no job's
    store.add_job(spec, "digest")
    assert store.chains.needed_checkpoints("judge") == {"final"}
    for name in ("a", "judge"):
        complete(store, name)
        with pytest.raises(JobConflict, match="next wait for it or use its checkpoint"):
            store.delete(name)


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        ("job:typo", {}, "there is no such job here"),
        ("job:next", {}, "a job cannot be rewarded by its own result"),
        ("job:a", {}, "job 'a' trains no reward model: name a job of the type 'reward'"),
        ("job:judge/merged", {}, "job 'judge' writes no checkpoint 'merged'"),
        ("job:judge/other", {}, "'other' is no checkpoint"),
    ],
)
def test_jobs_without_a_reward_model_are_refused_by_name(
    store: Store, settings: Settings, tmp_path: Path, model: str, options: Any, why: str
) -> None:
    add(store, "a", tmp_path)
    add(store, "judge", tmp_path, **REWARD)
    with pytest.raises(InvalidRequest) as refused:
        spec_of(model, store, settings, **options)
    assert refused.value.field == "algorithm_config.rewards.0.model"
    assert why in str(refused.value)
    with pytest.raises(InvalidRequest, match="there is no such job here"):
        spec_of("job:judge", None, settings)  # a job that is run by hand has no other ones
