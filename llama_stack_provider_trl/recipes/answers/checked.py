"""Evaluates a model by checks of its answers: the recipe of `evaluate` jobs with `checks`.

Answers are made and continued as those of `generate` jobs; the line of an answer has what it passes. Checks of type
judge follow when all prompts are answered (`recipes.evaluation.judge`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from math import fsum
from typing import Any

from ... import faults
from ...specs.answer_checks import AnswerCheck, is_enough, passes, reward_of
from ...specs.answer_rows import CheckedRow, read_checked_rows
from ...specs.compiled_checks import TIMEOUT
from ...specs.events import Evaluated, EventWriter, Finished, Warned
from ...specs.grading.isolated import WALL_S
from ...specs.job import AttemptSpec
from ...specs.work import ANSWERS, CheckedAnswering, EvaluateSpec
from ...system.files import sha256_of
from ..checkpoint.merged_base import discard_merged_base
from ..distributed.heartbeat import heartbeat
from ..distributed.replicas import ALONE, Replicas, replicas
from ..evaluation.judge import Judges, add_verdicts
from .generate import AnswerFile, Questions, answer_all, begin, open_answers


def check_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Answer the prompts that earlier attempts have not, have the answers judged, and report the shares that pass.
    Raises JobFailure, InvalidRows: a failure that the user can correct; any other exception is a bug or a limit of the
    machine."""
    with replicas(attempt, writer) as (team, events):
        _check(attempt, events, team)


def _check(attempt: AttemptSpec, writer: EventWriter, team: Replicas) -> None:
    work = attempt.job.work
    assert isinstance(work, EvaluateSpec)
    assert work.answers is not None
    spec, checks = attempt.job, work.answers.checks
    device = begin(attempt, writer)
    with heartbeat(writer):
        rows = list(read_checked_rows(spec.data.dataset.path, checks))
    questions = Questions([row.messages for row in rows], lambda row, text: _checked(checks, rows[row], text))
    with closing(open_answers(spec, work.answers, questions, team)) as answers:
        is_incomplete = answers.count < len(rows)
        with closing(Judges(spec, work.answers, len(rows), from_start=is_incomplete, team=team)) as judges:
            with heartbeat(writer):
                judges.check()  # before hours of answers
            more = judges.done, judges.total
            if not answer_all(attempt, writer, work.answers, questions, answers, device, more, team):
                return
            if not judges.judge_all(attempt, writer, rows, answers, device):
                return
            if not team.is_first:
                return
            discard_merged_base(spec)
            steps = answers.count + judges.total
            if judges.all:
                with heartbeat(writer):
                    add_verdicts(spec, checks, answers, judges)
    with closing(open_answers(spec, work.answers, questions, ALONE)) as answers, heartbeat(writer):
        measured = _measured(answers, checks)
    _report(measured, work.answers, steps, writer)
    faults.reach("finishing")
    file = spec.checkpoint_dir / ANSWERS
    of_answers = {**measured["answers"], "path": str(file), "sha256": sha256_of(file)}
    writer.write(Finished(step=steps, result={**measured, "answers": of_answers}), durable=True)


def _report(measured: dict[str, Any], work: CheckedAnswering, steps: int, writer: EventWriter) -> None:
    if timed_out := measured["timed_out"]:
        writer.write(
            Warned(message=f"{timed_out} checks took more than {_limits(work)} and count as failed: simplify them")
        )
    metrics = {"eval_passed": measured["passed"]}
    metrics |= {f"eval_passed_{name}": share for name, share in measured["checks"].items()}
    for name, of_grader in measured.get("graded", {}).items():
        metrics[f"eval_reward_{name}"] = of_grader["mean_reward"]
        if count := of_grader["errors"]:
            found = f"the grader {name!r} gives {count} of {measured['rows']} answers no reward, which counts as 0"
            writer.write(Warned(message=f"{found}; the first time: {of_grader['first_error']}"))
    for name, judged in measured.get("judged", {}).items():
        if unreadable := judged["unreadable"]:
            found = f"{unreadable} of {measured['rows']} verdicts of {name} are unreadable"
            writer.write(Warned(message=f"{found}: these answers do not pass, and have no part in the mean score"))
        if judged["mean_score"] is not None:
            metrics[f"eval_score_{name}"] = judged["mean_score"]
    writer.write(Evaluated(step=steps, epoch=1.0, metrics=metrics))


def _limits(work: CheckedAnswering) -> str:
    found = {"grader": f"{WALL_S:g} s (graders)", "other": f"{TIMEOUT:g} s"}
    kinds = {"grader" if check.type == "grader" else "other" for check in work.checks}
    return " or ".join(found[kind] for kind in sorted(kinds, reverse=True))


def _checked(checks: tuple[AnswerCheck, ...], row: CheckedRow, text: str) -> dict[str, Any]:
    """What an answer passes, which checks took too long, and the rewards of graders. Checks of type judge are not known
    yet."""
    passed: dict[str, bool] = {}
    timed_out: list[str] = []
    rewards: dict[str, dict[str, Any]] = {}
    expected: dict[str, str] = {}
    for check, reference in zip(checks, row.references, strict=True):
        if check.type == "judge":
            continue
        if check.type == "grader":
            given = reward_of(check, text, reference)
            passed[check.measure] = is_enough(check, given)
            error = given.error and given.error.sentence
            rewards[check.measure] = {"reward": given.reward, "error": error}
            if given.is_late:
                timed_out.append(check.measure)
            continue
        try:
            passed[check.measure] = passes(check, text, reference)
        except TimeoutError:
            passed[check.measure] = False
            timed_out.append(check.measure)
        if not passed[check.measure] and isinstance(reference, str):
            expected[check.measure] = reference
    found = {"passed": passed, "timed_out": timed_out}
    return found | ({"graded": rewards} if rewards else {}) | ({"expected": expected} if expected else {})


def _measured(answers: AnswerFile, checks: tuple[AnswerCheck, ...]) -> dict[str, Any]:
    """The result of a job: shares of its answers between 0 and 1, counts, and mean scores."""
    hits, counts = Counter[str](), Counter[str]()
    scores: dict[str, list[float | None]] = {check.measure: [] for check in checks if check.type == "judge"}
    graded: dict[str, list[dict[str, Any]]] = {check.measure: [] for check in checks if check.type == "grader"}
    for line in answers.lines():
        for name, rewards in graded.items():
            rewards.append(line["graded"][name])
        hits.update(name for name, passed in line["passed"].items() if passed)
        counts["all"] += all(line["passed"].values())
        counts["timed_out"] += len(line["timed_out"])
        counts["blank"] += not line["text"].strip()
        counts["incomplete"] += not line["complete"]
        counts["tokens"] += line["tokens"]
        for name, given in scores.items():
            given.append(line["judged"][name]["score"])
    return {
        "rows": answers.count,
        "passed": counts["all"] / answers.count,
        "checks": {check.measure: hits[check.measure] / answers.count for check in checks},
        "timed_out": counts["timed_out"],
        **({"graded": {name: _of_rewards(given) for name, given in graded.items()}} if graded else {}),
        **({"judged": {name: _summary(given) for name, given in scores.items()}} if scores else {}),
        "answers": {"count": answers.count, **{name: counts[name] for name in ("blank", "incomplete", "tokens")}},
    }


def _summary(scores: Sequence[float | None]) -> dict[str, Any]:
    """The mean of the readable scores, None where there is none, and the number of the others."""
    readable = [score for score in scores if score is not None]
    mean = fsum(readable) / len(readable) if readable else None
    return {"mean_score": mean, "unreadable": len(scores) - len(readable)}


def _of_rewards(given: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of a grader's rewards, in which errors are 0, their number, and the first of them."""
    errors = [one["error"] for one in given if one["error"] is not None]
    mean = fsum(one["reward"] for one in given) / len(given)
    return {"mean_reward": mean, "errors": len(errors), "first_error": errors[0] if errors else None}
