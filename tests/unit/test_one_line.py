"""`trl-remote train`, `run` and `resume` as a user types them, against a service that is played on loopback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl_remote.cli import main as cli
from llama_stack_provider_trl_remote.cli import whole_jobs
from tests.fake_service import FakeService, Run, command_line, fake_service, progress, status

SFT = [{"prompt": "Two and two?", "completion": "Four."}]
DPO = [{"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}]
FILES = {"model.safetensors": b"weights"}


@pytest.fixture
def service() -> Iterator[FakeService]:
    with fake_service() as service:
        yield service


@pytest.fixture
def run(service: FakeService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_line(service, monkeypatch, capsys)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return written(tmp_path / "my rows.jsonl", SFT)


def written(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def jobs(service: FakeService) -> list[tuple[str, Any]]:
    """Calls and bodies of the jobs that were posted; what they ask for is known to the provider."""
    found = [(path.partition("/")[2], body) for path, body in service.posted if path.startswith("post-training/")]
    for _, body in found:
        ProviderOptions.parse(body.get("provider_options"))
    return found


def test_train_uploads_submits_follows_and_pulls(run: Run, service: FakeService, rows: Path, tmp_path: Path) -> None:
    last = status("one", "completed", progress=progress(10))
    last["checkpoints"] = [{"identifier": "one-final", "path": "/there/final"}]
    service.jobs["one"] = [status("one"), status("one", "in_progress", progress=progress(5, loss=0.5)), last]
    service.files = dict(FILES)
    target = tmp_path / "model"
    words = ("--model", "org/name", "--job", "one", "--pull", target, "--interval", 0.01)
    exit_status, output, errors = run("train", rows, *words)
    assert (exit_status, errors) == (0, "")
    registered = service.posted[0][1]
    name = registered["dataset_id"]
    assert name == f"my-rows-{registered['source']['sha256'][:12]}"
    assert list(service.blobs) == [registered["source"]["sha256"]]
    data = {"dataset_id": name, "batch_size": 4, "shuffle": True}
    body = {"job_uuid": "one", "model": "org/name", "training_config": {"n_epochs": 1, "data_config": data}}
    assert jobs(service) == [("supervised-fine-tune", body)]
    assert output.splitlines() == [
        f"{name}: 1 row",
        "job one",
        "waiting",
        "running   50% step 5/10  loss 0.500",
        "completed  100% step 10/10",
        "checkpoint one-final: /there/final",
        "model.safetensors  7 bytes",
        f"one-final is in {target}",
    ]
    assert (target / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_every_option_of_train_is_in_the_request(run: Run, service: FakeService, rows: Path, tmp_path: Path) -> None:
    held_out = written(tmp_path / "held-out.jsonl", [{"prompt": "a", "completion": "b"}])
    words = "--model org/name --lora-r 4 --epochs 3 --batch-size 2 --gradient-accumulation 8 --learning-rate 1e-3"
    more = "--max-steps 5 --max-seq-length 128 --nodes 2 --nproc-per-node 3 --resume-from old/checkpoint-7 --merge"
    exit_status, output, _ = run("train", rows, *words.split(), *more.split(), "--eval-data", held_out, "--detach")
    ((call, body),) = jobs(service)
    assert (exit_status, output) == (0, f"{body['job_uuid']}\n")
    assert body["job_uuid"].startswith("sft-my-rows-")
    names = [posted["dataset_id"] for path, posted in service.posted if path == "datasets"]
    assert call == "supervised-fine-tune"
    lora = {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "apply_lora_to_mlp": True}
    assert body["algorithm_config"] == {"type": "LoRA", **lora, "rank": 4, "alpha": 8}
    assert body["training_config"] == {
        "n_epochs": 3,
        "max_steps_per_epoch": 5,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-3,
        "data_config": {
            "dataset_id": names[0],
            "batch_size": 2,
            "shuffle": True,
            "validation_dataset_id": names[1],
        },
    }
    assert body["provider_options"] == {
        "resources": {"nodes": 2},
        "nproc_per_node": 3,
        "resume_from": "old/checkpoint-7",
        "merge_adapter": True,
        "max_seq_length": 128,
    }


@pytest.mark.parametrize("words", [(), ("--method", "dpo")])
def test_rows_with_a_preference_are_trained_with_dpo(
    run: Run, service: FakeService, tmp_path: Path, words: tuple[str, ...]
) -> None:
    pairs = written(tmp_path / "pairs.jsonl", DPO)
    lora = ("--lora-alpha", 32, "--lora-modules", "q_proj,v_proj")
    assert run("train", pairs, "--model", "org/name", "--detach", *lora, *words)[0] == 0
    ((call, body),) = jobs(service)
    assert call == "preference-optimize"
    assert body["algorithm_config"] == {"type": "dpo"}
    modules = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": False}
    assert body["provider_options"] == {"lora": {"type": "LoRA", **modules, "rank": 8, "alpha": 32}}


def test_two_trainings_of_one_file_are_two_jobs_with_one_dataset(run: Run, service: FakeService, rows: Path) -> None:
    for _ in range(2):
        assert run("train", rows, "--model", "org/name", "--detach")[0] == 0
    assert len({body["job_uuid"] for _, body in jobs(service)}) == 2
    assert len({str(body) for path, body in service.posted if path == "datasets"}) == 1
    assert len(service.blobs) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"a"\n', "rows.jsonl: row 0: is not JSON in line 1"),
        ("rows.jsonl", "", "it has no rows"),
        ("rows.txt", "", "expected a name that ends in .csv, .jsonl, .json, .ndjson, one of these and .gz"),
        ("rows.json", "[1]", "row 0"),
        (None, "", "no such file"),
    ],
)
def test_a_bad_data_file_is_one_sentence_and_nothing_is_uploaded(
    run: Run, service: FakeService, tmp_path: Path, name: str | None, text: str, message: str
) -> None:
    file = tmp_path / (name or "missing.jsonl")
    if name:
        file.write_text(text)
    exit_status, output, errors = run("train", file, "--model", "org/name")
    assert (exit_status, output, errors.count("\n")) == (1, "", 1)
    assert message in errors
    assert not service.posted
    assert not service.blobs


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/no-such-model"])
def test_a_missing_model_is_one_sentence_before_anything_is_uploaded(
    run: Run, service: FakeService, rows: Path, model: str
) -> None:
    exit_status, output, errors = run("train", rows, "--model", model)
    assert (exit_status, output, errors.count("\n")) == (1, "", 1)
    assert "there is no such directory" in errors
    assert not service.posted


def test_a_model_of_this_machine_is_sent_with_its_whole_path(
    run: Run, service: FakeService, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run("train", rows, "--model", "models/mine", "--detach")[0] == 0
    assert jobs(service)[0][1]["model"] == str(tmp_path / "models" / "mine")


@pytest.mark.parametrize(("ending", "expected"), [("failed", 1), ("cancelled", 2)])
def test_a_job_that_does_not_complete_is_one_sentence_and_nothing_is_pulled(
    run: Run, service: FakeService, rows: Path, tmp_path: Path, ending: str, expected: int
) -> None:
    error = {"reason": "invalid_model", "message": "found nothing\nat org/name", "log_path": None}
    service.jobs["one"] = [status("one", ending, error=error)]
    target = tmp_path / "model"
    exit_status, _, errors = run("train", rows, "--model", "org/name", "--job", "one", "--pull", target)
    assert exit_status == expected
    assert errors == f"trl-remote: job one {ending} (invalid_model): found nothing at org/name\n"
    assert not target.exists()


def test_a_result_that_could_not_be_pulled_is_refused_before_the_job(
    run: Run, service: FakeService, rows: Path, tmp_path: Path
) -> None:
    for words, message in (
        (("--pull", tmp_path), "it exists already"),
        (("--pull", tmp_path / "new", "--detach"), "nothing waits for the result"),
    ):
        exit_status, _, errors = run("train", rows, "--model", "org/name", *words)
        assert exit_status == 1
        assert message in errors
    assert not service.posted


def test_with_json_each_line_is_an_object_and_the_last_ones_are_the_result(
    run: Run, service: FakeService, rows: Path, tmp_path: Path
) -> None:
    service.jobs["one"] = [status("one"), status("one"), status("one", "completed")]
    service.files = dict(FILES)
    target = str(tmp_path / "model")
    words = ("--job", "one", "--interval", 0.01, "--json", "--pull", target)
    exit_status, output, errors = run("train", rows, "--model", "org/name", *words)
    assert (exit_status, errors) == (0, "")
    *changes, pulled = [json.loads(line) for line in output.splitlines()]
    assert [found["event"]["type"] for found in changes] == ["state", "state", "end"]
    assert [found["event"]["status"] for found in changes] == ["scheduled", "completed", "completed"]
    event = {"type": "pulled", "identifier": "one-final", "directory": target}
    assert pulled == {"job_uuid": "one", "id": None, "event": event}


PLACED = {"name": "tune", "is_new": True, "state": "scheduled", "evaluation": None}


@pytest.fixture
def pipeline(service: FakeService, tmp_path: Path) -> Path:
    """The file of a pipeline whose job the service has placed."""
    file = tmp_path / "pipeline.yaml"
    file.write_text("jobs: {tune: {model: org/name}}\n")
    service.placed = [{**PLACED, "job_uuid": "tune-5f0c1e2b9a7d"}]
    service.jobs["tune-5f0c1e2b9a7d"] = [status("tune-5f0c1e2b9a7d", "completed")]
    return file


def test_with_json_a_pipeline_is_lines_of_the_form_that_changes_have(run: Run, pipeline: Path) -> None:
    exit_status, output, errors = run("run", pipeline, "--json", "--interval", 0.01)
    assert (exit_status, errors) == (0, "")
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[0] == {"job_uuid": "tune-5f0c1e2b9a7d", "id": None, "event": {"type": "placed", **PLACED}}
    assert {tuple(line) for line in lines} == {("job_uuid", "id", "event")}
    assert [line["event"]["type"] for line in lines] == ["placed", "state", "end"]
    assert run("run", pipeline, "--json", "--detach")[1] == output.splitlines(keepends=True)[0]


def test_with_json_a_registration_is_a_line_of_the_form_that_changes_have(
    run: Run, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def provider_of(url: str) -> str:
        return "trl"

    async def register(model: str, client: object, provider: str | None) -> Any:
        return SimpleNamespace(model=f"trl/{model}", is_listed=False)

    stack = SimpleNamespace(url="http://there:8321", provider_of=provider_of, register=register)
    monkeypatch.setattr(whole_jobs, "stack_at", lambda given: stack)
    file = tmp_path / "job.json"
    file.write_text('{"job_uuid": "one"}')
    service.jobs["one"] = [status("one", "completed")]
    exit_status, output, errors = run("run", file, "--json", "--register", "--interval", 0.01)
    assert (exit_status, errors) == (0, "")
    event = {"type": "registered", "model": "trl/ft:one", "url": "http://there:8321", "listed": False}
    assert json.loads(output.splitlines()[-1]) == {"job_uuid": "one", "id": None, "event": event}


@pytest.mark.parametrize("columns", [30, 80])
def test_the_names_of_a_pipelines_jobs_are_whole_on_a_terminal(
    run: Run, service: FakeService, pipeline: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    name = "evaluate-what-was-tuned"
    job_uuid = f"{name}-with-a-long-request-5f0c1e2b9a7d"
    state = {"is_new": False, "state": "completed"}
    service.placed = [{**PLACED, **state, "name": name, "job_uuid": job_uuid}]
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = run("run", pipeline, "--detach")[1]
    assert output.splitlines()[1] == f"{name}  {job_uuid}  there..."


def test_run_submits_a_file_and_follows_its_job(run: Run, service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("service: {device: cpu}\njob: {job_uuid: one, model: org/name, finetuned_model: mine}\n")
    service.jobs["one"] = [status("one", "completed")]
    assert run("run", file) == (0, "job one\ncompleted\n", "")
    assert jobs(service) == [
        ("preference-optimize", {"job_uuid": "one", "model": "org/name", "finetuned_model": "mine"})
    ]


def test_run_changes_the_placement_of_a_job_and_its_name(run: Run, service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    options = {"seed": 1, "resources": {"nodes": 1, "cpus": 2}}
    file.write_text(json.dumps({"job_uuid": "one", "provider_options": options}))
    words = ("--nodes", 2, "--nproc-per-node", 4, "--resume-from", "one")
    assert run("run", file, *words, "--detach")[0] == 0
    assert run("run", file, "--job", "two", "--detach")[1] == "two\n"
    file.write_text("{}")
    assert run("run", file, "--detach")[0] == 0
    (_, resumed), (_, named), (_, unnamed) = jobs(service)
    assert resumed["provider_options"] == {
        "seed": 1,
        "resources": {"nodes": 2, "cpus": 2},
        "nproc_per_node": 4,
        "resume_from": "one",
    }
    assert resumed["job_uuid"].startswith("one-")  # one is another job
    assert named == {"job_uuid": "two", "provider_options": options}
    assert unnamed["job_uuid"].startswith("job-")


@pytest.mark.parametrize("options", ["fast", ["fast"], {"resources": "many"}])
def test_run_refuses_options_that_are_no_object(
    run: Run, service: FakeService, tmp_path: Path, options: object
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"job_uuid": "one", "provider_options": options}))
    exit_status, _, errors = run("run", file, "--nodes", 2)
    assert (exit_status, errors.count("\n")) == (1, 1)
    assert "provider_options" in errors
    assert not service.posted


def test_resume_queues_a_paused_job_again_and_follows_it(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.jobs["one"] = [status("one", "scheduled", state="paused"), status("one", "completed")]
    service.files = dict(FILES)
    target = tmp_path / "model"
    exit_status, output, errors = run("resume", "one", "--pull", target)
    assert (exit_status, errors) == (0, "")
    assert service.posted == [("post-training/jobs/one/resume", {})]
    assert output.splitlines()[0] == "completed"
    assert (target / "model.safetensors").is_file()


def test_a_job_that_has_ended_is_not_resumed_and_the_message_has_the_command_for_it(
    run: Run, service: FakeService
) -> None:
    service.jobs["one"] = [status("one", "failed")]
    exit_status, _, errors = run("resume", "one")
    assert (exit_status, errors.count("\n")) == (1, 1)
    assert "trl-remote run FILE --resume-from one" in errors
    assert not service.posted


@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", "0"),
        ("--batch-size", "-1"),
        ("--learning-rate", "0"),
        ("--learning-rate", "nan"),
        ("--learning-rate", "1e400"),
        ("--lora-r", "x"),
        ("--nodes", "0"),
        ("--method", "ppo"),
    ],
)
def test_an_option_that_is_no_number_is_refused_by_the_parser(
    rows: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(rows), "--model", "org/name", *words])
    assert ended.value.code == 2
    assert words[0] in (error := capsys.readouterr().err)
    assert ("is not finite" in error) == (words[1] in ("nan", "1e400"))


@pytest.mark.parametrize(("model", "stem"), [("sft1/final", "sft1-final"), ("job:sft1", "sft1"), ("org/name", "name")])
def test_an_export_is_named_after_its_model_with_the_job_of_a_checkpoint(
    run: Run, service: FakeService, model: str, stem: str
) -> None:
    assert run("export", model, "--to", "lora-gguf", "--detach")[0] == 0
    ((call, body),) = jobs(service)
    assert (call, body["job_uuid"][:-7]) == ("export", f"lora-gguf-{stem}")
