"""What the page of a job shows, from its status."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.store.reader import SentRequest
from llama_stack_provider_trl.stack.responses import Checkpoint, PostTrainingJobStatusResponse, PostTrainingMetric
from llama_stack_provider_trl_remote.cli.main import parser
from llama_stack_provider_trl_remote.service.pages import job_view, rendering
from llama_stack_provider_trl_remote.service.pages.rendering import duration, moment, number, size, step_time
from llama_stack_provider_trl_remote.service.pages.settings_view import grouped
from tests.fakes import job_spec

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def attempt(number: int, **changes: Any) -> dict[str, Any]:
    return {
        **{"attempt": number, "device": "cpu", "started_at": NOW.isoformat(), "ended_at": None, "resumed_from": None},
        **{"start_step": 0, "step": 0, "reason": None, "message": "", **changes},
    }


def status(state: str, *attempts: dict[str, Any], **changes: Any) -> PostTrainingJobStatusResponse:
    config = {"ranks": 1, "algorithm": "sft"}
    found = {"state": state, "attempts": list(attempts), "effective_config": config, **changes}
    checkpoint = Checkpoint(
        identifier="mine-checkpoint-40",
        created_at=NOW,
        epoch=1,
        post_training_job_id="a",
        path="/x",
        training_metrics=None,
    )
    return PostTrainingJobStatusResponse(
        job_uuid="a b/c",
        status="in_progress",
        scheduled_at=NOW,
        started_at=None,
        completed_at=None,
        resources_allocated=found,
        checkpoints=[checkpoint],
    )


@pytest.mark.parametrize(("job", "checkpoint"), [("a b", "my model-final"), ("-x", "../up-final"), ("$(id)", "'q'")])
def test_the_command_for_a_checkpoint_names_it_whatever_its_job_is_called(job: str, checkpoint: str) -> None:
    words = shlex.split(job_view.pull_command(job, checkpoint, "https://head:1"))
    options = parser().parse_args(words[1:])
    assert (options.job_uuid, options.checkpoint, options.url) == (job, checkpoint, "https://head:1")
    assert "/" not in options.directory


def test_checkpoints_have_the_epochs_that_samples_have() -> None:
    config = {"ranks": 1, "algorithm": "sft", "n_epochs": 2}
    job = status("completed", effective_config=config, progress={"total_steps": 120, "epoch": 1.5})
    last = job.checkpoints[0].model_copy(update={"identifier": "mine-final"})
    job.checkpoints.append(last)
    assert job_view.epochs_of(job) == {"mine-checkpoint-40": pytest.approx(2 / 3), "mine-final": 1.5}


def test_a_result_is_shown_value_by_value() -> None:
    result = {"rows": 4, "passed": 0.25, "checks": {"right": 1 / 3}, "answers": {"path": "/a"}, "perplexity": None}
    shown = job_view.values(status("completed", result=result))["result"]
    names = ("rows", "passed", "checks.right", "answers.path", "perplexity")
    assert shown == list(zip(names, ("4", "0.25", "0.33333", "/a", ""), strict=True))
    assert job_view.values(status("in_progress", result=None))["result"] == []


@pytest.mark.parametrize(
    ("state", "allowed"),
    [
        ("scheduled", {"pause", "cancel"}),
        ("in_progress", {"pause", "cancel"}),
        ("pausing", {"cancel"}),
        ("paused", {"resume", "cancel"}),
        ("cancelling", set()),
        ("completed", {"export", "delete"}),
        ("failed", {"delete"}),
    ],
)
def test_the_forms_are_those_that_the_state_allows(state: str, allowed: set[str]) -> None:
    can = job_view.values(status(state))["can"]
    assert {name for name, may in can.items() if may} - {"chat"} == allowed


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        ({"algorithm": "sft", "work": None}, True),
        ({"algorithm": "reward", "work": None}, False),
        ({"algorithm": "sft", "work": {"kind": "merge"}}, True),
        ({"algorithm": "sft", "work": {"kind": "evaluate"}}, False),
        ({"algorithm": "sft", "work": {"kind": "export", "export": {"target": "gguf"}}}, False),
        ({"algorithm": "sft", "work": {"kind": "of-a-damaged-row"}}, False),
    ],
)
def test_a_job_can_be_talked_to_and_exported_where_its_checkpoints_write_text(config: Any, answers: bool) -> None:
    found = status("completed", effective_config={"ranks": 1, **config})
    for what in ("chat", "export"):
        assert job_view.values(found)["can"][what] is answers
        assert not job_view.values(found.model_copy(update={"checkpoints": []}))["can"][what]


@pytest.mark.parametrize(
    ("detail", "jobs"),
    [
        ("waiting for device 0: 0 (held by a b), 1 (held by c and d)", ["a b", "c and d"]),
        ("waiting for a node; x: needs 2 of 4 cores, free: 1 (held by a, b and 3 more)", ["a", "b"]),
        ("waiting for a node: older jobs come first", []),
        ("waiting for cpu; start not known: dpo-next-2 starts before it and has not trained yet", ["dpo-next-2"]),
        ("start not known: processes of job a have not ended yet", ["a"]),
        ("", []),
    ],
)
def test_the_jobs_that_hold_a_device_are_links_in_the_detail(detail: str, jobs: list[str]) -> None:
    parts = job_view.linked(detail)
    assert "".join(text for text, _ in parts) == detail
    assert [part for part in parts if part[1]] == [(name, job_view.path_of(name)) for name in jobs]


@pytest.mark.parametrize("has_charts", [True, False])
@pytest.mark.parametrize("name", ["job.html", "compare.html"])
def test_curves_are_preloaded_where_charts_are_drawn(name: str, has_charts: bool) -> None:
    environment = rendering._environment()
    found = {"status": status("completed"), "jobs": [status("completed")], "asset": str, "has_charts": has_charts}
    template = environment.get_template(name)
    context = template.new_context({"charts": environment.get_template("charts.html").module, **found})
    head = "".join(template.blocks["head"](context))
    assert ('rel="preload"' in head, "plotly" in head) == (has_charts, has_charts)


@pytest.mark.parametrize(
    ("code", "allowed", "where"),
    [(500, ["GET /health"], "logs/service.log"), (500, ["GET /"], "trl-remote dashboard"), (404, ["GET /health"], "")],
)
def test_the_page_of_a_bug_names_the_log(code: int, allowed: list[str], where: str) -> None:
    template = rendering._environment().get_template("error.html")
    values = {"status": code, "detail": "it is a bug", "allowed": allowed}
    shown = "".join(template.blocks["content"](template.new_context(values)))
    assert (where in shown, "log" in shown) == (True, bool(where))


def test_the_button_of_answers_has_the_name_of_their_page_and_differs_from_that_of_several_jobs() -> None:
    assert job_view.has_answers({"algorithm": "sft", "work": {"kind": "evaluate", "answers": {"seed": 0}}})
    for algorithm in ("grpo", "distillation"):
        assert job_view.has_answers({"algorithm": algorithm})
    assert job_view.has_answers({"algorithm": "sft", "samples": {"prompts": ["a"]}})
    assert not job_view.has_answers({"algorithm": "dpo"})
    templates = Path(job_view.__file__).parent / "templates"
    source = (templates / "job.html").read_text()
    assert ">Answers of several jobs</a>" in source
    assert '/samples">Answers</a>' in source
    assert "<h1>Answers</h1>" in (templates / "samples.html").read_text()


def test_each_attempt_has_its_end_in_words_and_its_part_of_the_ribbon() -> None:
    failed = attempt(1, reason="rank_failed", message="rank 0 ended\nmore", ended_at=NOW.isoformat(), step=60)
    moved = attempt(2, ended_at=NOW.isoformat(), start_step=50, step=50)
    found = job_view.attempts_of([failed, moved, attempt(3, start_step=50, step=90)], job_view.JobState.in_progress)
    assert [one.ended for one in found] == [
        "rank_failed: rank 0 ended",
        "it saved, for a pause or for a move to another node",
        "it is running",
    ]
    assert [one.kind for one in found] == ["failed", "ended", "running"]
    assert found[0].width > found[2].width > found[1].width > 0
    assert found[-1].left + found[-1].width == pytest.approx(job_view.RIBBON, abs=1)


@pytest.mark.parametrize(
    ("state", "ended"),
    [("completed", "the job completed"), ("cancelled", "the job was cancelled"), ("paused", "the job was paused")],
)
def test_the_last_attempt_ended_as_its_job_did(state: str, ended: str) -> None:
    (found,) = job_view.attempts_of([attempt(1, ended_at=NOW.isoformat())], job_view.JobState(state))
    assert (found.ended, found.kind) == (ended, "ended")


def test_what_the_training_reports_stands_beside_what_was_submitted() -> None:
    config = {"dtype": "fp32", "optimizer": {"lr": 0.1, "betas": None}, "packed": True, "name": ""}
    recipe = {"total_steps": 3, "effective": {"dtype": "bf16", "attention": {"kernel": "sdpa"}}}
    found = {one.name: one for one in job_view.settings_of({**config, "recipe": recipe})}
    assert (found["dtype"].submitted, found["dtype"].reported, found["dtype"].differs) == ("fp32", "bf16", True)
    assert (found["optimizer.lr"].submitted, found["optimizer.lr"].differs) == ("0.1", False)
    assert found["attention.kernel"].reported == "sdpa"
    assert found["packed"].submitted == "true"
    assert "optimizer.betas" not in found
    assert job_view.settings_of({"dtype": "fp32", "recipe": None})
    searched = {"search": {"parameters": {"provider_options.lora_dropout": [0.1, 0.2]}, "settings": ["lora.dropout"]}}
    dropouts = {"lora": {"dropout": 0.1}, "method": {"dropout": 0.3}}
    shown = {one.name: one.submitted for one in job_view.settings_of({**dropouts, **searched})}
    assert (shown["lora.dropout"], shown["method.dropout"], "search.settings" in shown) == ("searched", "0.3", False)
    (prompts,) = job_view.settings_of({"samples": {"prompts": [[{"role": "user", "content": "Hi"}]]}})
    assert (prompts.name, prompts.submitted) == ("samples.prompts", "1")


def test_marks_logs_and_addresses() -> None:
    ended = NOW.isoformat()
    tried = (
        attempt(1, step=44, ended_at=ended, reason="rank_failed", message="rank 0 ended"),
        attempt(2, start_step=40, step=60, ended_at=ended),
        attempt(3, start_step=60, step=70, ended_at=ended),
    )
    found = job_view.values(status("paused", *tried), [(50, "little memory is free")])
    assert [tuple(mark.values()) for mark in found["marks"]] == [
        ("checkpoint", 40, "mine-checkpoint-40"),
        *(("attempt", 40, "attempt 2 begins"), ("attempt", 60, "attempt 3 begins")),
        ("pause", 60, "attempt 2: it saved, for a pause or for a move to another node"),
        ("pause", 70, "attempt 3: the job was paused"),
        ("warning", 50, "little memory is free"),
    ]
    assert found["path"] == "/jobs/a%20b%2Fc"
    config = {"ranks": 2, "algorithm": "sft"}
    assert job_view.logs_of(status("failed", effective_config=config)) == ["0", "1", "launcher"]


def test_a_line_of_fifty_megabytes_is_cut() -> None:
    text = job_view.shortened("short\n" + "x" * 50_000_000)
    assert len(text) < 3000
    assert text.endswith("... (the line has 50000000 characters)")


def test_values_are_shown_with_their_units() -> None:
    assert [duration(value) for value in (None, 5.4, 65, 7300, float("inf"))] == [
        "",
        "5 s",
        "1 min 5 s",
        "2 h 1 min",
        "",
    ]
    assert [size(value) for value in (None, 5, 2048, 3 << 30, 5 << 40)] == [
        "",
        "5 bytes",
        "2.0 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [number(value) for value in (None, 0.0001234567, 2)] == ["", "0.00012346", "2"]
    assert [moment(value) for value in (None, NOW, NOW.isoformat())] == [
        "",
        "2026-01-02 03:04:05",
        "2026-01-02 03:04:05",
    ]


def test_the_configuration_is_in_groups_and_defaults_are_apart() -> None:
    config = job_spec(batch_size=4).flat()
    chosen, default = grouped(job_view.settings_of({**config, "recipe": {"effective": {"attention": "sdpa"}}}))
    named = {group.title: [one.name for one in group.settings] for group in chosen}
    assert {"batch_size", "dataset.dataset_id"} <= set(named["Data"])
    assert named["Optimizer"] == ["optimizer.learning_rate"]
    assert "algorithm" in named["Method"]
    assert "attention" in named["Reported by the training"]
    apart = {one.name for group in default for one in group.settings}
    assert {"shuffle", "optimizer.weight_decay", "lifecycle.retries"} <= apart
    assert not apart & {name for names in named.values() for name in names}
    differs = job_view.Setting("shuffle", "true", "false")
    assert grouped([differs])[0][0].settings == [differs]


@pytest.mark.parametrize(
    ("state", "call", "text"),
    [
        ("completed", "supervised-fine-tune", "Clone"),
        ("failed", "preference-optimize", "Edit and retry"),
        ("failed", "evaluate", ""),
    ],
)
def test_a_form_is_offered_with_the_request_of_a_training(state: str, call: str, text: str) -> None:
    assert job_view.again_of(job_view.JobState(state), SentRequest(call, {})) == text
    assert job_view.again_of(job_view.JobState(state), None) == ""


@pytest.mark.parametrize(
    ("algorithm", "title"), [("sft", "Loss"), ("dpo", "Rewards"), ("kto", "Rewards"), ("grpo", "Reward")]
)
def test_the_chart_that_tells_most_of_a_method_is_first(algorithm: Any, title: str) -> None:
    assert job_view.headline_of(algorithm) == title


def test_the_time_of_a_step() -> None:
    running = job_view.JobState.in_progress
    assert job_view.step_seconds_of({"step": 10, "total_steps": 30, "eta_seconds": 5.0}, running, []) == 0.25
    assert job_view.step_seconds_of({"step": 30, "total_steps": 30, "eta_seconds": 0.0}, running, []) is None
    ended = job_view.JobState.completed
    begun, end = NOW.isoformat(), (NOW + timedelta(seconds=30)).isoformat()
    tried = job_view.attempts_of([attempt(1, step=20, start_step=10, started_at=begun, ended_at=end)], ended)
    assert job_view.step_seconds_of({"step": 20}, ended, tried) == 3
    assert job_view.step_seconds_of({}, ended, []) is None
    assert [step_time(one) for one in (0.25, 2, 75, None)] == ["250 ms", "2.00 s", "1 min 15 s", ""]


def test_a_long_request_is_not_repeated() -> None:
    def shown(prompt: str) -> tuple[bool, bool]:
        requested = SentRequest("supervised-fine-tune", {"provider_options": {"system_prompt": prompt}})
        values = job_view.values(status("completed"), url="http://head:1", requested=requested)
        return values["requested"] is not None, values["too_long"]

    assert (shown("short"), shown("x" * (32 << 10))) == ((True, False), (False, True))
    values = job_view.values(status("completed"))
    assert (values["requested"], values["too_long"]) == (None, False)


def test_of_many_checkpoints_the_best_and_the_last_are_shown() -> None:
    losses = [3.0, 2.0, 1.0, 1.0, *[2.0] * 8, None]
    found = status("completed")
    found.checkpoints = [
        Checkpoint(
            identifier=f"mine-{name}",
            created_at=NOW,
            epoch=1,
            post_training_job_id="a",
            path=f"/x/{name}",
            training_metrics=PostTrainingMetric(epoch=1, train_loss=1, validation_loss=loss, perplexity=None),
        )
        for name, loss in zip([*(f"checkpoint-{step}" for step in range(12)), "final"], losses, strict=True)
    ]
    shown, others = job_view.saved_of(found)
    assert [one.name for one in shown] == ["checkpoint-2", "checkpoint-9", "checkpoint-10", "checkpoint-11", "final"]
    assert [one.is_best for one in shown] == [True, *[False] * 4]
    assert [one.resumes for one in shown] == [*[True] * 4, False]
    assert len(others) == 8
    found.checkpoints = found.checkpoints[:8]
    assert [len(part) for part in job_view.saved_of(found)] == [8, 0]


@pytest.mark.parametrize(
    ("state", "call", "allowed"),
    [("cancelled", "supervised-fine-tune", True), ("in_progress", "supervised-fine-tune", False)],
)
def test_a_job_that_has_ended_is_continued_from_its_last_checkpoint(state: str, call: str, allowed: bool) -> None:
    found = status(state)
    found.checkpoints[0].path = "/x/checkpoint-40"
    values = job_view.values(found, requested=SentRequest(call, {"job_uuid": "a"}))
    assert (values["can"]["continue"], values["last"]) == (allowed, "checkpoint-40")
