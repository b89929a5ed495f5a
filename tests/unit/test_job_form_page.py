"""The form of a job as a page, and pages that repeat requests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.service.pages import job_pages, job_view, new_job_pages, rendering
from llama_stack_provider_trl_remote.service.pages.job_form import FORM_METHODS, PRESETS, fields_of, preset_of
from tests.fakes import job_spec
from tests.plugins import install_example

FIELDS = rendering._environment().get_template("fields.html").module


def test_a_method_that_the_form_does_not_list_is_chosen_as_it_is() -> None:
    fields = fields_of({"model": "m", "algorithm_config": {"type": "ro<bust"}}, is_sft=False)
    chosen = str(FIELDS.choice(fields, "method", "Method", [*FORM_METHODS.items()], "sft"))  # type: ignore[attr-defined]
    assert chosen.count(" selected") == 1
    assert '<option value="ro&lt;bust" selected>ro&lt;bust</option>' in chosen
    for given in ({}, {"method": ""}, {"method": "sft"}):
        chosen = str(FIELDS.choice(given, "method", "Method", [*FORM_METHODS.items()], "sft"))  # type: ignore[attr-defined]
        assert chosen.count("<option") == len(FORM_METHODS)
        assert '<option value="sft" selected>' in chosen


def test_a_method_of_an_installed_package_is_one_of_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="expected one of sft, dpo"):
        asyncio.run(new_job_pages._method({"method": "robust"}))
    monkeypatch.syspath_prepend(tmp_path)
    install_example(tmp_path)
    assert asyncio.run(new_job_pages._method({"method": "robust"})) == "robust"


def test_a_text_of_lines_keeps_the_one_that_it_begins_with() -> None:
    area = str(FIELDS.area({"system_prompt": "\n a <b>\n"}, "system_prompt", "Prompt"))  # type: ignore[attr-defined]
    assert area.partition("</label>")[2].partition(">")[2] == "\n\n a &lt;b&gt;\n</textarea>\n"


def test_requests_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(*_: Any) -> dict[str, str]:
        threads.append(threading.get_ident())
        return {}

    def nothing(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(evaluations=[], resources_allocated={"state": "completed", "effective_config": {}})

    async def log(*_: Any) -> str:
        return ""

    monkeypatch.setattr(new_job_pages, "same_job", noted)
    monkeypatch.setattr(job_view, "values", noted)
    monkeypatch.setattr(job_pages, "_log", log)
    for name in ("read_warnings", "exports_of", "files_of_export", "read_request", "read_watched", "page"):
        monkeypatch.setattr(job_pages, name, nothing)
    monkeypatch.setattr(new_job_pages, "page", nothing)
    some: Any = SimpleNamespace(
        method="POST",
        base_url="http://head:1/",
        names=list,
        queue_page=lambda *_, **__: ([], None),
        status=nothing,
    )
    asyncio.run(new_job_pages.FormParts(some, some, some, some).page({"model": "m"}))
    asyncio.run(job_pages.job_page(some, some, some, "a"))
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_a_form_begins_with_the_newest_model_and_takes_the_one_that_a_short_name_means(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert new_job_pages.newest_model(store) == ""
    for number, model in enumerate(("/models/tiny-chat", "/models/twice", "/old/twice", "org/base")):
        store.add_job(job_spec(f"job-{number}", model=model), "digest")
    assert new_job_pages.newest_model(store) == "org/base"
    known = new_job_pages.with_known_model
    assert known({"model": "tiny-chat", "job": "a"}, store) == {"model": "/models/tiny-chat", "job": "a"}
    with pytest.raises(InvalidRequest, match=r"'twice'.* expected /old/twice or /models/twice"):
        known({"model": "twice"}, store)
    for model in ("", "job:a", "gpt2", "org/base", "/models/tiny-chat"):
        assert known({"model": model}, store) == {"model": model}
    with pytest.raises(InvalidRequest, match="not on this machine, which is offline"):
        known({"model": "gpt2"}, store, True)
    (tmp_path / "gpt2").mkdir()
    known({"model": "gpt2"}, store, True)


def test_the_preset_that_a_form_has_is_named() -> None:
    for name, preset in PRESETS.items():
        assert preset_of({**preset.fields, "epochs": "3"}) == name
    assert preset_of({**PRESETS["lora"].fields, "lora_rank": "8"}) == ""
