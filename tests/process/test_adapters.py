"""Adapters of every kind: resumed bit for bit, and exported to what PEFT loads with the same logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.specs.events import Failed, Progress
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec
from llama_stack_provider_trl.system.files import sha256_of
from tests.tiny import tiny_model
from tests.training import job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
PLAIN: dict[str, Any] = {"target_modules": ("q_proj", "v_proj"), "mlp": True, "rank": 4, "alpha": 8}


def spec_of(root: Path, algorithm: str = "sft", lora: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    optimizer = OptimizerSpec(learning_rate=1e-2)
    adapters = LoraSpec(**{**PLAIN, **(lora or {})})
    return job_spec(root, tiny_model(), algorithm, lora=adapters, optimizer=optimizer, batch_size=2, **changes)


def losses_of(root: Path, spec: JobSpec, resume_from: Path | None = None) -> list[float]:
    status, events = run(root, spec, resume_from)
    assert status == 0, [event.message + event.traceback for event in of_kind(events, Failed)]
    return [event.metrics["loss"] for event in of_kind(events, Progress)]


RESUMED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dropout": ("sft", {"dropout": 0.3}, {"gradient_checkpointing": True}),
    "dropout-packed": ("sft", {"dropout": 0.3, "use_dora": True}, {"packed": True, "max_seq_length": 64}),
    "dropout-dpo": ("dpo", {"dropout": 0.3, "use_rslora": True}, {}),
}


def test_dropout_reaches_the_adapters_of_dpo_and_not_their_reference(tmp_path: Path) -> None:
    without, with_dropout = (
        losses_of(tmp_path / str(rate), spec_of(tmp_path / str(rate), "dpo", {"dropout": rate})) for rate in (0.0, 0.3)
    )
    assert without[0] == with_dropout[0] == pytest.approx(math.log(2), abs=1e-6)
    assert without[1] != with_dropout[1]


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_job_ends_with_the_bytes_of_an_uninterrupted_one(tmp_path: Path, case: str) -> None:
    algorithm, lora, changes = RESUMED[case]
    spec = spec_of(tmp_path / "whole", algorithm, lora, save_steps=2, **changes)
    whole = losses_of(tmp_path / "whole", spec)
    part = spec.model_copy(update={"checkpoint_dir": tmp_path / "resumed"})
    resumed = losses_of(tmp_path / "resumed-run", part, spec.checkpoint_dir / "checkpoint-2")
    assert resumed == whole[2:]
    assert len(whole) > 2
    files = [one.checkpoint_dir / "final" / "adapter_model.safetensors" for one in (spec, part)]
    assert sha256_of(files[0]) == sha256_of(files[1])
