"""Walks every page of the dashboard with real jobs of every kind, and makes the pictures of docs/dashboard.md:
`python -m tests.screenshots [NAME ...]`.

Needs playwright and Debian's chromium, as the tests of the dashboard do.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.contract import browser
from tests.contract.browser import TORN, Window
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, promised, sft
from tests.contract.service import running
from tests.contract.stack import DPO, SFT, poll
from tests.security.guarded import Guarded
from tests.tiny import REPOSITORY, tiny_model

PICTURES = REPOSITORY / "docs" / "images"
SIZES = {"": {"width": 1440, "height": 900}, "-phone": {"width": 390, "height": 844}}
"""Behind the name of a picture -> the window it is taken of."""
_TRAINING = 900
"""Seconds that a training may take, on a machine with other work on it."""
_COLORS = 96
"""Of a picture: fewer make it small, and more are not seen."""
_CHECKS = [{"type": "exact", "normalize": True}, {"type": "regex", "pattern": "[0-9]"}]
_REWARDS = {
    "type": "grpo",
    "num_generations": 4,
    "max_completion_length": 8,
    "rewards": [{"check": {"type": "regex", "pattern": "[ea]"}}],
}


@dataclass(frozen=True)
class Page:
    """A page of the dashboard.

    Attributes:
        path: of its address.
        shown: what is there when it is complete.
        prepare: what a person does on it before they look at it.
    """

    path: str
    shown: str = "main h1"
    prepare: Callable[[Window], object] = lambda window: None


CHART = ".chart .main-svg"


def _show_tokens(window: Window) -> None:
    window.fill(dataset="questions", model=window.page.input_value("#model") or str(tiny_model()), max_seq_length="24")
    window.page.click("main button")
    window.page.wait_for_selector("article", timeout=60_000)


def _ask(window: Window) -> None:
    window.page.fill("#prompt", "What is 3 times two?")
    window.page.press("#prompt", "Control+Enter")
    window.page.wait_for_selector(".turn.assistant >> nth=1", timeout=120_000)
    window.page.wait_for_function("!document.querySelector('.turn.waiting')", timeout=120_000)


PAGES = {
    "login": Page("/login", "#token"),
    "jobs": Page("/?open=lr-search", ".spark"),
    "job": Page("/jobs/sft-long", CHART),
    "job-failed": Page("/jobs/too-few-rows"),
    "job-waiting": Page("/jobs/dpo-next"),
    "job-ended": Page("/jobs/sft-samples", CHART),
    "search": Page("/jobs/lr-search"),
    "trials": Page("/jobs/lr-search/trials", ".parallel"),
    "export": Page("/jobs/gguf"),
    "evaluation": Page("/jobs/checked-before"),
    "merge": Page("/jobs/averaged"),
    "samples": Page("/jobs/sft-samples/samples", "table.samples"),
    "rollouts": Page("/jobs/rewarded/samples"),
    "log": Page("/jobs/sft-samples/logs"),
    "checkpoint": Page("/jobs/sft-samples/checkpoints/final"),
    "compare": Page("/compare?job=sft-slow&job=sft-fast", CHART),
    "answers": Page("/answers?job=checked-before&job=checked-after"),
    "datasets": Page("/data"),
    "dataset": Page("/data/rows?dataset=questions"),
    "data": Page("/data/tokens", prepare=_show_tokens),
    "new-job": Page("/new?model=MODEL&dataset=questions", prepare=lambda window: window.page.fill("#job", "sft-3")),
    "playground": Page("/playground?job=sft-samples", "#prompt"),
    "nodes": Page("/nodes", CHART),
    "not-found": Page("/jobs/nobody", "main"),
}


def main(names: list[str]) -> None:
    """Train, open each page at both sizes and in both schemes, write its pictures, and say what is wrong with it.

    Args:
        names: of the pages; empty: all.

    Raises:
        SystemExit: a page has a fault.
    """
    PICTURES.mkdir(exist_ok=True)
    with laboratory() as (service, model), browser.chromium() as chromium:
        faults = walk(chromium, service, model, names, PICTURES)
    sys.exit("\n".join(faults) or None)


@contextmanager
def laboratory() -> Iterator[tuple[Guarded, str]]:
    """A service with real jobs of every kind and in every state, and the directory of their model."""
    with tempfile.TemporaryDirectory(prefix="trl-") as directory:
        root = Path(directory)
        model = root / "models" / "tiny-chat"
        shutil.copytree(tiny_model(), model)
        with running(Guarded(root)) as service:
            fill(service, str(model))
            yield service, str(model)


def fill(service: Guarded, model: str) -> None:
    """Train, search, generate, evaluate, merge and export; fail, cancel and pause; one runs, one waits behind it."""
    service.register("questions", QUESTIONS * 20)
    service.register("held-out", QUESTIONS)
    service.register("pairs", PAIRS * 10)

    def complete(path: str, body: dict[str, Any], **options: Any) -> None:
        service.wait(service.submit(path, body, options=options or None), "completed", _TRAINING)

    for name, rate in (("sft-slow", 2e-4), ("sft-fast", 1e-3)):
        body = job(sft(name, "questions"), model, n_epochs=3, optimizer_config={"lr": rate})
        body["training_config"]["data_config"]["validation_dataset_id"] = "held-out"
        complete(SFT, {**body, "algorithm_config": LORA}, eval_steps=20)
    samples = {"prompts": ["What is 3 times two?", "What is 7 times two?"], "max_new_tokens": 12}
    body = job(sft("sft-samples", "questions"), model, n_epochs=8, optimizer_config={"lr": 3e-3})
    body["training_config"]["data_config"].update(batch_size=8, shuffle=True)
    complete(SFT, body, samples=samples, save_steps=32)
    body = job(sft("lr-search", "questions"), model, n_epochs=1)
    body["training_config"]["data_config"].update(batch_size=8, validation_dataset_id="held-out")
    rates = {"training_config.optimizer_config.lr": [1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2]}
    complete(SFT, {**body, "hyperparam_search_config": {"method": "grid", "parameters": rates}}, eval_steps=10)
    body = job(sft("rewarded", "questions"), model, n_epochs=1, max_steps_per_epoch=4)
    complete(DPO, {**body, "algorithm_config": _REWARDS})
    for name, of in (("checked-before", model), ("checked-after", "job:sft-samples")):
        body = {"job_uuid": name, "model": of, "dataset_id": "held-out", "checks": _CHECKS, "max_new_tokens": 8}
        complete("/post-training/evaluate", body)
    output = {"output": {"dataset_id": "drawn"}, "samples_per_prompt": 2, "max_new_tokens": 8}
    complete("/post-training/generate", {"job_uuid": "drawn", "model": model, "dataset_id": "held-out", **output})
    models = [{"model": model, "weight": 1}, {"model": "job:sft-samples", "weight": 1}]
    complete("/post-training/merge", {"job_uuid": "averaged", "models": models, "method": "linear"})
    complete("/post-training/export", {"job_uuid": "gguf", "model": "job:sft-samples", "to": "gguf"})
    body = job(sft("too-few-rows", "questions"), model)
    service.submit(SFT, body, options={"max_seq_length": 2, "preflight": "off"})
    service.wait_state("too-few-rows", "failed", timeout=_TRAINING)
    for name, call in (("stopped", "cancel"), ("held", "pause")):
        service.submit(SFT, job(sft(name, "questions"), model, n_epochs=60))
        service.post(f"/post-training/jobs/{name}/{call}")
    service.wait_state("held", "paused", timeout=_TRAINING)
    body = job(sft("sft-long", "questions"), model, n_epochs=400)
    body["training_config"]["data_config"]["validation_dataset_id"] = "held-out"
    service.submit(SFT, body, options={"eval_steps": 50, "save_steps": 500})
    service.submit(DPO, job(promised("dpo-next", "pairs"), model))
    poll(lambda: service.state("sft-long") == "in_progress", "the job runs", timeout=60)


def job(body: dict[str, Any], model: str, **training: Any) -> dict[str, Any]:
    return {**body, "model": model, "training_config": {**body["training_config"], **training}}


def walk(
    chromium: Any, service: Guarded, model: str, names: list[str] | None = None, pictures: Path | None = None
) -> list[str]:
    """Open pages at both sizes, light and dark.

    Args:
        names: of the pages; none: all.
        pictures: where a picture of each is written, in the light scheme.

    Returns:
        What is wrong with each: not found, errors of scripts, violations of the policy, serious faults of
        accessibility, texts that are cut or lie over each other, contents that are wider than the window.
    """
    faults: list[str] = []
    for suffix, size in SIZES.items():
        # Each in a window of its own, so that what one has reported is not taken for another's.
        for name in names or PAGES:
            page = PAGES[name]
            with browser.window(chromium, service, viewport=size) as window:
                if name != "login":
                    window.login("admin")
                window.refused.clear()  # the login page is a 401 before
                window.open(page.path.replace("MODEL", model))
                window.page.wait_for_selector(page.shown, timeout=120_000)
                page.prepare(window)
                window.page.wait_for_load_state("load")
                if pictures:
                    window.page.wait_for_timeout(1500)  # for more points of what runs
                    save(pictures / f"{name}{suffix}.png", window.page.screenshot())
                found = [f"is {window.width()} wide"] if window.width() > size["width"] else []
                found += [f"cannot load {one}" for one in window.refused if name not in ("login", "not-found")]
                found += [*window.page.evaluate(TORN), *window.faults()]
                window.page.emulate_media(color_scheme="dark")
                found += [f"dark: {fault}" for fault in window.faults("color-contrast")]
                faults += [f"{name}{suffix}: {fault}" for fault in found]
    return faults


def save(path: Path, png: bytes) -> None:
    Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLORS).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
