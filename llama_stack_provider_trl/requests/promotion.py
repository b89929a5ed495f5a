"""Whether the conditions of `promote_if` can be checked, and whether they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidRequest, JobNotFound
from ..specs.promotion import BOUNDS, CheckedCondition, PromotionCondition, measures
from .choices import nearest

FIELD = "promote_if"
_LISTED = 30
"""Measures that a message names."""
_COUNTS = ("rows", "truncated", "dropped", "trained_tokens")
_OF_ANSWERS = (
    "rows",
    "passed",
    "timed_out",
    *(f"answers.{name}" for name in ("count", "blank", "incomplete", "tokens")),
)


class Model(NamedTuple):
    """A model, or an adapter, that is exported or measured."""

    name: str
    """A directory, or a model id."""
    revision: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Model:
        """What a job reads.

        Args:
            config: its effective configuration, as a status has it.
        """
        given = config.get("adapter") or config
        return cls(given["model"], given.get("revision"))


class Evaluation(NamedTuple):
    """A job that a condition names, or whose rows its evaluation reads."""

    config: Mapping[str, Any]
    """Its effective configuration, as a status has it: `dtype` is that of its attempt."""
    status: str
    result: Mapping[str, Any] | None
    """None: it has not completed."""
    age: int
    """Its place in the order of submission: the lower, the older. Times say less: a clock may be set back."""


type Find = Callable[[str], Evaluation]
"""Returns the job of a name. Raises JobNotFound."""


def refuse_unusable(
    conditions: Sequence[PromotionCondition],
    model: Model,
    find: Find,
    field: str = FIELD,
    *,
    age: int | None = None,
    completed: bool = False,
) -> None:
    """Refuse conditions that say nothing about a model. Raises InvalidRequest: names the condition's field: no bound or
    several, a job that is none or evaluates another model or other rows, or has failed; a measure that it does not
    report.

    Args:
        age: of the job whose checkpoint the model is: an older evaluation measured a deleted job of the same name.
            None: the model is no job's.
        completed: whether their evaluations must have completed.
    """
    for number, one in enumerate(conditions):
        where = f"{field}.{number}"
        _refuse_bounds(one, where)
        evaluation = _found(f"{where}.evaluation", one.evaluation, find, completed)
        _refuse_other_model(f"{where}.evaluation", one.evaluation, evaluation, model)
        _refuse_earlier(f"{where}.evaluation", one.evaluation, evaluation, model, age)
        _refuse_unknown(f"{where}.metric", one.metric, one.evaluation, evaluation)
        if one.against is not None:
            before = _found(f"{where}.against", one.against, find, completed)
            _refuse_other_rows(f"{where}.against", one, evaluation, before, find)
            _refuse_unknown(f"{where}.metric", one.metric, one.against, before)


def checked(conditions: Sequence[PromotionCondition], find: Find) -> tuple[CheckedCondition, ...]:
    """The conditions with what their evaluations, which have completed, have found. Raises JobNotFound."""

    def measure(name: str | None, metric: str) -> float | None:
        return None if name is None else dict(measures(find(name).result or {})).get(metric)

    return tuple(
        CheckedCondition(
            **dict(one), found=measure(one.evaluation, one.metric), before=measure(one.against, one.metric)
        )
        for one in conditions
    )


def unmet(conditions: Sequence[CheckedCondition], field: str = FIELD) -> str:
    """A sentence about each condition that does not hold; empty: all hold."""
    failed = [(f"{field}.{number}", one) for number, one in enumerate(conditions) if not one.holds]
    return " ".join(f"{where} does not hold: {one.sentence}." for where, one in failed)


def _refuse_bounds(one: PromotionCondition, where: str) -> None:
    named = list(one.bounds)
    of_values = ("at_least", "at_most")
    of_changes = tuple(name for name in BOUNDS if name not in of_values)
    if one.against is not None and one.against == one.evaluation:
        raise InvalidRequest(f"{where}.against", one.against, "it is `evaluation` itself: name another evaluation")
    expected = of_values if one.against is None else of_changes
    if len(named) == 1 and named[0] in expected:
        return
    kind = "without `against`" if one.against is None else "with `against`"
    hint = f"a condition {kind} has one of {' and '.join(expected)}, and no other: send several conditions"
    raise InvalidRequest(where, ", ".join(named) or "no bound", hint)


def _found(field: str, name: str, find: Find, completed: bool) -> Evaluation:
    try:
        found = find(name)
    except JobNotFound as error:
        hint = f"there is no job {name!r} here: submit the evaluation first, or correct its name"
        raise InvalidRequest(field, name, hint) from error
    work = found.config.get("work") or {}
    if work.get("kind") != "evaluate":
        does = work.get("kind") or "it trains"
        hint = f"job {name!r} is no evaluation ({does}): name a job of POST /v1/post-training/evaluate"
        raise InvalidRequest(field, name, hint)
    if found.status in ("failed", "cancelled"):
        hint = f"the evaluation is {found.status}, so nothing was measured: submit it again under another job_uuid"
        raise InvalidRequest(field, name, hint)
    if completed and found.status != "completed":
        raise InvalidRequest(field, name, f"the evaluation is {found.status}: wait until it has completed")
    return found


def _refuse_other_model(field: str, name: str, evaluation: Evaluation, model: Model) -> None:
    if members := (evaluation.config.get("work") or {}).get("members"):
        hint = (
            f"it measures an ensemble of {len(members)} models, and not {model.name}: name an evaluation of that alone"
        )
        raise InvalidRequest(field, name, hint)
    if (measured := Model.of(evaluation.config)) != model:
        hint = (
            f"it measures {_named(measured)}, and this is about {_named(model)}: name an evaluation of the same model"
        )
        raise InvalidRequest(field, name, hint)


def _refuse_earlier(field: str, name: str, evaluation: Evaluation, model: Model, age: int | None) -> None:
    if age is not None and evaluation.age < age:
        hint = (
            f"it was submitted before the job that makes {_named(model)}, so it measures a deleted job of the same "
            "name: evaluate the model again, under another job_uuid"
        )
        raise InvalidRequest(field, name, hint)


def _refuse_other_rows(
    field: str, one: PromotionCondition, evaluation: Evaluation, before: Evaluation, find: Find
) -> None:
    ours, theirs = _measuring(evaluation, find), _measuring(before, find)
    if other := [what for what in ours if ours[what] != theirs[what]]:
        hint = f"its {' and '.join(other)} are not those of {one.evaluation!r}: evaluate both models in the same way"
        raise InvalidRequest(field, one.against, hint)
    if (ours_in := _dtype(evaluation)) and (theirs_in := _dtype(before)) and ours_in != theirs_in:
        hint = (
            f"it computes in {theirs_in}, and {one.evaluation!r} in {ours_in}: evaluate both models with the same dtype"
        )
        raise InvalidRequest(field, one.against, hint)


def _measuring(evaluation: Evaluation, find: Find) -> dict[str, Any]:
    """What an evaluation measures on, and how."""
    config = evaluation.config
    rows, work = config.get("dataset") or {}, config.get("work") or {}
    maker = rows.get("of_job")
    return {
        "rows": (
            *(maker, None if maker is None else _reads_deleted(evaluation, maker, find)),
            *(rows.get("sha256"), rows.get("shard"), rows.get("names"), config.get("max_seq_length")),
        ),
        "measures": (config.get("algorithm"), config.get("method", {}) if config.get("algorithm") != "sft" else None),
        "checks": work.get("answers"),
        "tasks": work.get("harness"),
    }


def _dtype(evaluation: Evaluation) -> str | None:
    """What an evaluation computes in; None: its first attempt decides."""
    config = evaluation.config
    return None if config.get("dtype_by_device") and evaluation.status != "completed" else config.get("dtype")


def _reads_deleted(evaluation: Evaluation, maker: str, find: Find) -> bool:
    """Whether an evaluation reads rows of a deleted job, and another one has its name."""
    try:
        return evaluation.age < find(maker).age
    except JobNotFound:
        return False


def _refuse_unknown(field: str, metric: str, name: str, evaluation: Evaluation) -> None:
    if (known := _reported(evaluation)) is None:
        return
    if Counter(known)[metric] > 1:
        hint = f"the evaluation {name!r} reports several measures of this name: give its checks, or tasks, other names"
        raise InvalidRequest(field, metric, hint)
    if metric not in known:
        more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
        hint = f"the evaluation {name!r} reports {', '.join(known[:_LISTED])}{more}{nearest(metric, known)}"
        raise InvalidRequest(field, metric, hint)


def _reported(evaluation: Evaluation) -> list[str] | None:
    """The measures of an evaluation; None: they are known once it has completed."""
    if evaluation.result is not None:
        return [name for name, _ in measures(evaluation.result)]
    work = evaluation.config.get("work") or {}
    if work.get("harness"):
        return None
    if answers := work.get("answers"):
        named = [(one["type"], one.get("name") or one["type"]) for one in answers["checks"]]
        judged = [name for kind, name in named if kind == "judge"]
        of_judges = [f"judged.{name}.{what}" for name in judged for what in ("mean_score", "unreadable")]
        return [*_OF_ANSWERS, *(f"checks.{name}" for _, name in named), *of_judges]
    if evaluation.config.get("algorithm") == "dpo":
        return [*_COUNTS, "loss", "preference_accuracy", "margin"]
    return [*_COUNTS, "loss", "perplexity", "token_accuracy"]


def _named(model: Model) -> str:
    return model.name if model.revision is None else f"{model.name}@{model.revision}"
