"""Evaluations of ensembles: which requests are taken, what their members are, and what they wait for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.inputs import vocabularies
from llama_stack_provider_trl.jobs.inputs.merges import bases_of
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import keep_rows, submit
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.untrained import evaluation_after
from llama_stack_provider_trl.requests.work import EvaluateRequest, MergeRequest
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.specs.work import EvaluateSpec
from tests.fakes import FakeLauncher, job_spec
from tests.unit.based_jobs import LORA, add, model


def request(*models: Any, **changes: Any) -> EvaluateRequest:
    named = [one if isinstance(one, dict) else {"model": one} for one in models]
    return EvaluateRequest.model_validate({"job_uuid": "e", "dataset_id": "rows", "models": named, **changes})


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"models": None}, "model", "name what is evaluated"),
        ({"model": "m"}, "models", "names what is evaluated already"),
        ({"checks": [{"type": "json"}]}, "models", "answers are those of one model"),
        ({"algorithm": "dpo", "reference_model": "r"}, "models", "not by dpo"),
        ({"models": [{"model": "a", "weight": 0}]}, "models", "more than 0"),
        ({"reference_model": "r"}, "reference_model", "leave it out"),
        ({"seed": 3}, "seed", "without checks none are made"),
    ],
)
def test_what_an_ensemble_cannot_have_is_refused_by_name(changes: Any, field: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        request("a", "b", **changes).work()
    assert caught.value.field == field


@pytest.mark.parametrize(
    "models",
    [[], [{"weight": 1}], [{"model": "a", "weight": -1}], [{"model": "a", "weight": 1e7}], [{"model": "a", "rank": 1}]],
)
def test_members_of_another_form_are_refused(models: Any) -> None:
    with pytest.raises(ValueError, match="models"):
        request(models=models)


def test_the_evaluation_at_the_end_of_a_training_is_that_of_its_result_alone() -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options\.evaluate\.models=.*this job is evaluated"):
        evaluation_after("tune", {"dataset_id": "rows", "models": [{"model": "a"}]})


def test_members_are_what_a_single_model_would_be_and_their_jobs_come_before(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    whole = add(store, "whole", tmp_path)
    adapted = add(
        store,
        "adapted",
        tmp_path,
        **{"model": str(whole.checkpoint_dir / "final"), "lora": LORA, "after": ("whole",)},
        made_by=BaseJob(job_uuid="whole", checkpoint="final"),
    )
    settings = settings.model_copy(update={"trust_remote_code": ("org/own@abc",)})
    body = request({"model": "org/own", "weight": 3}, "job:adapted", {"model": "job:whole/checkpoint-2", "weight": 0})
    found = bases_of(body, settings, store)
    spec = job_spec("e", work=body.work(found))
    assert isinstance(spec.work, EvaluateSpec)
    own, second, third = spec.work.members
    assert [one.weight for one in spec.work.members] == [0.75, 0.25, 0]
    assert (own.model, own.revision, own.trust_remote_code, own.adapter) == ("org/own", "abc", True, None)
    assert second.adapter is not None
    assert (second.model, second.adapter.directory, second.lora) == (
        adapted.source.model,
        adapted.checkpoint_dir / "final",
        LORA,
    )
    assert (third.model, third.adapter) == (str(whole.checkpoint_dir / "checkpoint-2"), None)
    assert [(job.job_uuid, job.checkpoint) for job in spec.jobs_read] == [
        ("whole", "final"),
        ("adapted", "final"),
        ("whole", "checkpoint-2"),
    ]
    store.add_job(spec.model_copy(update={"after": ("adapted", "whole")}), "digest")
    assert store.chains.needed_checkpoints("whole") == {"final", "checkpoint-2"}


@pytest.mark.parametrize("kind", ["ensemble", "merge"])
def test_a_cancel_of_any_member_cancels_the_job_that_names_it(
    kind: str, store: Store, settings: Settings, tmp_path: Path
) -> None:
    """The first model is no job: `cancel_with` was refused then."""
    for name in ("a", "b"):
        add(store, name, tmp_path)
    members = [{"model": model(tmp_path, "first", {})}, {"model": "job:a"}, {"model": "job:b"}]
    body: EvaluateRequest | MergeRequest = request(*members)
    if kind == "merge":
        body = MergeRequest.model_validate({"job_uuid": "e", "models": members})
    options, found = ProviderOptions(cancel_with=True), bases_of(body, settings, store)

    async def rows(*_: object) -> tuple[DatasetRef, list[str]]:
        return keep_rows(tmp_path / "rows", "rows", [{"prompt": "a", "completion": "b"}], "sft", None)

    work = body.work(found)
    assert asyncio.run(submit(body, options, "digest", settings, store, rows, work=work, models=found))
    assert (store.get("e").spec.after, store.get("e").spec.cancel_with) == (("a", "b"), True)
    supervisor = Supervisor(store, FakeLauncher(), ["cpu"], tmp_path)
    supervisor.tick()
    store.request_cancel("b")
    supervisor.tick()
    assert store.get("e").state is JobState.cancelled
    alone = {"models": members[:1]} if kind == "merge" else {"models": members[:1], "dataset_id": "rows"}
    lonely = type(body).model_validate({"job_uuid": "f", **alone})
    bases = bases_of(lonely, settings, store)
    work = lonely.work(bases)
    with pytest.raises(InvalidRequest, match="cancel_with=True is not supported: it belongs to `after`"):
        asyncio.run(submit(lonely, options, "d", settings, store, rows, work=work, models=bases))


def test_a_member_that_cannot_be_used_is_refused_under_its_field(store: Store, settings: Settings) -> None:
    for name, sentence in (("job:typo", "there is no such job"), ("", "name the base model"), ("job:e", "own result")):
        with pytest.raises(InvalidRequest, match=rf"models\.1\.model='{name}'.*{sentence}"):
            bases_of(request("org/a", name), settings, store)
    merge = MergeRequest.model_validate({"job_uuid": "m", "models": [{"model": "org/a"}, {"model": ""}]})
    with pytest.raises(InvalidRequest, match=r"models\.1\.model=''"):
        bases_of(merge, settings, store)
    assert bases_of(request(models=None, model="org/a"), settings, store) == []


def test_weights_of_a_merge_that_add_up_to_nothing_are_refused_where_they_are_divided_by_their_sum(
    store: Store, settings: Settings
) -> None:
    def body(**changes: object) -> MergeRequest:
        members = [{"model": "org/a", "weight": 1}, {"model": "org/b", "weight": -1}]
        return MergeRequest.model_validate({"job_uuid": "m", "models": members, **changes})

    for method in ("linear", "slerp"):
        merge = body(method=method)
        with pytest.raises(InvalidRequest, match=r"models\.0\.weight=1\.0 .* add up to 0, and each is divided by it"):
            merge.work(bases_of(merge, settings, store))
    ties = body(method="ties", density=0.5, base="org/base")  # differences, which are added
    assert ties.work(bases_of(ties, settings, store)).merge.inputs[1].weight == -1


def test_tokenizers_that_number_tokens_otherwise_are_refused_by_both_names(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    first = model(tmp_path, "first", {"a": 0, "b": 1}, added_tokens=[{"id": 2, "content": "<end>"}])
    same = model(tmp_path, "same", [["a", -1.0], ["b", -2.0], ["<end>", 0.0]])
    odd = model(tmp_path, "odd", "of another form")
    other = model(tmp_path, "other", {"a": 0, "b": 1}, added_tokens=[{"id": 3, "content": "<end>"}])
    assert len(bases_of(request("org/unknown", first, same, odd, first), settings, store)) == 5
    with pytest.raises(InvalidRequest, match=f"{re.escape(repr(first))}.*'<end>'.*the same tokenizer") as caught:
        bases_of(request(first, same, other), settings, store)
    assert (caught.value.field, caught.value.value) == ("models.2.model", other)
    fewer = model(tmp_path, "fewer", {"a": 0})
    named = [{"model": first}, {"model": same}]
    for changes, field in (({"models": [*named, {"model": fewer}]}, "models.2.model"), ({"base": fewer}, "base")):
        merge = MergeRequest.model_validate({"job_uuid": "m", "models": named, "method": "ties", **changes})
        with pytest.raises(InvalidRequest, match="whose token 'b' it lacks: merge models with the same") as caught:
            bases_of(merge, settings, store)
        assert (caught.value.field, caught.value.value) == (field, fewer)


def test_files_of_tokenizers_of_another_form_are_left_to_the_evaluation() -> None:
    mixed, other = b'{"model": {"vocab": [[1, 0], ["a", 0]]}}', b'{"model": {"vocab": [["a", 0], [1, 0]]}}'
    assert vocabularies._disputed(vocabularies._vocabulary(mixed), vocabularies._vocabulary(other)) is None
    endless = b'{"model": {"vocab": {}}, "added_tokens": [{"content": "a", "id": 1e999}]}'
    assert vocabularies._vocabulary(endless) == {}


def test_one_model_is_evaluated_as_before() -> None:
    work = EvaluateRequest.model_validate({"job_uuid": "e", "model": "m", "dataset_id": "rows"}).work()
    assert work == EvaluateSpec()


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"algorithm": "DPOO"}, "provider_options.evaluate.algorithm='DPOO'.*the nearest is 'dpo'"),
        ({"engine": "vLLM"}, "the nearest is 'vllm'"),
        ({"checks": [{"type": "regexp"}]}, "the nearest is 'regex'"),
        ({"dataset": "rows"}, "there is no such field: did you mean `dataset_id`"),
    ],
)
def test_a_misspelt_option_of_the_evaluation_after_a_job_has_the_nearest_choice(
    given: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        evaluation_after("tune", {"dataset_id": "rows", **given})
