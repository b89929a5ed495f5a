"""Models that graders of GRPO's rewards ask: which can be named, what a job waits for and sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.inputs.of_methods import with_grading_models
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.methods import RewardSpec
from tests.unit.asking_graders import LABEL, SCORE
from tests.unit.based_jobs import LORA, ROWS, add, request

FIELD = "algorithm_config.rewards.0.check.grader"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", devices=("cpu",), model_roots=(tmp_path / "models",))


def spec_of(grader: dict[str, Any], store: Store | None, settings: Settings) -> JobSpec:
    config = {"type": "grpo", "rewards": [{"check": {"type": "grader", "grader": grader}}]}
    resolution = resolve(request("org/policy", "dpo", "next", algorithm_config=config), ProviderOptions(), settings)
    fields = with_grading_models(resolution.fields, settings, store)
    return JobSpec.of(**{**fields, "dataset": ROWS, "validation": None})


def test_a_job_comes_after_those_that_make_its_graders(store: Store, settings: Settings, tmp_path: Path) -> None:
    base = tmp_path / "models" / "base"
    adapter = add(store, "adapter", tmp_path, model=str(base), lora=LORA)
    whole = add(store, "whole", tmp_path)
    named = {"a": "job:adapter", "b": "ft:gpt:trl::whole:ckpt-step-4", "c": "org/judge"}
    graders = {name: {**(LABEL if name == "b" else SCORE), "model": model} for name, model in named.items()}
    spec = spec_of({"type": "multi", "name": "m", "graders": graders, "calculate_output": "a + b + c"}, store, settings)
    assert spec.after == ("adapter", "whole")
    (source,) = spec.method.rewards  # type: ignore[union-attr]
    one, two, three = source.grading
    assert (one.model, one.adapter and one.adapter.directory) == (str(base), adapter.checkpoint_dir / "final")
    assert (two.directory, two.adapter, three.model) == (whole.checkpoint_dir / "checkpoint-4", None, "org/judge")
    assert [(job.job_uuid, job.checkpoint) for job in spec.jobs_read] == [
        ("adapter", "final"),
        ("whole", "checkpoint-4"),
    ]
    assert spec.method.grading_models == (one, two, three)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("job:typo", "there is no such job here"),
        ("ft:typo", "there is no such job here"),
        ("job:next", "a job cannot be graded by its own result"),
        ("job:scores", "job 'scores' trains a reward model, which writes no text"),
        ("job:whole/other", "'other' is no checkpoint"),
        ("job:/", "send ft:NAME"),
        ("/elsewhere", "must lie below one of the configured model_roots"),
    ],
)
@pytest.mark.parametrize("kind", ["alone", "multi"])
def test_models_that_cannot_grade_are_refused_by_their_field(
    store: Store, settings: Settings, tmp_path: Path, model: str, why: str, kind: str
) -> None:
    add(store, "whole", tmp_path)
    add(store, "scores", tmp_path, method=RewardSpec())
    grader = {**SCORE, "model": model}
    if kind == "multi":
        grader = {"type": "multi", "name": "m", "graders": {"a": grader}, "calculate_output": "a"}
    with pytest.raises(InvalidRequest) as refused:
        spec_of(grader, store, settings)
    assert refused.value.field == (f"{FIELD}.graders.a.model" if kind == "multi" else f"{FIELD}.model")
    assert why in str(refused.value)
    if model == "job:typo":
        with pytest.raises(InvalidRequest, match="there is no such job here"):
            spec_of(grader, None, settings)
