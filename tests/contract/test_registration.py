"""A tuned model answers through the API of a running Llama Stack, and OGX, after `trl-remote register`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.llama_stack import LlamaStack as LlamaStackClient
from tests.contract.external import ExternalStack
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import SFT, LlamaStack, serving
from tests.releases import OGX
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running_service(tmp_path_factory.mktemp("service")) as service:
        service.register("rows", QUESTIONS)
        service.submit(SFT, sft("tuned", "rows", algorithm_config=LORA))
        service.wait_state("tuned", "completed", timeout=120)
        yield service


def with_inference(file: Path, url: str) -> None:
    """Add what the page says to a run file."""
    config = yaml.safe_load(file.read_text())
    config["apis"].append("inference")
    address = f"{url}/openai/v1"
    provider = {"url": address, "base_url": address, "api_token": "none", "refresh_models": True}
    config["providers"]["inference"] = [{"provider_id": "trl", "provider_type": "remote::vllm", "config": provider}]
    file.write_text(yaml.safe_dump(config))


@pytest.fixture(
    scope="module",
    params=[
        "0.3.5",
        pytest.param("0.7.3", marks=IN_FULL),
        pytest.param(OGX, marks=IN_FULL),
    ],
)
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, service: TrainingService
) -> Iterator[LlamaStack]:
    """A Llama Stack whose inference provider calls the service, where no model is registered."""
    root = tmp_path_factory.mktemp("stack")
    if request.param == "0.3.5":
        stack = LlamaStack(root)
        with_inference(root / "run.yaml", service.url)
    else:
        stack = ExternalStack(root, request.param, service)
        with_inference(stack.run_file, service.url)
    with serving(stack):
        yield stack


def register(service: TrainingService, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["register", *words, "--url", service.url])
    return status, *capsys.readouterr()


def test_a_result_answers_in_llama_stack_and_registering_it_again_changes_nothing(
    service: TrainingService, stack: LlamaStack, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        status, output, errors = register(service, capsys, "tuned", "--stack", stack.url, "--json")
        assert (status, errors) == (0, "")
        found = json.loads(output)
        assert (found["model"], found["url"]) == ("trl/ft:tuned", stack.url)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "What is two?"}], "temperature": 0}
    answers = [
        requests.post(f"{url}/chat/completions", json={**body, "model": model, "max_tokens": 8}, timeout=300).json()
        for url, model in ((f"{stack.url}/v1", found["model"]), (f"{service.url}/openai/v1", "ft:tuned"))
    ]
    assert answers[0]["choices"][0]["message"]["content"] == answers[1]["choices"][0]["message"]["content"] != ""
    if found["listed"]:
        listed = stack.get("/models").json()["data"]
        assert "trl/ft:tuned" in [row.get("identifier") or row["id"] for row in listed]


def test_a_model_that_the_stack_itself_lists_meanwhile_is_registered(
    service: TrainingService, stack: LlamaStack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refresh comes between the reading of its list and the registration."""
    assert register(service, capsys, "tuned", "--stack", stack.url)[0] == 0
    listed, looks = LlamaStackClient._listed, iter([False])

    async def late(self: LlamaStackClient, provider: str, model: str) -> str | None:
        return await listed(self, provider, model) if next(looks, True) else None

    monkeypatch.setattr(LlamaStackClient, "_listed", late)
    assert register(service, capsys, "tuned", "--stack", stack.url)[::2] == (0, "")
    assert next(looks, True), "the list was read"


def test_what_is_missing_is_said_in_one_sentence(
    service: TrainingService, stack: LlamaStack, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, errors = register(service, capsys, "other", "--stack", stack.url)
    assert status == 1
    assert "is not told of ft:other, which the service does not list (it has ft:" in errors
    status, _, errors = register(service, capsys, "tuned", "--stack", stack.url, "--provider", "another")
    assert status == 1
    assert "another" in errors
    listed = stack.get("/models").json()["data"]
    assert not [row for row in listed if "another" in json.dumps(row)]  # what does not answer is not left there
    status, _, errors = register(service, capsys, "tuned", "--stack", "http://127.0.0.1:9")
    assert status == 1
    assert "Llama Stack at http://127.0.0.1:9 cannot be reached" in errors
    status, _, errors = register(service, capsys, "tuned", "--stack", service.url)  # another program
    assert status == 1
    assert errors.count("\n") == 1


def test_a_stack_whose_provider_calls_something_else_is_named_with_what_to_add(
    service: TrainingService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = LlamaStack(tmp_path)
    with_inference(tmp_path / "run.yaml", "http://127.0.0.1:9")
    with serving(stack):
        status, _, errors = register(service, capsys, "tuned", "--stack", stack.url)
    assert status == 1
    assert f"no inference provider that calls {service.url}/openai/v1 (it has trl (remote::vllm))" in errors


def test_a_training_registers_its_result(
    service: TrainingService, stack: LlamaStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    words = ["train", str(rows), "--model", str(tiny_model()), "--job", "later", "--url", service.url]
    assert main([*words, "--register", stack.url, "--detach"]) == 1
    assert "with --detach nothing waits for the result" in capsys.readouterr().err
    for more, found in (
        (["--method", "reward"], "a reward model writes no text"),
        (["--register", "http://me:hunter2@stack:8321"], "found one with a password in it"),
        (["--register", "http://127.0.0.1:9"], "Llama Stack at http://127.0.0.1:9 cannot be reached"),
    ):
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
        data = [str(pairs)] if "reward" in more else [str(rows)]
        assert main(["train", *data, *words[2:], "--register", stack.url, *more]) == 1
        errors = capsys.readouterr().err
        assert found in errors
        assert "hunter2" not in errors
    assert "later" not in [job["job_uuid"] for job in service.get("/post-training/jobs").json()["data"]]
    assert main([*words, "--register", stack.url]) == 0
    assert "trl/ft:later answers at" in capsys.readouterr().out
