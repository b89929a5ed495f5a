"""Distillation: how it is requested, what is refused, and which jobs can be its teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.demands import Demand
from llama_stack_provider_trl.jobs.inputs.bases import check_checkpoints
from llama_stack_provider_trl.jobs.inputs.of_methods import with_teacher
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.methods import RewardSpec
from tests.unit.based_jobs import LORA, add, complete, request
from tests.unit.teacher_requests import method_of, spec_of
from tests.unit.teacher_requests import settings as settings


def test_a_method_gets_its_parameters_and_its_teacher_is_the_reference(settings: Settings) -> None:
    trusted = settings.model_copy(update={"trust_remote_code": ("org/teacher@abc",)})
    given = {"beta": 0.5, "temperature": 0.7, "top_p": 0.9, "max_completion_length": 32, "lmbda": 1}
    spec = spec_of(given, trusted)
    method = method_of(spec)
    assert (method.beta, method.temperature, method.top_p, spec.method.answer_tokens) == (0.5, 0.7, 0.9, 32)
    assert (spec.reference_source.model, spec.reference_source.revision) == ("org/teacher", "abc")
    assert (spec.reference_source.trust_remote_code, spec.source.trust_remote_code) == (True, False)
    assert (spec.sequences_per_row, spec.has_pairs, spec.after) == (1, False, ())
    plain = method_of(spec_of({}, settings))
    assert (plain.beta, plain.temperature, plain.top_p, plain.max_completion_length) == (1, 1, 1, 256)


def test_what_holds_on_one_machine_only_is_in_no_checkpoint_and_other_machines_find_the_teacher(
    settings: Settings,
) -> None:
    spec = spec_of({}, settings)
    here = method_of(spec).teacher.model_copy(update={"path": Path("/cache/teacher")})
    placed = spec.changed(method=method_of(spec).with_reference(source=here))
    assert placed.reference_source.location == "/cache/teacher"
    assert placed.without_model_paths() == spec
    assert method_of(spec).teacher.model == "org/teacher"


@pytest.mark.parametrize(
    ("config", "options", "field", "words"),
    [
        ({"teacher": None}, {}, "teacher", "name the teacher"),
        ({"teacher": ""}, {}, "teacher", "name the teacher"),
        ({"teacher": "job:"}, {}, "teacher", "send job:NAME"),
        ({"teacher": "job:../a"}, {}, "teacher", "send job:NAME"),
        ({"teacher": "job:a/"}, {}, "teacher", "send job:NAME"),
        ({"teacher": "/nowhere/model"}, {}, "teacher", "no such directory"),
        ({"lmbda": 0.5}, {}, "lmbda", "the model answers all prompts itself"),
        ({"lmbda": 0}, {}, "lmbda", "the model answers all prompts itself"),
        ({"beta": 1.5}, {}, "beta", "less than or equal to 1"),
        ({"beta": -0.1}, {}, "beta", "greater than or equal to 0"),
        ({"temperature": 0}, {}, "temperature", "greater than 0"),
        ({"top_p": 0}, {}, "top_p", "greater than 0"),
        ({"top_k": 5}, {}, "top_k", "distillation has no such field"),
        ({"num_generations": 5}, {}, "num_generations", "distillation has no such field"),
        ({"max_completion_length": 64}, {"max_seq_length": 64}, "max_completion_length", "no token for a prompt"),
        ({}, {"reference_model": "org/b"}, "provider_options.reference_model", "is its teacher"),
        ({}, {"precompute_reference": True}, "provider_options.precompute_reference", "is its teacher"),
        ({}, {"truncation_side": "left"}, "provider_options.truncation_side", "cuts no prompt"),
        ({}, {"label_smoothing": 0.1}, "provider_options.label_smoothing", "smoothed labels"),
        ({}, {"lora": {"quantize_base": True}}, "provider_options.lora.quantize_base", "4 bits"),
        ({}, {"resources": {"nodes": 2}}, "provider_options.resources.nodes", "on the ranks of one node"),
        ({}, {"nproc_per_node": 2, "averaging": {"interval": 4}}, "provider_options.averaging", "means over all ranks"),
    ],
)
def test_what_a_distillation_cannot_do_is_refused_by_name(
    settings: Settings, config: Any, options: Any, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_of(config, settings, **options)
    assert refused.value.field == (field if field.startswith("provider_options.") else f"algorithm_config.{field}")
    assert words in str(refused.value)


def test_held_out_rows_are_refused_by_name(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match=r"validation_dataset_id='more' .*distillation evaluates on no held-out"):
        spec_of({}, settings, data={"validation_dataset_id": "more"})


def test_a_distillation_comes_after_the_job_that_is_its_teacher_and_keeps_its_checkpoint(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    large = add(store, "large", tmp_path)
    add(store, "first", tmp_path)
    spec = spec_of({"teacher": "job:large"}, settings, store, after=["first"])
    assert spec.after == ("large", "first")
    method = method_of(spec)
    assert method.teacher.model == str(large.checkpoint_dir / "final")
    assert method.teacher.made_by == BaseJob(job_uuid="large", checkpoint="final")
    assert spec.bases == ()  # the model that it trains is no job's
    store.add_job(spec, "digest")
    assert store.chains.needed_checkpoints("large") == {"final"}
    assert store.chains.needed_checkpoints("first") == set()
    with pytest.raises(InvalidRequest, match=r"algorithm_config.teacher='job:large/final' .*is damaged or gone") as bad:
        check_checkpoints(spec)
    assert bad.value.field == "algorithm_config.teacher"


@pytest.mark.parametrize("options", [{}, {"resources": {"cpus": 2}}])
def test_a_distillation_runs_where_its_teacher_is_sent_and_is_cancelled_with_the_job_that_makes_it(
    store: Store, settings: Settings, tmp_path: Path, options: Any
) -> None:
    add(store, "large", tmp_path)
    spec = spec_of({"teacher": "job:large/checkpoint-4"}, settings, store, cancel_with=True, **options)
    assert not Demand.of(spec).home
    assert str(tmp_path / "checkpoints" / "large" / "checkpoint-4") in [source.model for source in spec.models]
    assert (spec.after, spec.cancel_with) == (("large",), True)


def test_the_merged_checkpoint_of_an_adapter_is_a_teacher(store: Store, settings: Settings, tmp_path: Path) -> None:
    add(store, "merging", tmp_path, lora=LORA, merge_adapter=True)
    spec = spec_of({"teacher": "job:merging"}, settings, store)
    assert method_of(spec).teacher.model == str(tmp_path / "checkpoints" / "merging" / "merged")


@pytest.mark.parametrize(
    ("teacher", "options", "words"),
    [
        ("job:typo", {}, "there is no such job here"),
        ("job:next", {}, "a job cannot begin with its own result"),
        ("job:judge", {}, "trains a reward model"),
        ("job:adapter", {}, "job 'adapter' trains an adapter, and a teacher is a whole model"),
        ("job:adapter/checkpoint-4", {}, "job 'adapter' trains an adapter, and a teacher is a whole model"),
        ("job:large/other", {}, "'other' is no checkpoint"),
        ("job:done/checkpoint-9", {}, "job 'done' has no checkpoint 'checkpoint-9'"),
    ],
)
def test_other_jobs_are_refused_by_name(
    store: Store, settings: Settings, tmp_path: Path, teacher: str, options: Any, words: str
) -> None:
    for name, changes in {
        "large": {},
        "done": {},
        "judge": {"method": RewardSpec()},
        "adapter": {"lora": LORA},
    }.items():
        add(store, name, tmp_path, **changes)
    complete(store, "done")
    with pytest.raises(InvalidRequest) as refused:
        spec_of({"teacher": teacher}, settings, store, **options)
    assert refused.value.field == "algorithm_config.teacher"
    assert words in str(refused.value)
    with pytest.raises(InvalidRequest, match="there is no such job here"):
        spec_of({"teacher": "job:large"}, settings)  # a job that is run by hand has no other ones


@pytest.mark.parametrize(
    ("vocab", "config", "problem"),
    [
        ({"a": 0, "b": 1}, {}, ""),
        (
            {"a": 1, "b": 0},
            {},
            "which has another number for the token 'a': name a teacher with the same",
        ),
        ({"a": 0}, {}, "whose token 'b' it lacks: name a teacher"),
        ({"a": 0, "b": 1, "c": 2}, {}, "which lacks its token 'c': name a teacher"),
        ({"a": 0}, {"added_tokens_decoder": {"1": {"content": "b"}}}, ""),
        ({"a": 0, "b": 1, "<pad>": 2, "[MASK]": 3}, {}, ""),
        (["a", "b"], {}, ""),
    ],
    ids=["same", "renumbered", "fewer", "more", "added by its configuration", "special", "another form"],
)
def test_a_teacher_with_another_vocabulary_is_refused_as_far_as_its_files_are_certain(
    settings: Settings, tmp_path: Path, vocab: Any, config: Any, problem: str
) -> None:
    for name, tokens in (("student", {"a": 0, "b": 1}), ("teacher", vocab)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    (tmp_path / "teacher" / "tokenizer_config.json").write_text(json.dumps(config))
    student, teacher = (str(tmp_path / name) for name in ("student", "teacher"))
    given = request(student, "dpo", algorithm_config={"type": "distillation", "teacher": teacher})
    fields = resolve(given, ProviderOptions(), settings).fields
    if not problem:
        assert with_teacher(fields, settings, None) == fields
        return
    with pytest.raises(InvalidRequest) as refused:
        with_teacher(fields, settings, None)
    assert (refused.value.field, refused.value.value) == ("algorithm_config.teacher", teacher)
    assert f"its tokenizer is not that of {student!r}, {problem}" in str(refused.value)
