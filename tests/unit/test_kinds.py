"""Requests for jobs that do not train, and the documented table of their fields."""

from __future__ import annotations

import ast
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.requests.bases import Base
from llama_stack_provider_trl.requests.data import rows_job_of
from llama_stack_provider_trl.requests.engines import with_engine
from llama_stack_provider_trl.requests.options import ProviderOptions, Resources
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.untrained import check_options, resolve_work
from llama_stack_provider_trl.requests.work import (
    KINDS,
    EvaluateRequest,
    ExportRequest,
    GenerateRequest,
    MergeRequest,
)
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.answer_rows import CheckedRow, RowsOnDemand, read_checked_rows
from llama_stack_provider_trl.specs.harness import HarnessSpec
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, ResourcesSpec, ShardingSpec
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.rows import PromptExample, check_rows, parse_row
from llama_stack_provider_trl.specs.work import TRAINS, WORKS, CheckedAnswering, EvaluateSpec
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl_remote.service.http.bodies import WORK_BODIES
from llama_stack_provider_trl_remote.service.jobs.pipeline_steps import resolved, steps_of
from tests.tiny import REPOSITORY


def generate(**changes: Any) -> GenerateRequest:
    body = {"job_uuid": "ask", "model": "org/base", "dataset_id": "prompts", "output": {"dataset_id": "answers"}}
    return GenerateRequest.model_validate({**body, **changes})


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"temperature": 0, "top_p": 0.9}, "top_p", "at temperature 0"),
        ({"temperature": 0, "samples_per_prompt": 2}, "samples_per_prompt", "at temperature 0"),
    ],
)
def test_values_that_would_be_ignored_are_refused_by_name(changes: dict[str, Any], field: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        generate(**changes).work()
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.field == field


def test_vllm_answers_where_the_operator_has_named_an_interpreter_with_it(tmp_path: Path) -> None:
    here = Settings(data_dir=tmp_path / "data", devices=("cpu",), vllm_python=tmp_path / "python")
    for body in (generate(engine="vllm"), EvaluateRequest.model_validate({**CHECKED, "engine": "vllm"})):
        with pytest.raises(InvalidRequest, match=r"engine='vllm' .*this service has no vLLM.*vllm_python"):
            with_engine(body.work(), Settings(data_dir=tmp_path / "data", devices=("cpu",)))
        found = with_engine(body.work(), here).answering
        assert found is not None
        assert (found.engine, found.vllm_python) == ("vllm", tmp_path / "python")
    assert with_engine(generate().work(), here) == generate().work()
    with pytest.raises(InvalidRequest, match=r"temperature=0.009 .*no temperature below 0.01 but 0"):
        with_engine(generate(engine="vllm", temperature=0.009).work(), here)
    for work in (generate(temperature=0.009).work(), generate(engine="vllm", temperature=0.01).work()):
        assert with_engine(work, here).kind == "generate"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    for engine, use in (("transformers", "continue"), ("vllm", "merge")):  # vLLM reads whole models
        body = generate(engine=engine, model=str(adapter))
        found = resolve_work(body, with_engine(body.work(), here), ProviderOptions(), here)
        assert found.fields["adapter"].use == use
    body = generate(engine="vllm")
    there = ProviderOptions(resources=Resources(nodes=1))
    with pytest.raises(
        InvalidRequest, match=r"provider_options\.resources=.*vLLM answers on the service's machine only"
    ):
        resolve_work(body, with_engine(body.work(), here), there, here)


def test_a_reference_belongs_to_preferences() -> None:
    body = {"job_uuid": "e", "model": "m", "dataset_id": "d"}
    for changes, sentence in (
        ({"algorithm": "dpo"}, "name the one before training"),
        ({"algorithm": "dpo", "reference_model": "m"}, "name the one before training"),
        ({"reference_model": "b"}, "leave it out, or set algorithm to dpo"),
    ):
        with pytest.raises(InvalidRequest, match=f"reference_model=.*{sentence}"):
            EvaluateRequest.model_validate({**body, **changes}).work()
    given = EvaluateRequest.model_validate({**body, "algorithm": "dpo", "reference_model": "b", "max_seq_length": 9})
    reads = given.reads()
    assert (reads.reference_model, reads.max_seq_length) == ("b", 9)


CHECKED: dict[str, Any] = {"job_uuid": "e", "model": "m", "dataset_id": "d", "checks": [{"type": "json"}]}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"checks": None, "max_new_tokens": 256}, "max_new_tokens"),
        ({"checks": None, "checkpoint_dir": "here"}, "checkpoint_dir"),
        ({"algorithm": "dpo"}, "algorithm"),
        ({"reference_model": "b"}, "reference_model"),
        ({"max_seq_length": 9}, "max_seq_length"),
        ({"top_p": 0.5}, "top_p"),
        ({"checks": [{"type": "regex", "pattern": "["}]}, "checks.0.pattern"),
    ],
)
def test_fields_of_an_evaluation_that_would_be_ignored_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EvaluateRequest.model_validate({**CHECKED, **changes}).work()
    assert caught.value.field == field
    work = EvaluateRequest.model_validate({**CHECKED, "temperature": 1, "top_p": 0.5}).work()
    assert work.answers is not None
    assert (work.answers.top_p, work.answers.samples_per_prompt) == (0.5, 1)


def test_rows_are_read_for_checks_or_refused_by_name(tmp_path: Path) -> None:
    def read(checks: list[dict[str, Any]], *rows: dict[str, Any]) -> list[CheckedRow]:
        blob = put_rows(tmp_path, rows)
        return list(read_checked_rows(blob.path, [AnswerCheck.model_validate(check) for check in checks]))

    own, by_column = {"type": "exact", "normalize": True}, {"type": "json", "name": "b", "column": "expected"}
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    answered = [*turns, {"role": "assistant", "content": " YES "}]
    (found,) = read([own, by_column, {"type": "json"}], {"messages": answered, "expected": '{"a": 1}'})
    assert found == CheckedRow(turns, ["yes", {"a": 1}, None])
    assert read([by_column], {"prompt": "a", "expected": [1]})[0].messages == [{"role": "user", "content": "a"}]
    good = {"prompt": "a", "completion": "b", "expected": 1}
    for checks, row, sentence in (
        (
            [by_column],
            {"prompt": "a", "kind": 1},
            "row 1: no column 'expected', which checks.0.column names.*kind, prompt",
        ),
        ([own, by_column], {**good, "expected": "{"}, r"row 1: column expected \(checks.1.column\): .*not JSON"),
        ([own], {"prompt": "a"}, "row 1: found the columns prompt, expected for SFT"),
        ([own], {"messages": turns}, "row 1: a last turn of role user"),
        ([own], {"text": "a"}, "row 1: plain text, and a check expects the row's own answer"),
    ):
        with pytest.raises(InvalidRows, match=sentence):
            read(checks, good, row)


def test_rows_that_are_read_when_they_are_needed_are_the_same_and_not_in_memory(tmp_path: Path) -> None:
    checks = [AnswerCheck(type="exact"), AnswerCheck(type="exact", name="b", column="other")]
    rows = [{"prompt": f"{number} ä", "completion": "a" * 2000, "other": f"{number}"} for number in range(2000)]
    path = put_rows(tmp_path, rows).path
    expected = list(read_checked_rows(path, checks))
    RowsOnDemand(path, checks)  # what is kept of any dataset
    tracemalloc.start()
    try:
        found = RowsOnDemand(path, checks)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < path.stat().st_size / 10
    path.unlink()  # a file that is open stays
    assert (len(found), found.columns(7)) == (2000, rows[7])
    assert [found.checked(number) for number in (1999, 0, 7)] == [expected[number] for number in (1999, 0, 7)]
    with pytest.raises(InvalidRows, match="row 1: no column 'other'"):
        RowsOnDemand(put_rows(tmp_path, [rows[0], {"prompt": "a", "completion": "b"}]).path, checks)


def test_the_documented_fields_of_a_check_are_its_own() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "evaluate.md").read_text()
    table = text.split("<!-- checks -->")[1].split("<!-- /checks -->")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) *\|", table, re.MULTILINE))
    assert list(rows) == list(AnswerCheck.model_fields)
    assert (rows["normalize"], rows["extract"]) == ("False", "False")


def test_options_of_training_are_refused_by_name() -> None:
    for kind in KINDS.values():
        check_options(ProviderOptions(after=["sft"], priority="high"), kind)
        with pytest.raises(InvalidRequest, match=r"provider_options\.seed.*option of training"):
            check_options(ProviderOptions(seed=3), kind)
    for kind in (GenerateRequest, EvaluateRequest):
        check_options(ProviderOptions(nproc_per_node=2, resources=Resources(nodes=1)), kind)
    check_options(ProviderOptions(resources=Resources(nodes=1)), MergeRequest)
    with pytest.raises(InvalidRequest, match=r"provider_options\.nproc_per_node=2"):
        check_options(ProviderOptions(nproc_per_node=2), MergeRequest)


@pytest.mark.parametrize(
    ("to", "kind", "sentence"),
    [
        ("vllm", "f16", "vllm keeps the type of the model's own files"),
        ("lora-gguf", "q8_0", "the pairs of an adapter are too narrow"),
    ],
)
def test_a_type_that_an_export_cannot_have_is_refused(to: str, kind: str, sentence: str) -> None:
    body = ExportRequest.model_validate({"job_uuid": "x", "model": "job:a", "to": to, "gguf_type": kind})
    with pytest.raises(InvalidRequest, match=f"gguf_type='{kind}'.*{sentence}"):
        body.work()


REFUSED_BY_HUBS = "expected hf://OWNER/NAME, each of at most 96 letters"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("hf://team/model", None),
        ("s3://models/chat/sft-1", None),
        ("s3://models/chat", None),
        ("hf://teams/model", r"below one of the configured export_destinations \(hf://team, s3://models/chat\)"),
        ("s3://models/chats/sft-1", "below one of the configured"),
        ("s3://models/chat/../x", "expected hf://OWNER/NAME or s3://BUCKET/PATH"),
        ("https://example.org/x", "expected hf://OWNER/NAME or s3://BUCKET/PATH"),
        ("hf://team", "expected hf://OWNER/NAME"),
        *((f"hf://team/{name}", REFUSED_BY_HUBS) for name in ("x.git", "x-", "x.", "x--y", "x..y", "-x", "x" * 97)),
        ("hf://team-/x", REFUSED_BY_HUBS),
        ("s3://models/chat/?endpoint_override=evil", "expected hf://OWNER/NAME"),
    ],
)
def test_an_export_is_sent_only_where_the_operator_allows_it(tmp_path: Path, place: str, sentence: str | None) -> None:
    settings = Settings(
        data_dir=tmp_path / "data", devices=("cpu",), export_destinations=("hf://team", "s3://models/chat")
    )
    body = ExportRequest.model_validate({"job_uuid": "x", "model": "org/a", "to": "gguf", "upload_to": place})

    def resolve_export(settings: Settings) -> None:
        resolve_work(body, body.work(), ProviderOptions(), settings)

    if sentence is None:
        resolve_export(settings)
        with pytest.raises(InvalidRequest, match=r"upload_to=.*\(none is configured\)"):
            resolve_export(settings.model_copy(update={"export_destinations": ()}))
    else:
        with pytest.raises(InvalidRequest, match=f"upload_to=.*{sentence}"):
            resolve_export(settings)


def test_ranks_of_a_job_that_does_not_train_are_requested_and_hold_the_whole_model(tmp_path: Path) -> None:
    sharding = ShardingSpec(strategy="FULL_SHARD", cpu_offload=True)
    service = Settings(
        data_dir=tmp_path / "data", devices=("cpu",), ranks=3, max_ranks=4, max_nodes=9, sharding=sharding
    )
    rows = DatasetRef(dataset_id="prompts", path=tmp_path / "rows", sha256="", num_rows=8)

    def job(settings: Settings, **given: Any) -> JobSpec:
        request = generate(model="org/base")
        return resolve_work(request, request.work(), ProviderOptions(**given), settings).spec(rows, None)

    assert (job(service).ranks, job(service).sharding) == (1, None)
    two = job(service, nproc_per_node=2)
    assert (two.ranks, two.nodes, two.sharding) == (2, 1, ShardingSpec(strategy="NO_SHARD"))
    with pytest.raises(InvalidRequest, match=r"nproc_per_node=5.*this node has devices for 4"):
        job(service, nproc_per_node=5)
    on_a_node = job(service, nproc_per_node=2, resources=Resources(labels={"zone": "a"}))
    assert (on_a_node.resources, on_a_node.ranks) == (ResourcesSpec(labels={"zone": "a"}), 2)
    with pytest.raises(InvalidRequest, match=r"resources\.nodes=2.*runs on one node: use 1"):
        job(service, resources=Resources(nodes=2))
    inline = Settings(data_dir=tmp_path / "data", devices=("cpu",))
    with pytest.raises(InvalidRequest, match=r"nproc_per_node=2.*trains in one process"):
        job(inline, nproc_per_node=2)


def test_an_evaluation_may_run_on_a_node(tmp_path: Path) -> None:
    service = Settings(data_dir=tmp_path / "data", devices=("cpu",), max_ranks=4, max_nodes=9, sharding=ShardingSpec())

    def resources(nodes: int | None = None, **changes: Any) -> ResourcesSpec | None:
        body = EvaluateRequest.model_validate({"job_uuid": "e", "model": "org/base", "dataset_id": "d", **changes})
        given = ProviderOptions(resources=Resources(nodes=nodes, labels={"zone": "a"}))
        work = body.work([base] * len(body.named()))
        rows = DatasetRef(dataset_id="d", path=tmp_path / "rows", sha256="", num_rows=8)
        return resolve_work(body, work, given, service).spec(rows, None).resources

    base = Base(ModelSource(model="org/base"))
    assert resources() == resources(1) == ResourcesSpec(labels={"zone": "a"})
    assert resources(checks=CHECKED["checks"]) == ResourcesSpec(labels={"zone": "a"})
    with pytest.raises(InvalidRequest, match=r"resources\.nodes=2.*runs on one node: use 1"):
        resources(2)
    for changes in (
        {"checks": [{"type": "judge", "model": "org/judge"}]},
        {"model": None, "models": [{"model": "org/base"}, {"model": "org/base"}]},
    ):
        assert resources(**changes) == ResourcesSpec(labels={"zone": "a"})


def test_errors_name_the_fields_of_the_request_itself(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", devices=("cpu",))
    for changes, field in (
        ({"dtype": "fp7"}, "dtype"),
        ({"model": ""}, "model"),
        ({"algorithm": "dpo", "reference_model": "/nowhere"}, "reference_model"),
        ({"model": None, "models": [{"model": "/nowhere"}]}, r"models\.0\.model"),
    ):
        given = {"job_uuid": "e", "model": "org/base", "dataset_id": "d", **changes}
        body = EvaluateRequest.model_validate(given)
        work = body.work([Base(ModelSource(model="org/base"))] * len(body.named()))
        with pytest.raises(InvalidRequest, match=f"^{field}='"):
            resolve_work(body, work, ProviderOptions(), settings)
    ask = generate()
    assert resolve_work(ask, ask.work(), ProviderOptions(), settings).rows_field == "dataset_id"


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "a", "completion": "b"}, [("user", "a")]),
        ({"instruction": "a", "input": "b", "output": "c"}, [("user", "a\n\nb")]),
        ({"question": "a"}, [("user", "a")]),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            [("system", "s"), ("user", "a")],
        ),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [("user", "a")]),
    ],
)
def test_prompts_are_read_from_rows_with_and_without_answers(
    row: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    found = parse_row(row, 0, "prompts")
    assert isinstance(found, PromptExample)
    assert [(message["role"], message["content"]) for message in found.messages] == messages


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": "a"}, "expected for prompts one of: chat_completion_input; prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "found assistant turns only"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "ends in an assistant turn"),
    ],
)
def test_rows_that_ask_nothing_are_refused(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRows, match=sentence):
        check_rows([{"prompt": "good"}, row], "prompts")


def test_a_dataset_id_may_name_a_job() -> None:
    assert rows_job_of("job:ask-1") == "ask-1"
    assert [rows_job_of(name) for name in ("ask", "job:", "job:a b", "Job:a")] == [None] * 4


def test_a_pipeline_gives_the_answers_of_a_job_to_the_one_that_names_it() -> None:
    data = {"dataset_id": "job:ask", "batch_size": 4}
    learn = {"model": "m", "training_config": {"n_epochs": 1, "data_config": data}}
    ask = {"kind": "generate", "model": "job:teach", "dataset_id": "rows"}
    teach = {"model": "m", "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 4}}}
    steps = steps_of({"jobs": {"learn": learn, "ask": ask, "teach": teach}})
    assert [(step.name, step.after, step.dataset_ids) for step in steps] == [
        ("teach", (), ("rows",)),
        ("ask", ("teach",), ("rows",)),
        ("learn", ("ask",), ()),
    ]
    names = {"teach": "teach-1", "ask": "ask-2", "learn": "learn-3"}
    generated = resolved(steps[1], "ask-2", names)
    assert (generated["kind"], generated["model"], generated["output"]) == (
        "generate",
        "job:teach-1",
        {"dataset_id": "ask-2"},
    )
    learned = resolved(steps[2], "learn-3", names)
    assert learned["training_config"]["data_config"]["dataset_id"] == "job:ask-2"
    assert data["dataset_id"] == "job:ask"
    with pytest.raises(InvalidRequest, match=r"jobs\.ask\.dataset_id='job:typo'"):
        steps_of({"jobs": {"ask": {**ask, "dataset_id": "job:typo"}, "teach": teach}})


def test_a_pipeline_merges_the_results_of_its_jobs() -> None:
    tune = {"model": "m", "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 4}}}
    merge = {
        "kind": "merge",
        "models": [{"model": "job:a/merged"}, {"model": "org/b", "weight": 2}, {"model": "job:b"}],
    }
    steps = steps_of({"jobs": {"soup": merge, "a": tune, "b": tune}})
    assert [(step.name, step.after) for step in steps] == [("a", ()), ("b", ()), ("soup", ("a", "b"))]
    models = resolved(steps[2], "soup-1", {"a": "a-1", "b": "b-2", "soup": "soup-1"})["models"]
    assert [one["model"] for one in models] == ["job:a-1/merged", "org/b", "job:b-2"]
    with pytest.raises(InvalidRequest, match=r"jobs\.soup\.models='job:b'"):
        steps_of({"jobs": {"soup": merge, "a": tune}})


@pytest.mark.parametrize("name", KINDS)
def test_the_documented_fields_are_those_of_the_request(name: str) -> None:
    body = WORK_BODIES[name]
    text = (REPOSITORY / "docs" / "how-to" / f"{name}.md").read_text()
    table = text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) *\|", table, re.MULTILINE))
    assert list(rows) == list(body.model_fields)
    for field_name, field in body.model_fields.items():
        if field.default is not None and not field.is_required():
            assert rows[field_name] == str(field.default)
    assert f"| {', '.join(f'`{name}`' for name in body.options)} |" in table


def test_every_kind_that_is_requested_is_run_by_a_recipe() -> None:
    assert KINDS.keys() == WORKS.keys()
    answers = CheckedAnswering(max_new_tokens=1, temperature=0, top_p=1, seed=1, samples_per_prompt=1, checks=())
    evaluations = (EvaluateSpec(answers=answers), EvaluateSpec(harness=HarnessSpec(tasks=("arc",))))
    recipes = [one.recipe for one in (TRAINS, *(kind.model_construct() for kind in WORKS.values()), *evaluations)]
    assert len({*recipes}) == len(recipes)
    for module, function in recipes:
        source = REPOSITORY / "llama_stack_provider_trl" / "recipes" / f"{module.replace('.', '/')}.py"
        assert function in {
            node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)
        }
