"""An export whose evaluations decide, in a file with the jobs that it waits for, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.work import ExportWork
from tests.contract.in_process import InProcess, job
from tests.contract.in_process import here as here
from tests.contract.payloads import LORA
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract
Json = dict[str, Any]


def pipeline(**changes: Any) -> Json:
    evaluation = {"kind": "evaluate", "dataset_id": "questions"}
    forgets = {"evaluation": "after", "metric": "loss", "against": "before", "at_most_change": 0.02, **changes}
    return {
        "jobs": {
            "tune": job(algorithm_config=LORA),
            "before": {**evaluation, "model": str(tiny_model())},
            "after": {**evaluation, "model": "job:tune"},
            "out": {"kind": "export", "model": "job:tune", "to": "gguf", "promote_if": [forgets]},
        }
    }


def test_an_export_in_a_file_waits_for_the_evaluations_that_decide(here: InProcess) -> None:
    refused = here.refused(pipeline(metric="token_acuracy"))
    assert "jobs.out.promote_if.0.metric='token_acuracy' is not supported: the evaluation 'after-" in refused
    assert "the nearest is 'token_accuracy'" in refused
    assert "jobs.out.promote_if.0.evaluation='before-" in here.refused(pipeline(evaluation="before", against="after"))
    assert "jobs.out.promote_if.0.at_most_chang" in here.refused(pipeline(at_most_chang=1))
    names = {row["name"]: row["job_uuid"] for row in here.run(pipeline())}
    spec = here.service.store.get(names["out"]).spec
    assert set(spec.after) == {names["tune"], names["before"], names["after"]}
    assert isinstance(spec.work, ExportWork)
    (condition,) = spec.work.promote_if
    assert (condition.evaluation, condition.against) == (names["after"], names["before"])
    assert [row["is_new"] for row in here.run(pipeline())] == [False] * 4
    # Another checkpoint is another model.
    other = {"job_uuid": "x", "model": f"job:{names['tune']}/checkpoint-1", "to": "gguf"}
    measure = {"evaluation": names["after"], "metric": "loss", "at_most": 2}
    answer = here.post("/v1/post-training/export", {**other, "promote_if": [measure]})
    assert answer.status == 400
    assert "promote_if.0.evaluation=" in answer.text
    assert "/checkpoint-1: name an evaluation of the same model" in answer.text


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("mixtral", "MixtralForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM")]
)
def test_an_export_of_an_unmapped_model_is_refused_before_the_model_is_trained(
    here: InProcess, tmp_path: Path, model_type: str, architecture: str
) -> None:
    config = {"model_type": model_type, "architectures": [architecture]}
    (base := tmp_path / "checkpoints" / "base").mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(config))
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    tune, further = job(model=str(base)), job(model="job:tune")
    for jobs, model, target in (
        ({"tune": {**tune, "algorithm_config": LORA}}, "job:tune", "lora-gguf"),
        ({"tune": tune, "further": further}, "job:further", "gguf"),
        ({"tune": tune}, "job:tune", "vllm"),
    ):
        refused = here.refused({"jobs": {**jobs, "out": {"kind": "export", "model": model, "to": target}}})
        assert "jobs.out.model='job:" in refused
        assert f"its model_type is {model_type!r}, and " in refused
        assert "llama, mistral, phi3, qwen2, qwen3: export it to safetensors" in refused
    out = {"kind": "export", "model": "job:tune", "to": "safetensors"}
    (base / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    assert f"{model_type!r}, which reads images, too" in here.refused({"jobs": {"tune": tune, "out": out}})
    (base / "config.json").write_text(json.dumps(config))
    assert len(here.run({"jobs": {"tune": tune, "out": out}})) == 2
