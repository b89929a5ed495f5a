"""Evaluates a model on held-out rows: `python -m llama_stack_provider_trl.recipes.evaluate SPEC RESULT`.

Reads a JobSpec whose validation rows are the ones to evaluate on. Writes one JSON object to RESULT: the counts and
metrics, or `reason` and `message` of the failure. They are the numbers of a job that evaluates these weights.
"""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from .. import faults
from ..specs.events import Evaluated, EventWriter, Finished, NullEventWriter, Prepared, Started, Warned
from ..specs.job import AttemptSpec, JobSpec
from ..specs.kinds import members_of
from .imports import quick_imports
from .results import write_result

if TYPE_CHECKING:
    from .build import BuiltTrainer


def main(argv: list[str]) -> int:
    """Evaluate the spec; returns the exit status (0 done, 1 failed)."""
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
    return {**_counts(built), "warnings": list(dict.fromkeys(writer.warnings)), **_measured(built)}


def evaluate_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Evaluate a model, or an ensemble, as a job, on the rows of its dataset. An attempt begins at the first row.

    Raises:
        JobFailure: as `evaluate`.
    """
    from .distributed.heartbeat import heartbeat
    from .model.loading import choose_device

    spec = attempt.job.model_copy(update={"validation": attempt.job.dataset})
    writer.write(Started(pid=os.getpid(), device=str(choose_device(spec.device)), versions={}))
    faults.reach("started")
    with heartbeat(writer):
        built = _built(spec, writer)
        counts = _counts(built)
        prepared: dict[str, Any] = {"total_parameters": _parameters(built), "effective": built.effective()}
        writer.write(Prepared(total_steps=1, num_rows=counts["rows"], trainable_parameters=0, **prepared))
        faults.reach("prepared")
        measured = _measured(built)
    known = {f"eval_{name}": value for name, value in measured.items() if value is not None}
    writer.write(Evaluated(step=1, epoch=1.0, metrics=known))
    writer.write(Finished(step=1, result={**counts, **measured}), durable=True)


def _built(spec: JobSpec, writer: EventWriter) -> BuiltTrainer:
    """The trainer that evaluates. Raises JobFailure."""
    with quick_imports():
        from transformers import PrinterCallback

        from .build import build_trainer, load_policy
        from .model.loading import choose_device, within_positions
        from .trainer.ensemble import EnsembleRecipe, check_members
        from .trainer.trl_patches import require_releases

    require_releases()
    spec, warnings = within_positions(spec)
    for message in warnings:
        writer.write(Warned(message=message))
    if members_of(spec.work):
        check_members(spec)
    built = build_trainer(spec, choose_device(spec.device), writer)
    built.trainer.remove_callback(PrinterCallback)
    if isinstance(built.trainer, EnsembleRecipe):
        built.trainer.add_members(load_policy)
    return built


def _parameters(built: BuiltTrainer) -> int:
    """Parameters of all models that are evaluated."""
    from .model.loading import parameter_counts
    from .trainer.ensemble import EnsembleRecipe

    models = built.trainer.models if isinstance(built.trainer, EnsembleRecipe) else [built.trainer.model]
    return sum(parameter_counts(model)[1] for model in models)


def _counts(built: BuiltTrainer) -> dict[str, Any]:
    report = built.data.validation_report
    if report is None:
        raise AssertionError("a spec without validation rows")
    return {
        "rows": report.kept,
        "truncated": report.truncated,
        "dropped": report.dropped,
        "trained_tokens": report.trained_tokens,
    }


def _measured(built: BuiltTrainer) -> dict[str, float | None]:
    metrics = built.trainer.evaluate()
    return {"loss": metrics["eval_loss"], **_measures(built.trainer.spec, metrics)}


def _measures(spec: JobSpec, metrics: dict[str, float]) -> dict[str, float | None]:
    if spec.has_pairs:
        return {"preference_accuracy": metrics["eval_rewards/accuracies"], "margin": metrics["eval_rewards/margins"]}
    loss = metrics["eval_loss"]
    # exp overflows a float beyond 709, where a perplexity has no meaning.
    return {"perplexity": math.exp(loss) if loss < 700 else None, "token_accuracy": metrics["eval_mean_token_accuracy"]}


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
