"""Evaluates a model by checks of its answers: the recipe of `evaluate` jobs with `checks`.

Answers are made and continued as those of `generate` jobs; the line of an answer has what it passes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..specs.answer_checks import TIMEOUT, AnswerCheck, passes
from ..specs.answer_rows import CheckedRow, read_checked_rows
from ..specs.events import Evaluated, EventWriter, Warned
from ..specs.job import AttemptSpec
from ..specs.kinds import ANSWERS, EvaluateSpec
from ..system.files import sha256_of
from .generate import AnswerFile, Questions, answer_attempt


def check_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Answer the prompts that earlier attempts have not, and report the shares of answers that pass the checks.

    Raises:
        JobFailure, InvalidRows: a failure that the user can correct; any other exception is a bug or a limit of the
            machine.
    """
    spec, work = attempt.job, attempt.job.work
    assert isinstance(work, EvaluateSpec)
    assert work.answers is not None
    checks, path = work.answers.checks, spec.dataset.path

    def read() -> Questions:
        rows = list(read_checked_rows(path, checks))
        return Questions([row.messages for row in rows], lambda row, text: _checked(checks, rows[row], text))

    def finish(answers: AnswerFile) -> dict[str, Any]:
        measured = _measured(answers, checks)
        if timed_out := measured["timed_out"]:
            writer.write(
                Warned(message=f"{timed_out} checks took more than {TIMEOUT:g} s and count as failed: simplify them")
            )
        shares = {f"eval_passed_{name}": share for name, share in measured["checks"].items()}
        metrics = {"eval_passed": measured["passed"], **shares}
        writer.write(Evaluated(step=answers.count, epoch=1.0, metrics=metrics))
        file = spec.checkpoint_dir / ANSWERS
        return {**measured, "answers": {**measured["answers"], "path": str(file), "sha256": sha256_of(file)}}

    answer_attempt(attempt, writer, work.answers, read, finish)


def _checked(checks: tuple[AnswerCheck, ...], row: CheckedRow, text: str) -> dict[str, Any]:
    """What an answer passes, and which checks took too long."""
    passed: dict[str, bool] = {}
    timed_out: list[str] = []
    for check, reference in zip(checks, row.references, strict=True):
        try:
            passed[check.measure] = passes(check, text, reference)
        except TimeoutError:
            passed[check.measure] = False
            timed_out.append(check.measure)
    return {"passed": passed, "timed_out": timed_out}


def _measured(answers: AnswerFile, checks: tuple[AnswerCheck, ...]) -> dict[str, Any]:
    """The result of a job: shares of its answers between 0 and 1, and counts."""
    hits, counts = Counter[str](), Counter[str]()
    for line in answers.lines():
        hits.update(name for name, passed in line["passed"].items() if passed)
        counts["all"] += all(line["passed"].values())
        counts["timed_out"] += len(line["timed_out"])
        counts["blank"] += not line["text"].strip()
        counts["incomplete"] += not line["complete"]
        counts["tokens"] += line["tokens"]
    return {
        "rows": answers.count,
        "passed": counts["all"] / answers.count,
        "checks": {check.measure: hits[check.measure] / answers.count for check in checks},
        "timed_out": counts["timed_out"],
        "answers": {"count": answers.count, **{name: counts[name] for name in ("blank", "incomplete", "tokens")}},
    }
