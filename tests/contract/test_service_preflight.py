"""Preflight over HTTP and on the command line: a job's steps, lengths and memory, and nothing queued."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from llama_stack_provider_trl_remote import TrlClient
from llama_stack_provider_trl_remote.cli.terminal import preflight_lines
from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.service import JOBS, TrainingService, refusal, running_service
from tests.contract.stack import SFT, Json
from tests.required import FULL
from tests.tiny import CHATML, tiny_model

pytestmark = pytest.mark.contract

PREFLIGHT = "/post-training/preflight"
PREVIEW = "/post-training/preview"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running_service(tmp_path_factory.mktemp("service"), **({"warm_start": True} if FULL else {})) as service:
        service.register("questions", QUESTIONS)
        service.register("pairs", PAIRS)
        yield service


def requested(service: TrainingService, body: Json, **more: str) -> Json:
    # Longer than any other call takes: on a busy machine it waits for its turn like a job.
    answer = service.session.post(f"{service.url}/v1alpha{PREFLIGHT}", json={**body, **more}, timeout=240)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_it_reports_what_the_job_then_does_and_queues_nothing(service: TrainingService) -> None:
    body = sft("checked", "questions")
    found = requested(service, body)
    assert found["fits"], found["message"]
    assert service.get(JOBS).json()["data"] == []
    assert not list((service.data_dir / "preflights").iterdir())
    job = service.submit(SFT, body)
    service.wait(job, "completed")
    status = service.status(job)["resources_allocated"]
    assert status["progress"]["total_steps"] == found["steps"]["total_steps"]
    assert status["warnings"] == []
    recorded = status["effective_config"]["recipe"]["effective"]["memory"]
    for part in ("weights_bytes", "optimizer_bytes", "activations_bytes", "logits_bytes", "largest_batch"):
        assert recorded[part] == found["memory"][part]
    data = status["effective_config"]["recipe"]["effective"]["data"]
    assert (data["kept"], data["truncated"]) == (found["data"]["trained"], found["data"]["truncated"])
    assert sum(bucket["rows"] for bucket in found["data"]["histogram"]) == data["kept"]


def test_two_at_once_and_a_bad_dataset_are_all_answered(service: TrainingService) -> None:
    bodies = [promised("any", "pairs"), sft("other", "questions"), sft("bad", "pairs")]
    with ThreadPoolExecutor(3) as threads:
        first, second, bad = threads.map(lambda body: service.post(PREFLIGHT, body), bodies)
    assert first.json()["memory"]["reference_bytes"] > 0  # DPO, by the body alone
    assert second.json()["memory"]["reference_bytes"] == 0
    assert "was POST /v1/post-training/preference-optimize meant?" in refusal(bad)


def test_the_command_line_prints_it(service: TrainingService, tmp_path: Path) -> None:
    request = tmp_path / "job.json"
    request.write_text(json.dumps(sft("cli", "questions")))
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "jobs", "preflight", str(request)]
    done = subprocess.run([*command, "--url", service.url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "verdict The job fits."


def test_where_it_does_not_fit_the_nearest_is_named_and_the_time_is_bounded(tmp_path: Path) -> None:
    with running_service(tmp_path, device_memory_gb=0.5) as service:
        service.register("questions", QUESTIONS)
        found = requested(service, sft("large", "questions"))
        assert not found["fits"]
        assert "does not fit in 0.50 GiB" in found["message"]
    service.configure(preflight_timeout=0.2)
    service.start()
    try:
        answer = service.post(PREFLIGHT, sft("late", "questions"))
        assert "the preflight took more than 0 s (preflight_timeout of the service)" in refusal(answer)
    finally:
        service.stop()


def test_a_preview_shows_rows_as_they_are_trained_and_queues_nothing(service: TrainingService) -> None:
    before = service.get(JOBS).json()["data"]
    answer = service.post(PREVIEW, {**promised("any", "pairs"), "first_row": 2, "rows": 3})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [row["row"] for row in found["rows"]] == [2, 3, 4]
    assert found["data"]["read"] == len(PAIRS) - 2
    assert found["inference"]["turns"] == found["inference"]["equal"] == 2 * (len(PAIRS) - 2)
    assert [turn["part"] for turn in found["rows"][0]["turns"]] == ["chosen", "rejected"]
    assert [*found["rows"][0]["parts"]] == ["prompt", "chosen", "rejected"]
    assert service.get(JOBS).json()["data"] == before
    assert not list((service.data_dir / "preflights").iterdir())
    assert TrlClient(service.url).preview(promised("any", "pairs"), first_row=2, rows=3) == found
    assert "first_row" in refusal(service.post(PREVIEW, {**sft("any", "questions"), "first_row": 8}))
    beyond: Json = {"first_row": (-1, 2**53 + 1, 0.5, True), "rows": (0, 101, "ten"), "algorithm": ("ppo", 1, [])}
    for name, values in beyond.items():
        for value in values:
            answer = service.post(PREVIEW, {**sft("any", "questions"), name: value})
            assert (answer.status_code, name in answer.text) == (400, True), answer.text
    assert "rows" in refusal(service.post(PREVIEW, {**sft("any", "questions"), "rows": 101}))
    assert "no-such" in refusal(service.post(PREVIEW, sft("any", "no-such")))


def test_a_preview_has_the_warnings_of_the_preflight_about_the_request_and_its_rows(service: TrainingService) -> None:
    service.register("wide", [{**row, "source": "web"} for row in QUESTIONS])
    body = sft("any", "wide")
    body["training_config"]["max_validation_steps"] = 3
    warnings = service.post(PREVIEW, body).json()["warnings"]
    assert "columns never read: source" in warnings
    assert [warning for warning in warnings if "max_validation_steps has no effect" in warning]
    assert warnings == requested(service, body)["warnings"]


def test_trl_remote_previews_a_dataset(service: TrainingService) -> None:
    words = ["datasets", "preview", "questions", "--model", str(tiny_model()), "--rows", "1", "--max-seq-length", "24"]
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", *words, "--url", service.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("row 0: 25 tokens, cut: 1 token does not fit into max_seq_length=24")
    assert [line[2] for line in lines[2:5]] == [" ", "+", "x"]
    assert lines[5:7] == ["  user assistant", "  turn 1: as at inference, but its row is cut or dropped"]
    assert "1 of 8 trained turns are as at inference, 0 differ, 7 more are in rows that are cut or dropped" in lines
    assert "8 trained, 7 of them cut to 24 tokens" in done.stdout


def test_the_pairs_of_a_row_are_counted_and_shown_under_its_number(service: TrainingService) -> None:
    rows = [{"prompt": "1 + 1?", "chosen": "Two.", "rejected": ["Three.", "No."]}] * 4
    service.register("several", rows)
    words = ["datasets", "preview", "several", "--model", str(tiny_model()), "--method", "dpo", "--rows", "1"]
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", *words, "--url", service.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    heads = [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith("row ")]
    assert heads == ["row 0, 1 of 2", "row 0, 2 of 2"]
    assert "4 of 4 rows read, which make 8 examples: 8 trained" in done.stdout
    assert "note    4 rows make 8 pairs" in done.stdout
    found = requested(service, promised("any", "several"))
    assert [found["data"][name] for name in ("num_rows", "examples", "trained", "dropped")] == [4, 8, 8, 0]
    assert found["steps"]["total_steps"] == found["steps"]["epochs"] * -(-8 // found["steps"]["global_batch"])
    assert preflight_lines(found)[0] == "rows    8 of 8 examples made of 4 rows, 0 truncated, 0 dropped"
    url, own = f"{service.url}/data/tokens", {"Origin": service.url}
    (token,) = set(re.findall(r'name="form_token" value="(\w+)"', requests.get(url, timeout=30).text))
    form = {"form_token": token, "dataset": "several", "model": str(tiny_model()), "method": "dpo", "rows": "1"}
    page = requests.post(url, form, headers=own, timeout=60).text
    assert "Of 4 rows, 4 were read from row 0 on. They make 8 examples." in page
    assert [*re.findall(r"<h3>(.*?) <", page)] == ["Row 0, 1 of 2", "Row 0, 2 of 2"]
    assert "16 of 16 trained turns are as at inference, 0 differ." in page
    assert "<p>user assistant assistant</p>" in page
    assert page.count("turn 1 (rejected): as at inference") == 2


def test_a_turn_that_is_not_as_at_inference_is_named_by_the_api_the_command_and_the_page(
    service: TrainingService, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model(), model := tmp_path / "numbered")
    template = "{{ 'Turns: ' + messages | length | string + '\n' }}" + CHATML
    (model / "chat_template.jinja").write_text(template)
    body = {**sft("any", "questions"), "model": str(model)}
    found = service.post(PREVIEW, body).json()
    assert found["inference"]["different"] == found["inference"]["turns"] == len(QUESTIONS)
    first = found["inference"]["first_different"]
    assert first.startswith("row 0, turn 1: token 5 is ' 2' ")
    words = ["datasets", "preview", "questions", "--model", str(model), "--rows", "1"]
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", *words, "--url", service.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"first   {first}" in done.stdout.splitlines()
    assert "  turn 1: not as at inference: token 5 is ' 2' " in done.stdout
    url, own = f"{service.url}/data/tokens", {"Origin": service.url}
    (token,) = set(re.findall(r'name="form_token" value="(\w+)"', requests.get(url, timeout=30).text))
    form = {"form_token": token, "dataset": "questions", "model": str(model), "rows": "1"}
    page = html.unescape(requests.post(url, form, headers=own, timeout=60).text)
    assert f'<p class="problem">{first}</p>' in page


def test_trl_remote_previews_labelled_answers(service: TrainingService) -> None:
    service.register("labelled", [{"prompt": "1 + 1?", "completion": "Two.", "label": True}])
    words = ["datasets", "preview", "labelled", "--model", str(tiny_model()), "--method", "kto"]
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", *words, "--url", service.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "  completion" in done.stdout.splitlines()
