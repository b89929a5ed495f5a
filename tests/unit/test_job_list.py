"""The list of jobs by its columns: order, filters, families, small curves, and the texts of its page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.related.searches import NewTrial
from llama_stack_provider_trl.jobs.store.store import NewJob, Store
from llama_stack_provider_trl.specs.bases import BaseJob
from llama_stack_provider_trl.specs.events import Evaluated, Prepared, Progress, Started
from llama_stack_provider_trl.specs.search import SearchSpec
from llama_stack_provider_trl.specs.work import GenerateSpec
from llama_stack_provider_trl_remote.service.http.bodies import QueueResponse, QueueRow
from llama_stack_provider_trl_remote.service.pages import list_pages, list_view, rendering
from llama_stack_provider_trl_remote.service.security.access import Caller
from llama_stack_provider_trl_remote.service.views import queue
from llama_stack_provider_trl_remote.service.views.queue import Sort, members_of, queue_page
from tests.fakes import FakeClock, job_spec


def train(store: Store, clock: FakeClock, name: str, losses: list[float], eval_loss: float | None = None) -> None:
    """Have a job do a step for each of its losses."""
    store.launch(name, 1, "cpu", Path("/runs") / name)
    begun = Prepared(total_steps=40, num_rows=1, trainable_parameters=1, total_parameters=1, time=clock.now)
    events = [Started(pid=1, device="cpu", versions={}, time=clock.now), begun]
    for step, loss in enumerate(losses, 1):
        clock.now += 10
        events.append(Progress(step=step, epoch=0.1, metrics={"loss": loss}, peak_memory_bytes=1, time=clock.now))
    if eval_loss is not None:
        events.append(Evaluated(step=len(losses), epoch=0.1, metrics={"eval_loss": eval_loss}, time=clock.now))
    store.apply_events(name, 1, events, 1)


@pytest.fixture
def store(store: Store, clock: FakeClock) -> Store:
    """Jobs a, b and c that train, one of another owner that waits, a search with two trials, and two behind a."""
    for name, model, owner in (("b", "org/Zeta", "ada"), ("c", "/models/beta/", "ada"), ("a", "org/alpha", "grace")):
        clock.now += 1
        metadata = {"paper": "v2", "openai": "{}"} if name == "b" else {}
        store.add_job(job_spec(name, model=model, metadata=metadata), "digest", created_by=owner)
    train(store, clock, "a", [3.0, 2.0], eval_loss=2.5)
    train(store, clock, "b", [3.0, 1.0], eval_loss=3.5)
    train(store, clock, "c", [float("nan"), float("nan")])
    store.add_job(job_spec("waits", "dpo"), "digest")
    given = {"method": "grid", "parameters": {"optimizer.lr": [1, 2]}, "trials": 2, "objective": "eval_loss"}
    search = SearchSpec.model_validate({**given, "direction": "minimize"})
    trials = [(NewTrial(n, {"optimizer.lr": n}), NewJob(job_spec(f"search-{n}"), "digest")) for n in (1, 2)]
    store.add_search(NewJob(job_spec("search", search=search), "digest"), trials)
    train(store, clock, "search-2", [0.5])
    for name, before in (("behind", "a"), ("last", "behind")):
        store.add_job(job_spec(name, after=[before]), "digest")
    return store


def test_a_job_behind_several_stands_under_the_first_that_is_there(store: Store) -> None:
    store.add_job(job_spec("both", after=["c", "a"]), "digest")
    found = queue_page(store, None, None, 100, 0, folded=True)
    assert "both" not in [row.job_uuid for row in found.data]
    roots = [row.job_uuid for row in found.data]
    assert [one.root for one in members_of(store, roots, roots, "") if one.job_uuid == "both"] == ["c"]


def names(store: Store, sort: Sort = "", search: str = "", owner: str | None = None) -> list[str]:
    return [row.job_uuid for row in queue_page(store, None, search, 100, 0, owner=owner, sort=sort).data]


def test_jobs_are_in_the_order_of_submission_where_the_clock_was_set_back(store: Store, clock: FakeClock) -> None:
    clock.now -= 3600
    store.add_job(job_spec("newest"), "digest")
    assert names(store, "created")[-2:] == ["last", "newest"]
    assert names(store, "-created")[0] == "newest"


@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        ("name", ["a", "b", "behind"], "waits"),
        ("-name", ["waits", "search-2", "search-1"], "a"),
        ("loss", ["search-2", "b", "a"], None),
        ("-loss", ["a", "b", "search-2"], None),
        ("eval", ["a", "b"], None),
        ("-eval", ["b", "a"], None),
        ("model", ["a", "c"], "b"),
        ("method", ["waits"], None),
        ("created", ["b", "c", "a"], "last"),
        ("-progress", ["a", "b", "c", "search-2"], None),
        ("owner", ["b", "c", "a"], None),
    ],
)
def test_a_list_is_sorted_by_a_column_and_jobs_without_a_value_are_last(
    store: Store, sort: Sort, first: list[str], last: str | None
) -> None:
    found = names(store, sort)
    assert sorted(found) == sorted(names(store))
    assert (
        found[: len(first)] == first
        if sort not in ("owner", "-progress")
        else sorted(found[: len(first)]) == sorted(first)
    )
    if last is not None:
        assert found[-1] == last


def test_names_that_begin_with_what_is_searched_come_first_however_many_jobs_have_it(store: Store) -> None:
    for number in range(120):
        store.add_job(job_spec(f"of-{number}", model="org/late"), "digest")
    store.add_job(job_spec("late"), "digest")
    store.add_job(job_spec("not-late"), "digest")
    assert names(store, "match", search="LATE")[:3] == ["late", "not-late", "of-0"]


def test_rows_have_what_the_columns_show(store: Store, clock: FakeClock) -> None:
    rows = {row.job_uuid: row for row in queue_page(store, None, None, 100, 0).data}
    assert (rows["a"].loss, rows["a"].eval_loss, rows["a"].eta_seconds) == (2.0, 2.5, 380.0)
    assert (rows["c"].loss, rows["waits"].loss, rows["waits"].eta_seconds) == (None, None, None)
    assert rows["b"].metadata == {"paper": "v2"}, "without what the service has there itself"
    assert rows["search-1"].search == "search"


def test_one_search_finds_names_models_and_tags_and_an_owner_is_a_filter(store: Store) -> None:
    assert names(store, search="ALPHA") == ["a"]
    assert names(store, search="paper=V2") == ["b"]
    assert names(store, search="earch-2") == ["search-2"]
    assert names(store, search="sha256") == names(store, search="openai") == []
    assert names(store, owner="grace") == ["a"]


@pytest.mark.parametrize("value", ['say "hi"', "C:\\data", "é\tü", 'a="b=c"'])
def test_the_link_of_a_tag_finds_its_jobs_whatever_its_value_is(store: Store, value: str) -> None:
    store.add_job(job_spec("tagged", metadata={"note": value}), "digest")
    assert names(store, search=f"note={value}") == ["tagged"]


def test_trials_and_chains_stand_under_their_first_job(store: Store) -> None:
    found = queue_page(store, None, None, 100, 0, folded=True)
    assert {row.job_uuid for row in found.data} == {"a", "b", "c", "waits", "search"}
    assert found.matching == 5
    families = {row.job_uuid: row.members for row in found.data if row.members}
    assert families == {"a": {"scheduled": 2}, "search": {"scheduled": 1, "in_progress": 1}}
    roots = [*families]
    assert [(one.job_uuid, one.root) for one in members_of(store, roots, [], "")] == [("search-2", "search")]
    opened = [one.job_uuid for one in members_of(store, roots, roots, "")]
    assert opened == ["search-2", "search-1", "behind", "last"], "what runs, the newest trial, and a chain in its order"
    by_loss = [row.job_uuid for row in queue_page(store, None, None, 100, 0, folded=True, sort="loss").data]
    assert by_loss[:3] == ["search", "b", "a"], "a search is as good as the best of its trials"
    assert queue_page(store, None, None, 2, 4, folded=True).matching == 5
    assert queue_page(store, None, None, 2, 100, folded=True).matching == 5


def test_what_trains_nothing_stands_by_itself_and_names_the_job_that_it_reads(store: Store) -> None:
    choices: dict[str, Any] = {"temperature": 0, "top_p": 1, "seed": 1, "samples_per_prompt": 1}
    for name, checkpoint in (("of-a", "final"), ("of-step", "checkpoint-6")):
        work = GenerateSpec(output_dataset_id=name, max_new_tokens=8, **choices)
        made_by = BaseJob(job_uuid="a", checkpoint=checkpoint)
        spec = job_spec(name, after=["a"], work=work, model=f"/checkpoints/a/{checkpoint}", made_by=made_by)
        store.add_job(spec, "digest")
    rows = {row.job_uuid: row for row in queue_page(store, None, None, 100, 0, folded=True).data}
    assert rows["a"].members == {"scheduled": 2}, "the two trainings behind it"
    assert [list_view.model_of(rows[name]) for name in ("a", "of-a", "of-step")] == ["alpha", "a", "a/checkpoint-6"]


def test_what_runs_stands_before_the_cut_of_each_opened_family_and_the_cut_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MOST_MEMBERS", 1)
    jobs = queue_page(store, None, None, 100, 0, folded=True).data
    for sort in ("", "-name", "owner"):
        members = members_of(store, ["a", "search"], ["a", "search"], sort)
        assert "search-2" in [one.job_uuid for one in members], sort
    members = members_of(store, ["a", "search"], ["a", "search"], "")
    assert [one.job_uuid for one in members] == ["search-2", "behind"]
    cuts = {row.job.job_uuid: row.cut for row in list_view.rows_of(jobs, members, ["a", "search"]) if row.cut}
    assert cuts == {"a": "1 of 2 are shown", "search": "1 of 2 are shown"}
    assert not any(row.cut for row in list_view.rows_of(jobs, members[:1], []))
    assert [row.cut for row in list_view.rows_of(jobs, members, ["a"]) if row.cut] == ["1 of 2 are shown"]
    query = list_view.Query(opened=("a",))
    shown = list_pages._values(StoredPages(store), store, query)  # type: ignore[arg-type]
    assert dict(shown["followed"])["a"] == "1-1", "its events are followed from what the row shows of them"
    around = {"asset": str, "caller": Caller(None), "navigation": [], "form_token": "", "allowed": ()}
    text = rendering._environment().get_template("jobs.html").render(**shown, **around)
    assert text.count('<a class="cut" href="/?flat=yes&amp;open=a">1 of 2 are shown</a>') == 1


def test_all_families_of_a_page_have_a_bound_together_and_each_names_its_cut(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = queue_page(store, None, None, 100, 0, folded=True).data
    opened = ["a", "search"]

    def shown(together: int, sort: Sort = "") -> tuple[set[str], dict[str, str]]:
        monkeypatch.setattr(queue, "MOST_TOGETHER", together)
        members = members_of(store, opened, opened, sort)
        cuts = {row.job.job_uuid: row.cut for row in list_view.rows_of(jobs, members, opened) if row.cut}
        return {one.job_uuid for one in members}, cuts

    both = {"a": "1 of 2 are shown", "search": "1 of 2 are shown"}
    for sort in ("", "-name", "owner"):
        assert shown(1, sort) == ({"search-2"}, {**both, "a": "0 of 2 are shown"}), "what runs is before the cut"
    assert shown(2) == ({"search-2", "behind"}, both), "equally many of each"
    assert shown(4) == ({"search-2", "search-1", "behind", "last"}, {})


def test_the_page_is_read_and_rendered_beside_the_event_loop(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(list_pages, "page", lambda *given, **values: threads.append(threading.get_ident()))
    asyncio.run(list_pages.jobs_page(None, StoredPages(store), store))  # type: ignore[arg-type]
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


class StoredPages:
    """What the page reads of a store."""

    def __init__(self, store: Store) -> None:
        self.store, self.sparks = store, store.sparks

    def queue(self, state: JobState | None, search: str, limit: int, offset: int, *more: Any) -> QueueResponse:
        owner, sort, folded = more
        return queue_page(self.store, state, search, limit, offset, owner=owner, sort=sort, folded=folded)

    def members(self, roots: Sequence[str], opened: Sequence[str], sort: Sort) -> list[QueueRow]:
        return members_of(self.store, roots, opened, sort)


def test_a_small_curve_has_the_first_and_the_last_loss_and_no_more_points_than_requested(
    store: Store, clock: FakeClock
) -> None:
    losses = [100.0 - step / 10 for step in range(500)]
    train(store, clock, "waits", losses)
    found = store.sparks(["waits", "a", "c", "last"], 24)
    assert (found["waits"][0], found["waits"][-1], len(found["waits"])) == (losses[0], losses[-1], 24)
    assert found["waits"] == sorted(found["waits"], reverse=True)
    assert found["a"] == [3.0, 2.0]
    assert not {"c", "last"} & {*found}


def test_a_line_through_values_stays_in_its_box() -> None:
    found = [tuple(map(float, one.split(","))) for one in list_view.spark([1.0, 5.0, 3.0]).split()]
    assert found == [(1.5, 14.5), (32.0, 1.5), (62.5, 8.0)]
    assert list_view.spark([1.0]) == ""
    assert {y for _, y in (one.split(",") for one in list_view.spark([2.0, 2.0]).split())} == {"8.0"}


NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "just now"),
        (-5, "just now"),
        (60, "1 min ago"),
        (7300, "2 h ago"),
        (86_400 * 3, "3 d ago"),
        (86_400 * 31, "2026-10-29"),
    ],
)
def test_times_are_relative_until_they_are_a_month_ago(seconds: float, text: str) -> None:
    assert list_view.ago(NOW - timedelta(seconds=seconds), NOW) == text


def test_the_page_has_an_address_for_each_of_its_states() -> None:
    query = list_view.Query(search="a b", sort="loss", opened=("x",), number=3)
    assert query.address() == "/?search=a+b&sort=loss&open=x"
    assert query.toggled("x") == "/?search=a+b&sort=loss&page=3"
    assert list_view.Query().toggled("x/y") == "/?open=x%2Fy"
    loss, created = (next(one for one in list_view.COLUMNS if one.key == key) for key in ("loss", "created"))
    assert [list_view.Query(sort=sort).sorted_by(loss) for sort in ("", "loss", "-loss")] == [
        "/?sort=loss",
        "/?sort=-loss",
        "/",
    ]
    assert [list_view.Query(sort=sort).sorted_by(created) for sort in ("", "-created")] == [
        "/?sort=-created",
        "/?sort=created",
    ]
    assert list_view.Query(sort="-loss").direction(loss) == "descending"
    assert (list_view.Query().folded, list_view.Query(state=JobState.failed).folded) == (True, False)


def test_durations_of_jobs_end_with_them() -> None:
    row = QueueRow(job_uuid="a", started_at=NOW - timedelta(hours=1), completed_at=NOW - timedelta(minutes=1))
    assert list_view.brief(list_view.seconds_of(row, NOW)) == "59:00 min"
    assert list_view.seconds_of(QueueRow(job_uuid="a"), NOW) is None
    assert [list_view.brief(value) for value in (None, 59.4, 3600, 200_000)] == ["", "59 s", "1 h 00", "2 d 7 h"]
