"""The metrics of a job as OpenAI's result file has them: a CSV file with a line per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from llama_stack_provider_trl.jobs.store.records import PointRecord
from llama_stack_provider_trl.jobs.store.store import Store

COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_PAGE = 4000
_ACCURACIES = ("mean_token_accuracy", "rewards/accuracies")
"""Of supervised jobs, and of DPO: the share of pairs whose preferred answer has the higher reward."""


def metrics_csv(store: Store, job_uuid: str) -> Iterator[bytes]:
    """The lines, some at a time. Raises JobNotFound."""
    yield (",".join(COLUMNS) + "\n").encode()
    after = -1
    while True:
        points = list(store.points(job_uuid, after, _PAGE))
        if len(points) == _PAGE:  # the last step may go on
            last = points[-1].step
            points = [point for point in points if point.step < last]
        if not points:
            return
        yield "".join(_line(step, list(group)) for step, group in groupby(points, lambda point: point.step)).encode()
        after = points[-1].step


def values_of(points: list[PointRecord]) -> dict[str, float | None]:
    """The columns behind the step, of the points of one step."""
    found: dict[str, float | None] = dict.fromkeys(COLUMNS[1:])
    for point in points:
        if point.kind == "train":
            found["train_loss"] = point.metrics.get("loss")
            found["train_accuracy"] = _accuracy(point.metrics, "")
        else:
            found["valid_loss"] = point.metrics.get("eval_loss")
            found["valid_mean_token_accuracy"] = _accuracy(point.metrics, "eval_")
    return found


def _accuracy(metrics: Mapping[str, float], prefix: str) -> float | None:
    return next((metrics[prefix + name] for name in _ACCURACIES if prefix + name in metrics), None)


def _line(step: int, points: list[PointRecord]) -> str:
    values = values_of(points)
    return ",".join([str(step), *("" if value is None else f"{value:.6g}" for value in values.values())]) + "\n"
