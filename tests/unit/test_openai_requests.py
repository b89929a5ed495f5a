"""What OpenAI's requests become: forms read in any pieces, and jobs of the engine with the numbers of the mapping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl_remote.openai.bodies import CreateFineTuningJob
from llama_stack_provider_trl_remote.openai.files import OpenAIFiles
from llama_stack_provider_trl_remote.openai.jobs import requested
from llama_stack_provider_trl_remote.openai.multipart import Form
from llama_stack_provider_trl_remote.openai.names import Called, job_of_result, result_file
from llama_stack_provider_trl_remote.service.http.errors import OpenAIRefused
from llama_stack_provider_trl_remote.service.openai_settings import OpenAIModel

TYPE = "multipart/form-data; boundary=b"
CONTENT = b'{"a": "\r\n--b"}\n\r\n-'
BODY = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="r\xc3\xb6ws.jsonl"\r\n'
    + b"Content-Type: text/plain\r\n\r\n"
    + CONTENT
    + b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
)


def read(pieces: Sequence[bytes], content_type: str = TYPE) -> tuple[Form, bytes]:
    form = Form(content_type, frozenset({"purpose"}))

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def whole() -> bytes:
        return b"".join([piece async for piece in form.file(stream(), lambda: None)])

    return form, asyncio.run(whole())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_form_is_read_in_pieces_of_any_size(size: int) -> None:
    form, content = read([BODY[start : start + size] for start in range(0, len(BODY), size)])
    assert (content, form.filename, form.fields) == (CONTENT, "röws.jsonl", {"purpose": "fine-tune"})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (BODY[:-8], "ends before its last boundary"),
        (b"no form", "no whole multipart/form-data"),
        (BODY.replace(b'"purpose"', b'"reason"'), "there is no field 'reason'"),
        (BODY.replace(b'"purpose"', b'"file"'), "file is there twice"),
        (BODY.replace(b"fine-tune", b"\xff"), "purpose is no UTF-8 text"),
        (BODY.replace(b"fine-tune", b"x" * 10_000), "more than 4096 bytes"),
        (BODY.replace(b'"file"', b'"purpose"', 1).replace(CONTENT, b"a"), "purpose is there twice"),
    ],
)
def test_a_form_that_is_none_is_refused(body: bytes, problem: str) -> None:
    with pytest.raises(OpenAIRefused, match=problem):
        read([body])


def test_nothing_but_line_ends_follows_the_last_boundary() -> None:
    assert read([BODY, b"\r\n"])[1] == CONTENT
    for behind in ([b"z"], [b"\r\n" * 20] * 2, [b"\r\n", b"--b\r\n"]):
        with pytest.raises(OpenAIRefused, match="more behind its last boundary"):
            read([BODY, *behind])


def test_another_content_type_is_refused() -> None:
    for content_type in ("application/json", "multipart/form-data", ""):
        with pytest.raises(OpenAIRefused, match="the Content-Type is"):
            Form(content_type, frozenset())


def test_a_page_of_files_ends_where_counting_their_bytes_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = SimpleNamespace(places=lambda prefix: [])
    ended = [(float(n), f"ftjob-{n}") for n in range(8, -1, -1)]
    store = SimpleNamespace(
        completed=lambda prefix, beyond, newest_first: [one for one in ended if beyond is None or one[0] <= beyond]
    )
    listed = OpenAIFiles(registry, None, None, store)  # type: ignore[arg-type]
    monkeypatch.setattr(listed, "get", lambda name: {"id": name})
    job = SimpleNamespace(completed_at=datetime.fromtimestamp(1, UTC))
    monkeypatch.setattr(listed, "_job_of", lambda file_id, job_uuid, param: job)
    assert len(listed.page(None, 10, None, newest_first=True)[0]) == 9
    monkeypatch.setattr("llama_stack_provider_trl_remote.openai.files._PAGE_SECONDS", -1)
    assert listed.page(None, 10, None, newest_first=True) == ([{"id": "file-results-8"}], True)
    assert listed.page("file-results-1", 10, None, newest_first=True) == ([{"id": "file-results-0"}], False)


MODEL = OpenAIModel(model="/models/a", n_epochs=4, batch_size=6, learning_rate=1e-3, dpo_learning_rate=1e-4)


def made(model: OpenAIModel = MODEL, base: str = "/models/a", **body: Any) -> Any:
    given = CreateFineTuningJob.model_validate({"model": "a", "training_file": "file-1", **body})
    return requested(given, "ftjob-1", "a", base, {"a": model})[0]


def called_of(**body: Any) -> Called | None:
    given = CreateFineTuningJob.model_validate({"model": "a", "training_file": "file-1", **body})
    return Called.of({"openai": requested(given, "ftjob-1", "a", "/models/a", {"a": MODEL})[1].text()})


def test_auto_means_what_the_mapping_has() -> None:
    hyperparameters = {"n_epochs": "auto", "batch_size": "auto"}
    for body in ({}, {"method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}}):
        job = made(**body)
        training = job.training_config
        # 6 examples of a step as 2 x 3: the largest part of them that is at most micro_batch_size
        assert (training.n_epochs, training.gradient_accumulation_steps, training.data_config.batch_size) == (4, 2, 3)
        assert training.learning_rate == 1e-3
        assert job.algorithm_config["rank"] == 16
        called = called_of(**body)
        assert called is not None
        numbers = {"n_epochs": 4, "batch_size": 6, "learning_rate_multiplier": 1.0}
        assert called.method == {"type": "supervised", "supervised": {"hyperparameters": numbers}}
        assert 0 <= job.provider_options["seed"] < 2**31


def test_numbers_of_a_request_are_honoured() -> None:
    method = {
        "type": "dpo",
        "dpo": {"hyperparameters": {"n_epochs": 1, "batch_size": 7, "learning_rate_multiplier": 0.5, "beta": 0.3}},
    }
    job = made(method=method, suffix="s", seed=5, metadata={"a": "b"}, validation_file="file-2")
    training = job.training_config
    assert (training.n_epochs, training.gradient_accumulation_steps, training.data_config.batch_size) == (1, 7, 1)
    assert training.learning_rate == 5e-5
    assert training.data_config.validation_dataset_id == "file-2"
    assert job.algorithm_config == {"type": "dpo", "beta": 0.3}
    options = job.provider_options
    assert (options["seed"], options["lora"]["rank"], options["metadata"]["a"]) == (5, 16, "b")
    assert "openai" not in options["metadata"]
    called = called_of(method=method, suffix="s")
    assert called is not None
    assert called.result_of("ftjob-1") == "ft:a:trl:s:ftjob-1"


def test_every_weight_is_trained_where_the_mapping_has_no_rank() -> None:
    whole = MODEL.model_copy(update={"lora_rank": None})
    assert made(whole).algorithm_config is None
    assert "lora" not in made(whole, method={"type": "dpo"}).provider_options
    assert made(base="job:ftjob-0").provider_options["adapter"] == "continue"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"method": {"type": "reinforcement"}}, "reinforcement"),
        ({"method": {"type": "dpo", "supervised": {}}}, "send the block of that type only"),
        ({"method": {"type": "dpo"}, "hyperparameters": {}}, "send those of the method"),
        ({"hyperparameters": {"beta": 0.1}}, "beta"),
        ({"hyperparameters": {"compute_multiplier": 1}}, "compute_multiplier"),
        ({"metadata": {"openai": "x"}}, "reserved"),
        ({"metadata": {"x" * 65: "x"}}, "at most 64"),
        ({"metadata": {"x": "x" * 513}}, "512"),
        ({"metadata": {"x": "\ud800"}}, "'x': its text has half of a surrogate pair"),
        ({"hyperparameters": {"n_epochs": "3"}}, "n_epochs"),
        ({"hyperparameters": {"n_epochs": True}}, "n_epochs"),
        ({"hyperparameters": {"learning_rate_multiplier": "2"}}, "learning_rate_multiplier"),
        ({"seed": "3"}, "seed"),
    ],
)
def test_what_a_request_cannot_have_is_refused(body: Any, problem: str) -> None:
    with pytest.raises((ValidationError, OpenAIRefused), match=problem):
        made(**body)


def test_processes_take_equal_parts() -> None:
    with pytest.raises(OpenAIRefused, match="send a multiple of 4"):
        made(MODEL.model_copy(update={"nproc_per_node": 4}))


def test_a_result_file_names_its_job_and_strange_metadata_no_job() -> None:
    assert job_of_result(result_file("ftjob-12ab")) == "ftjob-12ab"
    assert job_of_result("file-12ab") is None
    for text in ("", "1", "[]", "{}", '{"model": 1, "alias": "a", "suffix": "", "method": {}}'):
        assert Called.of({"openai": text}) is None
    for method in (
        {"type": "ppo", "ppo": {"hyperparameters": {}}},
        {"type": "dpo", "dpo": {"hyperparameters": {"beta": "<b>"}}},
        {"type": "dpo", "dpo": {"hyperparameters": {}}, "supervised": 1},
        {"type": "supervised", "supervised": {"hyperparameters": {"price": 1}}},
    ):
        assert Called.of({"openai": Called("a", "a", "", method).text()}) is None
    assert Called.of({}) is None
