"""Bad rows, models, names, paths and disks, sent to a running Llama Stack and to a training service whose jobs have two
ranks: a sentence to act on, and no job lost.

Not repeated here, since they stand elsewhere: an unknown or empty dataset, a row 17 without `chosen`, a model directory
that does not exist, an absolute checkpoint_dir outside the roots (test_http_refusals.py); another body, and the same
one again, under a job_uuid that is taken, and weights that end in their header (test_http_jobs.py); directories among
our own files (tests/security: test_own_files.py, test_attack_columns.py, test_inline_provider.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from llama_stack_provider_trl.jobs.decisions.states import REASONS
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.system.files import is_whole
from tests.census import assert_clean
from tests.contract.payloads import PAIRS, QUESTIONS, promised, sft
from tests.contract.service import TrainingService, refusal, running_service
from tests.contract.stack import DPO, ENDED, SFT, Json, LlamaStack, Server, poll
from tests.security.mounts import tmpfs
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

ONCE = {"retries": 0}
TWO_RANKS = {"nproc_per_node": 2}
SECONDS = 150
"""For a job of two ranks on a busy machine."""


@pytest.fixture(scope="module", params=[LlamaStack, TrainingService], ids=["llama-stack", "service"])
def kind(request: pytest.FixtureRequest) -> type[Server]:
    return request.param


@pytest.fixture(scope="module", autouse=True)
def server(kind: type[Server], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The server under test; of the service, every job has two ranks."""
    if kind is LlamaStack:
        stack: LlamaStack = request.getfixturevalue("stack")
        yield stack
        assert not stack.end_jobs()
        return
    with running_service(tmp_path_factory.mktemp("service"), torch_run_config=TWO_RANKS) as service:
        yield service
        assert not service.end_jobs()
        assert_clean(service.data_dir)


@pytest.fixture(scope="module")
def pairs(server: Server) -> str:
    return server.register("bad-input-pairs", PAIRS)


@pytest.fixture(scope="module")
def questions(server: Server) -> str:
    return server.register("bad-input-questions", QUESTIONS)


def error_of(status: Json, reason: Reason) -> str:
    """The message of a job that failed for `reason` at its first try; it ends in what to do."""
    allocated = status["resources_allocated"]
    error = allocated["error"]
    assert error["reason"] == reason, json.dumps(allocated, indent=1)
    assert error["message"].endswith(REASONS[reason].advice)
    assert Path(error["log_path"]).is_file()
    assert allocated["attempt"] == 1
    assert "Traceback" not in error["message"]
    return str(error["message"])


# Rows


def csv_source(server: Server, name: str, text: str) -> Json:
    """A source of a CSV file, given in the way that the server can read."""
    if isinstance(server, TrainingService):
        (server.files / f"{name}.csv").write_text(text)
        return {"type": "uri", "uri": f"{server.files}/{name}.csv"}
    encoded = base64.b64encode(text.encode()).decode()
    return {"type": "uri", "uri": f"data:text/csv;base64,{encoded}"}


def register_csv(server: Server, dataset_id: str, text: str) -> str:
    return server.register_source(dataset_id, csv_source(server, dataset_id, text))


def register_or_train(server: Server, dataset_id: str, source: Json, call: str = DPO) -> requests.Response:
    """The answer to what is refused: the registration of a dataset, which the service alone looks into, or its job."""
    # Not through `requests`, which itself would refuse to send a NaN; other clients do not.
    text = json.dumps({"dataset_id": dataset_id, "purpose": "post-training/messages", "source": source})
    headers = {"Content-Type": "application/json"}
    answer = requests.post(f"{server.url}/v1/datasets", data=text, headers=headers, timeout=30)
    if answer.status_code != 200:
        return answer
    return server.post(call, (promised if call == DPO else sft)("refused", dataset_id))


def assert_without(column: str, message: str) -> None:
    """A refusal shows what a row has: not this column, or its null. (What the service stores has no column that is not
    a number, and its reader of CSV files leaves out empty cells.)"""
    found = message.partition("found the columns ")[2].partition(", expected for ")[0].split(", ")
    assert column not in found
    assert {"prompt", "completion", "chosen", "rejected"}.intersection(found), message


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("call", "text", "row", "column"),
    [
        (DPO, "prompt,chosen,rejected\na,b,c\na,,c\n", 1, "chosen"),
        (SFT, "prompt,completion\na,b\nc,d\n,f\n", 2, "prompt"),
        (SFT, "prompt,completion\na,\nc,\n", 0, "completion"),
    ],
    ids=["dpo", "sft", "column"],
)
def test_an_empty_cell_of_a_csv_file_is_named_by_row_and_column(
    server: Server, call: str, text: str, row: int, column: str
) -> None:
    dataset = register_csv(server, f"csv-{row}-{column}", text)
    message = refusal(server.post(call, (promised if call == DPO else sft)("refused", dataset)))
    assert f"dataset '{dataset}', row {row}:" in message
    assert_without(column, message)


def test_a_nan_in_registered_rows_is_named_by_row_and_column(server: Server) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": float("nan")}]
    message = refusal(register_or_train(server, "nan-row", {"type": "rows", "rows": rows}, SFT))
    assert "row 1:" in message
    assert_without("completion", message)


def test_a_csv_file_with_a_head_and_no_rows_is_an_empty_dataset(server: Server) -> None:
    dataset = register_csv(server, "csv-head", "prompt,chosen,rejected\n")
    assert "'csv-head', the dataset is empty" in refusal(server.post(DPO, promised("refused", dataset)))


@pytest.mark.in_turn
@pytest.mark.parametrize("text", ["", "prompt,chosen,rejected\na,b,c\na,b,c,d,e\n"], ids=["empty", "ragged"])
def test_a_file_that_is_no_csv_is_refused(server: Server, text: str) -> None:
    dataset = register_csv(server, f"no-csv-{len(text)}", text)
    assert refusal(server.post(DPO, promised("refused", dataset)))


@pytest.mark.in_turn
@pytest.mark.parametrize("uri", ["file:///no/such/rows.csv", "http://127.0.0.1:9/rows.csv"])
def test_a_dataset_whose_file_cannot_be_read_is_refused_by_name(server: Server, uri: str) -> None:
    dataset = f"gone-{uri[:4]}"
    message = refusal(register_or_train(server, dataset, {"type": "uri", "uri": uri}))
    assert (uri if isinstance(server, TrainingService) else dataset) in message


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([1, 2, 3], "column prompt, turn 0: found a number 1"),
        ({"a": 1}, "column prompt: found an object"),
        ([], "column prompt: found an empty list"),
        ("  ", "column prompt: found blank text"),
    ],
    ids=["numbers", "object", "nothing", "blank"],
)
def test_a_prompt_of_a_wrong_type_is_refused_with_what_was_found(server: Server, prompt: Any, found: str) -> None:
    dataset = server.register(f"prompt-{len(found)}", [*QUESTIONS, {"prompt": prompt, "completion": "x"}])
    message = refusal(server.post(SFT, sft("refused", dataset)))
    assert f"row {len(QUESTIONS)}: {found}" in message
    assert "expected" in message


# Fields


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("training_config.n_epochs", "three", "valid integer"),
        ("training_config.n_epochs", 0, "greater than 0"),
        ("training_config.data_config.batch_size", -1, "greater than 0"),
        ("training_config.data_config.shuffle", "maybe", "valid boolean"),
        ("training_config.data_config.dataset_id", 7, "valid string"),
        ("training_config", [1], "valid dictionary"),
        ("algorithm_config", "dpo", "valid dictionary"),
        ("model", 7, "valid string"),
        ("job_uuid", 7, "valid string"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_path(
    server: Server, pairs: str, path: str, value: Any, message: str
) -> None:
    body = promised("refused", pairs)
    *parents, name = path.split(".")
    target: Json = body
    for parent in parents:
        target = target[parent]
    target[name] = value
    answer = server.post(DPO, body)
    if isinstance(server, TrainingService):
        sentence = refusal(answer)
        assert sentence.startswith(f"{path}={value!r}")
        assert message in sentence
        return
    # Llama Stack's own way, before it asks us.
    assert answer.status_code == 400
    (error,) = answer.json()["error"]["detail"]["errors"]
    assert error["loc"] == ["body", *path.split(".")]
    assert message in error["msg"]


def test_a_wrong_type_inside_algorithm_config_is_refused_with_its_path(
    server: Server, pairs: str, questions: str
) -> None:
    beta = server.post(DPO, promised("refused", pairs) | {"algorithm_config": {"beta": "much"}})
    assert "algorithm_config.beta='much'" in refusal(beta)
    rank = server.post(SFT, sft("refused", questions, algorithm_config={"type": "LoRA", "rank": "many"}))
    assert "algorithm_config.rank='many'" in refusal(rank)


def test_an_option_of_a_wrong_type_is_refused_by_name(server: Server, pairs: str) -> None:
    answer = server.post(DPO, promised("refused", pairs), options={"retries": "many"})
    assert "provider_options.retries='many'" in refusal(answer)


def test_a_pattern_that_would_take_all_memory_is_refused_by_name(server: Server, questions: str) -> None:
    """`regex` writes a repeated part out when it compiles a pattern: a million repetitions take 260 MiB."""
    prompts = [{"prompt": "a", "form": form} for form in ("a", "a{4000000000}")]
    forms = server.register("bad-input-forms", prompts)
    greedy = {"type": "regex", "pattern": "a{4000000000}"}
    grpo = {"type": "grpo", "rewards": [{"check": {"type": "exact", "expected": "a"}}, {"check": greedy}]}
    by_row = {"type": "grpo", "rewards": [{"check": {"type": "regex", "column": "form"}}]}
    before = psutil.Process(server.pid).memory_info().rss
    for algorithm, dataset, sentence in (
        (grpo, questions, "algorithm_config.rewards.1.check.pattern='a{4000000000}' is not supported: it takes more"),
        (by_row, forms, "dataset 'bad-input-forms', row 1: patterns and schemas up to this row take more than"),
    ):
        body = promised("refused", dataset) | {"algorithm_config": algorithm}
        assert sentence in refusal(server.post(DPO, body, options={"nproc_per_node": 1}))
    evaluate = {"evaluate": {"dataset_id": questions, "checks": [greedy]}}
    after = refusal(server.post(SFT, sft("refused", questions), options=evaluate))
    assert "provider_options.evaluate.checks.0.pattern='a{4000000000}' is not supported" in after
    if isinstance(server, TrainingService):
        body = {"job_uuid": "refused", "model": str(tiny_model()), "dataset_id": questions, "checks": [greedy]}
        assert refusal(server.post("/post-training/evaluate", body)).startswith("checks.0.pattern=")
    assert psutil.Process(server.pid).memory_info().rss - before < 128 << 20


# Names


@pytest.mark.in_turn
@pytest.mark.parametrize("job_uuid", ["a/b", "../up", "x" * 300, "", "two words", "checkpoint-7", "a.stale-1"])
def test_a_job_uuid_that_cannot_name_a_directory_is_refused_and_not_found(
    server: Server, pairs: str, job_uuid: str
) -> None:
    message = refusal(server.post(DPO, promised(job_uuid, pairs)))
    assert "job_uuid=" in message
    assert "use 1 to 128 letters" in message
    assert "not found" in refusal(server.get("/post-training/job/status", job_uuid=job_uuid), 404)
    assert "not found" in refusal(server.cancel(job_uuid), 404)


@pytest.fixture(scope="module")
def at_once(server: Server) -> Json:
    """The status of a job whose one request arrived twenty times at once; the prompts of its rows are numbers."""
    rows = [pair | {"prompt": number} for number, pair in enumerate(PAIRS)]
    body = promised("at-once", server.register("numbers", rows))
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: server.post(DPO, body), range(20)))
    assert [(a.status_code, a.json()) for a in answers] == [(200, {"job_uuid": "at-once"})] * 20
    status = server.status("at-once")
    server.cancel("at-once")
    return status


def test_one_request_that_arrives_twenty_times_at_once_is_one_job(server: Server, at_once: Json) -> None:
    assert server.jobs().count("at-once") == 1
    assert at_once["resources_allocated"]["attempt"] <= 1


def test_two_requests_that_arrive_ten_times_each_under_one_job_uuid_are_one_job(server: Server, pairs: str) -> None:
    bodies = [promised("fought-for", pairs) | {"finetuned_model": name} for name in ("one", "other")] * 10
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda body: server.post(DPO, body), bodies))
    server.cancel("fought-for")
    codes = {name: {a.status_code for a in answers[first::2]} for first, name in enumerate(("one", "other"))}
    taken = server.status("fought-for")["resources_allocated"]["effective_config"]["output_name"]
    assert codes.pop(taken) == {200}
    assert list(codes.values()) == [{409}]
    assert server.jobs().count("fought-for") == 1


def test_prompts_that_are_numbers_are_read_as_text_and_the_job_reports_it(at_once: Json) -> None:
    (warning,) = at_once["resources_allocated"]["warnings"]
    assert "prompt" in warning


# Checkpoint directories


@pytest.mark.in_turn
@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_checkpoint_dir_inside_another_jobs_directory_is_a_conflict(
    server: Server, pairs: str, at_once: Json, below: str
) -> None:
    answer = server.post(DPO, promised("inside", pairs) | {"checkpoint_dir": f"results/at-once{below}"})
    message = refusal(answer, 409)
    assert "conflicts with job 'at-once'" in message
    assert "choose another checkpoint_dir" in message


def test_a_checkpoint_dir_that_leads_out_of_the_roots_is_refused(server: Server, pairs: str, tmp_path: Path) -> None:
    link = server.data_dir / "checkpoints" / "way-out"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path)
    for checkpoint_dir in ("way-out", "checkpoints/way-out/deeper", str(link), "../up", "results/../../up"):
        message = refusal(server.post(DPO, promised("refused", pairs) | {"checkpoint_dir": checkpoint_dir}))
        assert f"checkpoint_dir={checkpoint_dir!r}" in message
        assert "give a relative path, which means one below" in message
    assert list(tmp_path.iterdir()) == []


# Models


def _half_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _nan_weights(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = {name: tensor * float("nan") for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})


MODELS: dict[str, Callable[[Path], None]] = {
    "half-weights": _half_weights,
    "nan-weights": _nan_weights,
}


@pytest.fixture(scope="module")
def spoilt(server: Server, questions: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A job for each copy of the tiny model that something was done to; the refusals of those that were refused."""
    root = tmp_path_factory.mktemp("spoilt")
    answers = {}
    for name, spoil in MODELS.items():
        shutil.copytree(tiny_model(), root / name)
        spoil(root / name)
        answers[name] = server.post(SFT, sft(f"spoilt-{name}", questions, model=str(root / name)), options=ONCE)
    return {name: answer.text for name, answer in answers.items() if answer.status_code != 200}


def test_a_checkpoint_dir_that_is_a_file_is_refused(server: Server, pairs: str, spoilt: dict[str, str]) -> None:
    (server.data_dir / "checkpoints").mkdir(exist_ok=True)
    (server.data_dir / "checkpoints" / "a-file").touch()
    answer = server.post(DPO, promised("below-a-file", pairs) | {"checkpoint_dir": "a-file"})
    server.cancel("below-a-file")
    assert "checkpoint_dir='a-file'" in refusal(answer)


# Disks


@pytest.fixture(scope="module")
def disk(kind: type[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for each server: a checkpoint directory belongs to the data directory of the job that made it."""
    with tmpfs(tmp_path_factory.mktemp("disk"), "size=6m") as path:
        yield path


@pytest.fixture(scope="module")
def read_only_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tmpfs(tmp_path_factory.mktemp("read-only-disk"), "size=1m,ro") as path:
        yield path


@pytest.fixture(scope="module")
def other_server(
    kind: type[Server], disk: Path, read_only_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose jobs may write to two small disks."""
    roots = {"checkpoint_roots": [str(disk), str(read_only_disk)], "min_free_disk_mb": 0}
    server = configured(kind, tmp_path_factory.mktemp("other-server"), roots)
    server.start()
    try:
        server.register("questions", QUESTIONS)
        yield server
        assert server.runs()
        assert not server.end_jobs()
        assert_clean(server.data_dir)
    finally:
        server.stop()


def configured(kind: type[Server], root: Path, settings: Json) -> LlamaStack | TrainingService:
    """A server that is not started."""
    if kind is TrainingService:
        return TrainingService(root, torch_run_config=TWO_RANKS, **settings)
    stack = LlamaStack(root)
    stack.configure(**settings)
    return stack


def saving_job(server: Server, job_uuid: str, checkpoint_dir: Path | str) -> Json:
    """Eight steps; with `save_steps` 2, three step checkpoints and the final one in place of a fourth."""
    body = sft(job_uuid, "questions", checkpoint_dir=str(checkpoint_dir))
    body["training_config"]["n_epochs"] = 2
    if isinstance(server, TrainingService):
        body["training_config"]["data_config"]["batch_size"] //= TWO_RANKS["nproc_per_node"]
    return body


SAVING = {**ONCE, "save_steps": 2}


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def assert_kept(status: Json, job_uuid: str) -> None:
    """The one checkpoint of before the disk was full is listed, whole, and lies alone in its directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (checkpoint,) = status["checkpoints"]
    assert checkpoint["identifier"] == f"{job_uuid}-checkpoint-2"
    path = Path(checkpoint["path"])
    assert is_whole(path)
    assert AutoTokenizer.from_pretrained(path).eos_token
    AutoModelForCausalLM.from_pretrained(path)
    assert {entry.name for entry in path.parent.iterdir()} == {"checkpoint-2", "latest"}


@pytest.mark.in_turn
def test_a_disk_that_fills_up_in_mid_checkpoint_fails_that_job_alone(other_server: Server, disk: Path) -> None:
    other_server.arm("saving-4", "hold")
    full = other_server.submit(SFT, saving_job(other_server, "full", disk), options=SAVING)
    after = other_server.submit(SFT, saving_job(other_server, "after", "results"), options=SAVING)
    other_server.wait_taken("saving-4", SECONDS)
    assert (disk / "full" / ".saving").is_dir()
    fill(disk / "ballast")
    other_server.go("saving-4")

    status = other_server.wait(full, "failed", SECONDS)
    assert "No space left" in error_of(status, Reason.disk_full)
    assert_kept(status, "full")
    (disk / "ballast").unlink()
    steps = [Path(c["path"]).name for c in other_server.wait(after, "completed", SECONDS)["checkpoints"]]
    assert steps == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "final"]


@pytest.mark.in_turn
def test_a_full_disk_found_between_two_checkpoints_is_reported_before_anything_is_written(
    other_server: Server, disk: Path
) -> None:
    other_server.arm("step-3", "hold")
    job = other_server.submit(SFT, saving_job(other_server, "between", disk), options=SAVING)
    other_server.wait_taken("step-3", SECONDS)
    poll(lambda: other_server.status(job)["checkpoints"], "checkpoint-2, written meanwhile, is listed", SECONDS)
    fill(disk / "ballast")
    other_server.go("step-3")
    status = other_server.wait(job, "failed", SECONDS)
    (disk / "ballast").unlink()
    assert "the next checkpoint takes about" in error_of(status, Reason.disk_full)
    assert_kept(status, "between")


@pytest.mark.in_turn
def test_a_disk_that_is_full_for_a_moment_costs_a_try_and_not_the_job(other_server: Server, disk: Path) -> None:
    other_server.arm("saving-4", "full")
    body = saving_job(other_server, "moment", "results")
    job = other_server.submit(SFT, body, options={"save_steps": 2, "retries": 1})

    def tried() -> Json | None:
        status = other_server.status(job)
        assert status["status"] not in ENDED
        return status if status["resources_allocated"]["retries_used"] else None

    status = poll(tried, "the job is queued again", SECONDS)
    assert status is not None
    assert status["status"] == "scheduled"
    (first,) = status["resources_allocated"]["attempts"]
    assert first["reason"] == Reason.disk_full, first
    assert_kept(status, "moment")
    assert "disk_full" in status["resources_allocated"]["detail"]
    assert other_server.cancel(job).status_code == 200


@pytest.mark.in_turn
def test_a_checkpoint_dir_on_a_read_only_disk_fails_its_job_with_the_systems_own_words(
    other_server: Server, read_only_disk: Path
) -> None:
    job = other_server.submit(SFT, saving_job(other_server, "read-only", read_only_disk), options=SAVING)
    error = other_server.wait(job, "failed", SECONDS)["resources_allocated"]["error"]
    assert "Read-only file system" in error["message"]
    assert str(read_only_disk) in error["message"]


def test_rows_that_cannot_be_stored_are_refused_in_our_own_words_until_they_can(other_server: Server) -> None:
    rows = [*QUESTIONS, {"prompt": "one row more", "completion": "than before"}]
    with tmpfs(other_server.data_dir / "datasets", "size=1m,ro"):
        answer = register_or_train(other_server, "unstored", {"type": "rows", "rows": rows}, SFT)
        message = refusal(answer, 507)
        assert "dataset 'unstored' cannot be stored" in message
        assert re.search("disk is read-only|Read-only file system", message)
        assert "refused" not in other_server.jobs()
    assert other_server.submit(SFT, sft("stored", other_server.register("unstored", rows))) == "stored"
    assert other_server.cancel("stored").status_code == 200


def test_a_server_reports_why_it_cannot_start_on_a_read_only_data_directory(
    kind: type[Server], read_only_disk: Path, tmp_path: Path
) -> None:
    # Llama Stack's own files lie elsewhere, or it would stumble before we do.
    server = configured(kind, tmp_path, {"data_dir": f"{read_only_disk}/trl"})
    if isinstance(server, TrainingService):
        server.data_dir = read_only_disk / "trl"
    with pytest.raises(AssertionError, match="ended by itself"):
        server.start()
    assert "Read-only file system" in server.log_tail()
    assert f"{read_only_disk}/trl" in server.log_tail()


# Models, last: their jobs have failed while the tests of disks trained on a server of their own


REFUSED = {
    "half-weights": "model.safetensors in that directory is cut off, it has",
}
"""What the files' first bytes show is refused when the job is submitted. Each other damage of a model, and models of
another kind: tests/process/test_model_checks.py, tests/security/test_damaged_models.py."""


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_that_cannot_be_trained_fails_its_job_with_a_reason(
    server: Server, spoilt: dict[str, str], name: str
) -> None:
    assert (name in spoilt) == (name in REFUSED)
    if name in REFUSED:
        assert f"/{name}' is not supported: {REFUSED[name]}" in spoilt[name]
        return
    status = server.wait(f"spoilt-{name}", "failed", timeout=SECONDS)
    assert f"/{name}'" in (found := error_of(status, Reason.invalid_model))
    if name == "nan-weights":
        assert "model.safetensors has values that are not finite" in found
