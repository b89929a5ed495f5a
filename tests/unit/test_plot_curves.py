"""The curves of a plot: chosen, smoothed and thinned; and the refusals of plots."""

from __future__ import annotations

import math
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, MissingExtra, StoreError
from llama_stack_provider_trl.jobs.store import database
from llama_stack_provider_trl.jobs.store.database import Database
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Evaluated
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl_remote.plots.curves import PlotCurve, curves_of, smooth, thin
from llama_stack_provider_trl_remote.plots.files import check_output, write_plot
from llama_stack_provider_trl_remote.plots.points import PlotPoint, stored_points
from tests.fakes import job_spec


def point(step: int, kind: str = "train", **metrics: float) -> PlotPoint:
    return PlotPoint(kind, step, step / 2, 1000.0 + 60 * step, metrics)


POINTS = [
    *(point(step, loss=value, grad_norm=1.0) for step, value in enumerate([4.0, 2.0, math.nan, 1.0], start=1)),
    point(4, "validation", eval_loss=1.5),
]


def test_a_metric_has_a_curve_for_training_and_one_for_evaluations() -> None:
    (panel,) = curves_of({"one": POINTS}, ["loss"], "step", smoothing=0.5)
    assert panel.metric == "loss"
    train, validation = panel.curves
    assert (train.x, train.y) == ([1, 2, 4], [4, 2, 1])  # without what is no number
    assert train.smoothed == pytest.approx([4, 8 / 3, 12 / 7])
    assert validation == PlotCurve("one", "validation", [4], [1.5], [])
    (panel,) = curves_of({"one": POINTS}, ["eval_loss"], "step")
    assert [curve.kind for curve in panel.curves] == ["validation"]


def test_several_jobs_and_metrics_are_panels_of_curves() -> None:
    panels = curves_of({"one": POINTS, "two": [point(1, loss=1.0)]}, ["loss", "grad_norm", "loss"], "epoch")
    assert [panel.metric for panel in panels] == ["loss", "grad_norm"]
    assert [curve.job_uuid for curve in panels[0].curves] == ["one", "one", "two"]
    assert [curve.job_uuid for curve in panels[1].curves] == ["one"]  # the other job lacks it
    assert panels[0].curves[0].x == [0.5, 1.0, 2.0]
    (panel,) = curves_of({"one": POINTS}, ["loss"], "time")
    assert panel.curves[0].x == [0, 1, 3]


@pytest.mark.parametrize(
    ("points", "metrics", "x", "smoothing", "message"),
    [
        ({}, ["loss"], "step", 0, "name at least one job"),
        ({"one": []}, ["loss"], "step", 0, "JOB='one' .* it has no metric points yet"),
        ({"one": POINTS}, ["los"], "step", 0, "metric='los' .* expected one of eval_loss, grad_norm, loss"),
        ({"one": POINTS}, ["loss"], "hours", 0, "x='hours' .* expected one of step, epoch, time"),
        ({"one": POINTS}, ["loss"], "step", 1, "smoothing=1 .* from 0 to less than 1"),
    ],
)
def test_what_cannot_be_plotted_is_refused(
    points: dict[str, list[PlotPoint]], metrics: list[str], x: str, smoothing: float, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        curves_of(points, metrics, x, smoothing)  # type: ignore[arg-type]


def test_smoothing_is_an_average_of_the_points_before() -> None:
    assert smooth([5.0] * 4, 0.9) == pytest.approx([5.0] * 4)
    assert smooth([0.0, 1.0], 0.5) == pytest.approx([0.0, 2 / 3])
    assert smooth([], 0.5) == []
    (panel,) = curves_of({"one": POINTS}, ["loss"], "step", smoothing=0)
    assert panel.curves[0].smoothed == []


def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    values = [math.sin(n / 1000) for n in range(200_000)]
    values[77_777], values[123_456] = 50.0, -50.0
    kept = thin(values)
    assert len(kept) <= 4000
    assert kept == sorted(set(kept))
    assert {0, 77_777, 123_456, 199_999} <= set(kept)
    assert thin(values[:4000]) == list(range(4000))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("loss.pdf", r"ends with \.png, \.svg, \.html"),
        ("loss", r"\.png"),
        ("no/such/loss.png", "no/such does not exist"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_fetched(output: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_output(output)


@pytest.mark.parametrize(("library", "suffix"), [("matplotlib", "png"), ("matplotlib", "svg"), ("plotly", "html")])
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, suffix: str
) -> None:
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    panels = curves_of({"one": POINTS}, ["loss"], "step")
    with pytest.raises(MissingExtra, match=rf"{library}, which is not installed: pip install .*\[plot\]"):
        write_plot(panels, tmp_path / f"loss.{suffix}", "step")
    assert not list(tmp_path.iterdir())


def test_a_directory_without_jobs_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"it has no jobs\.sqlite3"):
        stored_points(tmp_path, ["one"], ["loss"])
    assert not list(tmp_path.iterdir())
    Database(tmp_path / DATABASE).close()
    with pytest.raises(JobNotFound):
        stored_points(tmp_path, ["one"], ["loss"])
    with pytest.raises(InvalidRequest, match="has no jobs yet"):
        stored_points(tmp_path, [], ["loss"])


def test_without_a_job_the_newest_that_has_the_metric_is_plotted(tmp_path: Path) -> None:
    with closing(Store(tmp_path / DATABASE)) as store:
        for name, loss in (("old", 3.0), ("trained", 2.0), ("merged", None)):
            store.add_job(job_spec(name), "digest")
            store.launch(name, 1, "cpu", tmp_path / name)
            metrics = {"accuracy": 1.0} if loss is None else {"loss": loss}
            store.apply_events(name, 1, [Evaluated(step=1, epoch=1.0, metrics=metrics)], 1)
    found = {metric: list(stored_points(tmp_path, [], [metric])) for metric in ("loss", "accuracy", "grad_norm")}
    assert found == {"loss": ["trained"], "accuracy": ["merged"], "grad_norm": ["merged"]}


def test_the_database_of_an_earlier_release_is_refused_and_not_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SCHEMA_VERSION", 4)
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    before = (tmp_path / DATABASE).read_bytes()
    with pytest.raises(StoreError, match="has schema version 3, this program reads"):
        stored_points(tmp_path, ["one"], ["loss"])
    assert (tmp_path / DATABASE).read_bytes() == before
    (tmp_path / DATABASE).write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        stored_points(tmp_path, ["one"], ["loss"])
