"""The dashboard in a real Chromium, over a real training. Needs playwright and Debian's chromium (or TRL_CHROMIUM)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.service import running
from tests.contract.stack import DPO, SFT, poll
from tests.security.guarded import TOKENS, Guarded

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("TRL_CHROMIUM") or shutil.which("chromium")

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

_REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation",
    (event) => console.error("CSP", event.violatedDirective, event.blockedURI, event.sourceFile));
"""
_CHART = "document.querySelector('.chart').data[0]"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with running(Guarded(tmp_path_factory.mktemp("browser"))) as service:
        service.register("questions", QUESTIONS * 20)
        service.register("pairs", PAIRS * 10)
        yield service


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as running_playwright:
        # Without its sandbox, which root cannot have.
        browser = running_playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Window:
    """One page of a browser; it counts what no page may do."""

    def __init__(self, browser: Any, service: Guarded) -> None:
        self.service = service
        self.context = browser.new_context()
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.context.route("**/*", self._route)
        self.page = self.context.new_page()
        self.page.add_init_script(_REPORT_VIOLATIONS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept())

    def _route(self, route: Any) -> None:
        if route.request.url.startswith(self.service.url):
            route.continue_()
        else:
            self.foreign.append(route.request.url)
            route.abort()

    def _note(self, message: Any) -> None:
        # A browser itself reports answers of 401 and connections that are refused.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def open(self, path: str) -> None:
        self.page.goto(self.service.url + path)

    def login(self, role: str) -> None:
        self.open("/")
        self.page.fill("#token", TOKENS[role])
        self.page.click("main button")
        self.page.wait_for_selector("h1:has-text('Jobs')")

    def xs(self) -> list[int]:
        return list(self.page.evaluate(f"{_CHART}.x"))


@pytest.fixture
def window(chromium: Any, service: Guarded) -> Iterator[Window]:
    window = Window(chromium, service)
    yield window
    window.context.close()
    assert window.foreign == []
    assert window.errors == []


def test_a_wrong_login_is_named_and_a_right_one_opens_the_jobs(window: Window) -> None:
    window.open("/")
    window.page.fill("#token", "wrong")
    window.page.click("main button")
    window.page.wait_for_selector("[role=alert]")
    assert "does not know this token" in window.page.inner_text("[role=alert]")
    window.login("submit")
    assert "submit" in window.page.inner_text("header")
    window.page.click("text=Log out")
    window.page.wait_for_selector("#token")


def test_curves_move_and_a_killed_service_is_caught_up_without_a_gap_or_a_double_point(
    window: Window, service: Guarded
) -> None:
    body = sft("alive", "questions")
    body["training_config"]["n_epochs"] = 30
    service.submit(SFT, body)
    window.login("admin")
    window.page.wait_for_selector("tr[data-job=alive] .state.in_progress", timeout=30_000)
    window.open("/jobs/alive")
    window.page.wait_for_selector(".chart .main-svg", timeout=30_000)
    window.page.evaluate("window.kept = true")
    before = len(window.xs())
    poll(lambda: len(window.xs()) > before, "the curve grows", timeout=20)
    service.kill()
    window.page.wait_for_selector("#live:has-text('does not answer')", timeout=20_000)
    before = len(window.xs())
    service.start()
    poll(lambda: len(window.xs()) > before, "the curve grows again", timeout=30)
    xs = window.xs()
    assert xs == list(range(1, len(xs) + 1))
    assert window.page.evaluate("window.kept"), "the page was loaded again"
    window.page.click("text=Pause")
    window.page.wait_for_selector("button:has-text('Resume')", timeout=30_000)
    window.page.click("text=Cancel")
    window.page.wait_for_selector("#status .state.cancelled", timeout=30_000)


def test_metrics_of_dpo_have_charts_and_a_submit_role_sees_no_button_of_admins(
    window: Window, service: Guarded
) -> None:
    service.wait(service.submit(DPO, promised("dpo", "pairs")), "completed")
    window.login("submit")
    window.open("/jobs/dpo")
    window.page.wait_for_selector(".chart .main-svg", timeout=30_000)
    titles = poll(
        lambda: set(
            window.page.evaluate("[...document.querySelectorAll('.chart')].map((one) => one.layout.title.text)")
        ),
        "charts are drawn",
        timeout=10,
    )
    assert {"Loss", "Learning rate", "Gradient norm", "Rewards", "Reward accuracies", "Log-probabilities"} <= titles
    window.page.select_option("#axis", "time")
    poll(lambda: "T" in str(window.xs()[0]), "the axis is of times", timeout=10)
    assert window.page.locator("text=Delete").count() == 0
    window.page.click("text=Log out")
    window.login("admin")
    window.open("/jobs/dpo")
    assert window.page.locator("text=Delete").count() == 1


def test_a_phone_shows_the_pages_without_scrolling_sideways(window: Window) -> None:
    window.login("admin")
    window.page.set_viewport_size({"width": 390, "height": 800})
    for path in ("/", "/jobs/dpo", "/jobs/dpo/logs"):
        window.open(path)
        assert window.page.evaluate("document.documentElement.scrollWidth") <= 390
