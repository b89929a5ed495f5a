"""Bad rows, models, names, paths and disks, sent through a running Llama Stack: a sentence to act on, and no job lost.

Not repeated here, since they stand elsewhere: an unknown or empty dataset, a row 17 without `chosen`, a model directory
that does not exist, an absolute checkpoint_dir outside the roots (test_http_refusals.py); another body, and the same
one again, under a job_uuid that is taken, and weights that end in their header (test_http_jobs.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from llama_stack_provider_trl.faults import VARIABLE
from llama_stack_provider_trl.jobs.states import REASONS
from llama_stack_provider_trl.recipes.events import Reason
from tests.contract.payloads import PAIRS, QUESTIONS, promised, refusal, sft
from tests.contract.stack import DPO, ENDED, SFT, Json, LlamaStack, poll
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract

ONCE = {"retries": 0}


@pytest.fixture(scope="module", autouse=True)
def _leaves_the_device_free(stack: LlamaStack) -> Iterator[None]:
    yield
    assert not stack.end_jobs()


@pytest.fixture(scope="module")
def pairs(stack: LlamaStack) -> str:
    return stack.register("bad-input-pairs", PAIRS)


@pytest.fixture(scope="module")
def questions(stack: LlamaStack) -> str:
    return stack.register("bad-input-questions", QUESTIONS)


def error_of(status: Json, reason: Reason) -> str:
    """The message of a job that failed for `reason` at its first try; it ends in what to do."""
    allocated = status["resources_allocated"]
    error = allocated["error"]
    assert error["reason"] == reason, json.dumps(allocated, indent=1)
    assert error["message"].endswith(REASONS[reason].advice)
    assert Path(error["log_path"]).is_file()
    assert allocated["attempt"] == 1
    return str(error["message"])


# Rows


def register_csv(stack: LlamaStack, dataset_id: str, text: str) -> str:
    encoded = base64.b64encode(text.encode()).decode()
    return stack.register_source(dataset_id, {"type": "uri", "uri": f"data:text/csv;base64,{encoded}"})


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
    stack: LlamaStack, call: str, text: str, row: int, column: str
) -> None:
    dataset = register_csv(stack, f"csv-{row}-{column}", text)
    told = refusal(stack.post(call, (promised if call == DPO else sft)("refused", dataset)))
    assert f"dataset '{dataset}', row {row}:" in told
    assert f"{column} (null)" in told


def test_a_nan_in_registered_rows_is_named_by_row_and_column(stack: LlamaStack) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": float("nan")}]
    source = {"type": "rows", "rows": rows}
    body = json.dumps({"dataset_id": "nan-row", "purpose": "post-training/messages", "source": source})
    assert "NaN" in body  # `requests` itself would refuse to send it; other clients do not
    headers = {"Content-Type": "application/json"}
    assert requests.post(f"{stack.url}/v1/datasets", data=body, headers=headers, timeout=30).status_code == 200
    told = refusal(stack.post(SFT, sft("refused", "nan-row")))
    assert "row 1:" in told
    assert "completion (null)" in told


def test_a_csv_file_with_a_head_and_no_rows_is_an_empty_dataset(stack: LlamaStack) -> None:
    dataset = register_csv(stack, "csv-head", "prompt,chosen,rejected\n")
    assert "'csv-head', the dataset is empty" in refusal(stack.post(DPO, promised("refused", dataset)))


@pytest.mark.parametrize("text", ["", "prompt,chosen,rejected\na,b,c\na,b,c,d,e\n"], ids=["empty", "ragged"])
def test_a_file_that_is_no_csv_is_refused(stack: LlamaStack, text: str) -> None:
    dataset = register_csv(stack, f"no-csv-{len(text)}", text)
    assert refusal(stack.post(DPO, promised("refused", dataset))).startswith("Invalid value: ")


@pytest.mark.parametrize("uri", ["file:///no/such/rows.csv", "http://127.0.0.1:9/rows.csv"])
def test_a_dataset_whose_file_cannot_be_read_is_refused_by_name(stack: LlamaStack, uri: str) -> None:
    dataset = stack.register_source(f"gone-{uri[:4]}", {"type": "uri", "uri": uri})
    assert dataset in refusal(stack.post(DPO, promised("refused", dataset)))


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
def test_a_prompt_of_a_wrong_type_is_told_with_what_was_found(stack: LlamaStack, prompt: Any, found: str) -> None:
    dataset = stack.register(f"prompt-{len(found)}", [*QUESTIONS, {"prompt": prompt, "completion": "x"}])
    told = refusal(stack.post(SFT, sft("refused", dataset)))
    assert f"row {len(QUESTIONS)}: {found}" in told
    assert "expected" in told


# Fields


@pytest.mark.parametrize(
    ("path", "value", "told"),
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
def test_a_value_of_a_wrong_type_is_told_with_its_path(
    stack: LlamaStack, pairs: str, path: str, value: Any, told: str
) -> None:
    body = promised("refused", pairs)
    *parents, name = path.split(".")
    target: Json = body
    for parent in parents:
        target = target[parent]
    target[name] = value
    answer = stack.post(DPO, body)
    assert answer.status_code == 400
    (error,) = answer.json()["error"]["detail"]["errors"]
    assert error["loc"] == ["body", *path.split(".")]
    assert told in error["msg"]


def test_a_wrong_type_inside_algorithm_config_is_told_with_its_path(
    stack: LlamaStack, pairs: str, questions: str
) -> None:
    beta = stack.post(DPO, promised("refused", pairs) | {"algorithm_config": {"beta": "much"}})
    assert "algorithm_config.beta='much'" in refusal(beta)
    rank = stack.post(SFT, sft("refused", questions, algorithm_config={"type": "LoRA", "rank": "many"}))
    assert "algorithm_config.rank='many'" in refusal(rank)


def test_an_option_of_a_wrong_type_is_refused_by_name(stack: LlamaStack, pairs: str) -> None:
    answer = stack.post(DPO, promised("refused", pairs), options={"retries": "many"})
    assert "provider_options.retries='many'" in refusal(answer)


# Names


@pytest.mark.parametrize("job_uuid", ["a/b", "../up", "x" * 300, "", "two words", "checkpoint-7"])
def test_a_job_uuid_that_cannot_name_a_directory_is_refused_and_not_found(
    stack: LlamaStack, pairs: str, job_uuid: str
) -> None:
    told = refusal(stack.post(DPO, promised(job_uuid, pairs)))
    assert "job_uuid=" in told
    assert "use 1 to 128 letters" in told
    assert "not found" in refusal(stack.get("/post-training/job/status", job_uuid=job_uuid), 404)
    assert "not found" in refusal(stack.cancel(job_uuid), 404)


@pytest.fixture(scope="module")
def at_once(stack: LlamaStack) -> Json:
    """The status of a job whose one request arrived twenty times at once; the prompts of its rows are numbers."""
    rows = [pair | {"prompt": number} for number, pair in enumerate(PAIRS)]
    body = promised("at-once", stack.register("numbers", rows))
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: stack.post(DPO, body), range(20)))
    assert [(a.status_code, a.json()) for a in answers] == [(200, {"job_uuid": "at-once"})] * 20
    status = stack.status("at-once")
    stack.cancel("at-once")
    return status


def test_one_request_that_arrives_twenty_times_at_once_is_one_job(stack: LlamaStack, at_once: Json) -> None:
    assert stack.jobs().count("at-once") == 1
    assert at_once["resources_allocated"]["attempt"] <= 1


def test_two_requests_that_arrive_ten_times_each_under_one_job_uuid_are_one_job(stack: LlamaStack, pairs: str) -> None:
    bodies = [promised("fought-for", pairs) | {"finetuned_model": name} for name in ("one", "other")] * 10
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda body: stack.post(DPO, body), bodies))
    stack.cancel("fought-for")
    codes = {name: {a.status_code for a in answers[first::2]} for first, name in enumerate(("one", "other"))}
    taken = stack.status("fought-for")["resources_allocated"]["effective_config"]["output_name"]
    assert codes.pop(taken) == {200}
    assert list(codes.values()) == [{409}]
    assert stack.jobs().count("fought-for") == 1


def test_prompts_that_are_numbers_are_read_as_text_and_the_job_says_so(at_once: Json) -> None:
    (warning,) = at_once["resources_allocated"]["warnings"]
    assert "prompt" in warning


# Checkpoint directories


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_checkpoint_dir_inside_another_jobs_directory_is_a_conflict(
    stack: LlamaStack, pairs: str, at_once: Json, below: str
) -> None:
    answer = stack.post(DPO, promised("inside", pairs) | {"checkpoint_dir": f"results/at-once{below}"})
    told = refusal(answer, 409)
    assert "in the way of job 'at-once'" in told
    assert "choose another checkpoint_dir" in told


def test_a_checkpoint_dir_that_leads_out_of_the_roots_is_refused(stack: LlamaStack, pairs: str, tmp_path: Path) -> None:
    (stack.data_dir / "way-out").symlink_to(tmp_path)
    for checkpoint_dir in ("way-out", "way-out/deeper", str(stack.data_dir / "way-out"), "../up", "results/../../up"):
        told = refusal(stack.post(DPO, promised("refused", pairs) | {"checkpoint_dir": checkpoint_dir}))
        assert f"checkpoint_dir={checkpoint_dir!r}" in told
        assert "give a path relative to the data directory" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkpoint_dir", ["jobs", "jobs/at-once", "datasets", "./results/../datasets"])
def test_a_checkpoint_dir_among_our_own_files_is_refused(stack: LlamaStack, pairs: str, checkpoint_dir: str) -> None:
    answer = stack.post(DPO, promised("refused", pairs) | {"checkpoint_dir": checkpoint_dir})
    assert "holds our own files" in refusal(answer)


# Models


def _vision(path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=16)).save_pretrained(path)


def _encoder(path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, vocab_size=1024, max_position_embeddings=2048)).save_pretrained(path)


def _half_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _random_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(os.urandom(weights.stat().st_size))


def _missing_weights(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if "layers.1" not in name}
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _no_tokenizer(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).unlink()


def _no_json(path: Path) -> None:
    (path / "config.json").write_text("model_type: llama\n")


MODELS: dict[str, Callable[[Path], None]] = {
    "half-weights": _half_weights,
    "random-weights": _random_weights,
    "missing-weights": _missing_weights,
    "no-weights": _no_weights,
    "no-tokenizer": _no_tokenizer,
    "no-json": _no_json,
    "vision": _vision,
    "encoder": _encoder,
}


@pytest.fixture(scope="module")
def spoilt(stack: LlamaStack, questions: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A job for each copy of the tiny model that something was done to: its name, or the refusal of its request."""
    root = tmp_path_factory.mktemp("spoilt")
    answers = {}
    for name, spoil in MODELS.items():
        shutil.copytree(tiny_model(), root / name)
        spoil(root / name)
        answers[name] = stack.post(SFT, sft(f"spoilt-{name}", questions, model=str(root / name)), options=ONCE)
    return {name: answer.text for name, answer in answers.items() if answer.status_code != 200}


@pytest.mark.parametrize("job_uuid", ["jobs", "datasets", "jobs.sqlite3", "supervisor.lock"])
def test_a_job_whose_directory_would_be_one_of_our_own_files_is_refused(
    stack: LlamaStack, pairs: str, spoilt: dict[str, str], job_uuid: str
) -> None:
    answer = stack.post(DPO, promised(job_uuid, pairs) | {"checkpoint_dir": "."})
    stack.cancel(job_uuid)  # where it was taken: still behind the jobs of `spoilt`, so it has moved nothing aside
    assert "our own files" in refusal(answer)


def test_a_checkpoint_dir_that_is_a_file_is_refused(stack: LlamaStack, pairs: str, spoilt: dict[str, str]) -> None:
    (stack.data_dir / "a-file").touch()
    answer = stack.post(DPO, promised("below-a-file", pairs) | {"checkpoint_dir": "a-file"})
    stack.cancel("below-a-file")
    assert "checkpoint_dir='a-file'" in refusal(answer)


# Disks


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own at `path`; skips the test where none can be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount(8), to mount a tmpfs")
    path.mkdir(exist_ok=True)
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def configured(root: Path, old: str, new: str) -> LlamaStack:
    """A server, not started, whose run.yaml differs in one place."""
    stack = LlamaStack(root)
    config = root / "run.yaml"
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    return stack


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(tmp_path_factory.mktemp("disk"), "size=6m") as path:
        yield path


@pytest.fixture(scope="module")
def read_only_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(tmp_path_factory.mktemp("read-only-disk"), "size=1m,ro") as path:
        yield path


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def other_stack(
    disk: Path, read_only_disk: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaStack]:
    """A server whose jobs may write to two small disks, and whose trainings come by faults."""
    roots = f"device: cpu\n      checkpoint_roots: [{disk}, {read_only_disk}]\n      min_free_disk_mb: 0\n"
    stack = configured(tmp_path_factory.mktemp("other-stack"), "device: cpu\n", roots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(faults))
        stack.start()
    try:
        stack.register("questions", QUESTIONS)
        yield stack
        assert stack.runs()
        assert not stack.end_jobs()
    finally:
        stack.stop()


def saving_job(job_uuid: str, checkpoint_dir: Path | str) -> Json:
    """Eight steps; with `save_steps` 2, three step checkpoints and the final one in place of a fourth."""
    body = sft(job_uuid, "questions", checkpoint_dir=str(checkpoint_dir))
    body["training_config"]["n_epochs"] = 2
    return body


SAVING = {**ONCE, "save_steps": 2}


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def assert_kept(status: Json, job_uuid: str) -> None:
    """The one checkpoint of before the disk was full is listed, loads, and lies alone in its directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (checkpoint,) = status["checkpoints"]
    assert checkpoint["identifier"] == f"{job_uuid}-checkpoint-2"
    path = Path(checkpoint["path"])
    assert AutoTokenizer.from_pretrained(path).eos_token
    AutoModelForCausalLM.from_pretrained(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint-2"]


def test_a_disk_that_fills_up_in_mid_checkpoint_fails_that_job_alone(
    other_stack: LlamaStack, disk: Path, faults: Path
) -> None:
    (faults / "saving-4").write_text("hold")
    full = other_stack.submit(SFT, saving_job("full", disk), options=SAVING)
    after = other_stack.submit(SFT, saving_job("after", "results"), options=SAVING)
    poll((faults / "saving-4.taken").exists, "the second checkpoint is being written", timeout=60)
    assert (disk / "full" / ".saving").is_dir()
    fill(disk / "ballast")
    (faults / "saving-4.go").touch()

    status = other_stack.wait(full, "failed")
    assert "No space left" in error_of(status, Reason.disk_full)
    assert_kept(status, "full")
    (disk / "ballast").unlink()
    steps = [Path(c["path"]).name for c in other_stack.wait(after, "completed")["checkpoints"]]
    assert steps == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "final"]


def test_a_full_disk_found_between_two_checkpoints_is_told_before_anything_is_written(
    other_stack: LlamaStack, disk: Path, faults: Path
) -> None:
    (faults / "step-3").write_text("hold")
    job = other_stack.submit(SFT, saving_job("between", disk), options=SAVING)
    poll((faults / "step-3.taken").exists, "the third step is done", timeout=60)
    fill(disk / "ballast")
    (faults / "step-3.go").touch()
    status = other_stack.wait(job, "failed")
    (disk / "ballast").unlink()
    assert "the next checkpoint takes about" in error_of(status, Reason.disk_full)
    assert_kept(status, "between")


def test_a_disk_that_is_full_for_a_moment_costs_a_try_and_not_the_job(
    other_stack: LlamaStack, disk: Path, faults: Path
) -> None:
    (faults / "saving-4").write_text("full")
    job = other_stack.submit(SFT, saving_job("moment", "results"), options={"save_steps": 2, "retries": 1})

    def tried() -> Json | None:
        status = other_stack.status(job)
        assert status["status"] not in ENDED
        return status if status["resources_allocated"]["retries_used"] else None

    status = poll(tried, "the job is queued again", timeout=60)
    assert status is not None
    assert status["status"] == "scheduled"
    assert_kept(status, "moment")
    (first,) = status["resources_allocated"]["attempts"]
    assert first["reason"] == Reason.disk_full
    assert "disk_full" in status["resources_allocated"]["detail"]
    assert other_stack.cancel(job).status_code == 200


def test_a_checkpoint_dir_on_a_read_only_disk_fails_its_job_with_the_systems_own_words(
    other_stack: LlamaStack, read_only_disk: Path
) -> None:
    job = other_stack.submit(SFT, saving_job("read-only", read_only_disk), options=SAVING)
    error = other_stack.wait(job, "failed")["resources_allocated"]["error"]
    assert "Read-only file system" in error["message"]
    assert str(read_only_disk) in error["message"]


def test_rows_that_cannot_be_stored_are_refused_in_our_own_words_until_they_can(other_stack: LlamaStack) -> None:
    body = saving_job("unstored", "results")
    rows = [*QUESTIONS, {"prompt": "one row more", "completion": "than before"}]
    body["training_config"]["data_config"]["dataset_id"] = other_stack.register("unstored", rows)
    with mounted(other_stack.data_dir / "datasets", "size=1m,ro"):
        answer = other_stack.post(SFT, body)
        told = refusal(answer, 500)
        assert "dataset 'unstored' cannot be stored" in told
        assert "Read-only file system" in told
        assert "unstored" not in other_stack.jobs()
    assert other_stack.submit(SFT, body) == "unstored"
    assert other_stack.cancel("unstored").status_code == 200


def test_llama_stack_says_why_it_cannot_start_on_a_read_only_data_directory(
    read_only_disk: Path, tmp_path: Path
) -> None:
    # Llama Stack's own files lie elsewhere, or it would stumble before we do.
    default = "data_dir: ${env.TRL_OUTPUT_DIR:=~/.llama/trl}\n"
    stack = configured(tmp_path, default, f"data_dir: {read_only_disk}/trl\n")
    with pytest.raises(AssertionError, match="ended by itself"):
        stack.start()
    assert "Read-only file system" in stack.log_tail()
    assert f"{read_only_disk}/trl" in stack.log_tail()


# Models, last: their jobs have failed while the tests of disks trained on a server of their own


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_that_cannot_be_trained_fails_its_job_with_a_reason(
    stack: LlamaStack, spoilt: dict[str, str], name: str
) -> None:
    assert name not in spoilt
    told = error_of(stack.wait(f"spoilt-{name}", "failed"), Reason.invalid_model)
    assert f"spoilt0/{name}'" in told
    assert "Traceback" not in told
