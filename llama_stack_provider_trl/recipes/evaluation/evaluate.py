"""Evaluates a model on held-out rows: `python -m llama_stack_provider_trl.recipes.evaluation.evaluate SPEC RESULT`.

Reads a JobSpec whose validation rows are the ones to evaluate on. Writes one JSON object to RESULT: the counts and
metrics, or `reason` and `message` of the failure. They are the numbers of a job that evaluates these weights.
"""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from ... import faults
from ...specs.evaluations import perplexity_of
from ...specs.events import Evaluated, EventWriter, Finished, NullEventWriter, Prepared, Started, Warned
from ...specs.job import AttemptSpec, JobSpec
from ..imports import quick_imports
from ..results import write_result

LOSS = ""
"""The name of the loss among the sums of a batch: it has one part."""

if TYPE_CHECKING:
    from ..build import BuiltTrainer
    from ..distributed.replicas import Replicas
    from ..trainer.base import RecipeTrainer


def main(argv: list[str]) -> int:
    return write_result(argv, lambda text: evaluate(JobSpec.model_validate_json(text)))


def evaluate(spec: JobSpec) -> dict[str, Any]:
    """Evaluate a model in this process.

    Args:
        spec: a job on one rank. Its model is evaluated as it is; of a DPO job it is compared with the reference.

    Returns:
        `rows` that count, `truncated`, `dropped`, `trained_tokens`, `warnings` and `loss`. SFT: `perplexity` and
        `token_accuracy`, over all trained tokens. DPO: `preference_accuracy`, the share of pairs whose chosen answer
        has become more likely than the rejected one, against the reference; and `margin`, by how much.

    Raises:
        JobFailure: the model, its reference or a row cannot be used; any other exception is a limit of the machine.
    """
    writer = _WarningList()
    built = _built(spec, writer)
    from ..distributed.replicas import ALONE

    return {**_counts(built), "warnings": list(dict.fromkeys(writer.warnings)), **_measured(built, ALONE)}


def evaluate_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Evaluate a model, or an ensemble, as a job, on the rows of its dataset. An attempt begins at the first row.

    Of several ranks each evaluates batches of its own, those of one process, and their sums are added without rounding:
    the number of ranks changes no measure. Raises JobFailure: as `evaluate`.
    """
    from ..distributed.replicas import replicas

    with replicas(attempt, writer) as (team, events):
        _evaluate(attempt, events, team)


def _evaluate(attempt: AttemptSpec, writer: EventWriter, team: Replicas) -> None:
    from ..distributed.heartbeat import heartbeat
    from ..model.loading import choose_device

    alone = {"ranks": 1, "sharding": None}  # as each rank computes
    spec = attempt.job.changed(validation=attempt.job.data.dataset, **alone)
    writer.write(Started(pid=os.getpid(), device=str(choose_device(spec.device)), versions={}))
    faults.reach("started")
    with heartbeat(writer):
        built = _built(spec, writer)
        counts = _counts(built)
        prepared: dict[str, Any] = {"total_parameters": _parameters(built), "effective": built.effective()}
        writer.write(Prepared(total_steps=1, num_rows=counts["rows"], trainable_parameters=0, **prepared))
        faults.reach("prepared")
        measured = _measured(built, team)
    known = {f"eval_{name}": value for name, value in measured.items() if value is not None}
    writer.write(Evaluated(step=1, epoch=1.0, metrics=known))
    writer.write(Finished(step=1, result={**counts, **measured}), durable=True)


def _built(spec: JobSpec, writer: EventWriter) -> BuiltTrainer:
    """The trainer that evaluates. Raises JobFailure."""
    with quick_imports():
        from transformers import PrinterCallback

        from ..build import build_trainer, load_policy
        from ..model.loading import choose_device
        from ..model.positions import within_positions
        from ..trainer.ensemble import EnsembleRecipe, check_members
        from ..trainer.trl_patches import require_releases

    require_releases()
    spec, warnings = within_positions(spec)
    for message in warnings:
        writer.write(Warned(message=message))
    # The rows are those of training and of validation; only a training has a directory of its own for compiled code.
    spec = spec.changed(duplicates=None, compile_blocks="never")
    if spec.does.ensemble:
        check_members(spec)
    built = build_trainer(spec, choose_device(spec.device), writer)
    built.trainer.remove_callback(PrinterCallback)
    if isinstance(built.trainer, EnsembleRecipe):
        built.trainer.add_members(load_policy)
    return built


def _parameters(built: BuiltTrainer) -> int:
    from ..model.loading import parameter_counts
    from ..trainer.ensemble import EnsembleRecipe

    models = built.trainer.models if isinstance(built.trainer, EnsembleRecipe) else [built.trainer.model]
    return sum(parameter_counts(model)[1] for model in models)


def _counts(built: BuiltTrainer) -> dict[str, Any]:
    report = built.data.validation_report
    assert report is not None, "a spec without validation rows"
    return {
        "rows": report.kept,
        "truncated": report.truncated,
        "dropped": report.dropped,
        "trained_tokens": report.trained_tokens,
    }


def _measured(built: BuiltTrainer, team: Replicas) -> dict[str, float | None]:
    """The measures over the batches of all ranks, of which each has every so many. A collective."""
    rows, size = built.data.validation, built.trainer.args.eval_batch_size
    assert rows is not None
    count = built.trainer.rows_of(rows)
    begins = range(team.rank * size, count, team.count * size)
    own = [row for begin in begins for row in range(begin, min(begin + size, count))]
    filler = range(count, len(rows))  # which no batch has
    means = _means(team.gather(_batches(built.trainer, rows.select([*own, *filler])) if own else {}))
    return {"loss": means[LOSS], **_measures(built.trainer.spec, means)}


def _batches(trainer: RecipeTrainer, rows: Any) -> dict[str, list[list[float]]]:
    """Sum and count of each batch of some rows, in their order: of the loss, and of each metric."""
    trainer.kept_metrics = {}
    trainer.evaluate(rows)
    found = {**trainer.kept_metrics, **trainer.evaluation_sums}
    return {name: [batch.tolist() for batch in batches] for name, batches in found.items()}


def _means(ranks: list[dict[str, list[list[float]]]]) -> dict[str, float]:
    """The mean of each, without rounding of sums: in whichever order the batches are, it is the same number."""
    means = {}
    for name in dict.fromkeys(name for of_rank in ranks for name in of_rank):
        pairs = [pair for of_rank in ranks for pair in of_rank.get(name, ())]
        means[name] = _sum([total for total, _ in pairs]) / max(_sum([count for _, count in pairs]), 1.0)
    return means


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _measures(spec: JobSpec, means: dict[str, float]) -> dict[str, float | None]:
    if spec.has_pairs:
        return {"preference_accuracy": means["rewards/accuracies"], "margin": means["rewards/margins"]}
    return {"perplexity": perplexity_of(means[LOSS]), "token_accuracy": means["mean_token_accuracy"]}


class _WarningList(NullEventWriter):
    """Keeps the warnings, and no other event."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def write(self, event: Any, *, durable: bool = False) -> None:
        if isinstance(event, Warned):
            self.warnings.append(event.message)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
