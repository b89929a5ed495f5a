"""The dashboard in a real Chromium, over a real training. Needs playwright and Debian's chromium (or TRL_CHROMIUM)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract import browser
from tests.contract.browser import TORN, Window
from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.service import JOBS, running
from tests.contract.stack import DPO, SFT, poll
from tests.required import IN_FULL, in_full
from tests.screenshots import laboratory, walk
from tests.security.guarded import Guarded
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(240)]

PAGES = (
    "/",
    "/jobs/dpo",
    "/jobs/dpo/checkpoints/final",
    "/jobs/nobody",
    "/nodes",
    "/data",
    "/compare?job=dpo&job=alive",
    *in_full(
        "/jobs/dpo/logs",
        "/jobs/dpo/samples",
        "/data/rows?dataset=questions",
        "/data/tokens",
        "/playground?job=dpo",
    ),
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[Guarded]:
    with running(Guarded(tmp_path_factory.mktemp("browser"))) as service:
        service.register("questions", QUESTIONS * 20)
        service.register("pairs", PAIRS * 10)
        yield service


@pytest.fixture
def window(chromium: Any, service: Guarded) -> Iterator[Window]:
    with browser.window(chromium, service) as window:
        yield window


@pytest.fixture(scope="module")
def alive(service: Guarded) -> str:
    """A job that trains until it is cancelled, or for some minutes."""
    body = sft("alive", "questions")
    body["training_config"]["n_epochs"] = 30
    body["training_config"]["data_config"]["validation_dataset_id"] = "questions"
    return service.submit(SFT, body, options={"eval_steps": 4})


@pytest.fixture(scope="module")
def dpo(service: Guarded) -> str:
    samples = {"prompts": ["What is 3 plus 3?", "<b>And 4?</b>"], "max_new_tokens": 4}
    return service.submit(DPO, promised("dpo", "pairs"), options={"samples": samples, "save_steps": 5})


@pytest.fixture(scope="module")
def ended(service: Guarded, alive: str, dpo: str) -> None:
    """Both jobs have points and have ended, whichever tests were before."""
    poll(lambda: service.get(f"{JOBS}/{alive}/metrics").json()["data"], "it has points", timeout=60)
    service.post(f"{JOBS}/{alive}/cancel")
    service.wait(dpo, "completed")


def xs(window: Window) -> list[int]:
    """Where the points of the first chart are."""
    return list(window.page.evaluate("document.querySelector('.chart').data[0].x"))


def drawn(window: Window) -> dict[str, list[str]]:
    """Title of each chart -> names of its curves."""
    script = "[...document.querySelectorAll('.chart .main-svg')].map((one) => one.closest('.chart'))"
    charts = f"{script}.map((one) => [one.layout.title.text, one.data.map((curve) => curve.name)])"
    return dict(window.page.evaluate(charts))


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
    window: Window, service: Guarded, alive: str
) -> None:
    service.submit(SFT, sft("behind", "questions"))
    window.login("admin")
    window.page.wait_for_selector("tr[data-job=alive] .state.in_progress", timeout=30_000)
    window.page.wait_for_selector("tr[data-job=behind] .reason .steps:has-text('start')")
    service.post("/post-training/jobs/behind/cancel")
    window.open("/jobs/alive")
    window.wait_for_charts()
    window.page.evaluate("window.kept = true")
    before = len(xs(window))
    poll(lambda: len(xs(window)) > before, "the curve grows", timeout=20)
    poll(lambda: "eval_loss (validation)" in drawn(window)["Loss"], "evaluations are drawn", timeout=20)
    assert {"loss", "loss, smoothed"} <= set(drawn(window)["Loss"])
    left = re.compile(r"\d+ h \d+ min|(\d+ min )?\d+ s")
    poll(lambda: left.fullmatch(window.page.inner_text("#now-eta")), "the time left is shown", timeout=20)
    service.kill()
    window.page.wait_for_selector("#live:has-text('does not answer')", timeout=20_000)
    before = len(xs(window))
    service.start()
    poll(lambda: len(xs(window)) > before, "the curve grows again", timeout=30)
    points = xs(window)
    assert points == list(range(1, len(points) + 1))
    assert window.page.evaluate("window.kept"), "the page was loaded again"
    window.page.click("text=Pause")
    window.page.wait_for_selector("button:has-text('Resume')", timeout=30_000)
    poll(lambda: {"pause", "checkpoint"} <= set(drawn(window)["Loss"]), "the pause is marked", timeout=20)
    texts = "document.querySelector('.chart').data.filter((one) => one.name === 'pause')[0].text[0]"
    assert re.fullmatch(r"step \d+: attempt 1: the job was paused", window.page.evaluate(texts))
    assert window.page.locator(".ribbon rect.ended").count() == 1
    window.page.click("text=Cancel")
    window.page.wait_for_selector("#status .state.cancelled", timeout=30_000)


def test_metrics_of_dpo_have_charts_and_a_submit_role_sees_no_button_of_admins(
    window: Window, service: Guarded, dpo: str
) -> None:
    window.login("submit")
    window.open("/jobs/dpo/samples")
    window.page.evaluate("window.kept = true")
    window.page.wait_for_selector("th:has-text('after, step')", timeout=60_000)
    assert window.page.evaluate("window.kept"), "the page was loaded again"
    assert window.page.inner_text("tbody th >> nth=1") == "<b>And 4?</b>"
    service.wait("dpo", "completed")
    window.page.set_viewport_size({"width": 1280, "height": 5000})  # charts are drawn where they are seen
    window.open("/jobs/dpo")
    window.wait_for_charts()
    expected = {
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Rewards",
        "Reward accuracies",
        "Log-probabilities",
        "Memory",  # the last of the page: charts are drawn one after another
    }
    poll(lambda: expected <= set(drawn(window)), "charts are drawn", timeout=20)
    assert {"rank 0", "rank 0, peak"} <= set(drawn(window)["Memory"])
    window.page.select_option("#axis", "time")
    poll(lambda: "T" in str(xs(window)[0]), "the axis is of times", timeout=10)
    assert window.page.locator("text=Delete").count() == 0
    window.page.click("text=Log out")
    window.login("admin")
    window.open("/jobs/dpo")
    assert window.page.locator("text=Delete").count() == 1


@pytest.mark.usefixtures("ended")
def test_what_is_ticked_and_has_the_focus_stays_so_when_the_list_is_replaced(window: Window) -> None:
    window.login("submit")
    window.page.check("input[value=dpo]")
    window.page.focus("input[value=dpo]")
    window.page.evaluate("document.querySelector('#list p').textContent = 'old'")
    window.page.evaluate("import('/static/parts.js').then((found) => new found.Parts(['list']).fetch())")
    assert window.page.inner_text("#list p >> nth=0") != "old"
    assert window.page.is_checked("input[value=dpo]")
    assert window.page.evaluate("document.activeElement.value") == "dpo"


@pytest.mark.usefixtures("ended")
def test_ticked_jobs_are_compared_in_charts_with_a_curve_of_each(window: Window) -> None:
    window.login("submit")
    for job in ("alive", "dpo"):
        window.page.check(f"input[value={job}]")
    window.page.set_viewport_size({"width": 1280, "height": 5000})
    window.page.click("text=Compare selected")
    window.wait_for_charts()
    poll(lambda: set(drawn(window).get("Loss", ())) == {"alive", "dpo"}, "losses are drawn", timeout=20)
    poll(lambda: set(drawn(window).get("rewards/margins", ())) == {"dpo"}, "margins are drawn", timeout=20)
    window.page.select_option("#axis", "epoch")
    assert "job=dpo&job=alive" in window.page.url
    assert not window.page.is_visible("[aria-label='Settings that differ']"), "they are many: the curves come first"
    window.page.click("#settings summary >> nth=0")
    assert "learning_rate" in window.page.inner_text("[aria-label='Settings that differ']")


def test_a_job_is_checked_while_its_form_is_filled_in_and_queued(window: Window, service: Guarded) -> None:
    window.login("submit")
    window.page.click("nav >> text=New job")
    window.page.fill("#job", "by-form")
    chosen = ".presets [aria-current]"
    assert window.page.inner_text(chosen) == "LoRA"
    window.page.click("text=Full fine-tuning")
    assert window.page.inner_text(chosen) == "Full fine-tuning"
    assert (window.page.input_value("#tuning"), window.page.input_value("#job")) == ("full", "by-form")
    assert not window.page.is_visible("#lora_rank")
    window.page.click(".presets a >> nth=0")
    assert (window.page.input_value("#tuning"), window.page.input_value("#lora_rank")) == ("lora", "16")
    window.fill(model=str(tiny_model()), dataset="questions", epochs="2")
    # Not any answer: between two fields the form may have been checked without the second one.
    window.page.wait_for_selector("#answer:has-text('80 = 2 x 40') .state.completed", timeout=60_000)
    assert "n_epochs: 2" in window.page.inner_text("#same")
    assert window.page.inner_text("#answer p >> nth=0") == "Fits"
    window.fill(max_seq_length="1")
    window.page.wait_for_selector("#answer [role=alert]", timeout=60_000)
    assert "max_seq_length" in window.page.inner_text("#answer [role=alert]")
    assert window.faults() == []
    # What the preflight alone finds is told before the job is queued, beside its button, and at the field.
    window.fill(max_seq_length="2")
    window.page.wait_for_selector("#answer [role=alert]:has-text('raise max_seq_length')", timeout=60_000)
    assert window.page.inner_text("#answer [data-field]") == "Max sequence length (tokens)"
    assert window.page.locator("[aria-invalid]").evaluate_all("all => all.map((one) => one.id)") == ["max_seq_length"]
    window.page.locator("#queue").scroll_into_view_if_needed()
    assert window.page.locator("#answer [role=alert]").evaluate("one => one.getBoundingClientRect().top >= 0")
    assert window.questions == []
    window.page.click("text=Queue the job")
    window.page.wait_for_selector("h1:has-text('by-form')")
    (question,) = window.questions
    assert "within max_seq_length=2" in question
    service.wait("by-form", "failed")
    window.open("/new")
    assert window.page.input_value("#model") == str(tiny_model())
    # What was filled in is there again on the way back from another page, until the job is queued.
    window.fill(job="by-short-name", model=tiny_model().name, max_seq_length="64")
    window.page.click("text=Loss, placement and all other options")
    window.page.check("[name=train_on_input]")
    window.page.click("text=Upload a file")
    window.page.click("[aria-label='Train on questions']")
    window.page.wait_for_selector("#kept:has-text('is here again')")
    shown = {name: window.page.input_value(f"#{name}") for name in ("job", "dataset", "max_seq_length")}
    assert shown == {"job": "by-short-name", "dataset": "questions", "max_seq_length": "64"}
    window.page.wait_for_selector("#answer .state.completed", timeout=60_000)
    assert f"model: {tiny_model()}" in window.page.inner_text("#same")
    window.page.click("text=Queue the job")
    window.page.wait_for_selector("h1:has-text('by-short-name')")
    assert len(window.questions) == 1
    service.wait("by-short-name", "completed")
    window.open("/new")
    assert window.page.input_value("#job") == ""
    window.fill(job="other")
    window.page.reload()
    window.page.click("text=Begin anew")
    window.page.wait_for_selector("#kept", state="hidden")
    assert window.page.input_value("#job") == ""
    # What is kept is of the form that it was filled into, and never in place of what was sent.
    window.fill(max_seq_length="32")
    window.open("/new?from=by-short-name&checkpoint=checkpoint-4")
    assert window.page.input_value("#max_seq_length") == "64"
    window.page.uncheck("[name=train_on_input]")
    window.page.click("text=Check only")
    window.page.wait_for_selector("#answer .state.completed", timeout=60_000)
    assert window.page.input_value("#max_seq_length") == "64"
    assert "checkpoint-4" in window.page.input_value("#options")
    window.open("/new?from=by-short-name&checkpoint=checkpoint-4")
    window.page.wait_for_selector("#kept:has-text('is here again')")
    assert not window.page.is_checked("[name=train_on_input]")
    window.open("/new?from=by-short-name")
    assert window.page.is_checked("[name=train_on_input]")
    assert "checkpoint-4" not in window.page.input_value("#options")
    window.open("/data/tokens?dataset=questions")
    assert window.page.input_value("#model") == str(tiny_model())
    window.fill(model=tiny_model().name)
    window.page.click("main button")
    window.page.wait_for_selector("article", timeout=60_000)


def test_a_file_is_uploaded_and_its_rows_are_read_searched_trained_and_deleted(
    window: Window, service: Guarded, tmp_path: Path
) -> None:
    file, wrong = tmp_path / "colours.csv", tmp_path / "no rows.jsonl"
    file.write_text("prompt,completion,source\n" + "What is red?,A colour,web\n" * 2 + "What is <b>?,A tag,book\n")
    wrong.write_text("no row\n")
    window.login("submit")
    window.page.click("nav >> text=Datasets")
    window.page.wait_for_selector("#upload")  # its script has been read, and shows it
    with window.page.expect_event("console", lambda message: message.type == "error"):
        window.page.set_input_files("#upload input", [str(file), str(wrong)])
        window.page.wait_for_selector("#uploads .wrong", timeout=30_000)
    assert "not JSON" in window.page.inner_text("#uploads .wrong")
    assert "colours: 3 rows" in window.page.inner_text("#uploads li >> nth=0")
    uses = window.page.inner_text("[aria-label=Datasets] tr:has-text('colours') .use")  # the list has it by now
    assert uses.split() == ["Train", "on", "it", "Token", "view"]
    assert window.faults() == []
    assert window.refused, "a browser reports the answer of 400"
    window.refused.clear()
    window.open("/data?search=COL")
    assert "prompt + completion" in window.page.inner_text("[aria-label=Datasets] tbody tr")
    window.page.click("tbody >> text=colours")
    text = window.page.inner_text("main")
    assert "1 row is equal to one before it" in text
    assert "row 1 is row 0" in text
    assert window.page.inner_text("[aria-labelledby=sources-title] tbody tr >> nth=0").split()[:2] == ["web", "2"]
    window.page.fill("main [name=search]", "TAG")
    window.page.press("main [name=search]", "Enter")
    window.page.wait_for_selector("text=1 row has")
    assert window.page.locator("article").count() == 1
    assert "What is <b>?" in window.page.inner_text("article")
    window.page.click(".actions >> text=Token view")
    window.fill(model=str(tiny_model()))
    window.page.click("main button")
    window.page.wait_for_selector("article .t.loss", timeout=30_000)
    window.page.click(".trail >> text=colours")
    window.page.click("text=Delete")
    window.page.wait_for_selector("h1:has-text('Datasets')")
    assert service.get("/datasets/colours").status_code == 404
    assert [question.partition("?")[0] for question in window.questions] == ["Delete this dataset"]


def test_rows_are_shown_as_they_are_trained(window: Window) -> None:
    window.login("submit")
    window.open("/data/tokens")
    window.fill(dataset="pairs", model=str(tiny_model()), max_seq_length="30")
    window.page.select_option("#method", "dpo")
    window.page.click("main button")
    window.page.wait_for_selector("article", timeout=30_000)
    assert window.page.locator("article").count() == 10
    assert window.page.inner_text("article h4 >> nth=0") == "prompt"
    assert window.page.locator("article >> nth=0").locator(".t.loss").count() > 0
    assert window.page.locator("article >> nth=0").locator(".t.cut").count() > 0
    assert window.page.input_value("#max_seq_length") == "30"
    counts = window.page.locator("section[aria-labelledby=lengths-title] td:nth-child(2)").all_inner_texts()
    assert sum(map(int, counts)) == len(PAIRS) * 10
    assert window.faults() == []


def test_the_load_of_machines_is_drawn_over_time_with_gaps_and_grows_by_what_is_new(window: Window) -> None:
    script = """async () => {
        const { Loads } = await import('/static/loads.js');
        const gpu = (values) => ({ utilization_percent: values, memory_used_bytes: values, power_watts: values });
        const load = (time, values, devices) => ({ time, cpu_percent: values, memory_used_bytes: values,
            disk_free_bytes: values, devices });
        const loads = new Loads();
        loads.add('a', load([60, 120, 300], [1, 2, 3], {}));
        loads.add('b', load([], [], {}));
        const first = loads.since('a');
        loads.add('a', load([300, 360], [4, 5], { 'cuda:0': gpu([6, null]) }));
        loads.keep(['a']);
        const found = Object.fromEntries(loads.charts(3600).map((chart) => [chart.title, chart.traces]));
        const gpus = found['GPU (%)'][0];
        return [first, found['CPU (%)'][0].y, found['CPU (%)'][0].x[2], gpus.name, gpus.y,
            loads.charts(60)[0].traces[0].y, Object.keys(found).length];
    }"""
    window.open("/")
    assert window.page.evaluate(script) == [
        *(300, [1, 2, None, 4, 5], "1970-01-01T00:03:00.000Z"),
        *("cuda:0", [None, None, None, 6, None], [4, 5], 5),
    ]
    window.login("submit")
    window.page.click("nav >> text=Nodes")
    poll(
        lambda: {"CPU (%)", "Memory used (GiB)", "Free disk (GiB)"} <= set(drawn(window)), "loads are drawn", timeout=60
    )
    window.page.wait_for_selector("#nodes tbody tr:has-text('CPU')")  # its list is fetched apart from the loads
    command = window.page.inner_text("section[aria-labelledby=add-title] code")
    assert "TRL_SERVICE_HOST=ADDRESS TRL_SERVICE_TOKEN=TOKEN ./scripts/run-remote-fsdp-server.sh" in command


@pytest.mark.usefixtures("ended")
def test_pages_are_accessible_in_light_and_dark_and_a_phone_shows_them_without_scrolling_sideways(
    window: Window,
) -> None:
    window.open("/")
    assert window.faults() == []
    window.login("admin")
    for path in PAGES:
        window.page.set_viewport_size({"width": 1280, "height": 800})
        window.open(path)
        if path in ("/jobs/dpo", "/nodes") or "compare" in path:
            window.wait_for_charts()
        window.page.emulate_media(color_scheme="light")
        assert window.faults() == [], path
        window.page.emulate_media(color_scheme="dark")
        assert window.faults("color-contrast") == [], f"{path}, dark"
        assert window.page.evaluate(TORN) == [], path
        window.page.set_viewport_size({"width": 390, "height": 800})
        # Charts follow the size of the window after a moment.
        poll(lambda: window.width() <= 390, f"{path} is as wide as the window", timeout=10)
        assert window.page.evaluate(TORN) == [], f"{path}, 390 pixels wide"


@IN_FULL
@pytest.mark.timeout(1800)
def test_every_page_at_both_sizes_in_both_schemes_with_jobs_of_every_kind(chromium: Any) -> None:
    with laboratory() as (service, model):
        assert walk(chromium, service, model) == []
