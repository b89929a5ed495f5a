"""`trl-remote` as a user types it, against a service that is played on loopback."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.requests.bodies import (
    PreferenceOptimizeRequest,
    SupervisedFineTuneRequest,
    algorithm_of,
)
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.methods import METHODS
from llama_stack_provider_trl_remote.cli import main as cli
from llama_stack_provider_trl_remote.cli.terminal import (
    bar,
    duration,
    node_lines,
    progress_line,
    progress_within,
    table,
)
from llama_stack_provider_trl_remote.cli.watch import new_lines
from llama_stack_provider_trl_remote.cli.whole_jobs import training_request
from llama_stack_provider_trl_remote.nodes import start
from llama_stack_provider_trl_remote.nodes.joining import how_to_add_a_node
from tests.fake_service import FakeService, Run, command_line, fake_service, ndjson, progress, status
from tests.tiny import REPOSITORY

ROWS = [{"prompt": "Zwei plus zwei?", "completion": "Vier."}, {"prompt": "你好", "completion": "Hallo"}]


@pytest.fixture
def service() -> Iterator[FakeService]:
    with fake_service() as service:
        yield service


@pytest.fixture
def run(service: FakeService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_line(service, monkeypatch, capsys)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_help_names_every_command_and_needs_no_http_library() -> None:
    script = """
import sys
from llama_stack_provider_trl_remote.cli.main import main
try:
    main(["jobs", "--help"])
finally:
    print(*sorted({"aiohttp", "pydantic", "torch", "fastapi", "llama_stack"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for command in ("submit", "list", "show", "watch", "logs", "cancel", "pause", "resume", "pull"):
        assert f"\n    {command} " in done.stdout
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("body", "words", "call"),
    [
        ({"finetuned_model": "m"}, (), "preference-optimize"),
        ({}, (), "supervised-fine-tune"),
        ({}, ("--algorithm", "dpo"), "preference-optimize"),
        ({"finetuned_model": "m"}, ("--algorithm", "sft"), "supervised-fine-tune"),
    ],
)
def test_submit_makes_the_call_that_the_request_is_meant_for(
    run: Run, service: FakeService, tmp_path: Path, body: dict[str, object], words: tuple[str, ...], call: str
) -> None:
    body = {"job_uuid": "one", **body}
    file = tmp_path / "job.json"
    file.write_text(json.dumps(body))
    assert run("jobs", "submit", file, *words) == (0, "one\n", "")
    assert service.posted == [(f"post-training/{call}", body)]


def test_submit_reads_standard_input(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'\xef\xbb\xbf{"job_uuid": "piped"}')))
    assert run("jobs", "submit", "-")[:2] == (0, "piped\n")
    assert service.posted[0][1] == {"job_uuid": "piped"}


@pytest.mark.parametrize(("text", "message"), [("{", "it is not JSON"), ("[]", "found a list, expected an object")])
def test_submit_reports_what_is_wrong_with_a_file(run: Run, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.json"
    file.write_text(text)
    exit_status, output, errors = run("jobs", "submit", file)
    assert (exit_status, output) == (1, "")
    assert str(file) in errors
    assert message in errors
    exit_status, _, errors = run("jobs", "submit", tmp_path / "missing.json")
    assert exit_status == 1
    assert "No such file" in errors
    assert "missing.json" in errors


def test_the_services_own_sentence_is_shown(run: Run, service: FakeService) -> None:
    assert run("jobs", "show", "nobody") == (1, "", "trl-remote: job 'nobody' not found\n")
    service.trouble = [401]
    exit_status, _, errors = run("jobs", "list")
    assert exit_status == 1
    assert "the sentence of a 401" in errors
    assert "TRL_SERVICE_TOKEN" in errors


def test_a_service_that_is_down_is_one_sentence(run: Run, service: FakeService) -> None:
    exit_status, output, errors = run("jobs", "list", "--url", "http://127.0.0.1:1")
    assert (exit_status, output) == (1, "")
    assert errors.count("\n") == 1
    assert "http://127.0.0.1:1" in errors
    assert "run-remote-fsdp-server.sh" in errors
    assert run("jobs", "list", "--url", "8322")[0] == 1


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    with fake_service(token="s3cret") as guarded:
        assert run("jobs", "list", "--url", guarded.url)[0] == 1
        monkeypatch.setenv("TRL_SERVICE_TOKEN", "s3cret")
        assert run("jobs", "list", "--url", guarded.url)[0] == 0


def test_list_shows_every_job_of_every_page_and_those_of_a_status(run: Run, service: FakeService) -> None:
    names = [f"job-{n:03}" for n in range(450)]
    service.jobs = {name: [status(name, "completed" if name == "job-400" else "scheduled")] for name in names}
    _, output, _ = run("jobs", "list")
    assert [line.split()[-1] for line in output.splitlines()] == names
    assert service.seen["GET /v1/post-training/jobs"] == 3
    _, output, _ = run("jobs", "list", "--status", "completed")
    assert output == "2026-11-21 10:00:00  completed            0/?  job-400\n"


@pytest.mark.parametrize(("ending", "expected"), [("completed", 0), ("failed", 1), ("cancelled", 2)])
def test_watch_ends_with_the_job_and_its_exit_status_shows_how(
    run: Run, service: FakeService, ending: str, expected: int
) -> None:
    last = status("job", ending, error={"reason": "hung", "message": "found nothing", "log_path": "/log"})
    last["checkpoints"] = [{"identifier": "job-final", "path": "/there/final"}]
    running = [status("job", "in_progress", progress=progress(n, loss=1 / n)) for n in (1, 1, 1, 5)]
    service.jobs["job"] = [status("job", detail="waits for cpu"), *running, last]
    exit_status, output, errors = run("jobs", "watch", "job", "--interval", 0.01)
    assert (exit_status, errors) == (expected, "")
    assert output.splitlines() == [
        "waiting  waits for cpu",
        "running   10% step 1/10  loss 1.000",  # once, however often it is checked
        "running   50% step 5/10  loss 0.200",
        ending,
        "hung: found nothing",
        "log: /log",
        "checkpoint job-final: /there/final",
    ]


def test_watch_ends_with_what_a_job_has_measured(run: Run, service: FakeService) -> None:
    result = {"loss": 2.3456789, "rows": 8, "perplexity": None, "checks": {"json": 0.25}, "exact": True, "path": "/a"}
    service.jobs["job"] = [status("job", "completed", result=result)]
    assert run("jobs", "watch", "job")[1].splitlines() == ["completed", "loss 2.34568", "rows 8", "checks.json 0.25"]
    service.jobs["job"] = [status("job", "completed", result={"tasks": {f"task-{n}": 0.5 for n in range(42)}})]
    _, first, *_, last = run("jobs", "watch", "job")[1].splitlines()
    assert (first, last) == ("tasks.task-0 0.5", "2 more: trl-remote jobs show job")


def test_watch_ends_with_the_best_trial_of_a_search(run: Run, service: FakeService) -> None:
    best = {"job_uuid": "job-trial-2", "value": 1.23456789, "values": {"algorithm_config.rank": 8, "lr": 0.001}}
    for found, lines in (
        ({"best": best}, ["best job-trial-2: eval_loss 1.23457 with algorithm_config.rank=8, lr=0.001"]),
        ({"best": None}, []),
    ):
        service.jobs["job"] = [status("job", "completed", search={"objective": "eval_loss", **found})]
        assert run("jobs", "watch", "job")[1].splitlines() == ["completed", *lines]


def test_watch_outlives_the_service(run: Run, service: FakeService) -> None:
    service.jobs["job"] = [status("job"), status("job", "completed")]
    polls: list[int] = []
    original = service._job

    def job(job_uuid: str, what: str):  # type: ignore[no-untyped-def]
        polls.append(1)
        if len(polls) == 1:
            service.trouble = [503, "drop", "drop", 500]
        return original(job_uuid, what)

    service._job = job  # type: ignore[method-assign]
    exit_status, output, errors = run("jobs", "watch", "job", "--interval", 0.01)
    assert (exit_status, output) == (0, "waiting\ncompleted\n")
    assert errors.count("retrying every 0.01 s") == 1


def test_watch_ends_when_the_job_is_deleted(run: Run, service: FakeService) -> None:
    assert run("jobs", "watch", "gone")[0] == 1


def test_watch_as_json_prints_each_change_once_and_continues_behind_any_of_its_lines(
    run: Run, service: FakeService
) -> None:
    steps = [("1-100", {"type": "progress", "step": 1}), ("1-200", {"type": "progress", "step": 2})]
    running = status("job", "in_progress", detail="", device="cpu", attempt=1)
    last = status("job", "completed", device="cpu", attempt=1)

    def watched(*words: str, waits: bool = True) -> list[tuple[str, str, object]]:
        service.events = list(steps)
        service.jobs["job"] = [*([status("job", detail="waits")] if waits else []), running, running, last]
        exit_status, output, errors = run("jobs", "watch", "job", "--json", "--interval", 0.01, *words)
        assert (exit_status, errors) == (0, "")
        lines = [json.loads(line) for line in output.splitlines()]
        assert {line["job_uuid"] for line in lines} == {"job"}
        whole = lines.pop()
        assert whole == {"job_uuid": "job", "id": "1-200", "event": {"type": "end", **last}}
        return [
            (one["id"], one["event"]["type"], one["event"].get("detail", one["event"].get("step"))) for one in lines
        ]

    assert watched() == [
        ("", "state", "waits"),
        *(("1-100", "progress", 1), ("1-200", "progress", 2)),
        *(("1-200", "state", ""), ("1-200", "state", None)),
    ]
    behind = [("1-100", "state", ""), ("1-200", "progress", 2), ("1-200", "state", None)]
    assert watched("--after", "1-100", waits=False) == behind


def test_watch_as_json_of_several_jobs_continues_each(run: Run, service: FakeService) -> None:
    service.events = [("1-100", {"type": "progress", "step": 1})]
    service.jobs = {name: [status(name), status(name, "in_progress"), status(name, "failed")] for name in ("a", "b")}
    exit_status, output, errors = run("jobs", "watch", "a", "b", "--json", "--interval", 0.01)
    lines = [json.loads(line) for line in output.splitlines()]
    assert (exit_status, errors, lines[-1]["id"]) == (1, "", "1-100~1-100")
    assert [line["job_uuid"] for line in lines if line["event"]["type"] == "progress"] == ["a", "b"]
    service.jobs = {name: [status(name, "cancelled")] for name in ("a", "b")}
    exit_status, output, _ = run("jobs", "watch", "a", "b", "--json", "--after", "~1-100")
    lines = [json.loads(line) for line in output.splitlines()]
    assert exit_status == 2
    assert [line["job_uuid"] for line in lines if line["event"]["type"] == "progress"] == ["a"]
    for words, wrong in (
        (("a", "--json"), "a watch of the same jobs, with 1 part"),
        (("a", "b"), "it continues a watch with --json"),
    ):
        exit_status, output, errors = run("jobs", "watch", *words, "--after", "~1-100")
        assert (exit_status, output) == (1, "")
        assert wrong in errors


def test_watch_draws_a_bar_on_a_terminal(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    service.jobs["job"] = [status("job", "in_progress", progress=progress(5)), status("job", "completed")]
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    run("jobs", "watch", "job", "--interval", 0.01)
    drawn, *rest = terminal.getvalue().split("\r")[1:]
    assert drawn.rstrip() == "[############            ] running   50% step 5/10"
    assert len(drawn) == 79
    assert rest[-1] == "completed\n"


def test_several_jobs_are_watched_at_once_each_with_its_name(run: Run, service: FakeService) -> None:
    service.jobs["a"] = [status("a"), status("a", "completed")]
    service.jobs["long"] = [
        status("long"),
        *(status("long", "in_progress", progress=progress(n)) for n in (5, 6, 7, 8)),
        status("long", "failed"),
    ]
    exit_status, output, errors = run("jobs", "watch", "a", "long", "a", "--interval", 0.01)
    assert (exit_status, errors) == (1, "")
    lines = output.splitlines()
    assert sorted(lines[:2]) == ["a     waiting", "long  waiting"]
    assert lines.index("a     completed") < lines.index("long  running   80% step 8/10"), "not when all have ended"
    assert (len(lines), lines[-1]) == (8, "long  failed")
    service.jobs |= {"b": [status("b", "cancelled")], "c": [status("c", "completed")]}
    assert run("jobs", "watch", "b", "c")[0] == 2
    assert run("jobs", "watch", "b", "long")[0] == 1
    assert run("jobs", "watch", "c")[0] == 0
    assert run("jobs", "watch", "c", "nobody")[::2] == (1, "trl-remote: job 'nobody' not found\n")


def test_watch_redraws_the_lines_of_several_jobs_on_a_terminal(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.jobs["a"] = [status("a", "in_progress", progress=progress(5)), status("a", "completed")]
    service.jobs["b"] = [status("b"), status("b", "completed")]
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    run("jobs", "watch", "a", "b", "--interval", 0.01)
    assert displayed(terminal.getvalue()) == ["a  completed", "b  completed"]
    assert "a  [############            ] running   50% step 5/10" in terminal.getvalue()


def displayed(written: str) -> list[str]:
    """The lines of a terminal after what was written: carriage returns, lines up, and clearing to the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[AJ]|\r|\n|[^\x1b\r\n]+", written):
        if part.startswith("\x1b["):
            lines, row = (lines, row - int(part[2:-1])) if part[-1] == "A" else (lines[: row + 1], row)
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def test_jobs_are_listed_by_a_column_as_a_table(run: Run, service: FakeService) -> None:
    service.jobs["job"] = [status("job")]
    row = {"state": "completed", "status": "completed", "algorithm": "sft", "model": "org/tiny", "step": 5}
    row |= {"total_steps": 9, "scheduled_at": "2026-11-21T10:00:00Z", "created_by": "ada", "eval_loss": None}
    service.queue = [{**row, "job_uuid": name, "loss": loss} for name, loss in (("b", 0.5), ("a", 1.25), ("c", None))]
    service.queue.append({**row, "job_uuid": "d", "state": "paused", "status": "scheduled", "loss": None})
    exit_status, output, errors = run("jobs", "list", "--sort", "loss")
    assert (exit_status, errors, service.sorts) == (0, "", ["loss", "loss"])
    lines = output.splitlines()
    assert lines[0].split()[:6] == ["job", "state", "method", "model", "loss", "eval"]
    assert [line.split()[0] for line in lines[1:]] == ["b", "a", "c", "d"]
    assert lines[2].split() == ["a", "completed", "sft", "tiny", "1.25", "5/9", "2026-11-21", "10:00:00", "ada"]
    output = run("jobs", "list", "--reverse", "--status", "scheduled", "--json")[1]
    assert ([job["job_uuid"] for job in json.loads(output)], service.sorts[-1]) == (["d"], "-created")
    assert run("jobs", "list", "--reverse", "--status", "waiting", "--json")[1] == output


SHOWN = """\
job         dpo-1
state       running, attempt 2 on cuda:0
earlier     attempt 1 ended at step 5: rank_failed: killed by SIGKILL.
log         /runs/dpo-1/rank-0.log
progress    [########                ]  34% step 12/35  1:05 left
train       step 12: loss 2.31, rewards/margins 0.125, peak_memory_bytes 3.00
            GiB, memory_bytes_rank_1 2.00 GiB
validation  step 12: eval_loss 2.5
warning     the loss has not fallen in 100 steps: try a higher learning rate, or
            look at the rows in trl-remote datasets preview
method      dpo, lora of rank 16
model       org/a-model-whose-name-is-longer-than-what-a-terminal-has-beside-the-names
data        pairs, more; evaluated on held-out
submitted   2026-11-21 10:00:00 by ada
checkpoint  dpo-1-checkpoint-5 (loss 2.1, eval loss 2.6):
            /a/directory/that/stays/whole/however/long/it/is/so/that/it/can/be/copied/5
next        trl-remote jobs watch dpo-1
            trl-remote jobs logs dpo-1
            trl-remote jobs cancel dpo-1
"""


def test_a_job_is_shown_as_facts_that_fit_into_a_terminal(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    progressed = progress(12, 35, loss=2.3104, tokens_per_second=1870.4, eta_seconds=65.2)
    path = "/a/directory/that/stays/whole/however/long/it/is/so/that/it/can/be/copied/5"
    losses = {"train_loss": 2.1, "validation_loss": 2.6, "perplexity": None}
    config = {
        "algorithm": "dpo",
        "lora": {"method": "lora", "rank": 16},
        "model": "org/a-model-whose-name-is-longer-than-what-a-terminal-has-beside-the-names",
        "dataset": {"dataset_id": "pairs"},
        "mixed_with": [{"dataset": {"dataset_id": "more"}}],
        "validation": {"dataset_id": "held-out"},
        "optimizer": {"lr": 0.001},
    }
    warning = "the loss has not fallen in 100 steps: try a higher learning rate, or look at the rows in trl-remote"
    resources = {"attempt": 2, "device": "cuda:0", "created_by": "ada", "log_path": "/runs/dpo-1/rank-0.log"}
    failed = {"attempt": 1, "step": 5, "reason": "rank_failed", "message": "killed by SIGKILL.\nIts log:\n{}"}
    resources["attempts"] = [failed, {"attempt": 2, "step": 12, "reason": None, "message": None}]
    resources |= {"warnings": [f"{warning} datasets preview"], "effective_config": config}
    found = status("dpo-1", "in_progress", progress=progressed, **resources)
    found["checkpoints"] = [{"identifier": "dpo-1-checkpoint-5", "path": path, "training_metrics": losses}]
    service.jobs["dpo-1"] = [found]
    measured = {
        "train": {
            "loss": 2.31,
            "rewards/margins": 0.125,
            "peak_memory_bytes": 3.0 * 2**30,
            "memory_bytes_rank_1": 2**31,
        },
        "validation": {"eval_loss": 2.5},
    }
    service.points = [{"kind": kind, "step": 12, "metrics": metrics} for kind, metrics in measured.items()]
    service.points.insert(0, {"kind": "train", "step": 12, "metrics": {"loss": 9.9}})  # an older one is not shown
    monkeypatch.setenv("COLUMNS", "80")
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        assert run("jobs", "show", "dpo-1") == (0, SHOWN, "")
    lines = run("jobs", "show", "dpo-1", "--config")[1].splitlines()
    assert f"warning     {warning} datasets preview" in lines, "what is no terminal has no width"
    assert "            optimizer.lr = 0.001" in lines
    assert json.loads(run("jobs", "show", "dpo-1", "--json")[1]) == found


TRIAL = {"number": 1, "total_steps": 4, "values": {"lr": 1}, "pruned": None}


@pytest.mark.parametrize(
    ("word", "resources", "lines"),
    [
        (
            "failed",
            {"error": {"reason": "out_of_memory", "message": "found 9 GiB\ntry LoRA"}},
            ["reason  out_of_memory: found 9 GiB", "        try LoRA", "next    trl-remote jobs logs job"],
        ),
        (
            "scheduled",
            {"detail": "waits for cpu", "after": [{"job_uuid": "base", "state": "in_progress"}]},
            ["reason  waits for cpu", "after   base (running)", "next    trl-remote jobs watch job"],
        ),
        ("scheduled", {"state": "paused"}, ["state   paused", "next    trl-remote resume job"]),
        (
            "completed",
            {"effective_config": {"work": {"kind": "evaluate"}}, "result": {"loss": 2.5, "checks": {"exact": 0.5}}},
            [
                "result  loss 2.5",
                "        checks.exact 0.5",
                "method  evaluate",
                "next    trl-remote jobs pull job DIR",
            ],
        ),
        (
            "completed",
            {"search": {"best": {"job_uuid": "job-3", "value": 0.5, "values": {"lr": 1}}, "objective": "eval_loss"}},
            ["best    job-3: eval_loss 0.5 with lr=1", "next    trl-remote jobs show job-3"],
        ),
        (
            "completed",
            {
                "effective_config": {"algorithm": "sft"},
                "search": {
                    "best": {"job_uuid": "job-1", "value": 0.5, "values": {"lr": 1}},
                    "objective": "eval_loss",
                    "trials": [
                        {**TRIAL, "job_uuid": "job-1", "state": "completed", "step": 4, "value": 0.5},
                        {
                            **TRIAL,
                            "job_uuid": "job-2",
                            "state": "completed",
                            "step": 2,
                            "value": 0.75,
                            "pruned": "it was behind",
                        },
                        {**TRIAL, "job_uuid": "job-3", "state": "failed", "step": 1, "value": None},
                    ],
                },
            },
            [
                "trials  job-1: completed, 4/4 steps, eval_loss 0.5 with lr=1",
                "        job-2: pruned, 2/4 steps, eval_loss 0.75 with lr=1",
                "        job-3: failed, 1/4 steps with lr=1",
                "next    trl-remote chat job",
                "        trl-remote jobs show job-1",
            ],
        ),
        (
            "completed",
            {"effective_config": {"algorithm": "sft"}},
            ["method  sft, all weights", "next    trl-remote chat job", "        trl-remote jobs pull job DIR"],
        ),
    ],
)
def test_a_job_is_shown_with_what_its_state_leads_to(
    run: Run, service: FakeService, word: str, resources: dict[str, object], lines: list[str]
) -> None:
    service.jobs["job"] = [found := status("job", word, **resources)]
    found["checkpoints"] = [{"identifier": "job-final", "path": "/there"}] if word == "completed" else []
    shown = [
        re.sub(r"^(\w*) +", lambda found: f"{found[1]:<8}", line) for line in run("jobs", "show", "job")[1].splitlines()
    ]
    assert [line for line in shown if line in lines] == lines


JSON_COMMANDS = {
    "jobs submit FILE": {"job_uuid": "one"},
    "jobs list": [{"job_uuid": "job", "status": "completed", "scheduled_at": "2026-11-21T10:00:00Z"}],
    "jobs show job": status("job", "completed"),
    "jobs watch job": {"job_uuid": "job", "id": "", "event": {"type": "end", **status("job", "completed")}},
    "jobs logs job": {"rank": "0", "lines": ["one", "two"]},
    "jobs cancel job": status("job", "completed"),
    "jobs pause job": status("job", "scheduled", state="pause"),
    "jobs resume job": status("job", "scheduled", state="resume"),
    "jobs pull job DIR": {"identifier": "job-final", "directory": "DIR"},
    "datasets add ROWS --id mine": {"dataset_id": "mine", "num_rows": 1, "sha256": "DIGEST"},
    "datasets add ray:///shared/rows.parquet --id mine": {"dataset_id": "mine", "uri": "ray:///shared/rows.parquet"},
    "datasets list": [],
    "nodes": [{"node": "head", "devices": ["cpu"], "jobs": {"cpu": "job-1"}}],
    "nodes list": [{"node": "head", "devices": ["cpu"], "jobs": {"cpu": "job-1"}}],
    "nodes show b": {"node": "b", "devices": ["cuda:0"], "jobs": {}},
    "nodes cordon b": [{"node": "head", "devices": ["cpu"], "jobs": {"cpu": "job-1"}}],
    "jobs delete job": {"job_uuid": "job", "deleted": True, "checkpoints": False},
    "datasets delete a/b": {"dataset_id": "a/b", "deleted": True},
    "tokens revoke ci": {"name": "ci", "revoked": True},
    "run FILE --detach": {"job_uuid": "one"},
    "resume paused": {"job_uuid": "paused", "id": "", "event": {"type": "end", **status("paused", "completed")}},
}


@pytest.mark.parametrize("words", JSON_COMMANDS)
def test_every_command_prints_json(run: Run, service: FakeService, tmp_path: Path, words: str) -> None:
    service.jobs = {"job": [status("job", "completed")]}
    service.jobs["paused"] = [status("paused"), status("paused", "completed")]
    if words == "jobs list":
        del service.jobs["paused"]
    service.logs = ["one\ntwo\n"]
    service.files = {"model": b"content"}
    (tmp_path / "FILE").write_text('{"job_uuid": "one"}')
    (tmp_path / "ROWS.jsonl").write_text('{"text": "a"}\n')
    names = {"FILE": tmp_path / "FILE", "ROWS": tmp_path / "ROWS.jsonl", "DIR": tmp_path / "DIR"}
    exit_status, output, errors = run(*(names.get(word, word) for word in words.split()), "--json")
    assert (exit_status, errors) == (0, "")
    found = json.loads(output.splitlines()[-1] if '"type": "end"' in output else output)
    expected = JSON_COMMANDS[words]
    if isinstance(expected, dict):
        expected = {**expected, **{key: found[key] for key in ("directory", "sha256") if key in expected}}
    assert found == expected
    assert not run(*(names.get(word, word) for word in words.split()))[1].startswith(("{", "[")), "words without it"


def test_every_command_that_calls_the_service_takes_json() -> None:
    assert {" ".join(words) for words in subcommands() if "--json" not in options_of(words)} == {
        "agent",
        "completion",
        "dashboard",
        "jobspec",
        "openai",
        "serve",
    }


def test_every_command_that_calls_the_service_takes_the_options_of_logs() -> None:
    """The others call no service, or are it."""
    without = {" ".join(words) for words in subcommands() if not {"--verbose", "--log-level"} <= options_of(words)}
    alone = {"completion", "dashboard", "datasets check", "doctor", "evaluate", "jobspec", "merge", "openai", "serve"}
    alone |= {"adapter merge"}
    assert without == alone


@pytest.mark.parametrize("words", ["nodes --verbose list", "nodes list --verbose", "nodes --log-level debug list"])
def test_options_of_nodes_count_before_its_command_and_behind_it(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    levels: list[str] = []
    monkeypatch.setattr("llama_stack_provider_trl.system.logs.start_logging", lambda _, level, __: levels.append(level))
    assert run(*words.split())[0] == 0
    assert levels == ["debug"]


def subcommands(above: argparse.ArgumentParser | None = None) -> list[tuple[str, ...]]:
    """The words of every command."""
    groups = [one for one in (above or cli.parser())._actions if isinstance(one, argparse._SubParsersAction)]
    if not groups:
        return [()]
    return [(name, *rest) for name, parser in groups[0].choices.items() for rest in subcommands(parser)]


def options_of(words: tuple[str, ...]) -> set[str]:
    parser = cli.parser()
    for word in words:
        (group,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        parser = group.choices[word]
    return {option for action in parser._actions for option in action.option_strings}


def test_the_page_of_trl_remote_has_a_row_for_each_command() -> None:
    page = (REPOSITORY / "docs" / "reference" / "remote.md").read_text()
    table_of_commands = page.split("<!-- commands -->")[1].split("<!-- /commands -->")[0]
    rows = re.findall(r"^\| (`.*?) \|", table_of_commands.replace("\\|", "/"), re.MULTILINE)
    documented = {re.sub(r"\s*([\[A-Z]|-).*", "", name) for cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    commands = {" ".join(words) for words in subcommands()}
    assert documented == commands


def test_train_takes_every_method_that_needs_only_rows_and_names_what_serves_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert set(cli.TRAINED) == {
        name for name, method in METHODS.items() if method.rows != "prompts" and not name.startswith("custom_")
    }
    for method in cli.TRAINED:
        words = ["train", "rows.jsonl", "--model", "org/name", "--method", method, "--lora-r", "4"]
        body = training_request(cli.parser().parse_args(words), method, "org/name", "job", ["rows"])
        assert algorithm_of(body) == METHODS[method].call
        options = ProviderOptions.parse(body.pop("provider_options", None))
        kind = SupervisedFineTuneRequest if method == "sft" else PreferenceOptimizeRequest
        found = resolve(kind.model_validate(body), options, Settings(data_dir=tmp_path, devices=("cpu",))).fields
        assert (found["method"].algorithm, found["lora"].rank) == (method, 4)
    words = ["train", "rows.jsonl", "--model", "job:a", "--adapter", "merge"]
    body = training_request(cli.parser().parse_args(words), "sft", "job:a", "job", ["rows"])
    assert body["provider_options"] == {"adapter": "merge"}
    for method in ("grpo", "distillation", "ours"):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["train", "rows.jsonl", "--model", "m", "--method", method])
        assert f"argument --method: '{method}' is none of sft, dpo, " in (text := capsys.readouterr().err)
        assert "use `trl-remote run FILE`" in text


def test_each_option_of_train_run_and_plot_is_on_their_page() -> None:
    page = (REPOSITORY / "docs" / "reference" / "remote.md").read_text()
    for name in ("train", "run", "resume", "plot", "evaluate", "merge", "adapter merge", "datasets check"):
        missing = {one for one in options_of(tuple(name.split())) if one.startswith("--") and f"`{one}" not in page}
        assert missing - {"--help"} == set(), name


def test_logs_shows_the_end_of_a_log(run: Run, service: FakeService) -> None:
    service.logs = ["one\ntwo\n"]
    assert run("jobs", "logs", "job", "--rank", "launcher", "--tail", 2) == (0, "one\ntwo\n", "")


def test_logs_follow_prints_every_line_once_until_the_job_has_ended(run: Run, service: FakeService) -> None:
    running = status("job", "in_progress")
    service.jobs["job"] = [running, running, running, status("job", "completed")]
    service.logs = ["a\nb\nhalf a li", "a\nb\nhalf a line\nnext\n", "b\nhalf a line\nnext\nx\ny", "next\nx\ny\nlast"]
    exit_status, output, _ = run("jobs", "logs", "job", "--follow", "--tail", 1)
    assert exit_status == 0
    assert output.split("\n") == ["b", "half a line", "next", "x", "y", "last", ""]


def test_logs_follow_waits_for_a_job_that_has_no_log_yet(run: Run, service: FakeService) -> None:
    service.jobs["job"] = [status("job"), status("job", "in_progress"), status("job", "completed")]
    service.logs = ["first\nsecond\n"]
    seen = service._job

    def no_log_at_first(job_uuid: str, what: str):  # type: ignore[no-untyped-def]
        service.trouble = [404] if len(service.jobs["job"]) == 3 else []
        return seen(job_uuid, what)

    service._job = no_log_at_first  # type: ignore[method-assign]
    assert run("jobs", "logs", "job", "--follow") == (0, "first\nsecond\n", "")


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ("abc", "abcd", "d"),
        ("abc", "bcde", "de"),
        ("abc", "abc", ""),
        ("aa", "aaa", "a"),
        ("abc", "xyz", "xyz"),
        ("", "ab", "ab"),
        ("ab", "", ""),
    ],
)
def test_new_lines_are_those_after_what_was_seen(before: str, after: str, new: str) -> None:
    assert "".join(new_lines(list(before), list(after))) == new


def test_cancel_pause_and_resume_print_the_new_state(run: Run, service: FakeService) -> None:
    service.jobs["job"] = [status("job", "cancelled")]
    assert run("jobs", "cancel", "job") == (0, "cancelled\n", "")
    assert run("jobs", "pause", "job") == (0, "pause\n", "")
    assert run("jobs", "resume", "job") == (0, "resume\n", "")
    assert [path for path, _ in service.posted] == [
        "post-training/job/cancel",
        "post-training/jobs/job/pause",
        "post-training/jobs/job/resume",
    ]


FILES = {"config.json": b"{}", "deep/model.safetensors": bytes(range(256)) * 4000, "empty": b""}


def test_pull_puts_a_verified_checkpoint_in_place(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.files = dict(FILES)
    target = tmp_path / "new" / "model"
    exit_status, output, _ = run("jobs", "pull", "job", target)
    assert exit_status == 0
    assert output.endswith(f"job-final is in {target}\n")
    assert _tree(target) == FILES
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_pull_continues_where_a_connection_broke(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.files = {"model": FILES["deep/model.safetensors"]}
    service.trouble = [503]  # the list of checkpoints
    target = tmp_path / "model"
    assert run("jobs", "pull", "job", target)[0] == 1
    staging = _staged(service, target)
    staging.mkdir()
    (staging / "model").write_bytes(service.files["model"][:1000])
    half = []
    dispatch = service._file

    async def breaks_twice(request, name, _half):  # type: ignore[no-untyped-def]
        half.append(request.headers.get("Range"))
        return await dispatch(request, name, len(half) < 3)

    service._file = breaks_twice  # type: ignore[method-assign]
    assert run("jobs", "pull", "job", target)[0] == 0
    assert _tree(target) == service.files
    assert half[0] == "bytes=1000-"
    assert len(half) == 3


def test_pull_fetches_a_damaged_file_again(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.files = {"model": b"good content"}
    target = tmp_path / "model"
    staging = _staged(service, target)
    staging.mkdir()
    (staging / "model").write_bytes(b"bad")
    assert run("jobs", "pull", "job", target)[0] == 0
    assert _tree(target) == service.files


def test_pull_refuses_what_is_not_what_was_announced(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.files = {"model": b"content"}
    service.announced = {"model": "0" * 64}
    exit_status, _, errors = run("jobs", "pull", "job", tmp_path / "model")
    assert exit_status == 1
    assert "sent model with another sha256" in errors
    assert not (tmp_path / "model").exists()


def test_pull_never_writes_outside_its_directory(run: Run, service: FakeService, tmp_path: Path) -> None:
    for name in ("../escaped", str(tmp_path / "escaped")):
        service.files = {name: b"x"}
        exit_status, _, errors = run("jobs", "pull", "job", tmp_path / "model")
        assert exit_status == 1
        assert "send a relative path without '..'" in errors
    assert not (tmp_path / "escaped").exists()


def test_pull_touches_nothing_that_exists_and_lists_what_there_is(
    run: Run, service: FakeService, tmp_path: Path
) -> None:
    exit_status, _, errors = run("jobs", "pull", "job", tmp_path)
    assert exit_status == 1
    assert "it exists already" in errors
    _, _, errors = run("jobs", "pull", "job", tmp_path / "model", "--checkpoint", "merged")
    assert "the job has job-checkpoint-2, job-final." in errors
    _, _, errors = run("jobs", "pull", "young", tmp_path / "model")
    assert "the job has young-checkpoint-2; `final` is there once a training has completed." in errors
    (tmp_path / "file").touch()
    for place, problem in (
        (tmp_path / "file" / "model", "not a directory"),
        (Path("/proc/x"), "no such file or dir"),
    ):
        _, _, errors = run("jobs", "pull", "job", place)
        assert errors.startswith(f"trl-remote: '{place}' cannot be used: {problem}")


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("rows.jsonl", ndjson(ROWS).decode() + "\n", ROWS),
        ("rows.json", json.dumps(ROWS, indent=1), ROWS),
        (
            "rows.csv",
            'prompt,completion\r\n"a, b",c\r\nd,\r\n',
            [{"prompt": "a, b", "completion": "c"}, {"prompt": "d"}],
        ),
    ],
)
def test_datasets_add_uploads_rows_once_and_registers_them(
    run: Run, service: FakeService, tmp_path: Path, name: str, text: str, rows: list[dict[str, str]]
) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8", newline="")
    digest = sha256(ndjson(rows)).hexdigest()
    for _ in range(2):
        assert run("datasets", "add", file, "--id", "mine") == (0, f"mine: 2 rows, {digest}\n", "")
    assert service.blobs == {digest: len(ndjson(rows))}
    assert service.seen[f"PUT /v1/blobs/{digest}"] == 1
    assert service.posted[0] == (
        "datasets",
        {"dataset_id": "mine", "purpose": "post-training/messages", "source": {"type": "blob", "sha256": digest}},
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a"\n', "rows.jsonl: row 1: is not JSON in line 2"),
        ("rows.jsonl", '{"a": 1}\n[1]\n', "row 1: found list, expected an object"),
        ("rows.jsonl", '{"a": 1}\n\n{"a"\n', "row 1: is not JSON in line 3"),
        ("rows.json", '[{"a": 1}', "the file is not JSON"),
        ("rows.csv", "a,b\n1,2,3\n", "row 0: has more cells in line 2 than the header's 2 columns"),
        ("rows.csv", 'a,b\n1,"2\n', "row 0: is not CSV in the line 2 where it begins"),
        ("rows.parquet.gz", "", "expected a name that ends in .csv, .jsonl, .json, .ndjson, one of these and .gz"),
        ("rows.csv.gz", "a\n1\n", "rows.csv.gz: the file is not compressed by gzip, as its name says"),
    ],
)
def test_datasets_add_reports_where_a_file_is_wrong(
    run: Run, service: FakeService, tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    exit_status, output, errors = run("datasets", "add", file, "--id", "mine")
    assert (exit_status, output) == (1, "")
    assert message in errors
    assert not service.posted
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    assert "expected UTF-8" in run("datasets", "add", tmp_path / "bytes.jsonl", "--id", "mine")[2]


def test_datasets_and_nodes_are_tables(run: Run, service: FakeService) -> None:
    service.datasets = [
        {"identifier": "pairs", "metadata": {"num_rows": 8}, "source": {"type": "rows", "rows": []}},
        {"identifier": "file", "metadata": {}, "source": {"type": "uri", "uri": "file:///x.jsonl"}},
    ]
    assert run("datasets", "list")[1] == (
        "dataset  rows          source\npairs    8             rows\nfile     not read yet  file:///x.jsonl\n"
    )
    listed, _, more = run("nodes")[1].partition("\n\n")
    assert listed == "node  device  job    load  state\nhead  cpu     job-1  -     open"
    assert "TRL_SERVICE_HOST=ADDRESS" in more  # no node can join on loopback


def test_the_models_of_a_node_s_ollama_are_below_the_table(run: Run, service: FakeService) -> None:
    names = ["llama3.2:1b", "qwen3\x1b[2J:4b"]
    service.nodes = [{"node": "b", "devices": ["cpu"], "cpus": 4, "jobs": {}, "state": "open", "ollama_models": names}]
    assert "\nOllama on b, not for training: llama3.2:1b, qwen3\\u001b[2J:4b\n" in run("nodes")[1]


def test_reserved_cores_are_listed_below_their_cpu(run: Run, service: FakeService) -> None:
    jobs = {"cpu:10": "b", "cpu:2": "a", "cpu:0": "a"}
    service.nodes = [{"node": "head", "devices": ["cpu"], "cpus": 16, "jobs": jobs, "state": "open"}]
    assert [re.sub(" +", " ", line) for line in run("nodes")[1].partition("\n\n")[0].splitlines()[1:]] == [
        "head cpu 13 of 16 cores free - open",
        "head cpu:0 a - open",
        "head cpu:2 a - open",
        "head cpu:10 b - open",
    ]


def test_the_last_load_of_each_device_is_listed_with_its_age_where_it_is_old(run: Run, service: FakeService) -> None:
    gib = 1 << 30
    gpu = {"name": "cuda:0", "utilization_percent": 93.4, "memory_used_bytes": 61 * gib, "power_watts": None}
    lost = {"name": "cuda:1", "utilization_percent": None, "memory_used_bytes": None, "power_watts": None}
    load = {"cpu_percent": 12.3, "memory_used_bytes": 3 * gib, "disk_free_bytes": 1, "devices": [], "age_seconds": 2.0}
    head = {"node": "head", "devices": ["cpu"], "cpus": 4, "jobs": {}, "memory_bytes": 24 * gib, "load": load}
    worker = {"node": "b", "devices": ["cuda:0", "cuda:1"], "cpus": 4, "jobs": {}, "state": "silent"}
    worker |= {"memory_of_devices": {"cuda:0": 80 * gib}, "load": {**load, "devices": [gpu, lost], "age_seconds": 40.2}}
    service.nodes = [head, worker]
    assert [re.sub(" +", " ", line) for line in run("nodes")[1].partition("\n\n")[0].splitlines()] == [
        "node device job load state",
        "head cpu free 12 %, 3.0 of 24.0 GiB open",
        "b cuda:0 free 93 %, 61.0 of 80.0 GiB, 40 s ago silent",
        "b cuda:1 free - silent",
    ]


def test_a_node_is_shown_in_words_that_fit_the_terminal(run: Run) -> None:
    assert run("nodes", "show", "gpu-b") == (0, "node    gpu-b\nstate   open\ndevice  cuda:0: free\n", "")
    load = {"cpu_percent": 12.3, "memory_used_bytes": 3 << 30, "devices": [], "age_seconds": 40.0}
    node = {"node": "head\x1b[2J", "head": True, "state": "cordoned", "loaned": True, "cpus": 4, "load": load}
    node |= {"devices": ["cpu"], "jobs": {"cpu:1": "tune"}, "memory_bytes": 24 << 30, "disk_free_bytes": 5 << 30}
    node |= {
        "memory_available_bytes": 20 << 30,
        "agent": True,
        "address": "10.0.0.7",
        "machine": "ab12",
        "labels": {"zone": "a"},
    }
    node |= {"versions": {"torch": "2.13"}, "models": [" ".join(["words"] * 15), "b"], "ollama_models": ["q:4b"]}
    assert node_lines(node, 80) == [
        "node       head\\u001b[2J (of the service)",
        "state      cordoned; takes jobs only while the load of its owner is low",
        "device     cpu: 3 of 4 cores free, 12 %, 3.0 of 24.0 GiB, 40 s ago",
        "           cpu:1: tune",
        "cores      4",
        "memory     24.00 GiB, 20.00 GiB available",
        "free disk  5.00 GiB",
        "address    10.0.0.7",
        "machine    ab12",
        "version    torch 2.13",
        "label      zone=a",
        f"model      {' '.join(['words'] * 11)}",
        f"           {' '.join(['words'] * 4)}",
        "           b",
        "ollama     q:4b (not for training)",
        "next       trl-remote nodes uncordon 'head\\u001b[2J'",
    ]


def test_nodes_are_taken_out_and_put_back(run: Run, service: FakeService) -> None:
    for command in ("cordon", "uncordon", "drain"):
        assert run("nodes", command, "gpu-b")[1].startswith("node")
        assert service.seen[f"POST /v1/nodes/gpu-b/{command}"] == 1
    assert run("nodes", "remove", "gpu-b")[1].startswith("node")
    assert service.seen["DELETE /v1/nodes/gpu-b"] == 1
    assert run("nodes", "list")[1].startswith("node")


def test_how_to_add_a_node_is_a_command() -> None:
    script = "./scripts/run-remote-fsdp-server.sh"
    joins = "another machine joins with: TRL_SERVICE_NODE_TOKEN=TOKEN NODE_RANK=1"
    assert how_to_add_a_node("http://10.0.0.100:8322") == f"{joins} MASTER_ADDR=10.0.0.100 {script}"
    assert (
        how_to_add_a_node("http://10.0.0.100:9000") == f"{joins} MASTER_ADDR=10.0.0.100 TRL_SERVICE_PORT=9000 {script}"
    )
    secure = how_to_add_a_node("https://head:9000")
    assert secure.startswith(
        f"{joins} TRL_SERVICE_URL=https://head:9000 SSL_CERT_FILE=CERTIFICATE {script} (CERTIFICATE: "
    )


@pytest.mark.parametrize(("rank", "command"), [("0", "serve"), ("1", "agent")])
@pytest.mark.parametrize("absolute", [False, True])
def test_the_script_takes_a_certificate_from_where_the_user_stands(
    tmp_path: Path, rank: str, command: str, absolute: bool
) -> None:
    """The script changes into its repository, which is played: its Python prints its arguments."""
    repository, here = tmp_path / "repository", tmp_path / "here"
    for directory in (repository / "scripts", repository / ".venv" / "bin", here):
        directory.mkdir(parents=True)
    script = shutil.copy(REPOSITORY / "scripts" / "run-remote-fsdp-server.sh", repository / "scripts")
    (repository / ".venv" / "prepare-env.stamp").touch()
    python = repository / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$3 ${SSL_CERT_FILE-unset}"\n')
    python.chmod(0o755)
    plain = {"PATH": os.environ["PATH"], "NODE_RANK": rank, "TRL_SERVICE_URL": "https://head:8322"}
    certificate = f"{here}/cert.pem" if absolute else "cert.pem"
    for given, expected in (({"SSL_CERT_FILE": certificate}, f"{here}/cert.pem"), ({}, "unset")):
        message = subprocess.run([script], cwd=here, env={**plain, **given}, capture_output=True, text=True, check=True)
        assert message.stdout == f"{command} {expected}\n"


@pytest.mark.parametrize(
    ("url", "environ", "message"),
    [
        ("http://10.255.255.1:8322", {}, "a worker needs a token of the service"),
        ("http://127.0.0.1:8322", {"TRL_SERVICE_NODE_TOKEN": "t"}, "where no other machine reaches it"),
        (
            "http://127.0.0.1:8322",
            {"TRL_SERVICE_TOKEN": "t", "TRL_NODE_ADDRESS": "10.0.0.1", "TRL_NODE_NAME": "a b"},
            "cannot be a node's name",
        ),
        (
            "https://10.255.255.1:8322",
            {"TRL_SERVICE_TOKEN": "t", "TRL_NODE_ADDRESS": "10.0.0.1", "SSL_CERT_FILE": "no/cert.pem"},
            "SSL_CERT_FILE names no/cert.pem, which does not exist: ",
        ),
    ],
)
def test_a_worker_that_cannot_be_one_reports_it_at_once(
    url: str,
    environ: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("TRL_SERVICE_NODE_TOKEN", "TRL_SERVICE_TOKEN", "TRL_NODE_ADDRESS", "TRL_NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRL_NODE_DATA_DIR", str(tmp_path))  # one that could be one after all leaves nothing at home
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["agent", "--service", url]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("agent", "--service", "http://10.255.255.1:8322"), "TRL_SERVICE_NODE_TOKEN"),
        (("agent", "--service", "http://10.255.255.1:8322"), "TRL_SERVICE_TOKEN"),
        (("nodes",), "TRL_SERVICE_TOKEN"),
    ],
)
def test_a_token_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], name: str, service: FakeService
) -> None:
    monkeypatch.delenv("TRL_SERVICE_NODE_TOKEN", raising=False)
    monkeypatch.setenv(name, "one\r\ntwo\n")
    exit_status, _, errors = run(*words)
    assert (exit_status, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"trl-remote: {name}: the token has a character")
    assert "two" not in errors


@pytest.mark.parametrize("command", ["create", "revoke"])
def test_a_token_in_the_place_of_its_name_is_refused_and_not_sent(
    run: Run, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    token = "trl_" + 43 * "x"
    with pytest.raises(SystemExit):
        run("tokens", command, token)
    errors = capsys.readouterr().err
    assert "found a token" in errors
    assert token not in errors


def test_the_end_of_a_tokens_line_is_not_sent(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_SERVICE_TOKEN", " secret\r\n")
    assert run("jobs", "list")[0] == 0
    given: list[str | None] = []

    def serve(settings: start.NodeSettings) -> int:
        given.append(settings.token)
        return 0

    monkeypatch.setattr(start, "serve", serve)
    monkeypatch.setenv("TRL_NODE_ADDRESS", "10.0.0.1")
    monkeypatch.setenv("TRL_NODE_NAME", "b")
    monkeypatch.setenv("TRL_SERVICE_NODE_TOKEN", "node\n")
    assert run("agent", "--device", "cpu")[0] == 0
    assert given == ["node"]


def test_an_agent_s_heartbeat_interval_comes_from_its_option_or_its_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float | None] = []

    def serve(settings: start.NodeSettings) -> int:
        given.append(settings.heartbeat_interval)
        return 0

    monkeypatch.setattr(start, "serve", serve)
    for name, value in {"TRL_NODE_ADDRESS": "10.0.0.1", "TRL_NODE_NAME": "b", "TRL_SERVICE_NODE_TOKEN": "t"}.items():
        monkeypatch.setenv(name, value)
    assert run("agent", "--device", "cpu")[0] == 0
    monkeypatch.setenv("TRL_NODE_HEARTBEAT_INTERVAL", "3")
    assert run("agent", "--device", "cpu")[0] == 0
    assert run("agent", "--device", "cpu", "--heartbeat-interval", "0.5")[0] == 0
    assert given == [5.0, 3.0, 0.5]
    for wrong in ("0.4", "5.1", "nan", "often"):
        monkeypatch.setenv("TRL_NODE_HEARTBEAT_INTERVAL", wrong)
        errors = run("agent", "--device", "cpu")[2]
        assert f"heartbeat_interval={wrong!r}: expected seconds from 0.5 to 5" in errors
    assert len(given) == 3


def test_a_wrong_address_is_named_with_its_option(run: Run) -> None:
    assert run("agent", "--service", "8322")[2].startswith("trl-remote: --service or TRL_SERVICE_URL: ")
    assert run("nodes", "--url", "8322")[2].startswith("trl-remote: --url or TRL_SERVICE_URL: ")


def test_a_reader_that_has_seen_enough_is_no_error(service: FakeService) -> None:
    service.jobs = {f"job-{n}": [status(f"job-{n}")] for n in range(150)}
    words = [sys.executable, "-m", "llama_stack_provider_trl_remote", "jobs", "list", "--url", service.url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        assert listing.stdout is not None
        assert listing.stderr is not None
        listing.stdout.close()
        assert listing.stderr.read() == b""


def test_texts_are_as_short_as_they_can_be() -> None:
    assert (duration(65), duration(7200), duration(0.4)) == ("1:05", "2:00:00", "0:00")
    assert (bar(None), bar(0).count("#"), bar(100).count("#"), bar(250).count("#")) == ("", 0, 24, 24)
    assert table(("a", "b"), []) == ["a  b"]


def test_what_a_pool_has_is_whole_on_a_terminal(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "8 H200 of the partition gpu-long in the account research"
    request = {"request_id": "f" * 32, "nodes": [], "state": "pending", "requested_for": "tune-5f0c1e2b9a7d"}
    request["message"] = "waits for resources of the partition"
    pool = {"pool": "slurm", "nodes": 0, "max_nodes": 4, "what": what, "node_hours_used": 1.5, "node_hours": None}
    service.pools = [{**pool, "state": "ready", "allocations": [request]}]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, of_pool, _, _, of_request = run("nodes", "pools")[1].splitlines()
    assert of_pool.split("  ")[1] == f"0 of 4 x {what}"
    assert of_request.split() == ["f" * 32, "slurm", "0", "pending", "tune-5f0c1e2b9a7d", "waits..."]


def test_a_table_fits_into_a_terminal_and_its_names_stay_whole() -> None:
    head, name = ("dataset", "rows", "source", "why"), "orders-0123456789"
    rows = [(name, "120", "f" * 64, "a sentence that says why it is so"), ("pairs", "8", "hub", "-")]
    cut = ("source", "why")
    lines = table(head, rows, 80, cut=cut)
    assert max(map(len, lines)) == 80
    assert lines[1].split()[:2] == [name, "120"]
    assert "fff...  a sentence" in lines[1]
    assert lines[2].split() == ["pairs", "8", "hub", "-"]
    assert max(map(len, table(head, rows, 10, cut=cut))) == 17 + (2 + 4) + (2 + 8) + (2 + 8)  # what is short is not cut
    assert table(("a", "b"), [("x" * 99, "y" * 10**6)], 40, cut=("b",))[1] == "x" * 99 + "  yyyyy..."
    assert max(map(len, table(head, rows, cut=cut))) > 80  # no terminal
    assert table(head, rows, 80, cut=("why",))[1] == f"{name}  120   {'f' * 64}  a sen..."
    assert table(head, rows, 80) == table(head, rows)
    full = progress(12, 35, loss=2.3104, tokens_per_second=1870.4, eta_seconds=65.2)
    line = progress_line(status("x", "in_progress", progress=full))
    assert line == "running   34% step 12/35  loss 2.310  1,870 tokens/s  1:05 left"
    tokenizing = {"tokenized_rows": 120_000, "total_rows": 1_000_000}
    line = progress_line(status("x", "in_progress", progress={"step": 0, "total_steps": None, **tokenizing}))
    assert line == "running  tokenized 120,000/1,000,000 rows"
    assert "tokenized" not in progress_line(status("x", "in_progress", progress={**full, **tokenizing}))


def _tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def _staged(service: FakeService, target: Path) -> Path:
    """Where a pull keeps the fake's files until it has all of them."""
    files = [{"path": n, "size": len(c), "sha256": sha256(c).hexdigest()} for n, c in service.files.items()]
    digest = sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    return target.with_name(f".{target.name}.{digest}.pulling")


@pytest.mark.parametrize(("token", "key"), [(None, "none"), ("secret", '"$TRL_SERVICE_TOKEN"')])
def test_the_variables_of_openais_sdk_are_printed_for_a_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, token: str | None, key: str
) -> None:
    monkeypatch.delenv("TRL_SERVICE_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("TRL_SERVICE_TOKEN", token)
    assert cli.main(["openai", "--url", "http://127.0.0.1:8322/"]) == 0
    expected = f"export OPENAI_BASE_URL=http://127.0.0.1:8322/openai/v1\nexport OPENAI_API_KEY={key}\n"
    assert capsys.readouterr().out == expected
    assert cli.main(["openai", "--url", "nonsense"]) == 1


def test_a_line_on_a_narrow_terminal_keeps_the_time_that_is_left_to_the_end() -> None:
    progress = {"total_steps": 35000, "step": 12000, "percent": 34.0, "loss": 2.31, "tokens_per_second": 8700.0}
    resources = {"state": "in_progress", "progress": {**progress, "eta_seconds": 4000.0}, "detail": "saves"}
    found = {"status": "in_progress", "resources_allocated": resources}
    for columns in range(48, 120):
        line = progress_within(found, columns).removesuffix("  saves")
        assert len(line) <= columns
        assert line.endswith("1:06:40 left"), columns
        assert "34% step 12000/35000" in line
    assert progress_within(found, 86).startswith("[####    ")
    assert "tokens/s" not in progress_within(found, 56)
    assert progress_within(found, 200).startswith(bar(34.0))


@pytest.mark.parametrize(
    ("words", "command", "meant"),
    [
        ("job list", "", "jobs"),
        ("jobs wacth a", " jobs", "watch"),
        ("xyz", "", None),
        ("train a --model m --metod dpo", " train", "--method"),
        ("train a --model m --xyz=--method", " train", None),
        ("train a --model m --method dpoo", " train", "dpo"),
        ("train a --model m b", " train", None),
        ("jobs list --statsu failed", " jobs list", "--status"),
        ("nodes list --jsno", " nodes list", "--json"),
    ],
)
def test_what_is_mistyped_is_answered_by_the_nearest_with_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], words: str, command: str, meant: str | None
) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(words.split())
    text = capsys.readouterr().err
    assert text.startswith(f"usage: trl-remote{command} [-h]")
    assert f"trl-remote{command}: error: " in text
    assert text.endswith(f"; was {meant} meant?\n" if meant else "\n")
    assert ("meant?" in text) == (meant is not None)


@pytest.mark.parametrize(
    "words",
    [
        "train gone.jsonl --model m",
        "train {rows} --eval-data gone.jsonl --model m",
        "datasets add gone.jsonl --id a",
        "datasets check gone.jsonl --model m",
        "evaluate m gone.jsonl",
        "generate gone.jsonl --model m --output a",
    ],
)
def test_a_file_that_does_not_exist_is_named_with_where_it_was_looked_for(
    run: Run, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (rows := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    status, _, errors = run(*words.format(rows=rows).split())
    assert status in (1, 2)
    problem = f"'gone.jsonl' cannot be used: no such file or directory in {tmp_path}: correct the path"
    assert errors == f"trl-remote: {problem}\n"
    assert not service.posted


def test_version_and_the_help_of_serve_name_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, begin in (
        (["--version"], f"trl-remote {__version__}\n"),
        (["serve", "--help"], "usage: trl-remote serve "),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(begin)


def test_a_job_is_deleted_with_its_checkpoints_on_request(run: Run, service: FakeService) -> None:
    assert run("jobs", "delete", "job", "--checkpoints")[1] == "job is deleted; its checkpoints are, too\n"
    assert run("datasets", "delete", "rows")[0] == 0
    assert [line for line in service.seen if line.startswith("DELETE")] == [
        "DELETE /v1/post-training/jobs/job",
        "DELETE /v1/datasets/rows",
    ]


def test_make_alone_lists_its_targets() -> None:
    done = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    targets = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert {"train", "train-resume", "evaluate", "train-distributed", "train-multi-node", "export-viz"} <= {*targets}


@pytest.mark.parametrize("words", ["jobs list", "nodes", "nodes list", "datasets list"])
def test_options_of_all_commands_may_stand_before_them(
    run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("TRL_SERVICE_URL", "http://127.0.0.1:1")
    behind = run(*words.split(), "--url", service.url, "--json")
    assert behind[0] == 0
    assert run("--json", "--url", service.url, *words.split()) == behind
    assert run(f"--url={service.url}", "--json", *words.split()) == behind
