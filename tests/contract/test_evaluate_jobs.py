"""Jobs that evaluate, on a service whose trainers are killed in between.

They take a minute: `TRL_TESTS=full ./scripts/test.sh tests/contract/test_evaluate_jobs.py` runs them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.census import census
from tests.contract.crashing import CrashingService
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import running
from tests.contract.stack import SFT, Json
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400), IN_FULL]


def request(job_uuid: str, **changes: Any) -> Json:
    return {"job_uuid": job_uuid, "model": str(tiny_model()), "dataset_id": "rows", **changes}


CHECKS: list[Json] = [
    {"type": "exact", "normalize": True},
    {"type": "regex", "pattern": "[aeiou].*e"},
    {"type": "json_schema", "column": "shape"},
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_checked_once_each_whatever_was_killed_in_between(tmp_path: Path, ranks: int) -> None:
    """8 answers in batches of 2, of one process and of `ranks`. The trainer dies while it writes the second batch; its
    runner dies with all its processes, and the service, after the third."""
    rows = [{**row, "shape": '{"type": "object"}'} for row in QUESTIONS]
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", rows)
        server.register("bare", QUESTIONS)
        client = TrlClient(server.url)
        checked = {"checks": CHECKS, "max_new_tokens": 12, "temperature": 1.0, "batch_size": 2}
        client.evaluate(request("undisturbed", **checked))
        server.wait("undisturbed", "completed", timeout=server.patience)
        server.arm("answering-2", "kill")
        server.arm("step-6", "hold")
        client.evaluate(request("killed", **checked, provider_options={"retries": 3, "nproc_per_node": ranks}))
        server.wait_taken("step-6", server.patience)
        server.kill()
        for process in census(server.data_dir).running:
            os.kill(process.pid, signal.SIGKILL)
        server.launch()
        server.wait_until_it_answers()
        server.wait("killed", "completed", timeout=server.patience)
        found, expected = (server.status(name)["resources_allocated"]["result"] for name in ("killed", "undisturbed"))
        answers = answers_of(server, "killed")
        assert found.pop("answers") == {**expected.pop("answers"), "path": str(answers)}
        assert found == expected
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        assert [line["row"] for line in lines] == list(range(8))
        assert found["checks"] == {
            name: sum(line["passed"][name] for line in lines) / 8 for name in ("exact", "regex", "json_schema")
        }
        assert [line["passed"]["regex"] for line in lines] == [
            re.search("[aeiou].*e", line["text"]) is not None for line in lines
        ]
        (point,) = client.metrics("killed")[-1:]
        assert (point["kind"], point["metrics"]["eval_passed_regex"]) == ("validation", found["checks"]["regex"])
        assert "checks.regex" in server.get("/jobs/killed", prefix="").text
        for changes, sentence in (
            ({"checks": [{"type": "bleu"}]}, "checks.0.type"),
            ({"checks": [{"type": "json", "colum": "a"}]}, "checks.0.colum"),
            ({"checks": [{"type": "regex", "pattern": "("}]}, "checks.0.pattern='(' is not supported: it is not a reg"),
            ({"checks": [{"type": "json_schema", "json_schema": {"type": 3}}]}, "checks.0.json_schema="),
            (
                {"checks": CHECKS, "dataset_id": "bare"},
                "dataset 'bare', row 0: no column 'shape', which checks.2.column",
            ),
            ({"checks": []}, "checks"),
            ({"seed": 3}, "seed=3 is not supported: it concerns answers"),
        ):
            answer = server.post("/post-training/evaluate", request("bad", **changes))
            assert answer.status_code == 400, answer.text
            assert sentence in answer.json()["detail"], answer.text


def test_judges_are_waited_for_and_give_each_verdict_once_whatever_was_killed_in_between(tmp_path: Path) -> None:
    """8 answers and 16 verdicts in batches of 2, of one process and of two ranks. The trainer dies while it writes the
    second batch of verdicts; its runner dies with all its processes, and the service, within those of the second
    judge."""
    two_ranks = {"retries": 3, "nproc_per_node": 2}
    checks: list[Json] = [
        CHECKS[1],
        {"type": "judge", "name": "good", "model": "job:tune", "scale": [1, 5], "at_least": 3, "max_new_tokens": 8},
        {"type": "judge", "name": "right", "model": str(tiny_model()), "column": "shape", "max_new_tokens": 8},
    ]
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", [{**row, "shape": {"type": "object"}} for row in QUESTIONS])
        client = TrlClient(server.url)
        then: Json = {"evaluate": {"dataset_id": "rows", "checks": checks[2:], "max_new_tokens": 4}}
        judged = {"checks": checks, "max_new_tokens": 12, "batch_size": 2}
        early = server.post("/post-training/evaluate", request("early", **judged))
        assert early.status_code == 400
        assert "checks.1.model='job:tune' is not supported: there is no such job here" in early.json()["detail"]
        server.submit(SFT, {**sft("tune", "rows"), "algorithm_config": LORA}, options=then)
        client.evaluate(request("undisturbed", **judged))
        waits = server.status("undisturbed")["resources_allocated"]
        assert [one["job_uuid"] for one in waits["after"]] == ["tune"]
        assert server.get("/post-training/jobs/undisturbed/answers").status_code == 409
        server.wait("undisturbed", "completed", timeout=server.patience)
        server.wait("tune-evaluation", "completed", timeout=server.patience)
        assert "right" in server.status("tune-evaluation")["resources_allocated"]["result"]["judged"]
        server.arm("judging-2", "kill")
        server.arm("step-20", "hold")
        client.evaluate(request("killed", **judged, provider_options=two_ranks))
        server.wait_taken("step-20", server.patience)
        assert server.taken("judging-2")
        server.kill()
        for process in census(server.data_dir).running:
            os.kill(process.pid, signal.SIGKILL)
        server.launch()
        server.wait_until_it_answers()
        server.wait("killed", "completed", timeout=server.patience)
        status = server.status("killed")["resources_allocated"]
        assert status["progress"]["step"] == status["progress"]["total_steps"] == 24
        found, expected = status["result"], server.status("undisturbed")["resources_allocated"]["result"]
        assert found.pop("answers") == {**expected.pop("answers"), "path": str(answers_of(server, "killed"))}
        assert found == expected
        lines = list(client.answers("killed"))
        assert lines == list(client.answers("undisturbed"))
        assert [(line["row"], sorted(line["judged"])) for line in lines] == [(n, ["good", "right"]) for n in range(8)]
        unreadable = [sum(line["judged"][name]["score"] is None for line in lines) for name in ("good", "right")]
        assert [found["judged"][name]["unreadable"] for name in ("good", "right")] == unreadable
        assert "judged.good" in server.get("/jobs/killed", prefix="").text
        assert client.evaluate(request("killed", **judged, provider_options=two_ranks)) == "killed"
        slow = sft("slow", "rows")
        slow["training_config"]["n_epochs"] = 200
        server.submit(SFT, slow)
        client.pause("slow")
        client.evaluate(request("orphan", checks=[{**checks[1], "model": "job:slow"}]))
        server.cancel("slow")
        server.wait("orphan", "failed", timeout=server.patience)
        error = server.status("orphan")["resources_allocated"]["error"]
        assert error["reason"] == "predecessor_failed"
        assert "slow" in error["message"]
        for changes, sentence in (
            ({"template": "{answer}"}, "checks.1.template='{answer}' is not supported: it has no {prompt}"),
            ({"scale": [5, 1]}, "checks.1.scale=[5.0, 1.0] is not supported: expected the least"),
            ({"model": "job:killed"}, "checks.1.model='job:killed' is not supported: job 'killed' does not train"),
            ({"at_least": 9}, "checks.1.at_least=9.0 is not supported: it is the least score that passes"),
            ({"column": "x"}, "row 0: no column 'x', which checks.1.column names"),
        ):
            bad = [checks[0], {**checks[1], "model": str(tiny_model()), **changes}]
            answer = server.post("/post-training/evaluate", request("bad", checks=bad))
            assert answer.status_code == 400, answer.text
            assert sentence in answer.json()["detail"], answer.text


def answers_of(server: CrashingService, job_uuid: str) -> Path:
    directory = server.status(job_uuid)["resources_allocated"]["effective_config"]["checkpoint_dir"]
    return Path(directory) / "answers.jsonl"


def test_measures_are_those_of_the_command_over_a_kill_and_of_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    assert main(["evaluate", str(tiny_model()), str(file), "--device", "cpu", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", QUESTIONS)
        server.register("pairs", PAIRS, dataset_type="preference")
        client = TrlClient(server.url)
        server.arm("prepared", "kill")
        assert client.evaluate(request("base", provider_options={"retries": 1})) == "base"
        status = server.wait("base", "completed", timeout=server.patience)["resources_allocated"]
        assert status["attempt"] == 2
        found = status["result"]
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found.keys() == expected.keys() - {"model", "method", "warnings"}
        assert {name: found[name] for name in ("rows", "trained_tokens", "token_accuracy")} == {
            name: expected[name] for name in ("rows", "trained_tokens", "token_accuracy")
        }
        tuned = {**sft("tune", "rows"), "algorithm_config": LORA}
        tuned["training_config"]["data_config"]["validation_dataset_id"] = "rows"
        server.submit(SFT, tuned, options={"evaluate": {"dataset_id": "rows"}})
        client.evaluate(request("after", model="job:tune"))
        members = [{"model": "job:tune", "weight": 3}, {"model": str(tiny_model())}]
        ensemble = {"job_uuid": "both", "models": members, "dataset_id": "rows"}
        client.evaluate({**ensemble, "provider_options": {"retries": 1}})
        client.evaluate(
            {**ensemble, "job_uuid": "first", "models": [{"model": "job:tune"}, {**members[1], "weight": 0}]}
        )
        preferring = {"algorithm": "dpo", "reference_model": str(tiny_model())}
        client.evaluate(request("pairs", dataset_id="pairs", model="job:tune", **preferring))
        server.wait("after", "completed", timeout=server.patience)
        (last,) = server.status("tune")["checkpoints"][-1:]
        after = server.status("after")["resources_allocated"]["result"]
        assert after["loss"] == pytest.approx(last["training_metrics"]["validation_loss"], abs=1e-5)
        assert after["loss"] < found["loss"]
        server.wait("tune-evaluation", "completed", timeout=server.patience)
        assert server.status("tune-evaluation")["resources_allocated"]["result"] == after
        shown = server.status("tune")["resources_allocated"]
        assert shown["effective_config"]["evaluation"] == "tune-evaluation"
        assert {"job_uuid": "tune-evaluation", "state": "completed"} in shown["before"]
        measured_as_an_ensemble(server, client, found, after)
        points = client.metrics("after")
        assert [(point["kind"], point["metrics"]["eval_loss"]) for point in points] == [("validation", after["loss"])]
        server.wait("pairs", "completed", timeout=server.patience)
        measured = server.status("pairs")["resources_allocated"]["result"]
        renumbered = tmp_path / "renumbered"
        shutil.copytree(tiny_model(), renumbered)
        tokenizer = json.loads((renumbered / "tokenizer.json").read_text())
        tokens = list(tokenizer["model"]["vocab"])
        tokenizer["model"]["vocab"] = {token: len(tokens) - number for number, token in enumerate(tokens)}
        (renumbered / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert 0 <= measured["preference_accuracy"] <= 1
        assert measured["margin"] != 0
        for changes, sentence in (
            ({"algorithm": "dpo"}, "reference_model=None is not supported: preferences are measured"),
            ({"reference_model": "m"}, "reference_model='m' is not supported: only pairs"),
            ({"dataset_id": "gone"}, "dataset_id='gone' is not supported: no dataset"),
            ({"dataset_id": "pairs"}, "These columns are DPO's"),
            ({"model": "job:base"}, "model='job:base' is not supported: job 'base' does not train (evaluate)"),
            ({"model": "job:typo"}, "there is no such job"),
            ({"models": [{"model": "job:tune"}]}, "models=['job:tune'] is not supported: `model` names"),
            (
                {"model": None, "models": [{"model": "job:typo"}]},
                "models.0.model='job:typo' is not supported: there is",
            ),
            ({"model": None, "models": members, "checks": CHECKS}, "answers are those of one model"),
            ({"model": None, "models": [*members, {"model": str(renumbered)}]}, f"models.2.model='{renumbered}'"),
            ({"model": None, "models": [*members, {"model": str(renumbered)}]}, "not that of 'job:tune', which has"),
            ({"model": None}, "model=None is not supported: name what is evaluated"),
            ({"metrics": ["bleu"]}, "metrics"),
            ({"provider_options": {"seed": 1}}, "provider_options.seed"),
        ):
            answer = server.post("/post-training/evaluate", request("bad", **changes))
            assert answer.status_code == 400, answer.text
            assert sentence in answer.json()["detail"], answer.text


def measured_as_an_ensemble(server: CrashingService, client: TrlClient, base: Json, tuned: Json) -> None:
    """An adapter of a job, three times as much as its base, which were submitted before the job had trained.

    Args:
        base: the measures of the base.
        tuned: of the adapter.
    """
    server.wait("both", "completed", timeout=server.patience)
    server.wait("first", "completed", timeout=server.patience)
    status = server.status("both")["resources_allocated"]
    assert [one["job_uuid"] for one in status["after"]] == ["tune"]
    config, found = status["effective_config"], status["result"]
    assert [(one["weight"], one["adapter"] is None) for one in config["work"]["members"]] == [
        (0.75, False),
        (0.25, True),
    ]
    assert config["work"]["members"][1]["model"] == str(tiny_model())
    assert found.keys() == tuned.keys()
    # -log is convex: the loss of the mean is less than the mean of the losses.
    assert found["loss"] < 0.75 * tuned["loss"] + 0.25 * base["loss"]
    assert found["loss"] != tuned["loss"]
    first = server.status("first")["resources_allocated"]["result"]
    assert first == {**tuned, **{name: pytest.approx(tuned[name], abs=1e-6) for name in ("loss", "perplexity")}}
    (point,) = client.metrics("both")
    assert point["metrics"]["eval_loss"] == found["loss"]
    page = server.get("/jobs/both", prefix="")
    assert page.status_code == 200, page.text
    assert "token_accuracy" in page.text
    again = {"models": [{"model": "job:tune", "weight": 3}, {"model": str(tiny_model())}], "dataset_id": "rows"}
    assert client.evaluate({"job_uuid": "both", **again, "provider_options": {"retries": 1}}) == "both"
    assert server.store.get("both").attempt == 1
    answer = server.post("/post-training/evaluate", {"job_uuid": "both", **again})
    assert answer.status_code == 409, answer.text
