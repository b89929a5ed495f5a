"""Evaluations whose answers another model judges, whole and killed at every stage."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.answers import by_transformers as transformers_answerer
from llama_stack_provider_trl.recipes.answers.answerer import Answered
from llama_stack_provider_trl.recipes.evaluation import judge
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import (
    Evaluated,
    Event,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Started,
    Warned,
)
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.specs.work import CheckedAnswering, EvaluateSpec, FurtherModel
from llama_stack_provider_trl.system.files import RunDir
from tests.process.learned import learned
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import LORA, job_spec, of_kind, result_of, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
TEMPLATE = "{answer} to {prompt}? {reference}"
ANSWERS = {"The fox": "one", "What is a dog?": "two {prompt}", "Add it, friend.": "three", "I do not know.": "no"}
VERDICTS = {
    "one to The fox? a": "Verdict: 7",
    "two {prompt} to What is a dog?? a": "4/10",
    "three to Add it, friend.? a": "It is 9, I think",
    "no to I do not know.? a": "Verdict: 11",
}
SCORED: dict[str, Any] = {
    **{"type": "judge", "name": "good", "model": "the-judge", "template": TEMPLATE, "expected": "a"},
    **{"scale": (1, 10), "at_least": 5, "max_new_tokens": 24},
}
PLAIN: dict[str, Any] = {"type": "judge", "name": "plain", "model": "the-judge", "max_new_tokens": 4}
EXACT: dict[str, Any] = {"type": "exact", "expected": "one"}
ROWS = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in ANSWERS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that answers, and the adapter that judges."""
    root = tmp_path_factory.mktemp("models")
    return learned(root / "answers", ANSWERS), learned(root / "judge", VERDICTS, lora=LORA, n_epochs=100)


def spec_of(root: Path, models: tuple[Path, Path], *checks: dict[str, Any], **changes: Any) -> JobSpec:
    """Four answers in batches of two, judged by the adapter, and by its base for a check without a scale."""
    adapter = AdapterSpec(model=str(models[1]), use="continue")
    judges = {"good": FurtherModel(model=str(tiny_model()), adapter=adapter)}
    found = [AnswerCheck.model_validate(check) for check in checks or (EXACT, SCORED, PLAIN)]
    given = [
        judges.get(check.measure, FurtherModel(model=str(tiny_model()))) for check in found if check.type == "judge"
    ]
    answering = CheckedAnswering(
        **{"max_new_tokens": 24, "temperature": 0.0, "top_p": 1.0, "seed": 42, "samples_per_prompt": 1},
        checks=tuple(found),
        judges=tuple(given),
    )
    fields = {"rows": ROWS, "batch_size": 2, "num_threads": 1, "work": EvaluateSpec(answers=answering), **changes}
    return job_spec(root, models[0], **fields)


def files_of(spec: JobSpec) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in spec.checkpoint_dir.iterdir() if path.name != "ballast"}


@pytest.fixture(scope="module")
def undisturbed(
    ranks: Ranks, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[JobSpec, list[Event], dict[str, bytes]]:
    root = tmp_path_factory.mktemp("undisturbed")
    spec = spec_of(root, models)
    codes, events = ranks.run(root / "run", spec)
    assert codes == [0], of_kind(events, Failed)
    return spec, events, files_of(spec)


def test_a_judge_gives_each_answer_a_score_and_what_is_unreadable_is_counted_apart(undisturbed: Any) -> None:
    _, events, files = undisturbed
    lines = [json.loads(line) for line in files["answers.jsonl"].splitlines()]
    assert [line["text"] for line in lines] == list(ANSWERS.values())
    judged = [line["judged"]["good"] for line in lines]
    assert [one["verdict"] for one in judged] == list(VERDICTS.values())
    assert [one["score"] for one in judged] == [7.0, 4.0, None, None]
    assert [line["passed"] for line in lines] == [
        {"exact": number == 0, "good": number == 0, "plain": False} for number in range(4)
    ]
    found = result_of(events)
    assert found["judged"] == {
        "good": {"mean_score": 5.5, "unreadable": 2},
        "plain": {"mean_score": None, "unreadable": 4},
    }
    assert (found["passed"], found["checks"]) == (0.0, {"exact": 0.25, "good": 0.25, "plain": 0.0})
    (point,) = of_kind(events, Evaluated)
    assert point.metrics == {
        **{"eval_passed": 0.0, "eval_passed_exact": 0.25, "eval_passed_good": 0.25, "eval_passed_plain": 0.0},
        "eval_score_good": 5.5,
    }
    assert "2 of 4 verdicts of good are unreadable: these answers do not pass" in of_kind(events, Warned)[-2].message
    (prepared,) = of_kind(events, Prepared)
    assert (prepared.total_steps, [event.step for event in of_kind(events, Progress)]) == (12, [2, 4, 6, 8, 10, 12])


@pytest.mark.parametrize(
    ("fault", "step", "steps"),
    [
        ("judging-2", 6, [8, 10, 12]),
        ("verdicts-staged", 12, []),
        *in_full(("judging-0", 4, [6, 8, 10, 12]), ("step-8", 8, [10, 12]), ("finishing", 12, [])),
    ],
)
def test_an_attempt_after_sigkill_in_the_judges_phase_continues_exactly(
    ranks: Ranks,
    armed: Path,
    models: tuple[Path, Path],
    undisturbed: Any,
    tmp_path: Path,
    fault: str,
    step: int,
    steps: list[int],
) -> None:
    (armed / fault).write_text("kill")
    spec = spec_of(tmp_path, models)
    codes, first = ranks.run(tmp_path / "first", spec)
    assert codes == [-9]
    assert not of_kind(first, Finished)
    codes, events = ranks.run(tmp_path / "second", spec)
    assert codes == [0], of_kind(events, Failed)
    assert [event.step for event in of_kind(events, Progress)] == steps
    (prepared,), (whole,) = of_kind(events, Prepared), of_kind(undisturbed[1], Prepared)
    assert prepared.start_step == step
    assert (prepared.total_parameters, prepared.effective) == (whole.total_parameters, whole.effective)
    assert files_of(spec) == undisturbed[2]
    found, expected = result_of(events), result_of(undisturbed[1])
    path = found["answers"].pop("path")
    assert path == str(spec.checkpoint_dir / "answers.jsonl")
    assert found == {**expected, "answers": {k: v for k, v in expected["answers"].items() if k != "path"}}


@pytest.mark.parametrize(
    ("text", "is_complete", "begins", "score"),
    [
        ("Verdict: 7", True, "", 7.0),
        ("Verdict: 7", False, "", None),  # the next token might have been a digit
        ("It is so.\nVerdict: 7\nOr", True, "<think>", None),  # thoughts that its chat template begins
        ("Verdict: 2\nNo.</think>\nVerdict: 7", True, "<think>", 7.0),
    ],
)
def test_a_judge_that_has_not_come_to_its_verdict_gives_none(
    text: str, is_complete: bool, begins: str, score: float | None
) -> None:
    check, answered = AnswerCheck.model_validate(SCORED), Answered(text, 9, is_complete)
    line = judge._line(check, {"row": 3, "sample": 0}, answered, begins)
    assert line == {"row": 3, "sample": 0, "score": score, "verdict": text}


def test_one_model_is_in_memory_at_a_time_and_judges_that_are_equal_are_loaded_once(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = transformers_answerer.load_to_infer

    def counted(*arguments: Any) -> Any:
        assert [one() for one in loaded if one() is not None] == []
        model = load(*arguments)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(transformers_answerer, "load_to_infer", counted)
    checks = PLAIN, {**PLAIN, "name": "again"}, {**SCORED}
    status, events = run(tmp_path / "run", spec_of(tmp_path, models, *checks))
    assert status == 0, of_kind(events, Failed)
    assert len(loaded) == 3
    gc.collect()
    assert [one() for one in loaded] == [None] * 3


def test_a_pause_between_verdicts_is_observed(models: tuple[Path, Path], undisturbed: Any, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, models)
    spec.checkpoint_dir.mkdir(parents=True)
    for name in ("answers.jsonl", "verdicts-1.jsonl"):
        shutil.copy(undisturbed[0].checkpoint_dir / name, spec.checkpoint_dir / name)
    paths = RunDir(tmp_path / "run")
    paths.root.mkdir()
    paths.control.write_text("pause")
    status, events = run(paths.root, spec)
    assert (status, [event.step for event in of_kind(events, Paused)]) == (0, [8])
    assert not of_kind(events, Finished)


def test_what_a_judge_has_no_positions_for_is_unreadable_and_the_others_of_its_batch_are_judged(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    positions = json.loads((tiny_model() / "config.json").read_text())["max_position_embeddings"]
    long = {"prompt": [{"role": "user", "content": "a b " * 30}]}
    template = "{answer} to {prompt}? {reference}" + " " * 20 + "{prompt}" * (positions // 60)
    check = {**SCORED, "template": template, "max_new_tokens": 6}
    rows = [ROWS[0], long, long, ROWS[1]]
    status, events = run(tmp_path / "run", spec_of(tmp_path, models, check, rows=rows))
    assert status == 0, of_kind(events, Failed)
    lines = (tmp_path / "checkpoints" / "verdicts-0.jsonl").read_text().splitlines()
    found = [json.loads(line)["verdict"] for line in lines]
    assert found[1:3] == [None, None]
    alone = tmp_path / "alone"
    status, events = run(alone / "run", spec_of(alone, models, check, rows=[ROWS[0], ROWS[1]], batch_size=1))
    assert status == 0, of_kind(events, Failed)
    lines = (alone / "checkpoints" / "verdicts-0.jsonl").read_text().splitlines()
    assert [found[0], found[3]] == [json.loads(line)["verdict"] for line in lines]


def test_an_attempt_loads_no_model_that_has_nothing_left_to_do(
    models: tuple[Path, Path], undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[JobSpec] = []
    load = transformers_answerer.load_to_infer
    monkeypatch.setattr(
        transformers_answerer, "load_to_infer", lambda spec, device: (loaded.append(spec), load(spec, device))[1]
    )
    spec = spec_of(tmp_path, models)
    shutil.copytree(undisturbed[0].checkpoint_dir, spec.checkpoint_dir)
    status, events = run(tmp_path / "run", spec)
    assert (status, loaded, [event.step for event in of_kind(events, Progress)]) == (0, [], [])
    assert files_of(spec) == undisturbed[2]
    (spec.checkpoint_dir / "verdicts-2.jsonl").unlink()
    status, events = run(tmp_path / "again", spec)
    assert (status, [(one.source.model, one.adapter) for one in loaded]) == (0, [(str(tiny_model()), None)])
    assert files_of(spec) == undisturbed[2]


def test_an_attempt_without_work_reports_the_same_model_with_its_adapter(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    adapter = AdapterSpec(model=str(models[1]), use="continue")
    spec = spec_of(tmp_path, models, EXACT).changed(model=str(tiny_model()), adapter=adapter)
    (first,), (again,) = (of_kind(run(tmp_path / name, spec)[1], Prepared) for name in ("first", "again"))
    assert (again.total_parameters, again.effective) == (first.total_parameters, first.effective)
    assert first.effective["model_class"].startswith("Peft")
    assert (first.start_step, again.start_step) == (0, 4)


def test_a_judge_that_is_no_model_fails_the_job_before_a_prompt_is_answered(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, models)
    assert isinstance(spec.work, EvaluateSpec)
    assert spec.work.answers is not None
    judges = (spec.work.answers.judges[0], FurtherModel(model=str(tmp_path / "none")))
    work = EvaluateSpec(answers=spec.work.answers.model_copy(update={"judges": judges}))
    status, events = run(tmp_path / "run", spec.model_copy(update={"work": work}))
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason, str(tmp_path / "none") in failed.message) == (1, "invalid_model", True)
    assert not of_kind(events, Prepared)
    assert files_of(spec)["answers.jsonl"] == b""


def test_an_answer_that_belongs_to_another_prompt_is_refused_by_its_row(
    models: tuple[Path, Path], undisturbed: Any, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, models)
    spec.checkpoint_dir.mkdir(parents=True)
    lines = undisturbed[2]["answers.jsonl"].replace(b"What is a dog?", b"What is a cat?", 1)
    (spec.checkpoint_dir / "answers.jsonl").write_bytes(lines)
    status, events = run(tmp_path / "run", spec)
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_dataset")
    assert failed.message.startswith("row 1: answer 1 in")
    assert of_kind(events, Started)
    (spec.checkpoint_dir / "answers.jsonl").write_bytes(lines.replace(b'"row": 0', b'"row": 9', 1))
    (failed,) = of_kind(run(tmp_path / "again", spec)[1], Failed)
    assert (failed.reason, "cannot be read as an answer" in failed.message) == ("invalid_dataset", True)


def test_lines_after_the_last_verdict_do_not_count(models: tuple[Path, Path], undisturbed: Any, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, models)
    shutil.copytree(undisturbed[0].checkpoint_dir, spec.checkpoint_dir)
    with open(spec.checkpoint_dir / "verdicts-1.jsonl", "ab") as file:
        file.write(b'{"row": 4}\n{"row": 5}\n')
    status, events = run(tmp_path / "run", spec)
    assert status == 0, of_kind(events, Failed)
    assert files_of(spec) == undisturbed[2]


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        (b'{"row": 2', b"x", 3),
        (b'"row": 2', b'"row": 3', 3),
        (b'"score": 7.0', b'"score": "7"', 1),
        (b'"score": 7.0', b'"score": NaN', 1),
    ],
)
def test_a_verdict_that_is_damaged_or_on_another_answer_fails_the_job_in_a_sentence(
    models: tuple[Path, Path], undisturbed: Any, tmp_path: Path, old: bytes, new: bytes, number: int
) -> None:
    spec = spec_of(tmp_path, models)
    shutil.copytree(undisturbed[0].checkpoint_dir, spec.checkpoint_dir)
    verdicts = undisturbed[2]["verdicts-1.jsonl"]
    assert old in verdicts
    (spec.checkpoint_dir / "verdicts-1.jsonl").write_bytes(verdicts.replace(old, new, 1))
    status, events = run(tmp_path / "run", spec)
    (failed,) = of_kind(events, Failed)
    assert (status, failed.reason) == (1, "invalid_dataset")
    assert (
        f"line {number} in {spec.checkpoint_dir / 'verdicts-1.jsonl'} cannot be read as a verdict (" in failed.message
    )


def test_what_the_template_of_a_judge_leaves_out_is_a_warning_before_its_first_verdict(
    ranks: Ranks, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model(), tmp_path / "mute")
    (tmp_path / "mute" / "chat_template.jinja").write_text("<|im_start|>assistant\n")
    spec = spec_of(tmp_path, (tiny_model(), tiny_model()), PLAIN)
    assert isinstance(spec.work, EvaluateSpec)
    assert spec.work.answers is not None
    judges = (FurtherModel(model=str(tmp_path / "mute")),)
    work = EvaluateSpec(answers=spec.work.answers.model_copy(update={"judges": judges}))
    codes, events = ranks.run(tmp_path / "run", spec.model_copy(update={"work": work}))
    assert codes == [0], of_kind(events, Failed)
    (warning,) = [event for event in of_kind(events, Warned) if "leaves out turns" in event.message]
    assert warning.message.startswith(
        "the judge the-judge's chat template leaves out turns of 4 of 4 prompts (4 user), first in row 0"
    )
    verdicts = [event for event in of_kind(events, Progress) if event.step > len(ROWS)]
    assert events.index(warning) < events.index(verdicts[0])
