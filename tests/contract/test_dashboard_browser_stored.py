"""The dashboard in a real Chromium, over jobs that nothing trains: hostile texts, 10,000 jobs, 200,000 points;
by keyboard, with scripts off. Needs playwright and Debian's chromium (or TRL_CHROMIUM)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl_remote.service.pages.list_view import brief, count, short
from llama_stack_provider_trl_remote.service.pages.rendering import duration, number, size, step_time
from tests.contract import browser
from tests.contract.browser import Window
from tests.contract.ended import add_ended_job
from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.stack import SFT, poll
from tests.contract.stored_jobs import (
    HOSTILE,
    MANY,
    POINTS,
    add_answered,
    add_hostile,
    add_long,
    add_many,
    add_overfitting,
    add_running,
    add_search,
    add_step,
    complete,
)
from tests.contract.unsupervised import unsupervised
from tests.fakes import job_spec
from tests.required import IN_FULL, in_full
from tests.security.guarded import TOKENS, Guarded
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(240)]

WITHOUT_SCRIPTS = (
    "/jobs/ended/checkpoints/tiny-tuned-final",
    "/new",
    "/data/tokens",
    "/data/rows?dataset=questions",
    "/answers?job=asked-after",
)
"""Pages that scripts add nothing to."""
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, summary, textarea, [tabindex='0']"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Guarded]:
    """A service whose jobs nothing supervises: they stay as they were stored."""
    jobs = (
        add_ended_job,
        add_many,
        add_long,
        add_hostile,
        lambda data_dir: add_running(data_dir, "writes"),
        lambda data_dir: add_answered(data_dir, "asked-before", [False, True, False, *[True] * 30]),
        lambda data_dir: add_answered(data_dir, "asked-after", [True, True, False, *[True] * 30]),
    )
    with unsupervised(tmp_path_factory.mktemp("stored"), *jobs) as service:
        service.register("questions", QUESTIONS)
        yield service


@pytest.fixture
def window(chromium: Any, service: Guarded) -> Iterator[Window]:
    with browser.window(chromium, service) as window:
        yield window


def rows(window: Window) -> list[str]:
    return list(window.page.eval_on_selector_all("#list tr[data-job]", "rows => rows.map((row) => row.dataset.job)"))


def drawn_steps(window: Window) -> list[int]:
    """Of the first curve, in the part that is shown."""
    script = """() => {
        const chart = document.querySelector(".chart");
        const [from, to] = chart.layout.xaxis.range;
        return chart.data[0].x.filter((x) => x >= from && x <= to);
    }"""
    return list(window.page.evaluate(script))


def test_html_and_script_are_text_on_every_page_and_in_charts(window: Window) -> None:
    window.login("admin")
    for path in ("/jobs/hostile", "/jobs/hostile/logs", "/jobs/hostile/samples", "/compare?job=hostile&job=ended"):
        window.open(path)
        if "compare" in path or path == "/jobs/hostile":
            window.wait_for_charts()
        window.page.wait_for_timeout(500)  # what a page would load by itself
        if "compare" not in path:
            assert HOSTILE.partition("&amp;")[0] in window.page.text_content("main")
        found = "img, b, main script:not([type='application/json']), a[href^='javascript']"
        assert window.page.locator(found).count() == 0, path
        assert window.faults() == [], path
    window.page.set_viewport_size({"width": 1280, "height": 5000})
    window.open("/jobs/hostile")
    window.wait_for_charts()
    titles = "[...document.querySelectorAll('.chart')].map((chart) => chart.textContent)"
    poll(lambda: any("<b>bold</b>" in text for text in window.page.evaluate(titles)), "titles are text", timeout=20)
    assert any("<script>alert(1)</script>" in text for text in window.page.evaluate(titles))
    assert window.page.locator(".chart a, .chart image").count() == 0
    for path in (
        f"/?search={HOSTILE}",
        f"/new?dataset={HOSTILE}",
        f"/data?search={HOSTILE}",
        f"/data/rows?dataset={HOSTILE}",
        f"/data/tokens?dataset={HOSTILE}",
        f"/answers?job={HOSTILE}",
        f"/jobs/{HOSTILE}",
        f"/playground?model_a={HOSTILE}&votes={HOSTILE}",
    ):
        window.open(path)
        assert window.page.locator("img, main script:not([type='application/json'])").count() == 0, path


def test_evaluations_are_beside_each_other_with_their_rows(window: Window) -> None:
    window.login("submit")
    window.open("/jobs/asked-after")
    window.page.click(".links >> text=Answers of several jobs")
    assert window.page.locator("article").count() == 20
    window.page.click("text=next")
    window.page.wait_for_selector("article[aria-label='Row 32']")
    window.page.click("text=with a failed check")
    window.page.wait_for_selector("article[aria-label='Row 2']")
    assert window.page.locator("article").count() == 1
    window.open("/compare?job=asked-before&job=asked-after")
    window.page.click("text=Their answers beside each other")
    window.page.wait_for_selector("h1:has-text('Answers')")
    assert window.page.inner_text("[aria-label=Results] tbody tr >> nth=0").split() == ["passed", "0.93939", "0.9697"]
    window.page.click("text=where the jobs differ")
    window.page.wait_for_selector("[aria-current]:has-text('differ')")
    (row,) = window.page.locator("article").all()
    assert row.locator(".state").all_inner_texts() == ["✗ exact", "✓ exact"]
    assert HOSTILE.partition("&amp;")[0] in row.text_content()
    assert row.locator("b, img, script").count() == 0
    window.page.set_viewport_size({"width": 390, "height": 844})
    assert window.faults() == []
    assert window.width() <= 390


def test_ten_thousand_jobs_are_paged_searched_and_filtered(window: Window, service: Guarded) -> None:
    window.login("submit")
    assert f"{len(service.jobs())} jobs" in window.page.inner_text("#list p >> nth=0")
    first = rows(window)
    assert first[:3] == ["writes", "paused-high", "paused-low"]
    window.page.click("text=next")
    window.page.wait_for_selector("text=page 2 of 101")
    second = rows(window)
    assert (len(first), len(second), set(first) & set(second)) == (100, 100, set())
    window.open("/?page=101")
    assert len(rows(window)) == len(service.jobs()) - 100 * 100
    window.open("/")
    window.page.fill("[name=search]", "MANY-0999")
    window.page.keyboard.press("Enter")
    window.page.wait_for_selector("#list p:has-text('10 jobs')")
    assert sorted(rows(window)) == [f"many-{number:05}" for number in range(9990, 10_000)]
    window.page.fill("[name=search]", "")
    window.page.click("main .filter button")
    window.page.click("text=paused (2)")
    window.page.wait_for_selector("#list p:has-text('2 jobs')")
    assert f"cancelled ({MANY})" in window.page.inner_text(".tabs")


def test_a_job_with_200_000_points_is_drawn_and_exact_where_it_is_enlarged(window: Window) -> None:
    window.login("submit")
    window.open("/jobs/long")
    window.wait_for_charts()
    whole = drawn_steps(window)
    assert (len(whole) <= 1000, whole[0], whole[-1]) == (True, 1, POINTS)
    for _ in range(3):  # a part of a chart that the pointer can mark has thousands of steps
        with window.page.expect_response("**/series?metric=*"):
            drag(window, 0.60, 0.66)
    poll(lambda: 10 < len(drawn_steps(window)) == steps_of(window), "every step of the part is drawn", timeout=20)


def steps_of(window: Window) -> int:
    """From the first to the last one that is drawn."""
    steps = drawn_steps(window)
    return steps[-1] - steps[0] + 1


def drag(window: Window, begin: float, end: float) -> None:
    """Enlarge a part of the first chart."""
    area = window.page.locator(".chart .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    height = box["y"] + box["height"] / 2
    window.page.mouse.move(box["x"] + begin * box["width"], height)
    window.page.mouse.down()
    window.page.mouse.move(box["x"] + end * box["width"], height, steps=5)
    window.page.mouse.up()


def test_jobs_are_compared_by_order_from_their_own_beginning_and_by_single_points(window: Window) -> None:
    window.login("submit")
    window.open("/compare")
    assert "Name a job" in window.page.inner_text("main")
    window.open("/compare?job=writes&job=ended&axis=relative")
    window.wait_for_charts()
    assert "writes" in window.page.inner_text("[aria-label='Jobs'] tbody tr >> nth=0")
    script = """() => {
        const chart = document.querySelector(".chart");
        const shown = chart.data.filter((one) => one.showlegend !== false);
        return {
            names: shown.map((one) => one.name),
            places: shown.map((one) => [...one.x]),
            drawn: chart.querySelectorAll(".scatterlayer .point").length,
            axis: chart.layout.xaxis.title.text,
        };
    }"""
    found = window.page.evaluate(script)
    assert found["names"] == ["writes", "ended"], "in the order of the table, which colours follow"
    assert found["places"] == [[0], [0]], "since the first point of each"
    assert found["drawn"] >= 2
    assert found["axis"] == "seconds since the first point"
    heads = window.page.eval_on_selector_all("#states th[scope=col]", "heads => heads.map((one) => one.textContent)")
    assert heads[3:7] == ["Loss", "Eval loss", "Steps", "Learning rate"]
    assert window.page.is_visible("[aria-label='Settings that differ']")
    above = "#settings, #curves"
    assert window.page.eval_on_selector_all(above, "all => all.map((one) => one.id)") == ["settings", "curves"]
    assert titles(window, "[data-section=Main]") == ["Loss"]
    window.page.focus(".chart >> nth=0")
    window.page.keyboard.press("Home")
    poll(lambda: window.page.evaluate(HOVERED) >= 1, "the charts show the place", timeout=20)
    assert "writes" in window.page.text_content("#readout")


def test_runs_stand_beside_their_curves_sorted_hidden_marked_and_removed(window: Window, service: Guarded) -> None:
    for name in ("run-a", "run-b"):
        add_overfitting(service.data_dir, name)
    add_step(service.data_dir, "run-b", 121)
    window.login("submit")
    page = window.page
    page.set_viewport_size({"width": 1440, "height": 900})
    window.open("/compare?job=run-a&job=run-b&axis=relative")
    window.wait_for_charts()
    rows = "rows => rows.map((row) => row.dataset.run)"
    table, chart = (page.locator(one).bounding_box() for one in (".runs", ".chart >> nth=0"))
    assert table["x"] < chart["x"]
    assert max(box["y"] + box["height"] for box in (table, chart)) <= 900, "both are in the first screen"
    page.click("a.sort >> nth=2")
    page.wait_for_selector("[aria-sort=ascending]")
    assert page.eval_on_selector_all("tr[data-run]", rows) == ["run-b", "run-a"], "by the loss"
    assert "axis=relative" in page.url
    colors = "[...document.querySelectorAll('[name=show]')].map((one) => getComputedStyle(one).accentColor)"
    assert page.evaluate(colors) == ["rgb(192, 86, 30)", "rgb(47, 111, 176)"], "colours stay with their runs"
    assert set(page.evaluate(RUNS)) == {"run-a", "run-b"}
    page.uncheck("[aria-label='Show the curves of run-a']")
    poll(lambda: set(page.evaluate(RUNS)) == {"run-b"}, "it is drawn no longer", timeout=20)
    page.reload()
    window.wait_for_charts()
    assert set(page.evaluate(RUNS)) == {"run-b"}
    assert not page.is_checked("[aria-label='Show the curves of run-a']")
    page.check("[aria-label='Show the curves of run-a']")
    poll(lambda: set(page.evaluate(RUNS)) == {"run-a", "run-b"}, "it is drawn again", timeout=20)
    page.hover("tr[data-run=run-b] th")
    poll(lambda: page.evaluate(RUNS)["run-a"] < 0.2, "the others are faint", timeout=20)
    assert page.evaluate(RUNS)["run-b"] == 1
    box = page.locator(".chart .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("tr.marked")
    poll(lambda: page.evaluate(RUNS)["run-a"] == 1, "none stands out any more", timeout=20)
    page.focus("tr[data-run=run-a] a.job")
    page.keyboard.press("k")
    poll(lambda: page.evaluate(RUNS)["run-a"] < 0.2, "the keys mark a run, too", timeout=20)
    page.keyboard.press("x")
    poll(lambda: set(page.evaluate(RUNS)) == {"run-a"}, "and hide it", timeout=20)
    assert window.faults() == []
    page.click("[aria-label='Remove run-a']")
    page.wait_for_selector("tr[data-run=run-a]", state="detached")
    assert "axis=relative&job=run-b&hide=run-b&sort=loss" in page.url
    for name in ("run-a", "run-b"):
        complete(service.data_dir, name)


RUNS = """Object.fromEntries([...document.querySelector(".chart").data].filter((one) => one.showlegend !== false)
    .map((one) => [one.meta, one.opacity]))"""
"""Jobs that the first chart shows -> opacity of their curves."""


def test_the_log_of_a_rank_is_followed_until_its_job_has_ended(window: Window, service: Guarded) -> None:
    log = service.data_dir / "jobs" / "writes" / "attempts" / "1" / "rank-1.log"
    log.write_text("first\n")
    requests: list[str] = []
    window.page.on("request", lambda request: requests.append(request.url))
    window.login("submit")
    window.open("/jobs/writes/logs?rank=1")
    assert window.page.inner_text("#log") == "first"
    append(log, "<b>second</b>\n")
    window.page.wait_for_selector("#log:has-text('<b>second</b>')", timeout=20_000)
    window.open("/jobs/writes")
    append(log.with_name("rank-0.log"), "of rank 0\n")
    window.page.wait_for_selector("#log:has-text('of rank 0')", timeout=20_000)
    window.open("/jobs/writes/logs?rank=1")
    append(log, "the last line\n")
    complete(service.data_dir, "writes")
    window.page.wait_for_selector("#log:has-text('the last line')", timeout=20_000)

    def is_quiet() -> bool:
        count = len(requests)
        window.page.wait_for_timeout(4000)  # longer than from one request to the next
        return len(requests) == count

    poll(is_quiet, "the log of a job that has ended is not requested again", timeout=30)


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def add_paused(service: Guarded, name: str) -> None:
    store = Store(service.data_dir / DATABASE)
    store.add_job(job_spec(name, checkpoint_dir=service.data_dir / "checkpoints" / name), "digest")
    store.request_pause(name)
    store.close()


def test_with_scripts_off_pages_have_their_contents_and_forms_work(chromium: Any, service: Guarded) -> None:
    add_paused(service, "by-form")
    with browser.window(chromium, service, java_script_enabled=False) as window:
        page = window.page
        window.open("/")
        page.fill("#token", TOKENS["admin"])
        page.click("main button")
        for path, shown in (
            ("/", "by-form"),
            ("/jobs/ended", "another line"),
            ("/jobs/ended", "tiny-tuned-final"),
            ("/jobs/ended/logs", "another line"),
            ("/jobs/ended/checkpoints/tiny-tuned-final", "model.bin"),
            ("/jobs/hostile/samples", "before, step 0"),
            ("/compare?job=ended&job=long", "settings are the same"),
            ("/nodes", "Add a node"),
            ("/new", "As YAML, command or JSON"),
            ("/data", "trl-remote datasets add"),
            ("/data/rows?dataset=questions", "No row is equal to another one"),
            ("/answers?job=asked-after", "Row 0"),
            ("/data/tokens", "Dataset"),
            ("/playground", "Scripts are off"),
        ):
            window.open(path)
            assert shown in page.locator("main").inner_text(), path
            if path not in WITHOUT_SCRIPTS:
                assert page.locator("noscript").count() > 0, path
        window.open("/jobs/ended/checkpoints/tiny-tuned-final")
        with page.expect_download() as begun:
            page.click("main a[download]")
        assert begun.value.path().stat().st_size == 1000
        window.open("/jobs/by-form")
        page.click("button:has-text('Resume')")
        page.wait_for_selector("button:has-text('Pause')")
        page.click("text=Pause")
        page.wait_for_selector("button:has-text('Resume')")
        page.click("main button:has-text('Cancel')")
        page.wait_for_selector("#status .state.cancelled")
        page.click("text=Delete")
        page.wait_for_selector("h1:has-text('Jobs')")
        assert service.get("/post-training/jobs/by-form/status").status_code == 404
        window.open("/new")
        window.fill(job="checked", model=str(tiny_model()), dataset="no-such-rows")
        page.click("text=Check only")
        assert "no-such-rows" in page.locator("#answer [role=alert]").inner_text()


def focused(window: Window) -> str:
    """What has the focus, and whether that is seen."""
    script = """() => {
        const one = document.activeElement;
        const seen = getComputedStyle(one).outlineStyle !== "none";
        return `${[...document.querySelectorAll(FOCUSABLE)].indexOf(one)} ${seen}`;
    }"""
    return str(window.page.evaluate(script.replace("FOCUSABLE", repr(FOCUSABLE))))


def test_everything_of_a_page_is_reached_by_tab_and_the_focus_is_seen(window: Window, service: Guarded) -> None:
    add_paused(service, "by-keys")
    window.open("/")
    window.page.keyboard.press("Tab")
    assert window.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    window.page.focus("#token")
    window.page.keyboard.type(TOKENS["admin"])
    window.page.keyboard.press("Enter")
    window.page.wait_for_selector("h1:has-text('Jobs')")
    for path in (
        *("/?search=many-0001", "/jobs/ended", "/nodes", "/new", "/data", "/data/rows?dataset=questions"),
        *("/playground", "/jobs/by-keys"),
    ):
        window.open(path)
        visible = "all => [all.filter((one) => one.checkVisibility()).length, all.length]"
        numbers = None
        while numbers != (numbers := window.page.eval_on_selector_all(FOCUSABLE, visible)):
            # Again where the page's scripts have added something meanwhile, which shifts the numbers.
            found = set()
            for _ in range(numbers[0] + 1):
                window.page.keyboard.press("Tab")
                found.add(focused(window))
        wanted = numbers[0]
        found = {one for one in found if not one.startswith("-1")}  # the page itself, behind its last element
        assert not [one for one in found if one.endswith("false")], path
        assert len(found) == wanted, path
        ids = window.page.eval_on_selector_all("[id]", "all => all.map((one) => one.id)")
        assert len(ids) == len(set(ids)), path  # else a label may name another element
    window.page.focus("button:has-text('Cancel')")
    window.page.keyboard.press("Enter")
    window.page.wait_for_selector("#status .state.cancelled")


@IN_FULL  # CI: what such a page shows in place of a log, in test_dashboard_pages.py
def test_the_pages_of_a_running_search_request_no_log_that_is_not_there(window: Window, service: Guarded) -> None:
    add_search(service.data_dir, "searching", JobState.in_progress)
    window.login("submit")
    window.refused.clear()  # the answer to who is not logged in
    for path in ("/jobs/searching", "/jobs/searching/logs"):
        window.open(path)
        window.page.wait_for_timeout(3500)  # longer than from one request to the next
        assert window.refused == [], path


def test_scripts_write_values_as_the_service_does(window: Window) -> None:
    window.login("submit")
    window.open("/jobs/ended")
    numbers = [0.0, 1.0, 0.333333333, 12345.678, 123456.7, 0.00012345678, 0.0000123, -2.5e-7, 100.0, 4e20]
    sizes = [0, 1000, 1024, 1273 << 20, 1 << 31, 3 << 40]
    seconds = [0, 59.4, 61, 3599, 3661, 90_000]
    script = """async ([numbers, sizes, seconds]) => {
        const own = document.querySelector("script[type=module]").src;
        const texts = await import(new URL("./texts.js", own));
        return [numbers.map((one) => texts.number(one)), sizes.map(texts.size), seconds.map(texts.duration),
            numbers.map(texts.short), seconds.map(texts.brief),
            seconds.map((one) => texts.count(Math.round(one))), [...seconds, 0.0204, 3.14159].map(texts.stepTime)];
    }"""
    assert window.page.evaluate(script, [numbers, sizes, seconds]) == [
        [number(one) for one in numbers],
        [size(one) for one in sizes],
        [duration(one) for one in seconds],
        [short(one) for one in numbers],
        [brief(one) for one in seconds],
        [count(round(one)) for one in seconds],
        [step_time(one) for one in (*seconds, 0.0204, 3.14159)],
    ]


FITS = """[...document.querySelectorAll("#headline .chart")].every((one) => {
    const drawn = one.querySelector(".main-svg");
    return drawn.clientWidth <= one.clientWidth && drawn.clientHeight <= one.clientHeight;
})"""


@pytest.mark.parametrize(("algorithm", "top"), [("dpo", ["Rewards", "Loss"]), *in_full(("sft", ["Loss"]))])
def test_the_first_screen_of_a_running_job_has_its_state_its_eta_and_its_curves(
    window: Window, service: Guarded, algorithm: str, top: list[str]
) -> None:
    name = f"running-{algorithm}"
    add_overfitting(service.data_dir, name, algorithm)
    window.login("submit")
    charts = [f"#headline .chart >> nth={number}" for number in range(len(top))]
    for width, height in ((1440, 900), (390, 844)):
        window.page.set_viewport_size({"width": width, "height": height})
        window.open(f"/jobs/{name}")
        window.wait_for_charts()
        poll(lambda: titles(window, "#headline") == top, "the first charts are drawn", timeout=20)
        for shown in ("#status .state", "#now-eta", "#steps", *charts):
            box = window.page.locator(shown).bounding_box()
            assert box is not None, shown
            assert box["y"] + box["height"] <= height, (shown, box)
            assert box["x"] + box["width"] <= width, (shown, box)
        poll(lambda: window.page.evaluate(FITS), "no chart is over anything else", timeout=20)
        curves = "[...document.querySelectorAll('#headline .chart')].at(-1).data.map((one) => one.name)"
        assert "eval_loss (validation)" in window.page.evaluate(curves)
        assert window.page.inner_text("#now-eval_loss") == "2.1"
        assert "lowest at step 60 (1.5)" in window.page.inner_text("#warnings")
        assert window.width() <= width
    assert titles(window, "[data-section=System]") == [], "nobody has seen them"
    assert window.page.locator("[data-section=System] .chart").count() == 2, "they have their places"
    window.page.locator("[data-section=System]").scroll_into_view_if_needed()
    poll(
        lambda: titles(window, "[data-section=System]") == ["Tokens per second", "Memory"], "of the system", timeout=20
    )
    assert window.faults() == []
    complete(service.data_dir, name)


HOVERED = "[...document.querySelectorAll('.chart .hoverlayer')].filter((one) => one.textContent).length"


def test_one_cursor_is_in_all_charts_and_a_chart_is_shown_alone_and_saved(window: Window, service: Guarded) -> None:
    add_overfitting(service.data_dir, "looked-at", "dpo")
    window.login("submit")
    window.page.set_viewport_size({"width": 1440, "height": 900})
    window.open("/jobs/looked-at?outliers=no&scale=log")
    window.wait_for_charts()
    poll(lambda: titles(window, "#headline") == ["Rewards", "Loss"], "the first charts are drawn", timeout=20)
    page, loss = window.page, window.page.locator(".chart >> nth=1")
    loss.focus()
    page.keyboard.press("End")
    poll(lambda: page.evaluate(HOVERED) >= 2, "both charts show the step", timeout=20)
    assert page.text_content("#readout").startswith("step 120: loss, smoothed 1.")
    hovered = "chart => chart.querySelector('.hoverlayer').textContent"
    assert "loss, smoothed : 1." in loss.evaluate(hovered)
    page.keyboard.press("ArrowLeft")
    assert page.text_content("#readout").startswith("step 119: ")
    lines = """() => import("/static/charts.js").then(({ withLines }) => [7, 8].map((count) => {
        const marks = [{ kind: "pause" }, ...Array.from({ length: count }, () => ({ kind: "checkpoint" }))];
        return withLines(marks).length;
    }))"""
    assert page.evaluate(lines) == [8, 1], "from 8 marks of a kind on only its symbols are drawn"
    drawn = """() => import("/static/charts.js").then(({ hovered }) =>
        hovered([0.0002916667, 2e-5, null, 12345.678]).text)"""
    assert page.evaluate(drawn) == ["0.0002917", "2e-05", "", "1.235e+04"]
    modes = """() => import("/static/charts.js").then(({ colorOf, modeOf }) => [colorOf(0),
        ...[1, 2, 100].map((count) => modeOf({ step: Array(count).fill(0) }, "validation"))])"""
    assert page.evaluate(modes) == ["#2f6fb0", "lines+markers", "lines+markers", "lines"], "many symbols are a band"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(modes)[0] == "#79b8ff"
    page.emulate_media(color_scheme="light")
    page.keyboard.press("Escape")
    poll(lambda: page.evaluate(HOVERED) == 0, "the cursor is gone", timeout=20)
    page.locator("[data-section=Training]").scroll_into_view_if_needed()
    poll(lambda: len(titles(window, "[data-section=Training]")) == 2, "rate and gradient are drawn", timeout=20)
    axes = "[...document.querySelectorAll('.js-plotly-plot')].map(({ layout }) => layout.xaxis.range.map(Math.round))"
    assert {tuple(ends) for ends in page.evaluate(axes)} == {(0, 120)}, "whether they have symbols or not"
    rate, gradient = (page.locator(f"[aria-label^='{title} by']") for title in ("Learning rate", "Gradient norm"))
    ticks = rate.evaluate("chart => [...chart.querySelectorAll('.ytick text')].map((one) => one.textContent)")
    assert "1e\N{MINUS SIGN}4" in ticks
    assert all(re.fullmatch("\\de\N{MINUS SIGN}\\d", tick) for tick in ticks), ticks
    assert gradient.evaluate("chart => chart.data.at(-1).y.indexOf(null)") == -1, "a mean"
    assert gradient.evaluate("chart => chart.data[0].y.indexOf(null)") == 59, "no line falls to 0 on a log scale"
    page.evaluate("scrollTo(0, 0)")
    box = loss.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    poll(lambda: page.evaluate(HOVERED) >= 2, "the pointer moves both", timeout=20)
    assert loss.evaluate("chart => [chart.layout.yaxis.type, chart.layout.yaxis.autorange ?? false]") == ["log", False]
    back = """import("/static/curves.js").then(({ along }) =>
        along({ time: [10, 11, 10.5, 12] }, "relative", 10, { seconds: 1 }))"""
    assert page.evaluate(back) == [0, 1, 1, 2], "a clock that was set back does not turn the line round"
    script = """import("/static/curves.js").then(({ withoutOutliers }) =>
        [false, true].map((one) => withoutOutliers([...Array(100).keys(), 1e6], one)))"""
    plain, powers = page.evaluate(script)
    assert plain == pytest.approx([0.5, 99.5], abs=0.01), "from the 5th to the 95th percentile, with a margin"
    assert powers == pytest.approx([0.714, 2.038], abs=0.01)
    page.click("[aria-label='Menu of Loss']")
    assert window.faults() == []
    with page.expect_download() as begun:
        page.click(".chart-menu[open] >> text=CSV")
    assert begun.value.suggested_filename == "looked-at-Loss.csv"
    lines = begun.value.path().read_text().splitlines()
    assert page.inner_text(".figure:has([aria-label='Menu of Loss']) .chart-note") == ""
    assert lines[0] == "job,kind,step,epoch,time,loss,eval_loss"
    assert (len(lines), lines[-1].split(",")[:4], lines[-1].split(",")[5:]) == (
        *(125, ["looked-at", "validation", "120", "1.2"]),
        ["", "2.1"],
    )
    page.click("[aria-label='Menu of Loss']")
    page.click(".chart-menu[open] >> text=Full screen")
    poll(lambda: loss_width(window) > 1300, "the chart is as wide as the window", timeout=20)
    page.click("[aria-label='Menu of Loss']")
    with page.expect_download() as begun:
        page.click(".chart-menu[open] >> text=PNG")
    picture = Image.open(begun.value.path())
    assert picture.width == 2 * loss_width(window)
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 50, "more than a background"
    page.keyboard.press("Escape")
    # A closed dialog has no width before the chart has left it.
    poll(lambda: titles(window, "#headline") == ["Rewards", "Loss"], "the chart is in its place again", timeout=20)
    poll(lambda: loss_width(window) < 700, "it has its width there", timeout=20)
    complete(service.data_dir, "looked-at")


def test_a_csv_that_lacks_points_says_so_and_one_that_cannot_be_made_too(window: Window) -> None:
    window.login("submit")
    window.open("/jobs/long")
    window.wait_for_charts()
    page, note = window.page, ".figure:has([aria-label='Menu of Loss']) .chart-note"
    page.click("[aria-label='Menu of Loss']")
    with page.expect_download() as begun:
        page.click(".chart-menu[open] >> text=CSV")
    assert begun.value.suggested_filename == "long-Loss-thinned.csv"
    assert "more than 20,000 points" in page.inner_text(note)
    page.click("[aria-label='Menu of Loss']")
    page.click(".chart-menu[open] >> text=Full screen")
    poll(lambda: loss_width(window) > 1200, "the chart is as wide as the window", timeout=20)
    poll(lambda: page.evaluate(APART), "the note is below the chart, in the window", timeout=20)
    page.set_viewport_size({"width": 390, "height": 844})
    poll(lambda: page.evaluate(APART), "the note is below the chart on a phone, too", timeout=20)
    page.set_viewport_size({"width": 1280, "height": 720})
    page.keyboard.press("Escape")
    page.route("**/series?*", lambda route: route.abort())
    page.click("[aria-label='Menu of Loss']")
    page.click(".chart-menu[open] >> text=CSV")
    page.wait_for_selector(f"{note}:has-text('No CSV is saved: the service does not answer')")
    assert window.faults() == []


APART = """(() => {
    const note = document.querySelector(".whole .chart-note").getBoundingClientRect();
    const drawn = document.querySelector(".whole .main-svg").getBoundingClientRect();
    const isInside = note.bottom <= innerHeight && note.right <= innerWidth;
    return note.height > 0 && drawn.height > 200 && drawn.bottom <= note.top + 1 && isInside;
})()"""


def loss_width(window: Window) -> int:
    script = """() => [...document.querySelectorAll(".js-plotly-plot")].find((one) => one.layout.title.text === "Loss")
        .querySelector(".main-svg").clientWidth"""
    return int(window.page.evaluate(script))


def titles(window: Window, where: str) -> list[str]:
    """Of the charts in a part of the page, in their order."""
    script = "(where) => [...document.querySelectorAll(`${where} .js-plotly-plot`)].map((one) => one.layout.title.text)"
    return list(window.page.evaluate(script, where))


def test_a_job_is_cloned_by_one_click_with_its_whole_request(window: Window, service: Guarded) -> None:
    body = sft("original", "questions")
    body["training_config"]["dtype"] = "fp32"
    service.submit(SFT, {**body, "algorithm_config": LORA}, options={"seed": 7, "priority": "low"})
    window.login("submit")
    window.open("/jobs/original")
    assert "seed: 7" in window.page.text_content("[aria-label='Request as YAML']")
    window.page.click("text=Clone")
    window.page.wait_for_selector("h1:has-text('New job')")
    value = window.page.input_value
    assert (value("#job"), value("#dataset"), value("#priority")) == ("original-2", "questions", "low")
    assert '"seed": 7' in value("#options")
    assert '"dtype": "fp32"' in value("#request")
    window.page.wait_for_selector("#answer .state", timeout=60_000)
    assert "seed: 7" in window.page.inner_text("#same pre >> nth=0")
    assert window.faults() == []
    window.fill(batch_size="3")
    window.page.click("text=Queue the job")
    window.page.wait_for_selector("h1:has-text('original-2')")
    config, copied = (
        service.status(name)["resources_allocated"]["effective_config"] for name in ("original", "original-2")
    )
    different = {name for name in config if config[name] != copied[name]}
    assert different <= {"job_uuid", "batch_size", "checkpoint_dir", "output_name"}, different
    for name in ("original", "original-2"):
        service.post(f"/post-training/jobs/{name}/cancel")
    window.open("/jobs/original")
    assert window.page.locator("a:has-text('Edit and retry')").count() == 1
    window.open("/new?from=original&checkpoint=checkpoint-4")
    assert json.loads(value("#options"))["resume_from"] == "original/checkpoint-4"
    assert json.loads(value("#options"))["seed"] == 7
    window.open("/new?from=ended")
    assert "its request is not kept" in window.page.inner_text("#answer [role=alert]")


def test_a_click_before_the_scripts_of_a_page_are_read_loses_nothing(window: Window, service: Guarded) -> None:
    add_paused(service, "clicked-soon")
    window.login("submit")
    page, frame, questions = window.page, window.page.main_frame, list[str]()
    page.on("dialog", lambda dialog: questions.append(dialog.message))
    page.route(re.compile(r"/static/(?!early)[\w.]+\.js"), lambda _: None)  # never answered
    for path in ("/new", "/playground", "/jobs/clicked-soon"):
        page.goto(service.url + path, wait_until="commit")
        if path == "/new":
            frame.locator("#job").fill("typed")
            frame.locator("[data-preset]:has-text('Full fine-tuning')").click()
            page.wait_for_function("document.getElementById('tuning').value === 'full'")
            assert frame.input_value("#job") == "typed"
        elif path == "/playground":
            assert frame.is_disabled("#send"), "it would leave the page, and what was typed"
            assert frame.is_disabled("#next")
        else:
            frame.locator("button:has-text('Cancel')").click()
            page.wait_for_selector("#status .state.cancelled")
    assert questions == ["Cancel this job? Its checkpoints stay."]


def test_an_answer_that_comes_late_takes_nothing_back_that_is_shown_since(window: Window) -> None:
    window.login("submit")
    script = """async () => {
        const { Parts } = await import("/static/parts.js");
        const { Charts } = await import("/static/charts.js");
        const answers = [];
        const later = () => new Promise((answer) => answers.push(answer));
        window.fetch = later;
        const parts = new Parts(["live"]);
        const asked = [parts.fetch(), parts.fetch()];
        for (const [number, text] of [[1, "new"], [0, "old"]]) {
            answers[number](new Response(`<p id="live">${text}</p>`));
            await asked[number];
        }
        const chart = { group: { names: [] }, zoomed: null, range: null };
        const zoom = (change) => Charts.prototype.zoom.call({ closer: later, changed: () => {} }, chart, change);
        const enlarged = zoom({ "xaxis.range[0]": 1, "xaxis.range[1]": 2 });
        await zoom({ "xaxis.autorange": true });
        answers[2]({});
        await enlarged;
        return [document.getElementById("live").textContent, chart.zoomed];
    }"""
    assert window.page.evaluate(script) == ["new", None]


def test_a_list_that_comes_late_takes_no_step_back(window: Window, service: Guarded) -> None:
    add_overfitting(service.data_dir, "lagging")
    add_paused(service, "beside-it")
    window.login("submit")
    page, held = window.page, list[Any]()
    steps = "tr[data-job=lagging] .steps"
    assert page.inner_text(steps) == "120 of 300"

    def hold(route: Any) -> None:
        if held:  # a further list would have the step
            route.abort()
            return
        held.append(route)
        held.append(route.fetch())

    page.route(f"{service.url}/", hold)
    service.post("/post-training/jobs/beside-it/cancel")
    poll(lambda: page.wait_for_timeout(50) or len(held) == 2, "the list is rendered again, and under way", timeout=20)
    add_step(service.data_dir, "lagging", 121)
    page.wait_for_selector(f"{steps}:has-text('121 of 300')")
    held[0].fulfill(response=held[1])
    page.wait_for_selector("tr[data-job=beside-it] .state.cancelled", state="attached")
    assert page.inner_text(steps) == "121 of 300"
    page.unroute(f"{service.url}/")
    complete(service.data_dir, "lagging")


def test_a_stream_that_is_stopped_follows_the_page_no_longer(window: Window) -> None:
    window.login("submit")
    script = """async () => {
        window.EventSource = class extends EventTarget { close() {} };
        const { Stream } = await import("/static/stream.js");
        const stream = new Stream(["any"], "", {});
        let seen = 0;
        stream.visible = () => (seen += 1);
        document.dispatchEvent(new Event("visibilitychange"));
        stream.stop();
        document.dispatchEvent(new Event("visibilitychange"));
        return seen;
    }"""
    assert window.page.evaluate(script) == 1


def test_a_search_in_a_large_dataset_reads_a_part_and_looks_further(window: Window, tmp_path: Path) -> None:
    file, texts = tmp_path / "wide.jsonl", ["x" * (1 << 20)] * 9 + ["a needle"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    page = window.page
    window.login("submit")
    window.open("/data")
    page.wait_for_selector("#upload")  # its script has been read, and shows it
    page.set_input_files("#upload input", str(file))
    page.click("#uploads >> text=wide: 10 rows >> a")
    page.fill("main [name=search]", "NEEDLE")
    page.press("main [name=search]", "Enter")
    page.click("text=look further", trial=True)
    text = page.inner_text("main")
    assert "0 rows have “NEEDLE” among the first 8 (8.0 MiB of 9.0 MiB)" in text
    assert "There is none so far." in text
    page.click("text=look further")
    page.wait_for_selector("article[aria-label='Row 9']:has-text('a needle')")
    assert "1 row has “NEEDLE”" in page.inner_text("main")
    assert page.locator("text=look further").count() == 0
    assert window.faults() == []


def test_a_problem_of_a_form_is_gone_when_its_field_is_changed(window: Window) -> None:
    window.login("submit")
    window.open("/new")
    window.fill(job="repaired", model=str(tiny_model()), dataset="no-such-rows")
    window.page.wait_for_selector("#answer [role=alert]", timeout=30_000)
    window.fill(dataset="questions")
    assert window.page.locator("#answer [role=alert]").count() == 0
