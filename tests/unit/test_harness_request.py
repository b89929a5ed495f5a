"""Evaluations on tasks of lm-evaluation-harness: what is refused at POST, and what the job has, without the library."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.inputs import harness as submitted
from llama_stack_provider_trl.jobs.inputs import task_files
from llama_stack_provider_trl.jobs.inputs.harness import with_task_files
from llama_stack_provider_trl.jobs.inputs.task_files import read_task_files
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import keep_rows, submit
from llama_stack_provider_trl.launch.isolation import spec_paths
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.harness import Harness
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.requests.work import EvaluateRequest
from llama_stack_provider_trl.specs.harness import HarnessSpec, Unusable, check_tasks, final_event, tasks_of
from llama_stack_provider_trl.specs.job import AttemptSpec, DataFormat, DatasetRef, JobSpec, RowUse, ShardingSpec
from llama_stack_provider_trl.specs.work import EvaluateSpec
from llama_stack_provider_trl.system.installed import version_for
from tests.fakes import job_spec
from tests.tiny import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "harness"
TASK = "task: {}\ndataset_path: json\ndataset_kwargs: {{data_files: rows.jsonl}}\n"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitted, "version_for", lambda python, module: "0.4.13")


def request(harness: Any = None, **changes: Any) -> EvaluateRequest:
    body = {"job_uuid": "e", "model": "org/base", "harness": {"tasks": ["capitals"], **(harness or {})}}
    return EvaluateRequest.model_validate({**body, **changes})


def settings(root: Path, *roots: Path, **changes: Any) -> Settings:
    return Settings(data_dir=root / "data", devices=("cpu",), harness_roots=roots or (EXAMPLES,), **changes)


def refused(given: EvaluateRequest, known: Settings) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        with_task_files(given.work(), known)
    return caught.value


def written(root: Path, **files: str) -> Path:
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        (root / f"{name}.yaml").write_text(text)
    return root


def test_the_job_has_the_tasks_and_the_directories_of_the_operator(tmp_path: Path) -> None:
    given = {"tasks": ["basics", "sums"], "num_fewshot": 2, "limit": 0.5, "seed": 7, "apply_chat_template": True}
    more = {"fewshot_as_multiturn": False, "system_instruction": "Be short."}
    work = with_task_files(request({**given, **more}).work(), settings(tmp_path))
    expected = {**given, **more, "tasks": ("basics", "sums"), "roots": (EXAMPLES,)}
    assert work == EvaluateSpec(harness=HarnessSpec(**expected))
    assert with_task_files(EvaluateSpec(), settings(tmp_path)) == EvaluateSpec()
    assert request().work() == EvaluateSpec(harness=HarnessSpec(tasks=("capitals",)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dataset_id": "rows"}, "dataset_id"),
        ({"algorithm": "dpo"}, "algorithm"),
        ({"reference_model": "b"}, "reference_model"),
        ({"max_seq_length": 9}, "max_seq_length"),
        ({"checks": [{"type": "json"}]}, "checks"),
        ({"max_new_tokens": 9}, "max_new_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"seed": 3}, "seed"),
        ({"models": [{"model": "a"}], "model": None}, "models"),
        ({"harness": {"tasks": ["a"], "limit": 2.5}}, "harness.limit"),
        ({"harness": {"tasks": ["a"], "fewshot_as_multiturn": True}}, "harness.fewshot_as_multiturn"),
        ({"harness": {"tasks": ["a", "a"]}}, "harness.tasks"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**changes).work()
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match=r"dataset_id=None.*or in `harness` tasks"):
        EvaluateRequest.model_validate({"job_uuid": "e", "model": "m"}).work()
    assert request(checkpoint_dir="here", batch_size=9, dtype="fp32").work().harness is not None


@pytest.mark.parametrize(
    ("harness", "place"),
    [
        ({"gen_kwargs": {"temperature": 1}}, ("harness", "gen_kwargs")),
        ({"tasks": []}, ("harness", "tasks")),
        ({"tasks": ["/etc/task.yaml"]}, ("harness", "tasks", 0)),
        ({"tasks": [{"task": "a", "class": "x"}]}, ("harness", "tasks", 0)),
        ({"limit": 0}, ("harness", "limit")),
        ({"num_fewshot": -1}, ("harness", "num_fewshot")),
        ({"system_instruction": ""}, ("harness", "system_instruction")),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(harness: Any, place: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        request(harness)
    assert caught.value.errors()[0]["loc"] == place


def test_without_directories_library_or_such_a_task_the_request_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Settings(data_dir=tmp_path / "data", devices=("cpu",))
    assert "harness=['capitals'] is not supported: no directory of task files is configured here: the oper" in str(
        refused(request(), none)
    )
    unknown = refused(request({"tasks": ["sums", "mmlu"]}), settings(tmp_path))
    assert (unknown.field, unknown.hint) == (
        "harness.tasks",
        "no task file has 'mmlu'; there are basics, capitals, opposites, sums",
    )
    empty = refused(request(), settings(tmp_path, tmp_path / "none"))
    assert empty.hint.endswith("no task file has 'capitals'; there is none in the configured harness_roots")
    for found_there, sentence in (
        (None, "/opt/python, which trains, has no lm_eval; run there: pip install 'llama_stack_provider_trl[harness]"),
        ("0.4.9.1", "has lm_eval 0.4.9.1, and 0.4.13 or a later 0.4 is needed; run there: pip install"),
        ("0.5.0", "has lm_eval 0.5.0, and"),
        ("unknown", "has lm_eval unknown, and"),
    ):
        monkeypatch.setattr(submitted, "version_for", lambda python, module, found=found_there: found)
        found = refused(request(), settings(tmp_path, train_python=Path("/opt/python")))
        assert (found.field, sentence in found.hint) == ("harness", True), found.hint
    monkeypatch.setattr(submitted, "version_for", lambda python, module: "0.4.14")
    assert with_task_files(request().work(), settings(tmp_path)) != EvaluateSpec()
    monkeypatch.undo()
    gone = refused(request(), settings(tmp_path, train_python=tmp_path / "none"))
    assert "cannot be started: [Errno 2]" in gone.hint


def test_the_version_of_a_package_is_found_in_another_interpreter() -> None:
    own = Path(sys.executable)
    other = own.parent / ".." / own.parent.name / own.name  # the same, which is not recognized
    assert version_for(other, "pydantic") == version_for(None, "pydantic") == version("pydantic")
    assert [version_for(python, "no_such_package") for python in (other, None)] == [None, None]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dataset_path: org/rows\n", "task 'a' reads the dataset 'org/rows', and only files of this machine"),
        ("dataset_path: json\n", "task 'a' reads the dataset 'json', and only"),
        ("dataset_path: json\ndataset_kwargs: {data_files: {test: [x, 'https://host/y']}}\n", "task 'a' reads the"),
        ("output_type: multiple_choice\n", "task 'a' reads no dataset"),
        ("unsafe_code: true\n", "task 'a' runs code that the model writes"),
        ("doc_to_image: picture\n", "task 'a' has images or sound"),
        ("dataset_path: csv\ndataset_kwargs: {data_files: a}\nnum_fewshot: 0\n", "task 'a' has num_fewshot 0 in its"),
        ("dataset_path: /srv/rows\nnum_fewshot: 3\n", ""),
        ("dataset_path: /srv/a\ndataset_path: /srv/b\n", "task 'a' has the key 'dataset_path' twice in the mapping of"),
        ("dataset_path: /srv/a\nx: {b: 1, b: 2}\n", "task 'a' has the key 'b' twice in the mapping of line 3 of /"),
        ("dataset_path: /srv/a\nx: &x {b: 1}\ny: {<<: *x, b: 2}\n", ""),
        ("dataset_path: /srv/a\nrepeats: yes\n", "task 'a' has a boolean as repeats in its file, which is a number"),
        (
            "dataset_path: /srv/a\ngeneration_kwargs: {do_sample: true, temperature: true}\n",
            "task 'a' has a boolean as generation_kwargs.temperature in its file",
        ),
        ("class: t.Task\nmetric_list: [{metric: f1, hf_evaluate: true}]\n", "task 'a' has a metric with hf_evaluate"),
        (
            "dataset_path: /srv/rows\nprocess_results: !function f.f\nmetric_list: [{metric: f, hf_evaluate: true}]\n",
            "",
        ),
        ("custom_dataset: !function rows.read\n", ""),
        ("class: !function task.Task\n", ""),
        ("dataset_path: parquet\ndataset_kwargs: {data_dir: rows}\n", ""),
    ],
)
def test_a_task_that_cannot_be_measured_here_is_refused_by_its_name(tmp_path: Path, text: str, sentence: str) -> None:
    index = read_task_files([written(tmp_path / "tasks", one=f"task: a\n{text}")])
    spec = HarnessSpec(tasks=("a",), num_fewshot=1)
    if not sentence:
        check_tasks(spec, index)
        return
    with pytest.raises(Unusable, match=f"^{re.escape(sentence)}"):
        check_tasks(spec, index)


def test_a_task_is_refused_for_a_key_that_a_file_which_it_includes_has_twice(tmp_path: Path) -> None:
    included = "dataset_path: /srv/a\nrepeats: 1\nrepeats: 2\n"
    index = read_task_files([written(tmp_path / "tasks", base=included, one="task: a\ninclude: base.yaml\n")])
    with pytest.raises(
        Unusable, match=r"^task 'a' has the key 'repeats' twice in the mapping of line 1 of .*base\.yaml"
    ):
        check_tasks(HarnessSpec(tasks=("a",)), index)


def test_groups_and_tags_are_their_tasks_with_the_settings_of_the_group(tmp_path: Path) -> None:
    root = written(
        tmp_path / "tasks",
        a=TASK.format("a") + "tag: [easy, short]\n",
        b="include: a.yaml\ntask: b\n",
        c="task: c\ndataset_path: org/rows\n",
        inner="group: inner\ntask: [easy]\nnum_fewshot: 2\n",
        outer="group: outer\ntask:\n- {task: c, dataset_path: text, dataset_kwargs: {data_files: t}}\n- inner\n"
        "- {group: own, task: [{task: free, dataset_path: /rows}]}\n",
        endless="group: endless\ntask: [endless]\n",
        nothing="group: nothing\ntask: []\n",
        lost="group: lost\ntask: [gone]\n",
        broken="task: [",
        list="task: [a, b]\n",
    )
    index = read_task_files([root])
    kinds = {name: entry.kind for name, entry in index.items()}
    assert kinds == {
        **{"a": "task", "b": "task", "c": "task", "easy": "tag", "short": "tag"},
        **dict.fromkeys(("inner", "outer", "endless", "nothing", "lost"), "group"),
    }
    assert [*tasks_of("short", index)] == ["a", "b"]
    outer = tasks_of("outer", index)
    assert {name: one.get("num_fewshot") for name, one in outer.items()} == {
        **{"c": None, "a": 2, "b": 2},
        "outer::own::free": None,
    }
    check_tasks(HarnessSpec(tasks=("outer",)), index)
    for names, sentence in (
        (("endless",), "contains itself"),
        (("nothing",), "'nothing' has no tasks"),
        (("lost",), "task 'lost::gone' reads no dataset"),
        (("outer", "a"), "'outer' and 'a' both have the task 'a': leave one of them out"),
        (("c",), "task 'c' reads the dataset 'org/rows'"),
    ):
        with pytest.raises(Unusable, match=re.escape(sentence)):
            check_tasks(HarnessSpec(tasks=names), index)


def test_files_are_read_as_the_library_reads_them_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = written(tmp_path / "one", a="task: t\nnum_fewshot: 1\n", b="task: t\nnum_fewshot: 2\n")
    two = written(tmp_path / "two", c="task: u\ninclude: c.yaml\n", d="task: v\n" + "#" * (1 << 20))
    (one / "__pycache__").mkdir()
    written(one / "__pycache__", e="task: w\n")
    assert {name: entry.config.get("num_fewshot") for name, entry in read_task_files([one, two]).items()} == {"t": 1}
    written(two, f="task: t\nnum_fewshot: 3\n")
    written(one, a="task: t\nnum_fewshot: 4444\n")
    assert read_task_files([one])["t"].config["num_fewshot"] == 4444
    assert read_task_files([one, two])["t"].config["num_fewshot"] == 3
    assert read_task_files([two, one])["t"].config["num_fewshot"] == 4444
    monkeypatch.setattr(task_files, "MOST_FILES", 4)
    with pytest.raises(Unusable, match="more than 4 task files"):
        read_task_files([one, two])


def test_too_many_tasks_and_too_long_names_are_refused(tmp_path: Path) -> None:
    members = ", ".join(f"{{task: t{number}, dataset_path: /rows}}" for number in range(1001))
    long = f"task: {'a' * 129}\ndataset_path: /rows\ntag: long\n"
    index = read_task_files([written(tmp_path / "tasks", many=f"group: many\ntask: [{members}]\n", long=long)])
    with pytest.raises(Unusable, match="more than 1000 tasks: send several jobs"):
        check_tasks(HarnessSpec(tasks=("many",)), index)
    with pytest.raises(Unusable, match="has a name of more than 128 characters"):
        check_tasks(HarnessSpec(tasks=("long",)), index)


def test_a_training_sees_the_directories_of_its_tasks(tmp_path: Path) -> None:
    work = EvaluateSpec(harness=HarnessSpec(tasks=("a",), roots=(tmp_path / "tasks",)))
    attempt = AttemptSpec(job=job_spec(work=work), attempt=1, run_dir=tmp_path)
    assert tmp_path / "tasks" in spec_paths(attempt, [tmp_path]).read


class _Submissions:
    """A store, and the rows of one dataset."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, Store(root / "jobs.sqlite3")

    async def rows(self, dataset_id: str, use: RowUse, data_format: DataFormat | None) -> tuple[DatasetRef, list[str]]:
        assert dataset_id == "rows"
        return keep_rows(self.root / "datasets", dataset_id, [{"prompt": "a", "completion": "b"}], use, data_format)

    def train(self, evaluate: Any, job_uuid: str = "tune") -> None:
        training = {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 2}}
        body = {"job_uuid": job_uuid, "model": "org/base", "training_config": training}
        sent, parsed = SupervisedFineTuneRequest.model_validate(body), ProviderOptions.parse({"evaluate": evaluate})
        asyncio.run(submit(sent, parsed, "digest", settings(self.root), self.store, self.rows))

    def post(self, given: EvaluateRequest, **options: Any) -> JobSpec:
        parsed, work = ProviderOptions.parse(options), given.work()
        known = settings(self.root, max_ranks=4, max_nodes=4, sharding=ShardingSpec(strategy="FULL_SHARD"))
        asyncio.run(submit(given, parsed, "digest", known, self.store, self.rows, work=work, models=[]))
        return self.store.get(given.job_uuid).spec


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[_Submissions]:
    made = _Submissions(tmp_path)
    with closing(made.store):
        yield made


def test_the_job_is_stored_without_rows_and_its_options_are_honoured_or_refused(jobs: _Submissions) -> None:
    spec = jobs.post(request(batch_size=9, dtype="fp32"), priority="high", nproc_per_node=1)
    assert (spec.data.dataset.num_rows, spec.data.batch_size, spec.compute.dtype, spec.ranks) == (0, 9, "fp32", 1)
    assert isinstance(spec.work, EvaluateSpec)
    assert spec.work.harness == HarnessSpec(tasks=("capitals",), roots=(EXAMPLES,))
    assert os.path.getsize(spec.data.dataset.path) == 0
    for options, sentence in (
        ({"nproc_per_node": 2}, r"provider_options\.nproc_per_node=2 .*tasks of a harness are measured by one process"),
        ({"resources": {"cpus": 1}}, r"provider_options\.resources=.*tasks of a harness are on the service's machine"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            jobs.post(request(job_uuid="other"), **options)


def test_the_evaluation_at_the_end_of_a_training_may_measure_tasks(jobs: _Submissions) -> None:
    jobs.train({"harness": {"tasks": ["basics"], "seed": 3}})
    spec = jobs.store.get("tune-evaluation").spec
    assert spec.work == EvaluateSpec(harness=HarnessSpec(tasks=("basics",), roots=(EXAMPLES,), seed=3))
    assert (spec.after, spec.data.dataset.num_rows) == (("tune",), 0)
    with pytest.raises(InvalidRequest, match=r"provider_options\.evaluate\.harness\.tasks=\['mmlu'\]"):
        jobs.train({"harness": {"tasks": ["mmlu"]}}, job_uuid="other")
    with pytest.raises(InvalidRequest, match=r"provider_options\.evaluate\.dataset_id=None"):
        jobs.train({}, job_uuid="other")


def test_the_documented_fields_are_those_of_the_block() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "evaluate.md").read_text()
    table = text.split("<!-- harness -->")[1].split("<!-- /harness -->")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) *\|", table, re.MULTILINE))
    assert list(rows) == list(Harness.model_fields)
    assert (rows["apply_chat_template"], rows["fewshot_as_multiturn"]) == ("False", "True")


@pytest.mark.parametrize(
    "text",
    [
        "tag: 5",
        "tag: [[1]]",
        'include: "a\\0b"',
        "include: /dev/zero",
        "include: pipe",
        "include: loop.yaml",
        f"x: {'[' * 200_000}{']' * 200_000}",  # which ends a process, in the parser's C
        "x: !!bool perhaps",
        "x: !!timestamp perhaps",
        "dataset_path: json\ndataset_kwargs: {data_files: &a [*a]}",
        "a0: &a0 [x, x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)),
        "a0: &a0 {x: 1}\n" + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)),
    ],
    ids=lambda text: str(text).replace("\0", "")[-24:],
)
def test_a_file_that_would_stop_or_fill_the_service_is_left_out(tmp_path: Path, text: str) -> None:
    root = written(tmp_path / "tasks", good=TASK.format("good"), other=f"task: other\n{text}")
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "pipe.yaml")
    (root / "loop.yaml").symlink_to("loop.yaml")
    assert list(read_task_files([root])) == ["good"]


def test_files_and_groups_that_multiply_are_read_in_bounded_time(tmp_path: Path) -> None:
    levels = range(12)
    included = {f"i{n}": f"task: i{n}\ninclude: [{', '.join([f'i{n + 1}.yaml'] * 8)}]" for n in levels}
    groups = {f"g{n}": f"group: g{n}\ntask: [{', '.join([f'g{n + 1}'] * 8)}]" for n in levels}
    ends = {"i12": TASK.format("i12"), "g12": "group: g12\ntask: [i12]"}
    index = read_task_files([written(tmp_path / "tasks", **included, **groups, **ends)])
    assert index["i0"].config["dataset_path"] == "json"
    with pytest.raises(Unusable, match="is one of more than 10000 groups and tasks: name fewer at once"):
        check_tasks(HarnessSpec(tasks=("g0",)), index)
    check_tasks(HarnessSpec(tasks=("g10",)), index)
    chain = {f"c{n:03}": f"task: c{n}\ninclude: c{n + 1:03}.yaml" for n in range(200)}
    with pytest.raises(Unusable, match=r"c065.yaml is included by more than 64 files, one by the other"):
        read_task_files([written(tmp_path / "chain", **chain)])


def test_a_result_is_one_that_is_read_or_refused_before_it_is_written() -> None:
    measures = {f"{number:0200}": 0.5 for number in range(9_000)}
    assert final_event({"tasks": {"a": measures}}, 1).result == {"tasks": {"a": measures}}
    for result, why in (
        ({"tasks": {"a": measures, "b": measures}}, "an event has 2097152 at most"),
        ({"left_out": ["x" * 70_000]}, "a text has more than 65536 characters"),
    ):
        with pytest.raises(Unusable, match=f"the measures of its 2 names are more than a job's result .*{why}"):
            final_event(result, 2)
