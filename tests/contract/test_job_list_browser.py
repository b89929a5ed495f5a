"""The page of jobs in a real Chromium: sorted, folded, searched, by keys and on a phone, over jobs in every state."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.contract import browser
from tests.contract.browser import Window
from tests.contract.listed_jobs import add_listed
from tests.contract.stack import poll
from tests.contract.unsupervised import unsupervised
from tests.security.guarded import TOKENS, Guarded

pytestmark = [pytest.mark.contract, pytest.mark.timeout(240)]

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Guarded]:
    with unsupervised(tmp_path_factory.mktemp("listed"), add_listed) as service:
        yield service


@pytest.fixture
def window(chromium: Any, service: Guarded) -> Iterator[Window]:
    with browser.window(chromium, service, viewport=DESKTOP) as window:
        window.login("admin")
        yield window


def shown(window: Window) -> list[str]:
    return list(window.page.eval_on_selector_all("tr[data-job]", "rows => rows.map((row) => row.dataset.job)"))


def losses(window: Window) -> list[float]:
    texts = window.page.locator(".loss .value").all_inner_texts()
    return [float(text.removeprefix("best ")) for text in texts if text]


def test_eighteen_jobs_are_in_the_first_screen_with_their_curves_and_reasons(window: Window) -> None:
    script = "rows => rows.filter((row) => row.getBoundingClientRect().bottom <= innerHeight).length"
    assert window.page.eval_on_selector_all("tr[data-job]", script) >= 18
    assert window.page.locator(".spark polyline").count() >= 18
    assert shown(window)[0] == "trains"
    text = window.page.inner_text("tr[data-job=trains]")
    assert "25 of 40" in text
    assert re.search(r"\d+:\d\d min left", text)
    assert "out_of_memory" in window.page.inner_text("tr[data-job=too-large] .reason")
    assert window.page.inner_text("tr[data-job=next-in-line] .reason .steps").startswith("start")
    assert re.match(r"until it is resumed, requested at 20", window.page.inner_text("tr[data-job=held] .reason"))
    lefts = "all => new Set(all.map((one) => one.getBoundingClientRect().left)).size"
    assert window.page.eval_on_selector_all(".spark", lefts) == 1, "whatever the width of the number beside it is"
    window.page.eval_on_selector("tr[data-job=trains] .value", "one => (one.textContent = '0.0006812')")
    spilt = """all => all.flatMap((one) => [...one.children].filter((part) =>
        part.getBoundingClientRect().left < one.getBoundingClientRect().left).map((part) => part.outerHTML))"""
    assert window.page.eval_on_selector_all("td.number", spilt) == []
    before = window.page.inner_text("tr[data-job=trains] [data-seconds]")
    poll(lambda: window.page.inner_text("tr[data-job=trains] [data-seconds]") != before, "it counts", timeout=20)
    window.page.click("tr[data-job=sft-19] .pill")
    window.page.wait_for_selector("h1:has-text('sft-19')")


def test_progress_begins_at_what_the_page_shows_and_never_goes_back(window: Window) -> None:
    script = """async () => {
        const { isBehind } = await import("/static/stream.js");
        return ["1-90", "1-100", "1-101", "2-0"].map((cursor) => isBehind(cursor, "1-100"));
    }"""
    assert window.page.evaluate(script) == [False, False, True, True]
    with window.page.expect_request("**/v1/post-training/events?*") as requested:
        window.open("/")
    followed = dict(json.loads(window.page.text_content("#followed") or ""))
    assert followed["trains"] == "1-1"
    assert parse_qs(urlsplit(requested.value.url).query)["after"] == ["~".join(followed.values())]


def test_a_click_on_a_head_sorts_by_it_and_the_address_has_it(window: Window) -> None:
    window.page.click("thead >> text=Loss")
    window.page.wait_for_selector("[aria-sort=ascending]")
    assert window.page.url.endswith("/?sort=loss")
    found = losses(window)
    assert found == sorted(found)
    window.page.click("thead >> text=Loss")
    window.page.wait_for_selector("[aria-sort=descending]")
    assert losses(window) == sorted(losses(window), reverse=True)
    window.open("/?sort=name&state=completed")
    names = shown(window)
    assert names == sorted(names)
    assert "stopped" not in names


def test_the_command_line_lists_jobs_in_the_order_of_the_page(window: Window, service: Guarded) -> None:
    words = [sys.executable, "-m", "llama_stack_provider_trl_remote", "jobs", "list", "--sort", "eval", "--json"]
    environ = {**os.environ, "TRL_SERVICE_TOKEN": TOKENS["submit"], "TRL_SERVICE_URL": service.url}
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env=environ).stdout
    window.open("/?sort=eval&flat=yes")
    assert [job["job_uuid"] for job in json.loads(printed)] == shown(window)


def test_a_search_and_a_chain_are_folded_and_open_at_a_click_without_a_new_page(window: Window) -> None:
    assert not {"lr-search-1", "base-dpo", "base-eval"} & {*shown(window)}
    window.page.evaluate("window.kept = true")
    fold = "tr[data-job=lr-search] .fold"
    assert "6 jobs" in window.page.inner_text(fold)
    window.page.click(fold)
    window.page.wait_for_selector("tr[data-job=lr-search-1]")
    at = shown(window).index("lr-search")
    assert shown(window)[at : at + 7] == ["lr-search", *(f"lr-search-{number}" for number in range(6, 0, -1))]
    assert window.page.evaluate("window.kept"), "the page was loaded again"
    assert "open=lr-search" in window.page.url
    window.page.click(fold)
    window.page.wait_for_selector("tr[data-job=lr-search-1]", state="detached")
    window.page.click("text=unfold")
    window.page.wait_for_selector("tr[data-job=base-dpo]")
    assert "trial of" in window.page.inner_text("tr[data-job=lr-search-1]")


def test_one_field_searches_names_models_and_tags(window: Window) -> None:
    for text, found in (("SFT-0", 10), ("smollm2", 16), ("paper=v2", 1)):
        window.page.keyboard.press("/")
        window.page.keyboard.type(text)
        window.page.keyboard.press("Enter")
        window.page.wait_for_selector(f".count:has-text('{found} job')")
        assert len(shown(window)) == found, text
    window.open("/?search=nothing+of+this")
    assert "There is none" in window.page.inner_text("main")
    window.page.click("text=Show all jobs")
    window.page.wait_for_selector("tr[data-job=trains]")


def test_the_palette_and_keys_lead_to_jobs_and_pages(window: Window) -> None:
    page = window.page
    page.keyboard.press("Control+k")
    page.wait_for_selector("#palette[open]")
    page.keyboard.type("st")
    page.wait_for_selector("#palette li:has-text('trains')")
    assert page.inner_text("#palette li >> nth=0").startswith("stopped"), "its name begins with it, not its model"
    page.fill("#palette input", "")
    page.keyboard.type("lr-search-3")
    page.wait_for_selector("#palette li:has-text('lr-search-3') >> nth=1")  # the search for it is there before the job
    assert window.faults() == []
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('lr-search-3')")
    page.wait_for_selector(".jump")  # its script has been read, and takes keys
    page.keyboard.press("g")
    page.keyboard.press("j")
    page.wait_for_selector("h1:has-text('Jobs')")
    page.wait_for_selector(".jump")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("x")
    assert page.is_checked("tr:nth-child(2) input[name=job]")
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    assert "g j" in page.inner_text("#help")
    assert window.faults() == []
    page.keyboard.press("Escape")
    page.wait_for_selector("#help", state="hidden")
    page.keyboard.press("g")
    page.keyboard.press("n")
    page.wait_for_selector("h1:has-text('New job')")


def test_ticked_jobs_are_cancelled_and_deleted_and_a_refusal_is_shown(window: Window, service: Guarded) -> None:
    assert not window.page.locator(".ticked").is_visible()
    for name in ("held", "stopped"):
        window.page.check(f"input[name=job][value={name}]")
    window.page.click(".ticked >> text=Cancel jobs")
    poll(lambda: service.state("held") == "cancelled", "the job is cancelled", timeout=20)
    window.page.wait_for_selector("tr[data-job=held] .state.cancelled")
    window.open("/?search=held")
    window.page.check("input[name=job][value=held]")
    window.page.click(".ticked >> text=Delete jobs")
    window.page.wait_for_selector("main:has-text('There is none')")
    window.open("/")
    window.page.check("input[name=job][value=base]")
    assert not window.page.is_visible(".ticked >> text=Cancel jobs"), "it has completed"
    window.page.click(".ticked >> text=Delete jobs")
    window.page.wait_for_selector("#live:has-text('base-eval')")
    assert service.state("base") == "completed"


def test_times_are_relative_and_exact_where_the_pointer_is(window: Window) -> None:
    found = window.page.locator("tr[data-job=sft-00] time")
    assert found.inner_text() == "4 d ago"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", found.get_attribute("title") or "")


def test_nothing_is_wider_than_the_window_small_to_hit_or_hard_to_read(window: Window) -> None:
    page = window.page
    for path in ("/", "/?open=lr-search&open=base", "/?state=failed"):
        for size in (DESKTOP, PHONE):
            page.set_viewport_size(size)
            window.open(path)
            assert window.width() <= size["width"], f"{path} {size}"
            scrolled = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.className)"
            assert page.eval_on_selector_all("header nav, .tabs, .jobs thead tr", scrolled) == [], f"{path} {size}"
            assert page.eval_on_selector_all("button, .tick label, nav a, thead a", SMALL) == [], f"{path} {size}"
            assert page.eval_on_selector_all("tr[data-job]", OVERLAPS) == [], f"{path} {size}"
            assert window.faults() == [], f"{path} {size}"
        page.emulate_media(color_scheme="dark")
        assert window.faults("color-contrast") == [], f"{path} dark"
        page.emulate_media(color_scheme="light")


SMALL = """all => all.filter((one) => one.checkVisibility()).filter((one) => {
    const { width, height } = one.getBoundingClientRect();
    return height < 23.9 || width < 23.9; // 24, but for what binary numbers leave of it
}).map((one) => one.outerHTML.slice(0, 200))"""
OVERLAPS = """rows => rows.flatMap((row) => {
    const cells = [...row.children].filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect());
    const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    const spills = [...row.querySelectorAll(".line > *")].some((one) =>
        one.getBoundingClientRect().right > one.closest("th").getBoundingClientRect().right + 1);
    const overlaps = cells.some((one, at) => cells.slice(at + 1).some((other) => over(one, other)));
    return spills || overlaps ? [row.dataset.job] : [];
})"""


def test_the_trials_of_a_search_are_sorted_drawn_and_compared(window: Window) -> None:
    window.open("/jobs/lr-search")
    window.page.click(".links >> text=Trials")
    assert window.page.inner_text("tr.best th").split() == ["lr-search-3", "best"]
    names = "rows => rows.map((row) => row.textContent.trim())"
    assert window.page.eval_on_selector_all(".trials tbody th a", names)[0] == "lr-search-3"
    assert window.page.locator(".parallel polyline").count() == 6
    beside = """all => {
        const axes = [...document.querySelectorAll(".parallel line")].map((line) => line.x1.baseVal.value);
        return all.every((one) => Number(one.getAttribute("x")) > Math.max(...axes));
    }"""
    assert window.page.locator(".parallel .after").count() >= 2
    assert window.page.eval_on_selector_all(".parallel .after", beside), "no line runs through the last numbers"
    assert "from 10 completed trials on" in window.page.inner_text("[aria-labelledby=importance-title]")
    window.page.click("thead >> text=lr")
    window.page.wait_for_selector("[aria-sort=ascending]")
    assert window.page.eval_on_selector_all(".trials tbody th a", names)[0] == "lr-search-6"
    assert window.faults() == []
    window.page.set_viewport_size(PHONE)
    assert window.width() <= PHONE["width"]
    window.page.click("text=Compare the trials")
    window.page.wait_for_selector("h1:has-text('Compare jobs')")
    assert window.page.locator("#states tbody tr").count() == 6
