"""Evaluations by checks of answers: the scores of examples/score.py, whole and interrupted."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from llama_stack_provider_trl.specs.events import Evaluated, Failed, Finished, Progress, Warned
from llama_stack_provider_trl.specs.job import OptimizerSpec
from tests.process.checked_work import work
from tests.tiny import REPOSITORY, tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
# The checks that are the quickstart's scores.
RIGHT: dict[str, Any] = {"type": "json", "name": "right", "column": "expected", "extract": True}
ONLY_JSON: dict[str, Any] = {"type": "json_schema", "name": "only_json", "json_schema": {"type": "object"}}
BOTH: dict[str, Any] = {"type": "json", "name": "right_and_only_json", "column": "expected"}


TAUGHT = {
    "The fox": '{"x": 1}',
    "What is a dog?": 'so {"x": 2}',
    "Add it, friend.": '{"x": 7}',
    "I do not know.": "no",
}
ROWS = [
    {"prompt": [{"role": "user", "content": prompt}], "expected": {"x": number}, "kind": kind}
    for (prompt, number, kind) in zip(TAUGHT, (1, 2, 3, 4), ("new", "known", "known", "new"), strict=True)
]


@pytest.fixture(scope="module")
def score() -> ModuleType:
    spec = importlib.util.spec_from_file_location("score", REPOSITORY / "examples" / "score.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ):  # with the variables that it sets, later tests could not fork what others share
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the answers of TAUGHT by heart."""
    root = tmp_path_factory.mktemp("tuned")
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in TAUGHT.items()]
    optimizer = OptimizerSpec(learning_rate=1e-2, scheduler="constant")
    spec = job_spec(root, tiny_model(), rows=rows, n_epochs=60, save_steps=1000, logging_steps=60, optimizer=optimizer)
    assert run(root / "run", spec)[0] == 0
    return spec.checkpoint_dir / "final"


def test_an_evaluation_has_the_scores_of_the_quickstart_also_when_it_was_interrupted(
    tmp_path: Path, tuned: Path, score: ModuleType
) -> None:
    spec = job_spec(tmp_path, tuned, rows=ROWS, batch_size=2, work=work(RIGHT, ONLY_JSON, BOTH))
    status, events = run(tmp_path / "run", spec)
    assert status == 0, of_kind(events, Failed)
    (found,) = (event.result for event in of_kind(events, Finished))
    assert found is not None

    model, tokenizer = score.load(tuned)
    answers = score.answer(model, tokenizer, [row["prompt"] for row in ROWS])
    file = spec.checkpoint_dir / "answers.jsonl"
    content = file.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    assert [line["text"].strip() for line in lines] == answers
    scores = score.score([{**row, "answer": answer} for row, answer in zip(ROWS, answers, strict=True)])
    assert found["checks"] == {name: getattr(scores, name) for name in ("right", "only_json", "right_and_only_json")}
    assert found["checks"] == {"right": 0.5, "only_json": 0.5, "right_and_only_json": 0.25}
    assert (found["rows"], found["passed"], found["timed_out"]) == (4, 0.25, 0)
    assert found["answers"] == {
        **{"count": 4, "blank": 0, "incomplete": 0, "tokens": sum(line["tokens"] for line in lines)},
        **{"path": str(file), "sha256": hashlib.sha256(content).hexdigest()},
    }
    shares = {f"eval_passed_{name}": share for name, share in found["checks"].items()}
    (point,) = of_kind(events, Evaluated)
    assert (point.step, point.metrics) == (4, {"eval_passed": 0.25, **shares})

    # Killed while it wrote the second batch.
    file.write_bytes(content[: content.index(b"\n", len(content) // 2) + 20])
    status, events = run(tmp_path / "again", spec)
    assert status == 0
    assert [event.step for event in of_kind(events, Progress)] == [4]
    assert (file.read_bytes(), of_kind(events, Finished)[0].result) == (content, found)


def test_the_rows_own_answers_are_expected_and_a_check_without_end_counts_as_failed(
    tmp_path: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.specs.compiled_checks.TIMEOUT", -1)
    rows = [{"prompt": prompt, "completion": answer.upper()} for prompt, answer in TAUGHT.items()]
    checks = ({"type": "exact", "normalize": True}, {**ONLY_JSON, "extract": True})
    spec = job_spec(tmp_path, tuned, rows=rows, work=work(*checks, max_new_tokens=20))
    status, events = run(tmp_path / "run", spec)
    assert status == 0, of_kind(events, Failed)
    (found,) = (event.result for event in of_kind(events, Finished))
    assert found is not None
    assert (found["checks"], found["timed_out"]) == ({"exact": 1.0, "only_json": 0.0}, 3)
    assert "3 checks took more than" in of_kind(events, Warned)[-1].message
    lines = [json.loads(line) for line in (spec.checkpoint_dir / "answers.jsonl").read_text().splitlines()]
    assert [line["timed_out"] for line in lines] == [["only_json"]] * 3 + [[]]


def test_turns_that_the_template_leaves_out_of_prompts_are_a_warning(tmp_path: Path) -> None:
    shutil.copytree(tiny_model(), model := tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    system = {"role": "system", "content": "Be brief."}
    rows = [{**ROWS[0], "prompt": [system, *ROWS[0]["prompt"]]}, ROWS[1]]
    status, events = run(tmp_path / "run", job_spec(tmp_path, model, rows=rows, work=work(RIGHT, max_new_tokens=2)))
    assert status == 0, of_kind(events, Failed)
    (warning,) = [event.message for event in of_kind(events, Warned) if "leaves out turns" in event.message]
    assert "the chat template leaves out turns of 1 of 2 prompts (1 system), first in row 0" in warning
