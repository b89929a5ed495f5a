"""Jobs that evaluate, on a service whose trainers are killed in between.

They take a minute: `TRL_CLUSTER=full ./scripts/test.sh tests/contract/test_evaluate_jobs.py` runs them.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.cluster.jobs import IN_FULL
from tests.contract.crashing import CrashingService
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import running
from tests.contract.stack import SFT, Json
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400), IN_FULL]


def request(job_uuid: str, **changes: Any) -> Json:
    return {"job_uuid": job_uuid, "model": str(tiny_model()), "dataset_id": "rows", **changes}


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
        server.submit(SFT, tuned)
        client.evaluate(request("after", model="job:tune"))
        preferring = {"algorithm": "dpo", "reference_model": str(tiny_model())}
        client.evaluate(request("pairs", dataset_id="pairs", model="job:tune", **preferring))
        server.wait("after", "completed", timeout=server.patience)
        (last,) = server.status("tune")["checkpoints"][-1:]
        after = server.status("after")["resources_allocated"]["result"]
        assert after["loss"] == pytest.approx(last["training_metrics"]["validation_loss"], abs=1e-5)
        assert after["loss"] < found["loss"]
        points = client.metrics("after")
        assert [(point["kind"], point["metrics"]["eval_loss"]) for point in points] == [("validation", after["loss"])]
        server.wait("pairs", "completed", timeout=server.patience)
        measured = server.status("pairs")["resources_allocated"]["result"]
        assert 0 <= measured["preference_accuracy"] <= 1
        assert measured["margin"] != 0
        for changes, sentence in (
            ({"algorithm": "dpo"}, "reference_model=None is not supported: preferences are measured"),
            ({"reference_model": "m"}, "reference_model='m' is not supported: only pairs"),
            ({"dataset_id": "gone"}, "dataset_id='gone' is not supported: no dataset"),
            ({"dataset_id": "pairs"}, "These columns are DPO's"),
            ({"model": "job:base"}, "model='job:base' is not supported: job 'base' does not train (evaluate)"),
            ({"model": "job:typo"}, "there is no such job"),
            ({"metrics": ["bleu"]}, "metrics"),
            ({"provider_options": {"seed": 1}}, "provider_options.seed"),
        ):
            answer = server.post("/post-training/evaluate", request("bad", **changes))
            assert answer.status_code == 400, answer.text
            assert sentence in answer.json()["detail"], answer.text
