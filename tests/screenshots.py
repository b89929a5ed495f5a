"""Makes the pictures of docs/dashboard.md from real trainings: `python -m tests.screenshots [NAME ...]`.

Needs playwright and Debian's chromium, as the tests of the dashboard do.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.process import FileLock
from tests.contract import browser
from tests.contract.listed_jobs import add_listed
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, promised, sft
from tests.contract.service import running
from tests.contract.stack import DPO, SFT, poll
from tests.security.guarded import Guarded
from tests.tiny import REPOSITORY, tiny_model

PICTURES = REPOSITORY / "docs" / "images"
_SIZE = {"width": 1100, "height": 640}
_DESKTOP, _PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
_SIZES = {"jobs": _DESKTOP, "jobs-phone": _PHONE}
"""Of the pictures of the list of jobs; the others have `_SIZE`."""
_TRAINING = 900
"""Seconds that a training may take, on a machine with other work on it."""
_COLORS = 96
"""Of a picture: fewer make it small, and more are not seen."""


def main(names: list[str]) -> None:
    """Train, open each page, and write its picture.

    Args:
        names: of the pictures; empty: all.
    """
    PICTURES.mkdir(exist_ok=True)
    take_list([*_SIZES] if not names else [name for name in names if name in _SIZES])
    if names and {*names} <= {*_SIZES}:
        return
    with tempfile.TemporaryDirectory(prefix="trl-") as directory:
        root = Path(directory)
        model = root / "models" / "tiny-chat"
        shutil.copytree(tiny_model(), model)
        with running(Guarded(root)) as service, browser.chromium() as chromium:
            fill(service, str(model))
            with browser.window(chromium, service, viewport=_SIZE) as window:
                take(window, str(model), names)


def fill(service: Guarded, model: str) -> None:
    """Three trainings that have ended, one that runs, and one that waits behind it."""
    service.register("questions", QUESTIONS * 20)
    service.register("pairs", PAIRS * 10)
    for name, rate in (("sft-slow", 2e-4), ("sft-fast", 1e-3)):
        body = job(sft(name, "questions"), model, n_epochs=3, optimizer_config={"lr": rate})
        service.wait(service.submit(SFT, {**body, "algorithm_config": LORA}), "completed", _TRAINING)
    samples = {"prompts": ["What is 3 times two?", "What is 7 times two?"], "max_new_tokens": 12}
    data = {"dataset_id": "questions", "batch_size": 8, "shuffle": True}
    optimizer = {"lr": 3e-3}
    body = job(sft("sft-samples", "questions"), model, n_epochs=8, data_config=data, optimizer_config=optimizer)
    options = {"samples": samples, "save_steps": 32}
    service.wait(service.submit(SFT, body, options=options), "completed", _TRAINING)
    service.submit(SFT, job(sft("sft-long", "questions"), model, n_epochs=60))
    service.submit(DPO, job(promised("dpo-next", "pairs"), model))
    poll(lambda: service.state("sft-long") == "in_progress", "the job runs", timeout=60)


def job(body: dict[str, Any], model: str, **training: Any) -> dict[str, Any]:
    return {**body, "model": model, "training_config": {**body["training_config"], **training}}


def take(window: browser.Window, model: str, names: list[str]) -> None:
    """Open the pages and write their pictures."""
    page = window.page

    def drawn() -> None:
        page.wait_for_selector(".chart .main-svg", timeout=60_000)
        page.locator("#curves").scroll_into_view_if_needed()
        page.wait_for_timeout(1500)  # for some more points

    def filled() -> None:
        window.fill(dataset="questions", model=model, max_seq_length="24")
        page.click("main button")
        page.wait_for_selector("article", timeout=60_000)
        page.locator("#lengths-title").scroll_into_view_if_needed()
        page.evaluate("document.getElementById('lengths-title').scrollIntoView()")

    def checked() -> None:
        page.fill("#job", "sft-3")
        window.fill(model=model, dataset="questions")
        page.wait_for_selector("#answer .state", timeout=60_000)

    def drawn_loads() -> None:
        page.wait_for_timeout(240_000)  # means of some minutes
        page.wait_for_selector(".chart .main-svg", timeout=120_000)

    window.login("admin")
    pictures: dict[str, tuple[str, Callable[[], object]]] = {
        "job": ("/jobs/sft-long", drawn),
        "compare": ("/compare?job=sft-slow&job=sft-fast", drawn),
        "samples": ("/jobs/sft-samples/samples", lambda: page.wait_for_selector("table.samples")),
        "data": ("/data/tokens", filled),
        "new-job": ("/new", checked),
        "nodes": ("/nodes", drawn_loads),
    }
    for name, (path, prepare) in pictures.items():
        if names and name not in names:
            continue
        window.open(path)
        prepare()
        save(name, page.screenshot())


def take_list(names: list[str]) -> None:
    """Write the pictures of the list of jobs: of jobs in every state, which nothing trains."""
    with tempfile.TemporaryDirectory(prefix="trl-") as directory:
        data_dir = Path(directory) / "data"
        data_dir.mkdir(mode=0o700)
        supervisor = FileLock(DataDir(data_dir).supervisor_lock)
        assert supervisor.acquire("tests.screenshots")
        add_listed(data_dir)
        with running(Guarded(Path(directory))) as service, browser.chromium() as chromium:
            for name in names:
                with browser.window(chromium, service, viewport=_SIZES[name]) as window:
                    window.login("admin")
                    window.open("/?open=lr-search" if _SIZES[name] == _DESKTOP else "/")
                    window.page.wait_for_selector(".spark")
                    save(name, window.page.screenshot())
        supervisor.release()


def save(name: str, png: bytes) -> None:
    Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLORS).save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
