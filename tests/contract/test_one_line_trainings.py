"""From data to a model in one line, with real trainings: `trl-remote train`, `run`, `plot`, `make`, and `TrlClient`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from llama_stack_provider_trl_remote import AsyncTrlClient, TrlClient
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.request_files import read_request
from tests.contract.payloads import PAIRS, QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, ndjson, running_service
from tests.contract.stack import Json, poll
from tests.required import FULL, IN_FULL, in_full
from tests.tiny import REPOSITORY, tiny_model

pytestmark = pytest.mark.contract

Run = Callable[..., tuple[int, str, str]]
TARGETS = ("help", "train", "train-resume", "evaluate", "train-distributed", "train-multi-node", "export-viz")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def run(service: TrainingService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("TRL_SERVICE_URL", service.url)

    def run(*words: object) -> tuple[int, str, str]:
        exit_status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return exit_status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def trained(service: TrainingService) -> str:
    """A job of two epochs of four steps, with a checkpoint and an evaluation after each."""
    client = TrlClient(service.url)
    rows, held_out = client.upload(QUESTIONS, "questions"), client.upload(QUESTIONS[:2], "held-out")
    body = sft("trained", rows.dataset_id)
    body["training_config"]["n_epochs"] = 2
    body["training_config"]["data_config"]["validation_dataset_id"] = held_out.dataset_id
    assert client.wait(client.submit(body), timeout=90, interval=0.1)["status"] == "completed"
    return "trained"


def test_the_quickstarts_job_is_one_line_from_an_empty_service_to_a_model_that_was_pulled(
    run: Run, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    target = tmp_path / "model"
    data = REPOSITORY / "examples" / "data"
    words = ("--model", tiny_model(), "--lora-r", 16, "--learning-rate", 1e-3, "--max-steps", 4, "--merge")
    held_out = ("--eval-data", data / "sft_validation.jsonl")
    exit_status, output, errors = run("train", data / "sft_train.jsonl", *words, *held_out, "--pull", target)
    assert exit_status == 0, errors
    rows = [len((data / f"sft_{name}.jsonl").read_text().splitlines()) for name in ("train", "validation")]
    assert [line.split(": ")[1] for line in output.splitlines()[:2]] == [f"{count} rows" for count in rows]
    assert "-merged is in " in output
    AutoModelForCausalLM.from_pretrained(target)


def test_pairs_are_trained_with_dpo_and_every_weight_without_lora_options(
    service: TrainingService, run: Run, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_bytes(ndjson(PAIRS))
    exit_status, output, _ = run("train", pairs, "--model", tiny_model(), "--job", "pairs", "--max-steps", 1, "--json")
    assert exit_status == 0
    changes = [json.loads(line)["event"] for line in output.splitlines()]
    types = [change["type"] for change in changes]
    assert (types[0], types[-1], types.count("progress"), types.count("finished")) == ("state", "end", 1, 1)
    assert changes[-1]["status"] == "completed"
    assert "effective_config" not in changes[-1]["resources_allocated"]
    effective = service.status("pairs")["resources_allocated"]["effective_config"]
    assert (effective["method"]["algorithm"], effective["lora"]) == ("dpo", None)


def test_a_model_that_cannot_be_found_is_one_sentence_and_exit_status_1(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(ndjson(QUESTIONS))
    for model in (tmp_path, "org/no-such-model"):  # a directory without a model; an id that no cache has
        exit_status, _, errors = run("train", rows, "--model", model)
        assert (exit_status, errors.count("\n")) == (1, 1), errors
        assert errors.startswith("trl-remote: ")
        assert str(model) in errors


@pytest.mark.parametrize("kind", ["toml", *in_full("json", "yaml")])  # those that make reads below
def test_run_takes_a_job_in_each_format_to_its_end(
    service: TrainingService, trained: str, run: Run, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / f"job.{kind}"
    body = sft(f"from-{kind}", "questions")
    body["training_config"]["max_steps_per_epoch"] = 1
    data = body["training_config"].pop("data_config")
    if kind == "toml":
        tables = {"training_config.optimizer_config": body["training_config"].pop("optimizer_config")}
        top = {"job_uuid": body["job_uuid"], "model": body["model"]}
        tables = {"": top, "training_config": body["training_config"], **tables, "training_config.data_config": data}
        text = "".join(
            (f"[{name}]\n" if name else "") + "".join(f"{key} = {json.dumps(v)}\n" for key, v in values.items())
            for name, values in tables.items()
        )
    else:
        body["training_config"]["data_config"] = data
        text = json.dumps(body) if kind == "json" else yaml.safe_dump({"job": body, "service": {}})
    file.write_text(text)
    exit_status, output, errors = run("run", file, "--interval", 0.1)
    assert (exit_status, errors) == (0, "")
    assert f"checkpoint from-{kind}-final: " in output


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "examples" / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_a_recipe_is_submitted_as_it_is(
    service: TrainingService, trained: str, run: Run, recipe: Path, tmp_path: Path
) -> None:
    """Its model and its ranks are not here, and its dataset is registered: it is refused for nothing else."""
    service.register("my-rows", QUESTIONS)
    body = read_request(str(recipe))
    exit_status, output, errors = run("run", recipe, "--nproc-per-node", 1, "--detach")
    assert (exit_status, errors) == (0, ""), errors
    assert output == f"{body['job_uuid']}\n"
    service.cancel(body["job_uuid"])


def test_a_paused_job_is_resumed_and_followed(service: TrainingService, trained: str, run: Run) -> None:
    body = sft("pausing", "questions", provider_options={"priority": "low"})
    body["training_config"]["n_epochs"] = 500
    service.submit("/post-training/supervised-fine-tune", body)
    poll(lambda: service.status("pausing")["resources_allocated"]["progress"]["step"] > 2, "it trains", timeout=60)
    assert run("jobs", "pause", "pausing", "--json")[0] == 0
    service.wait_state("pausing", "paused")
    words = [sys.executable, "-m", "llama_stack_provider_trl_remote", "resume", "pausing", "--interval", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as resumed:
        service.wait_state("pausing", "in_progress")
        service.cancel("pausing")
        output, errors = resumed.communicate(timeout=60)
    assert resumed.returncode == 2
    assert "cancelled" in output
    assert errors == "trl-remote: job pausing cancelled\n"


@pytest.mark.parametrize("source", ["service", "data directory"])
def test_plots_of_each_kind_show_the_jobs(
    service: TrainingService, trained: str, run: Run, tmp_path: Path, source: str
) -> None:
    more = () if source == "service" else ("--data-dir", service.data_dir, "--url", "http://127.0.0.1:1")
    is_whole = source == "service" or FULL
    for kind in ("png", *(("svg", "html") if is_whole else ())):
        file = tmp_path / f"loss.{kind}"
        exit_status, output, errors = run(
            "plot", trained, "--metric", "loss", "--metric", "grad_norm", "-o", file, *more
        )
        assert (exit_status, output, errors) == (0, f"{file}: loss, grad_norm of trained\n", "")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    if is_whole:
        svg = ElementTree.parse(tmp_path / "loss.svg")
        assert svg.getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert_page_needs_no_network(tmp_path / "loss.html")
    exit_status, _, errors = run("plot", trained, "--metric", "los", "-o", tmp_path / "x.png", *more)
    assert (exit_status, errors.count("\n")) == (1, 1)
    assert "grad_norm" in errors


def test_a_plot_holds_the_points_of_its_jobs(service: TrainingService, trained: str, tmp_path: Path) -> None:
    client = TrlClient(service.url)
    page = client.plot(trained, output=tmp_path / "loss.html", smoothing=0).read_text()
    points = client.metrics(trained)
    losses = [point["metrics"]["loss"] for point in points if point["kind"] == "train"]
    assert len(losses) == 8
    assert json.dumps(losses, separators=(",", ":")) in page.replace(" ", "")
    validation = [point["metrics"]["eval_loss"] for point in points if point["kind"] == "validation"]
    assert len(validation) == 2
    assert json.dumps(validation, separators=(",", ":")) in page.replace(" ", "")


def test_the_same_points_are_the_same_picture(service: TrainingService, trained: str, tmp_path: Path) -> None:
    client = TrlClient(service.url)
    for kind in ("png", "svg"):
        files = [client.plot(trained, output=tmp_path / f"{n}.{kind}").read_bytes() for n in range(2)]
        assert files[0] == files[1]


def assert_page_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert "Plotly.newPlot" in text
    assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)=""", text.replace("\\", ""))


def test_both_clients_read_the_same_events_and_a_job_can_be_followed_live(
    service: TrainingService, trained: str, tmp_path: Path
) -> None:
    client = TrlClient(service.url)
    body = sft("followed", "questions")
    job = client.submit(body)
    live = list(client.events(job))
    assert client.status(job)["status"] == "completed"

    async def again() -> tuple[list[Json], list[Json]]:
        other = AsyncTrlClient(service.url)
        stored = [event.event async for event in other.events(job, follow=False)]
        rest = [event.event async for event in other.events(job, live[2].id)]
        return stored, rest

    stored, rest = asyncio.run(again())
    assert [event.event for event in live] == stored
    assert rest == stored[3:]
    assert [event["type"] for event in stored][-1] == "finished"
    assert client.pull(job, tmp_path / "model") == "followed-final"
    assert (tmp_path / "model" / "config.json").is_file()
    assert client.preflight(sft("followed-2", "questions"))["fits"]


def test_events_of_a_service_that_is_killed_and_started_again_arrive_once_each(
    service: TrainingService, trained: str
) -> None:
    client = TrlClient(service.url)
    body = sft("interrupted", "questions")
    body["training_config"]["n_epochs"] = 10
    live = []
    for event in client.events(client.submit(body)):
        live.append(event)
        if event.event["type"] == "progress" and event.event["step"] == 5:
            service.kill()
            service.start()
    assert client.status("interrupted")["status"] == "completed"
    assert live == list(client.events("interrupted", follow=False))
    steps = [event.event["step"] for event in live if event.event["type"] == "progress"]
    assert steps == list(range(1, 41))


def make(service: TrainingService, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a target of the Makefile as a user does, with this test's Python."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRL_SERVICE_")}
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", f"VIZ_PORT={service.port}", *map(str, words)]
    return subprocess.run(
        command, cwd=REPOSITORY, env={**variables, **environ}, capture_output=True, text=True, timeout=100
    )


def test_the_makefile_has_its_targets_with_a_line_each() -> None:
    rules = re.findall(r"^([a-z][a-z-]*):\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {name: lines.count("\n") for name, lines in rules} == dict.fromkeys(TARGETS, 1)


@pytest.mark.parametrize(
    ("target", "variable"),
    [
        ("train", "DATA_PATH"),
        ("train-resume", "CHECKPOINT"),
        ("evaluate", "DATA"),
        ("train-distributed", "CONFIG"),
        ("train-multi-node", "CONFIG"),
    ],
)
def test_a_target_names_the_variable_that_it_lacks(service: TrainingService, target: str, variable: str) -> None:
    done = make(service, target)
    assert done.returncode == 2
    assert f"{variable} is not set: make {target} {variable}=..." in done.stderr


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("train", "DATA_PATH=a.jsonl", "MODEL=m", "MONITOR=false"), 'train "a.jsonl" --model "m" --detach'),
        (("evaluate", "MODEL=m", "DATA=a.jsonl", "ARGS=--json"), 'evaluate "m" "a.jsonl" --json'),
        (("train-distributed", "WORLD_SIZE=2", "CONFIG=job.yaml"), 'run "job.yaml" --nproc-per-node "2"'),
        (("train-multi-node", "NUM_NODES=2", "NODE_RANK=0", "CONFIG=job.yaml"), 'run "job.yaml" --nodes "2"'),
    ],
)
def test_a_target_runs_the_documented_command(service: TrainingService, words: tuple[str, ...], command: str) -> None:
    printed = make(service, "--dry-run", *words).stdout.split()
    assert " ".join(printed) == f"{sys.executable} -m llama_stack_provider_trl_remote {command}"


def test_make_train(service: TrainingService, tmp_path: Path) -> None:
    rows = tmp_path / "my rows.jsonl"
    rows.write_bytes(ndjson(QUESTIONS))
    common = (f"DATA_PATH={rows}", f"MODEL={tiny_model()}")
    # A variable of torchrun, which is not about this target.
    done = make(service, "train", *common, "MONITOR=true", "ARGS=--max-steps 1", MASTER_ADDR="127.0.0.2")
    assert done.returncode == 0, done.stderr
    assert "completed" in done.stdout
    if FULL:
        done = make(service, "train", *common, "MONITOR=false", "ARGS=--max-steps 1 --job made")
        assert done.stdout.splitlines()[-1] == "made"
        service.wait("made", "completed")


def test_make_train_resume(service: TrainingService, trained: str, tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    body = sft("resumed", "questions")
    body["training_config"]["n_epochs"] = 2
    body["training_config"]["data_config"]["validation_dataset_id"] = "held-out"
    config.write_text(json.dumps(body))
    done = make(service, "train-resume", "CHECKPOINT=trained", f"CONFIG={config}", "ARGS=--job resumed")
    assert done.returncode == 0, done.stderr
    (attempt,) = service.status("resumed")["resources_allocated"]["attempts"]
    assert attempt["start_step"] == 4
    service.post(f"{JOBS}/resumed/pause")
    done = make(service, "train-resume", "CHECKPOINT=resumed")
    assert "only a paused one can be resumed" in done.stderr


@IN_FULL
def test_make_evaluate(service: TrainingService, trained: str, tmp_path: Path) -> None:
    """The measures are those of the job's own evaluation, which is of the same weights and rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(ndjson(QUESTIONS[:2]))
    final = service.status(trained)["checkpoints"][-1]
    done = make(
        service, "evaluate", f"MODEL={final['path']}", f"DATA={rows}", "ARGS=--device cpu --json", HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["loss"] == pytest.approx(final["training_metrics"]["validation_loss"], rel=1e-4)
    assert found["perplexity"] == pytest.approx(final["training_metrics"]["perplexity"], rel=1e-4)


@IN_FULL
def test_make_train_distributed(service: TrainingService, trained: str, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump({"job": sft("distributed", "questions")}))
    done = make(service, "train-distributed", "WORLD_SIZE=2", f"CONFIG={config}")
    assert done.returncode == 0, done.stderr
    assert service.get(f"{JOBS}/distributed/logs", rank=1).status_code == 200


@IN_FULL
def test_make_train_multi_node(service: TrainingService, trained: str, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump({"job": sft("multi-node", "questions")}))
    first = make(service, "train-multi-node", "NUM_NODES=1", "NODE_RANK=0", "MASTER_ADDR=127.0.0.1", f"CONFIG={config}")
    assert first.returncode == 0, first.stderr
    assert service.status("multi-node")["status"] == "completed"
    elsewhere = make(service, "train-multi-node", "NUM_NODES=1", "MASTER_ADDR=127.0.0.2", f"CONFIG={config}")
    assert f"http://127.0.0.2:{service.port} accepts no connection" in elsewhere.stderr
    second = make(
        service, "train-multi-node", "NUM_NODES=2", "NODE_RANK=1", "MASTER_ADDR=127.0.0.1", f"CONFIG={config}"
    )
    # The agent of a node: on this machine, which no other one reaches at this address.
    assert "a worker needs a token of the service" in second.stderr


def test_make_export_viz(service: TrainingService, trained: str, tmp_path: Path) -> None:
    for words in ((f"JOB={trained}",), ()):  # the newest job, whose trainings are those of this module
        file = tmp_path / f"{len(words)}.html"
        done = make(service, "export-viz", f"OUTPUT={file}", *words)
        assert done.returncode == 0, done.stderr
        assert_page_needs_no_network(file)
