"""Jobs that merge, on a service whose trainers are killed in between.

They take a minute: `TRL_TESTS=full ./scripts/test.sh tests/contract/test_merge_jobs.py` runs them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.system.files import is_whole, sha256_of
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.contract.crashing import CrashingService
from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import JOBS, running
from tests.contract.stack import SFT, Json
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400), IN_FULL]


def request(job_uuid: str, *models: str, **changes: Any) -> Json:
    weights = (0.25, 0.75)
    named = [{"model": model, "weight": weight} for model, weight in zip(models, weights, strict=False)]
    return {"job_uuid": job_uuid, "models": named, **changes}


def test_a_merge_of_jobs_that_have_not_begun_is_that_of_the_command_over_a_kill(tmp_path: Path) -> None:
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", QUESTIONS)
        client = TrlClient(server.url)
        server.arm("started", "hold")
        server.submit(SFT, {**sft("one", "rows"), "algorithm_config": LORA}, options={"merge_adapter": True})
        server.submit(SFT, {**sft("two", "rows"), "algorithm_config": LORA}, options={"seed": 3})
        tiny = str(tiny_model())
        for changes, sentence in (
            (request("bad", "job:one", "job:two"), "models='job:two' is not supported: it is an adapter"),
            (request("bad", "job:one", tiny, method="ties"), "base=None is not supported: method ties needs it"),
            (request("bad", "job:one", tiny, density=0.5), "density=0.5 is not supported: method linear has none"),
            (request("bad", "job:one", tiny, method="cat"), "method='cat' is not supported: whole models are merged"),
            (request("bad", tiny, "job:typo"), "models.1.model='job:typo' is not supported: there is no such job"),
            (request("bad", tiny, method="slerp"), "method='slerp' is not supported: it merges two models"),
            (request("bad", tiny, provider_options={"resources": {"nodes": 2}}), "provider_options.resources"),
        ):
            answer = server.post("/post-training/merge", changes)
            assert answer.status_code == 400, answer.text
            assert sentence in answer.json()["detail"], answer.text
        server.arm("merging-final", "kill")
        assert client.merge(request("models", "job:one", tiny, provider_options={"retries": 1})) == "models"
        client.merge(request("adapters", "job:one/final", "job:two"))
        client.evaluate({"job_uuid": "measured", "model": "job:models", "dataset_id": "rows"})
        after = server.status("adapters")["resources_allocated"]["after"]
        assert [one["job_uuid"] for one in after] == ["one", "two"]
        assert server.delete(f"{JOBS}/one").status_code == 409
        server.wait_taken("started", server.patience)
        server.go("started")
        finals: dict[str, Path] = {}
        for name in ("one", "two", "models", "adapters", "measured"):
            server.wait(name, "completed", timeout=server.patience)
            config = server.status(name)["resources_allocated"]["effective_config"]
            finals[name] = Path(config["checkpoint_dir"])
        for name, models, file in (
            ("models", (finals["one"] / "merged", tiny), "model.safetensors"),
            ("adapters", (finals["one"] / "final", finals["two"] / "final"), "adapter_model.safetensors"),
        ):
            final, by_hand = finals[name] / "final", tmp_path / name
            words = [f"{model}={weight}" for model, weight in zip(models, (0.25, 0.75), strict=True)]
            assert main(["merge", *words, "-o", str(by_hand)]) == 0
            assert is_whole(final)
            assert sha256_of(final / file) == sha256_of(by_hand / file)
            assert server.status(name)["resources_allocated"]["result"]["tensors"] > 0
        assert server.store.get("models").attempt == 2
        client.pull("models", tmp_path / "pulled")
        assert sha256_of(tmp_path / "pulled" / "model.safetensors") == sha256_of(
            tmp_path / "models" / "model.safetensors"
        )
        answer = server.post(
            "/post-training/evaluate", {"job_uuid": "x", "model": "job:adapters", "dataset_id": "rows"}
        )
        assert "its result is an adapter: name its directory" in answer.json()["detail"]
