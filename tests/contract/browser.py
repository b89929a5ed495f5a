"""Debian's chromium, driven by playwright, as tests of the dashboard use it: one browser for a module, a window for a
test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tests.required import lacking
from tests.security.guarded import TOKENS

CHROMIUM = os.environ.get("TRL_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
"""The headless shell is the same engine without menus and extensions: a window takes a fifth of the CPU time."""

SLOW = float(os.environ.get("TRL_BROWSER_SLOW") or 1)
"""How many times slower than this machine pages run, with 50 ms for each such time before an answer: what a test reads
before a script has drawn it is not there then."""

_REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation",
    (event) => console.error("CSP", event.violatedDirective, event.blockedURI, event.sourceFile));
"""
_ARGUMENTS = (
    # Without its sandbox, which root cannot have, and without /dev/shm, which containers have little of.
    *("--no-sandbox", "--disable-dev-shm-usage"),
    # Of another site nothing is found, whatever a page requests.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
_SERIOUS = ("serious", "critical")
_ACTIONS = {
    "page": (
        *("click", "check", "fill", "focus", "press", "select_option", "set_input_files"),
        *("eval_on_selector_all", "evaluate", "inner_text", "input_value", "is_checked", "locator", "text_content"),
    ),
    "keyboard": ("press", "type"),
    "mouse": ("down", "move"),
}

TORN = """() => {
    const said = [];
    const leaves = [...document.querySelectorAll("main *, header *, nav *")].filter((one) => one.checkVisibility()
        && ![...one.children].length && one.textContent.trim() && !one.closest("svg, pre, textarea, select, .chart"));
    const boxes = leaves.flatMap((one) => {
        const range = document.createRange();
        range.selectNodeContents(one);
        return [...range.getClientRects()].map((box) => [one, box]);
    }).filter(([, box]) => box.width > 1 && box.height > 1);
    const name = (one) => one.outerHTML.slice(0, 120);
    for (let up of leaves) {
        const text = up;
        for (; up && up !== document.body; up = up.parentElement) {
            const style = getComputedStyle(up);
            if (!["hidden", "clip"].includes(style.overflowX) || up.scrollWidth <= up.clientWidth + 1) continue;
            if (up.clientWidth <= 1 || text.closest("[title]")) break;
            said.push("cut: " + name(text));
            break;
        }
    }
    boxes.sort((a, b) => a[1].top - b[1].top);
    boxes.forEach(([one, box], at) => {
        for (let next = at + 1; next < boxes.length && boxes[next][1].top < box.bottom - 4; next++) {
            const [other, second] = boxes[next];
            const wide = Math.min(box.right, second.right) - Math.max(box.left, second.left);
            const high = Math.min(box.bottom, second.bottom) - Math.max(box.top, second.top);
            const apart = one === other || getComputedStyle(other).position === "sticky" || one.closest(".hidden");
            const scrolled = [one, other].some((text) => text.closest("nav, header, [class*=scroll], table"));
            if (wide > 3 && high > 4 && !apart && !scrolled) said.push(`over each other: ${name(one)} ${name(other)}`);
        }
    });
    return [...new Set(said)];
}"""
"""A script: the texts of a page that are cut without a title that has them whole, or lie over each other."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, of playwright's class Browser. Skips the test where there is none."""
    try:
        from playwright import sync_api
    except ImportError:
        lacking("playwright is not installed: scripts/prepare-env.sh installs it")
    if CHROMIUM is None:
        lacking("no browser is installed: `apt-get install chromium-headless-shell`, or name one in TRL_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield browser
        browser.close()


class HasPages(Protocol):
    """A service, or `trl-remote dashboard`."""

    @property
    def url(self) -> str: ...


@contextmanager
def window(browser: Any, service: HasPages, **options: Any) -> Iterator[Window]:
    """A window of the browser on a service. Fails where a page of it requested anything of another site, reported an
    error or a violation of the policy, or opened an alert.

    Args:
        options: of playwright's `new_context`.
    """
    window = Window(browser, service, **options)
    yield window
    window.context.close()
    assert window.foreign == []
    assert window.errors == [], window.errors
    assert window.alerts == []


class Window:
    """One page of a browser; it counts what no page may do."""

    def __init__(self, browser: Any, service: HasPages, **options: Any) -> None:
        self.service = service
        self.context = browser.new_context(**options)
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.alerts: list[str] = []
        self.questions: list[str] = []
        self.refused: list[str] = []
        """What could not be loaded, which a test may mean to happen."""
        # Not by a route, which would keep the browser from caching: each page would load and compile plotly again.
        self.context.on("request", self._count)
        self.page = self.context.new_page()
        self._devtools = self.context.new_cdp_session(self.page)
        if SLOW > 1:
            self._devtools.send("Emulation.setCPUThrottlingRate", {"rate": SLOW})
            self.receive()
        self.page.add_init_script(_REPORT_VIOLATIONS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", self._answer)
        for part, names in _ACTIONS.items():
            owner = self.page if part == "page" else getattr(self.page, part)
            for name in names:
                setattr(owner, name, self._when_loaded(getattr(owner, name)))

    def receive(self, bytes_per_second: int = -1) -> None:
        """Have what the page requests arrive no faster; -1: as it is sent."""
        latency = 50 * SLOW if SLOW > 1 else 0
        limits = {"latency": latency, "downloadThroughput": bytes_per_second, "uploadThroughput": -1}
        self._devtools.send("Network.enable")
        self._devtools.send("Network.emulateNetworkConditions", {"offline": False, **limits})

    def _when_loaded(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """What a person would do on a page that is there. Playwright clicks as soon as an element has been parsed,
        before the scripts of the page have been read: then a link leads away that a script would have answered. It
        reads a page of which a part has been parsed."""

        def act(*args: Any, **options: Any) -> Any:
            self.page.wait_for_load_state("load")
            return action(*args, **options)

        return act

    def _count(self, request: Any) -> None:
        if not request.url.startswith(self.service.url):
            self.foreign.append(request.url)

    def _answer(self, dialog: Any) -> None:
        """The questions of the dashboard are answered with yes. Any other dialog is of a script in a page."""
        (self.questions if dialog.type == "confirm" else self.alerts).append(dialog.message)
        dialog.accept()

    def _note(self, message: Any) -> None:
        if message.type != "error":
            return
        # A browser itself reports answers of 401 and connections that are refused.
        if message.text.startswith("Failed to load resource"):
            self.refused.append(f"{message.location.get('url')}: {message.text}")
        else:
            self.errors.append(message.text)

    def wait_for_charts(self, seconds: float = 60) -> None:
        """Until the first chart is drawn. Fails with what the page shows instead."""
        from playwright.sync_api import TimeoutError

        try:
            self.page.wait_for_selector(".chart .main-svg", timeout=seconds * 1000)
        except TimeoutError as error:
            charts = "[typeof window.Plotly, document.querySelectorAll('.chart').length]"
            shown = self.page.evaluate(charts), self.page.inner_text("body")
            message = f"no chart on {self.page.url}: {shown=} {self.errors=} {self.foreign=} {self.refused=}"
            raise AssertionError(message) from error

    def open(self, path: str) -> None:
        self.page.goto(self.service.url + path)

    def fill(self, **fields: str) -> None:
        """Fill in the fields of a form, named by their ids."""
        for name, text in fields.items():
            self.page.fill(f"#{name}", text)

    def login(self, role: str) -> None:
        self.open("/")
        self.page.fill("#token", TOKENS[role])
        self.page.click("main button")
        self.page.wait_for_selector("h1:has-text('Jobs')")

    def faults(self, *rules: str) -> list[str]:
        """What is seriously wrong with the accessibility of the page, as axe finds it; by these rules, or all."""
        from axe_playwright_python.sync_playwright import Axe

        only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
        found = Axe().run(self.page, options={"resultTypes": ["violations"], **only}).response["violations"]
        return [
            f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
            for one in found
            if one["impact"] in _SERIOUS
            for node in one["nodes"]
        ]

    def width(self) -> int:
        """Of all that the page shows, in CSS pixels."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))
