"""Curves of a job: few points of many, with every extreme, and exactly up to the cursor that comes with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobNotFound
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Evaluated, Event, Prepared, Progress, Started
from llama_stack_provider_trl_remote.service.http.bodies import SeriesResponse
from llama_stack_provider_trl_remote.service.views import series
from llama_stack_provider_trl_remote.service.views.series import Growing, SeriesAnswers, read_series
from tests.fakes import job_spec


@pytest.fixture
def store(store: Store, tmp_path: Path) -> Store:
    store.add_job(job_spec("a"), "digest")
    assert store.launch("a", 1, "cpu", tmp_path / "run")
    return store


def point(step: int, loss: float, **more: float) -> Progress:
    return Progress(step=step, epoch=step / 10, time=1000.0 + step, metrics={"loss": loss, **more}, peak_memory_bytes=7)


def stored(store: Store, *events: Event) -> SeriesResponse:
    started = [Started(pid=1, device="cpu", versions={})]
    prepared = [Prepared(total_steps=10**6, num_rows=1, trainable_parameters=1, total_parameters=1)]
    assert store.apply_events("a", 1, [*started, *prepared, *events], 77)
    return read_series(store, "a", (), 1000)


class CountedAnswers(SeriesAnswers):
    """Answers that count how often the points of a job are read."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(store)
        self.reads = 0
        read = series.read_series

        def counted(*given: Any) -> SeriesResponse:
            self.reads += 1
            return read(*given)

        monkeypatch.setattr(series, "read_series", counted)

    def losses(self, *given: Any) -> list[float]:
        found = json.loads(self.read("a", *(given or ((), 1000))))
        assert {**found, "next": "1-77"} == found
        return list(found["train"]["loss"]["value"])


def test_the_curves_of_a_job_that_has_ended_are_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = CountedAnswers(store, monkeypatch)
    stored(store, point(1, 5.0), point(2, 4.0))
    assert answers.losses() == answers.losses() == [5.0, 4.0]
    assert answers.reads == 2, "points may come as long as it runs"
    assert store.transition("a", 1, JobState.in_progress, JobState.completed)
    assert answers.losses() == answers.losses() == [5.0, 4.0]
    assert answers.read("a", (), 1000) == read_series(store, "a", (), 1000).model_dump_json().encode()
    assert answers.reads == 3
    assert answers.losses(["loss"], 1000, 2, 2) == answers.losses(["loss"], 1000, 2, 2) == [4.0]
    assert answers.reads == 4, "another part of them is read, too"
    assert not store.apply_events("a", 1, [point(3, 3.0)], 99), "nothing is stored of it any more"


def test_a_job_under_the_name_of_a_deleted_one_has_its_own_curves(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = CountedAnswers(store, monkeypatch)
    for loss in (5.0, 1.0):
        stored(store, point(1, loss))
        assert store.transition("a", 1, JobState.in_progress, JobState.completed)
        assert answers.losses() == answers.losses() == [loss]
        store.delete("a")
        with pytest.raises(JobNotFound):
            answers.read("a", (), 1000)
        store.add_job(job_spec("a"), "digest")
        assert store.launch("a", 1, "cpu", tmp_path / "run")


@pytest.mark.parametrize(("name", "value", "kept"), [("_KEPT", 2, 2), ("_KEPT_BYTES", 500, 3), ("_LARGEST", 100, 0)])
def test_few_answers_are_kept_and_no_large_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, value: int, kept: int
) -> None:
    answers = CountedAnswers(store, monkeypatch)
    stored(store, point(1, 5.0), point(2, 4.0))
    assert store.transition("a", 1, JobState.in_progress, JobState.completed)
    monkeypatch.setattr(series, name, value)
    for points in range(10, 20):
        answers.losses(["loss"], points)
    assert len(answers._kept) == kept
    assert answers._bytes == sum(len(answer) + asked.size for asked, answer in answers._kept.items())
    before = answers.reads
    answers.losses(["loss"], 19)
    answers.losses(["loss"], 10)
    assert answers.reads == before + (1 if kept else 2), "the last one is kept, the first is not"


def test_a_job_without_points_has_no_curves(store: Store) -> None:
    found = read_series(store, "a", (), 1000)
    assert (found.train, found.validation, found.exact, found.next) == ({}, {}, True, "1-0")


def test_an_unknown_job_has_no_series(store: Store) -> None:
    with pytest.raises(JobNotFound):
        read_series(store, "b", (), 1000)


def test_few_points_are_all_there_with_memory_and_evaluations(store: Store) -> None:
    found = stored(store, point(1, 5.0), point(2, 4.0), Evaluated(step=2, epoch=0.2, metrics={"eval_loss": 4.5}))
    assert found.exact
    assert found.next == "1-77"
    assert found.train["loss"].model_dump() == {
        **{"step": [1, 2], "epoch": [0.1, 0.2], "time": [1001.0, 1002.0], "value": [5.0, 4.0]}
    }
    assert found.train["peak_memory_bytes"].value == [7, 7]
    assert found.validation["eval_loss"].value == [4.5]


def test_the_memory_of_every_rank_is_a_curve_that_ends_with_the_attempt_that_measured_it(store: Store) -> None:
    of_two = {"rank_memory_bytes": (5, 6), "rank_peak_memory_bytes": (7, 8)}
    found = stored(store, point(1, 5.0).model_copy(update=of_two), point(2, 4.0).model_copy(update=of_two))
    curves = {name: found.train[name].value for name in found.train if "memory" in name}
    assert curves == {
        **{"memory_bytes": [5, 5], "memory_bytes_rank_1": [6, 6]},
        **{"peak_memory_bytes": [7, 7], "peak_memory_bytes_rank_1": [8, 8]},
    }
    store.transition("a", 1, JobState.in_progress, JobState.scheduled)
    assert store.launch("a", 2, "cpu", Path("/run"))
    resumed = Prepared(total_steps=2, start_step=1, num_rows=1, trainable_parameters=1, total_parameters=1)
    alone = point(2, 4.0).model_copy(update={"rank_memory_bytes": (9,), "rank_peak_memory_bytes": (9,)})
    assert store.apply_events("a", 2, [Started(pid=1, device="cpu", versions={}), resumed, alone], 10)
    again = read_series(store, "a", (), 1000).train
    assert (again["memory_bytes"].value, again["memory_bytes_rank_1"].value) == ([5, 9], [6])


def test_of_many_points_the_extremes_of_every_part_remain(store: Store) -> None:
    points = [point(step, math.sin(step / 50), spike=100.0 if step == 7777 else 0.0) for step in range(1, 10_001)]
    stored(store, *points)
    found = read_series(store, "a", (), 100)
    assert not found.exact
    for curve in found.train.values():
        assert len(curve.step) <= 100
        assert curve.step == sorted(set(curve.step))
    spike = found.train["spike"]
    assert spike.value[spike.step.index(7777)] == 100.0
    loss = found.train["loss"]
    values = {one.step: one.metrics["loss"] for one in points}
    assert [values[step] for step in loss.step] == loss.value
    assert (loss.step[0], loss.step[-1]) == (1, 10_000), "the first and the last point"
    for first in range(1, 10_001, 205):  # 49 parts
        part = [values[step] for step in range(first, min(first + 205, 10_001))]
        kept = [value for step, value in zip(loss.step, loss.value, strict=True) if first <= step < first + 205]
        assert (min(kept), max(kept)) == (min(part), max(part))  # type: ignore[type-var]


def test_a_part_of_the_range_is_exact_where_the_whole_is_not(store: Store) -> None:
    stored(store, *(point(step, float(step)) for step in range(1, 5001)))
    part = read_series(store, "a", ["loss"], 100, 1000, 1049)
    assert part.exact
    assert part.train["loss"].step == list(range(1000, 1050))
    assert list(part.train) == ["loss"]
    assert read_series(store, "a", ["loss"], 100, 1000, 1099).exact, "as many points as are requested"
    assert read_series(store, "a", ["loss"], 100, 9000, 9999).train == {}


def test_points_that_lack_a_metric_and_values_that_are_no_numbers_do_no_harm(store: Store) -> None:
    events = [point(step, math.nan if step % 3 else float(step)) for step in range(1, 1000)]
    rare = [point(1000, 1.0, rare=3.0), *(point(step, math.nan) for step in range(1001, 1100))]
    stored(store, *events, *rare)
    found = read_series(store, "a", (), 10)
    loss = found.train["loss"]
    assert found.train["rare"].step == [1000]
    assert 999.0 in loss.value
    assert not [value for step, value in zip(loss.step, loss.value, strict=True) if step < 1000 and math.isnan(value)]  # type: ignore[arg-type]
    assert "null" in found.model_dump_json() or all(map(math.isfinite, filter(None, loss.value)))


@pytest.mark.parametrize("counts", [(2, 1), (3, 3), (20_000, 1)])
def test_any_number_of_points_may_be_requested(store: Store, counts: Sequence[int]) -> None:
    requested, stored_points = counts
    stored(store, *(point(step, 1.0) for step in range(1, stored_points + 1)))
    assert read_series(store, "a", (), requested).train["loss"].step


class Long:
    """A job whose points are looked at while it runs, and the steps that are read of it."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(series, "_LONG", 100)
        monkeypatch.setattr(series, "_FINEST", 16)
        self.store, self.growing, self.reads = store, Growing(), list[tuple[int, int]]()
        self._points_together = store.points_together
        monkeypatch.setattr(store, "points_together", self._noted)

    def _noted(self, job_uuid: str, begin: int, end: int) -> Any:
        self.reads.append((begin, end))
        return self._points_together(job_uuid, begin, end)

    def curves(self, *metrics: str, points: int = 12) -> SeriesResponse:
        """As a page has them; every extreme of the parts is one of all points of the job."""
        self.reads.clear()
        found = read_series(self.store, "a", metrics, points, growing=self.growing)
        self.read = sum(end - begin + 1 for begin, end in self.reads)
        for kind in ("train", "validation"):
            every = read_series(self.store, "a", metrics, 20_000)
            assert getattr(found, kind).keys() == getattr(every, kind).keys()
            for name, curve in getattr(found, kind).items():
                whole = getattr(every, kind)[name]
                assert len(curve.step) <= points
                own, all_points = ({*zip(*one.model_dump().values(), strict=True)} for one in (curve, whole))
                assert own <= all_points
                assert (curve.step[0], curve.step[-1]) == (whole.step[0], whole.step[-1])
                assert (min(curve.value), max(curve.value)) == (min(whole.value), max(whole.value))  # type: ignore[type-var]
        return found


def test_of_a_long_job_that_runs_only_new_points_are_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Long(store, monkeypatch)
    points: list[Event] = [point(step, math.sin(step), rare=float(step)) for step in range(1, 201)]
    stored(store, *points[:50], Evaluated(step=50, epoch=5.0, metrics={"eval_loss": 3.0}), *points[50:])
    assert not long.curves().exact
    assert long.read == 200
    long.curves("loss")
    assert long.read == 8, "the last part, which is not over"
    store.apply_events("a", 1, [point(step, 100.0 if step == 205 else 0.0) for step in range(201, 221)], 78)
    assert 205 in long.curves().train["loss"].step
    assert long.read < 40
    store.apply_events("a", 1, [point(step, 0.0) for step in range(221, 600)], 79)
    long.curves()
    assert long.read >= 599, "its parts are wider now"


def test_points_that_a_later_attempt_measures_again_are_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = Long(store, monkeypatch)
    stored(store, *(point(step, float(step)) for step in range(1, 201)))
    long.curves()
    assert store.transition("a", 1, JobState.in_progress, JobState.scheduled)
    assert store.launch("a", 2, "cpu", tmp_path / "second")
    long.curves()
    assert long.read <= 8, "nothing is superseded yet"
    prepared = Prepared(total_steps=10**6, start_step=100, num_rows=1, trainable_parameters=1, total_parameters=1)
    again = [point(step, 1000.0 + step).model_copy(update={"time": 5000.0 + step}) for step in range(101, 221)]
    assert store.apply_events("a", 2, [Started(pid=1, device="cpu", versions={}), prepared, *again], 10)
    assert long.curves().train["loss"].value[-1] == 1220.0
    assert long.read > 200


def test_few_points_are_kept_of_jobs_that_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Long(store, monkeypatch)
    stored(store, *(point(step, float(step)) for step in range(1, 201)))
    monkeypatch.setattr(series, "_GROWING_POINTS", 10)
    long.curves()
    assert not long.growing._kept
    monkeypatch.setattr(series, "_GROWING_POINTS", 1 << 17)
    long.curves()
    assert len(long.growing._kept) == 1
    monkeypatch.setattr(series, "_GROWING", 0)
    store.apply_events("a", 1, [point(step, float(step)) for step in range(201, 230)], 78)
    long.curves()
    assert not long.growing._kept


def test_the_curves_of_four_jobs_with_many_metrics_are_kept_beside_each_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(series, "_LONG", 4000)
    reads, points_together = list[str](), store.points_together

    def noted(job_uuid: str, begin: int, end: int) -> Any:
        reads.extend([job_uuid] * (end - begin + 1))
        return points_together(job_uuid, begin, end)

    monkeypatch.setattr(store, "points_together", noted)
    steps, growing = range(1, 4096), Growing()
    pairs = [
        f"{name}/{one}" for name in ("rewards", "logps") for one in ("chosen", "rejected", "margins", "accuracies")
    ]
    memory = {f"rank_{kind}memory_bytes": tuple(range(8)) for kind in ("", "peak_")}
    points = [
        point(step, 1.0, **dict.fromkeys(["grad_norm", "learning_rate", *pairs], float(step))).model_copy(update=memory)
        for step in steps
    ]
    jobs = ("a", "b", "c", "d")
    for name in jobs:
        if name != "a":
            store.add_job(job_spec(name), "digest")
            assert store.launch(name, 1, f"cpu-{name}", tmp_path / name)
        assert store.apply_events(name, 1, [Started(pid=1, device="cpu", versions={}), *points], 77)
    for _ in range(2):
        reads.clear()
        for name in jobs:
            assert len(read_series(store, name, (), 1000, growing=growing).train) == 27
    assert {name: reads.count(name) for name in jobs} == dict.fromkeys(jobs, 1), "the last part, which is not over"
