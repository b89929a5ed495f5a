"""What a running Llama Stack answers to requests that cannot be honoured: a status code and a sentence to act on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from fastapi import HTTPException

from llama_stack_provider_trl.errors import LimitReached
from llama_stack_provider_trl.stack.compat import to_http
from tests.contract.payloads import PAIRS, promised
from tests.contract.service import refusal
from tests.contract.stack import DPO, SFT, LlamaStack

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_queued(stack: LlamaStack) -> Any:
    before = stack.jobs()
    yield
    assert stack.jobs() == before


@pytest.fixture(scope="module")
def pairs(stack: LlamaStack) -> str:
    return stack.register("refused-pairs", PAIRS)


@pytest.mark.parametrize("prefix", ["/v1", "/v1alpha"])
def test_an_unknown_job_is_not_found_by_status_artifacts_and_cancel(stack: LlamaStack, prefix: str) -> None:
    answers = [
        stack.get("/post-training/job/status", prefix=prefix, job_uuid="nobody"),
        stack.get("/post-training/job/artifacts", prefix=prefix, job_uuid="nobody"),
        stack.post("/post-training/job/cancel", {"job_uuid": "nobody"}, prefix=prefix),
    ]
    for answer in answers:
        assert "job 'nobody' not found" in refusal(answer, 404)


@pytest.mark.parametrize("call", [SFT, DPO])
@pytest.mark.parametrize("prefix", ["/v1", "/v1alpha"])
def test_an_empty_body_names_the_fields_that_are_missing(stack: LlamaStack, prefix: str, call: str) -> None:
    answer = stack.post(call, {}, prefix=prefix)
    assert answer.status_code == 400
    missing = {error["loc"][-1] for error in answer.json()["error"]["detail"]["errors"]}
    assert missing == {"job_uuid", "training_config"}


def test_an_unknown_field_is_named_with_the_nearest_that_exists(stack: LlamaStack, pairs: str) -> None:
    body = promised("refused", pairs)
    body["training_config"]["n_epoch"] = 3
    text = refusal(stack.post(DPO, body))
    assert "training_config.n_epoch=3" in text
    assert "`n_epochs`" in text


def test_a_row_that_cannot_be_read_is_named_by_number(stack: LlamaStack) -> None:
    rows = [dict(PAIRS[number % len(PAIRS)]) for number in range(24)]
    del rows[17]["chosen"]
    text = refusal(stack.post(DPO, promised("refused", stack.register("gap-in-row-17", rows))))
    assert "row 17:" in text
    assert "chosen" in text


@pytest.mark.parametrize("path", ["training_config.learning_rate", "algorithm_config.beta"])
def test_a_number_too_large_for_a_float_is_refused_and_breaks_nothing(stack: LlamaStack, pairs: str, path: str) -> None:
    body = promised("refused", pairs)
    parent, name = path.split(".")
    body[parent][name] = "HERE"
    text = json.dumps(body).replace('"HERE"', "1e999")
    answer = requests.post(stack.url + "/v1" + DPO, data=text, headers={"Content-Type": "application/json"}, timeout=30)
    assert f"{path}=inf" in refusal(answer)


@pytest.mark.parametrize("field", ["model", "checkpoint_dir"])
@pytest.mark.parametrize("path", ["~no-such-user/x", "/" + "x" * 5000, "nul\0character"], ids=["user", "long", "nul"])
def test_a_path_that_the_system_cannot_read_is_refused_by_field(
    stack: LlamaStack, pairs: str, field: str, path: str
) -> None:
    assert refusal(stack.post(DPO, promised("refused", pairs) | {field: path})).startswith(f"Invalid value: {field}=")


def test_an_unknown_option_is_refused_with_a_list_of_those_that_exist(stack: LlamaStack, pairs: str) -> None:
    text = refusal(stack.post(DPO, promised("refused", pairs), options={"merge_adaptor": True}))
    assert "provider_options.merge_adaptor=True" in text
    assert "merge_adapter" in text.partition("the options are:")[2]


@pytest.mark.parametrize("options", ["x", 7, ["merge_adapter"]])
def test_options_that_are_no_object_are_refused(stack: LlamaStack, pairs: str, options: Any) -> None:
    assert f"provider_options={options!r}" in refusal(stack.post(DPO, promised("refused", pairs), options=options))


def test_other_providers_keys_in_the_header_do_not_disturb(stack: LlamaStack) -> None:
    headers = {"X-LlamaStack-Provider-Data": json.dumps({"fireworks_api_key": "k"})}
    body = promised("refused", "no-such-rows")
    answer = requests.post(stack.url + "/v1" + DPO, json=body, headers=headers, timeout=30)
    assert "'no-such-rows'" in refusal(answer)  # as far as without the header


def test_a_request_that_cannot_be_checked_now_is_a_429_with_its_sentence() -> None:
    from llama_stack.core.server.server import translate_exception

    found = translate_exception(to_http(LimitReached("too many requests are being checked: send it again later")))
    assert isinstance(found, HTTPException)
    assert (found.status_code, found.detail) == (429, "too many requests are being checked: send it again later")
