"""Evaluations on tasks of lm-evaluation-harness, with the library, in the extra `harness`.

`.venv/bin/python -m pip install -c constraints/llama-stack-0.3.5.txt 'lm-eval>=0.4.13,<0.5'` installs it.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.inputs.task_files import read_task_files
from llama_stack_provider_trl.recipes.evaluation import harness
from llama_stack_provider_trl.requests.harness import Harness
from llama_stack_provider_trl.specs.events import Evaluated, Failed, Finished, Paused, Prepared, Progress, Warned
from llama_stack_provider_trl.specs.harness import HarnessSpec
from llama_stack_provider_trl.specs.job import JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.specs.work import EvaluateSpec
from llama_stack_provider_trl.system.files import RunDir
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import REPOSITORY, tiny_model
from tests.training import LORA, job_spec, of_kind, result_of, run

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra harness is not installed"),
    # The library and what it imports use what Python, numpy and nltk have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]
EXAMPLES = REPOSITORY / "examples" / "harness"
NAMES = ("basics", "sums")
FAST = OptimizerSpec(learning_rate=1e-2)


def spec_of(root: Path, *names: str, model: Path | None = None, fields: Any = None, **changes: Any) -> JobSpec:
    work = EvaluateSpec(harness=HarnessSpec(**{"tasks": names or NAMES, "roots": (EXAMPLES,), **changes}))
    given = {"rows": [], "batch_size": 4, "num_threads": 1, "work": work, **(fields or {})}
    return job_spec(root, model or tiny_model(), **given)


def measured(root: Path, *names: str, **changes: Any) -> dict[str, Any]:
    """The result of a job in this process."""
    return result_of(run(root / "run", spec_of(root, *names, **changes))[1])


def directly(names: list[str], root: Path = EXAMPLES, **arguments: Any) -> dict[str, Any]:
    """What the library finds by itself, with the model as it loads it."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(root), include_defaults=False)
    with chdir(root), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISABLE_MULTIPROC", "1")
        found: Any = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tiny_model()), "dtype": "float32"},
            **{"tasks": names, "batch_size": 4, "device": "cpu", "task_manager": manager, "bootstrap_iters": 1000},
            **arguments,
        )
    results: dict[str, Any] = found["results"]
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_fewshot": 2, "limit": 3},
        {"num_fewshot": 2, "apply_chat_template": True, "fewshot_as_multiturn": False, "limit": 0.5},
        {"apply_chat_template": True, "system_instruction": "Answer in one word.", "num_fewshot": 1},
    ],
    ids=["defaults", "examples", "one turn", "system"],
)
def test_measures_are_those_of_the_library_called_directly(tmp_path: Path, options: dict[str, Any]) -> None:
    names = ["capitals"] if "num_fewshot" in options else ["basics"]
    expected = directly(names, **options)
    found = measured(tmp_path, *names, **options)
    for task, measures in {**found["tasks"], **found["groups"]}.items():
        assert {f"{name},none": value for name, value in measures.items()} == {
            name: value for name, value in expected[task].items() if "," in name
        }


def test_the_names_of_task_files_are_those_that_the_library_finds(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    task = "task: {}\ndataset_path: json\n"
    for name, text in {
        "one/a": task.format("t") + "tag: easy\nnum_fewshot: !function code.count\n",
        "one/b": task.format("t") + "num_fewshot: 3\n",
        "one/c": "include: a.yaml\ntask: u\ntag: [easy, hard]\n",
        "one/d": "include: d.yaml\ntask: v\n",
        "one/e": "group: g\ntask: [t, {task: u, num_fewshot: 1}]\n",
        "one/f": "- a\n",
        "one/g": "task: [t, u]\n",
        "one/h": "class: !function code.Task\ntask: w\n",
        "one/i": "tag: x\n",
        "one/__pycache__/j": task.format("y"),
        "two/deep/k": task.format("u") + "num_fewshot: 9\n",
        "two/l": task.format("easy"),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    roots = [tmp_path / "one", tmp_path / "two"]
    for given in ([EXAMPLES], roots, roots[::-1], roots[:1]):
        index = TaskManager(include_path=[*given], include_defaults=False).task_index
        expected = {name: harness._entry(found) for name, found in index.items()}
        found = {name: one._replace(members=tuple(sorted(one.members))) for name, one in read_task_files(given).items()}
        assert {name: (one.kind, one.members) for name, one in found.items()} == {
            name: (one.kind, one.members) for name, one in expected.items()
        }
        assert [found[name].config.keys() for name in found] == [expected[name].config.keys() for name in found]


def test_an_error_that_has_no_formula_is_that_of_the_library(
    roots: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = directly(["likely"], roots[1])["likely"]
    monkeypatch.setattr("multiprocessing.Pool", None)  # one process per core
    found = measured(tmp_path, "likely", roots=roots)["tasks"]["likely"]
    assert found == {name: expected[f"{name},none"] for name in ("perplexity", "perplexity_stderr")}
    assert found["perplexity_stderr"] > 0


TURNS: dict[str, Any] = {"apply_chat_template": True, "num_fewshot": 2}
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tasks": ({}, {"tasks": ("opposites",)}),
    "num_fewshot": ({}, {"num_fewshot": 1}),
    "limit": ({}, {"limit": 0.4}),
    "apply_chat_template": ({}, {"apply_chat_template": True}),
    "fewshot_as_multiturn": (TURNS, {**TURNS, "fewshot_as_multiturn": False}),
    "system_instruction": ({}, {"system_instruction": "Be short."}),
    "seed": ({"num_fewshot": 2}, {"num_fewshot": 2, "seed": 7}),
}
"""What each field of a request changes: the job without, and with it."""


@pytest.mark.parametrize("field", Harness.model_fields)
def test_every_field_changes_what_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    from lm_eval.models.huggingface import HFLM

    computed: list[list[Any]] = []
    answer = HFLM.loglikelihood

    def noted(model: Any, requests: list[Any], *more: Any, **named: Any) -> Any:
        computed.append([request.args for request in requests])
        return answer(model, requests, *more, **named)

    monkeypatch.setattr(HFLM, "loglikelihood", noted)
    for number, changes in enumerate((*EFFECTS[field], EFFECTS[field][0])):
        measured(tmp_path / str(number), **{"tasks": ("capitals",), **changes})
    before, after, again = computed
    assert before == again != after


@pytest.mark.parametrize("size", [2, 5])
def test_rows_are_computed_in_batches_of_the_size_that_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    sizes: list[int] = []
    load = harness.load_to_infer

    def noted(*arguments: Any, **more: Any) -> Any:
        model = load(*arguments, **more)
        model.register_forward_pre_hook(
            lambda _, given, named: sizes.append(len((*given, *named.values())[0])), with_kwargs=True
        )
        return model

    monkeypatch.setattr(harness, "load_to_infer", noted)
    measured(tmp_path, "sums", fields={"batch_size": size})
    assert set(sizes) == {size, 8 % size} - {0}


def test_an_adapter_is_measured_and_in_4_bits_where_it_was_trained_so(
    roots: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, bool]] = []
    load = harness.load_to_infer

    def noted(spec: JobSpec, device: Any, *, in_4_bits: bool) -> Any:
        model = load(spec, device, in_4_bits=in_4_bits)
        loaded.append((type(model).__name__, any(type(one).__name__ == "Linear4bit" for one in model.modules())))
        return model

    monkeypatch.setattr(harness, "load_to_infer", noted)
    base = measured(tmp_path / "base", "likely", roots=roots)
    for name, lora in (("whole", LORA), ("4bit", LORA.model_copy(update={"quantize_base": True}))):
        trained = job_spec(tmp_path / name, tiny_model(), n_epochs=2, lora=lora, optimizer=FAST)
        assert run(tmp_path / name / "run", trained)[0] == 0
        adapter = AdapterSpec(model=str(trained.checkpoint_dir / "final"), use="continue")
        found = measured(
            tmp_path / f"{name}-measured", "likely", roots=roots, fields={"adapter": adapter, "lora": lora}
        )
        assert found["details"] == base["details"]
        assert abs(found["tasks"]["likely"]["perplexity"] / base["tasks"]["likely"]["perplexity"] - 1) > 0.01
    assert loaded == [("LlamaForCausalLM", False), ("PeftModelForCausalLM", False), ("PeftModelForCausalLM", True)]


ALL = ("basics", "sums", "drawn")


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """The examples, and a task in another directory whose rows its own code draws, with samples as answers."""
    root = tmp_path_factory.mktemp("tasks")
    (root / "rows.py").write_text(
        "import random, datasets\n"
        "def read(**given):\n"
        "    rows = [{'text': ''.join(random.choices('abcd', k=9))} for _ in range(6)]\n"
        "    return {'test': datasets.Dataset.from_list(rows)}\n"
        "def score(doc, results):\n"
        "    return {'length': len(results[0]), 'text': results[0]}\n"
        "def first(texts):\n"
        "    return texts[0]\n"
    )
    (root / "drawn.yaml").write_text(
        "task: drawn\ncustom_dataset: !function rows.read\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{text}}'\ndoc_to_target: '{{text}}'\nprocess_results: !function rows.score\n"
        "generation_kwargs: {until: ['x'], max_gen_toks: 6, do_sample: true, temperature: 2.0}\n"
        "metric_list:\n- {metric: length, aggregation: mean, higher_is_better: true}\n"
        "- {metric: text, aggregation: !function rows.first, higher_is_better: true}\n"
    )
    (root / "likely.yaml").write_text(
        "task: likely\ndataset_path: json\ndataset_kwargs: {data_files: {test: words.jsonl}}\ntest_split: test\n"
        "output_type: loglikelihood\ndoc_to_text: 'It is'\ndoc_to_target: ' {{word}}'\n"
        "metric_list:\n- {metric: perplexity, aggregation: perplexity, higher_is_better: false}\n"
    )
    (root / "words.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in ("cold", "a fox", "late")))
    return EXAMPLES, root


@pytest.fixture(scope="module")
def undisturbed(
    ranks: Ranks, roots: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], bytes]:
    """The result of a job in a process of its own, and the lines that it has written."""
    root = tmp_path_factory.mktemp("undisturbed")
    spec = spec_of(root, *ALL, roots=roots)
    codes, events = ranks.run(root / "run", spec)
    assert codes == [0], of_kind(events, Failed)
    assert not (root / "run" / "harness").exists()
    return result_of(events), (spec.checkpoint_dir / "harness.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("fault", "step"),
    [("measuring-0", 0), ("step-2", 2), ("finishing", 3), *in_full(("prepared", 0), ("measuring-1", 1), ("step-3", 3))],
)
def test_an_attempt_after_sigkill_measures_what_is_left_and_finds_the_same(
    ranks: Ranks, armed: Path, roots: tuple[Path, ...], undisturbed: Any, tmp_path: Path, fault: str, step: int
) -> None:
    (armed / fault).write_text("kill")
    spec = spec_of(tmp_path, *ALL, roots=roots)
    codes, first = ranks.run(tmp_path / "first", spec)
    assert codes == [-9]
    assert not of_kind(first, Finished)
    codes, events = ranks.run(tmp_path / "second", spec)
    assert codes == [0], of_kind(events, Failed)
    (prepared,) = of_kind(events, Prepared)
    assert (prepared.start_step, prepared.total_steps, prepared.num_rows) == (step, 3, 30)
    assert [event.step for event in of_kind(events, Progress)] == list(range(step + 1, 4))
    assert (result_of(events), (spec.checkpoint_dir / "harness.jsonl").read_bytes()) == undisturbed


def test_measures_are_the_result_and_a_point_of_the_curves(
    roots: tuple[Path, ...], undisturbed: Any, tmp_path: Path
) -> None:
    """A name by itself has the numbers that it has among others, and a measure that is no number has a warning."""
    status, events = run(tmp_path / "run", spec_of(tmp_path, "drawn", "capitals", roots=roots))
    assert status == 0, of_kind(events, Failed)
    found, whole = result_of(events), undisturbed[0]
    assert found["tasks"] == {name: whole["tasks"][name] for name in ("drawn", "capitals")}
    assert found["details"] == {
        "drawn": {"rows": 6, "num_fewshot": 0, "version": "Yaml"},
        "capitals": {"rows": 10, "num_fewshot": 0, "version": "1.0"},
    }
    assert (found["rows"], found["left_out"], found["groups"]) == (16, ["drawn: text"], {})
    (point,) = of_kind(events, Evaluated)
    assert point.metrics == {
        "eval_drawn_length": found["tasks"]["drawn"]["length"],
        "eval_capitals_acc": found["tasks"]["capitals"]["acc"],
        "eval_capitals_acc_norm": found["tasks"]["capitals"]["acc_norm"],
    }
    assert "no numbers, and left out: drawn: text" in of_kind(events, Warned)[-1].message
    assert whole["groups"]["basics"]["acc"] == pytest.approx(
        (10 * whole["tasks"]["capitals"]["acc"] + 6 * whole["tasks"]["opposites"]["acc"]) / 16
    )


def test_a_seed_decides_what_tasks_draw(roots: tuple[Path, ...], tmp_path: Path) -> None:
    found = [measured(tmp_path / str(n), "drawn", roots=roots, seed=seed) for n, seed in enumerate((None, 7, 7))]
    assert found[0] != found[1] == found[2]


def test_a_pause_takes_effect_before_the_next_name(tmp_path: Path) -> None:
    paths = RunDir(tmp_path / "run")
    paths.root.mkdir()
    paths.control.write_text("pause")
    status, events = run(paths.root, spec_of(tmp_path))
    assert (status, [event.step for event in of_kind(events, Paused)]) == (0, [0])
    assert not of_kind(events, Finished)


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        (b'{"name": "basics"', b'{"name": "sums"', 1),
        (b'"details"', b'"detail"', 2),
        (b'"rows": 8', b'"rows": "x"', 2),
        (b'"files"', b'"file"', 2),
        (b'{"name": "sums"', b"x", 2),
    ],
)
def test_lines_of_earlier_attempts_that_are_damaged_fail_the_job_in_a_sentence(
    undisturbed: Any, roots: tuple[Path, ...], tmp_path: Path, old: bytes, new: bytes, number: int
) -> None:
    spec = spec_of(tmp_path, *ALL, roots=roots)
    spec.checkpoint_dir.mkdir(parents=True)
    at = undisturbed[1].index(b'{"name": "sums"') if number == 2 else 0
    damaged = undisturbed[1][:at] + undisturbed[1][at:].replace(old, new, 1)
    assert damaged != undisturbed[1]
    (spec.checkpoint_dir / "harness.jsonl").write_bytes(damaged)
    (failed,) = of_kind(run(tmp_path / "run", spec)[1], Failed)
    assert failed.reason == "invalid_dataset"
    assert (
        f"line {number} in {spec.checkpoint_dir / 'harness.jsonl'} cannot be read as the measures of" in failed.message
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tasks": {"sums": {f"{number:0200}": 0.5 for number in range(12_000)}}}, "an event has 2097152 at most"),
        ({"left_out": ["x" * 70_000]}, "a text has more than 65536 characters"),
    ],
)
def test_measures_that_no_result_can_have_fail_the_job_in_a_sentence_that_names_their_file(
    undisturbed: Any, roots: tuple[Path, ...], tmp_path: Path, more: dict[str, Any], why: str
) -> None:
    spec = spec_of(tmp_path, *ALL, roots=roots)
    spec.checkpoint_dir.mkdir(parents=True)
    *first, last = map(json.loads, undisturbed[1].splitlines())
    lines = spec.checkpoint_dir / "harness.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in (*first, {**last, **more})))
    events = run(tmp_path / "run", spec)[1]
    (failed,) = of_kind(events, Failed)
    assert (failed.reason, of_kind(events, Finished)) == ("invalid_request", [])
    assert why in failed.message
    assert f"All measures are in {lines}; name fewer tasks in a job" in failed.message


def test_task_files_that_were_changed_after_they_were_measured_fail_the_job_by_the_name(
    undisturbed: Any, roots: tuple[Path, ...], tmp_path: Path
) -> None:
    changed = []
    for number, root in enumerate(roots):
        changed.append(Path(shutil.copytree(root, tmp_path / str(number))))
    (path,) = (path for root in changed for path in root.rglob("sums.yaml"))
    path.write_text(f"{path.read_text()}\n# what is no part of a task\n")
    spec = spec_of(tmp_path, *ALL, roots=tuple(changed))
    measured = [line for line in undisturbed[1].splitlines(keepends=True) if json.loads(line)["name"] != ALL[-1]]
    spec.checkpoint_dir.mkdir(parents=True)
    lines = spec.checkpoint_dir / "harness.jsonl"
    lines.write_bytes(b"".join(measured))
    found = result_of(run(tmp_path / "first", spec)[1])
    assert found["tasks"] == undisturbed[0]["tasks"]
    path.write_text(f"{path.read_text()}\nfewshot_delimiter: x\n")
    lines.write_bytes(b"".join(measured))
    (failed,) = of_kind(run(tmp_path / "second", spec)[1], Failed)
    assert failed.reason == "invalid_request"
    assert "the files of 'sums' were changed after an earlier attempt of the job had measured it" in failed.message


TASK = "task: a\ntest_split: test\noutput_type: generate_until\ndoc_to_text: '{{word}}'\ndoc_to_target: '{{word}}'\n"
ROWS = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (ROWS.replace("rows.jsonl", "none.jsonl"), "", "'a' cannot be measured (FileNotFoundError: "),
        (ROWS + "process_docs: !function code.read\n", "def read(docs): raise ValueError('odd')", "(ValueError: odd)"),
        (
            ROWS + "process_docs: !function code.read\n",
            "import no_such_module",
            "(ModuleNotFoundError: No module named",
        ),
        (ROWS + "process_results: !function code.score\n", "def score(*of): return 1 / 0", "(ZeroDivisionError: "),
        (ROWS + "doc_to_txt: x\n", "", "'a' cannot be measured (TypeError: "),
        (ROWS + "num_fewshot: 99\n", "", "'a' cannot be measured ("),
        (
            ROWS + "metric_list: [{metric: no_such_metric}]\n",
            "",
            "(ValueError: lm_eval has no metric 'no_such_metric')",
        ),
        (
            ROWS + "metric_list: [{metric: acc, hf_evaluate: true}]\n",
            "",
            "'a' has a metric with hf_evaluate, whose code",
        ),
        ("dataset_path: org/rows\n", "", "task 'a' reads the dataset 'org/rows', and only files of this machine"),
        ("", "", "task 'a' reads no dataset"),
    ],
)
def test_a_task_that_fails_fails_the_job_by_its_name(tmp_path: Path, text: str, code: str, sentence: str) -> None:
    root = tmp_path / "tasks"
    root.mkdir()
    (root / "a.yaml").write_text(TASK + text)
    (root / "code.py").write_text(code)
    (root / "rows.jsonl").write_text(json.dumps({"word": "a"}) + "\n")
    status, events = run(tmp_path / "run", spec_of(tmp_path, "a", roots=(root,)))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_request")
    assert failed.message.startswith("harness.tasks: ")
    assert sentence in failed.message, failed.message


def test_a_task_file_that_would_stop_or_fill_the_job_fails_it_by_its_path(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "tasks")
    os.mkfifo(tmp_path / "tasks" / "pipe.yaml")
    (failed,) = of_kind(run(tmp_path / "run", spec_of(tmp_path, roots=(tmp_path / "tasks",)))[1], Failed)
    assert failed.reason == "invalid_request"
    assert (
        f"{tmp_path / 'tasks' / 'pipe.yaml'} cannot be read: it is not a regular file. The operator" in failed.message
    )


def test_a_limit_of_the_machine_is_not_blamed_on_a_task(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "tasks")
    (tmp_path / "tasks" / "code.py").write_text("def read(docs): raise MemoryError\n")
    with open(tmp_path / "tasks" / "sums.yaml", "a") as file:
        file.write("process_docs: !function code.read\n")
    (failed,) = of_kind(run(tmp_path / "run", spec_of(tmp_path, roots=(tmp_path / "tasks",)))[1], Failed)
    assert failed.reason == "out_of_memory"


def test_a_model_without_a_chat_template_cannot_be_measured_with_one(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, model=tiny_model(chat_template=False), apply_chat_template=True)
    (failed,) = of_kind(run(tmp_path / "run", spec)[1], Failed)
    assert (failed.reason, "harness.apply_chat_template: the tokenizer of" in failed.message) == ("invalid_model", True)
