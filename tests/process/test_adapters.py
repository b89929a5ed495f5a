"""Adapters of every kind: resumed bit for bit, and exported to what PEFT loads with the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM

from llama_stack_provider_trl.specs.events import Failed, Progress
from llama_stack_provider_trl.specs.job import JobSpec, LoraSpec, OptimizerSpec
from llama_stack_provider_trl.system.files import sha256_of
from tests.required import in_full
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


def assert_loads_as_trained(spec: JobSpec) -> None:
    """The adapter on its base, and the merged model, give the same logits, which are not those of the base."""
    ids = torch.arange(20)[None]
    base = AutoModelForCausalLM.from_pretrained(spec.source.model)
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, spec.checkpoint_dir / "final")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(spec.checkpoint_dir / "merged")(ids).logits
    assert (merged - adapted).abs().max() < 1e-5
    assert (before - adapted).abs().max() > 1e-2


RESUMED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dropout": ("sft", {"dropout": 0.3}, {"packed": True, "max_seq_length": 64, "gradient_checkpointing": True}),
    "dropout-dpo": ("dpo", {"dropout": 0.3, "use_rslora": True}, {}),
    "ia3": ("dpo", {"method": "ia3"}, {}),
    "vera": ("sft", {"method": "vera"}, {}),
    "vera-bf16": ("sft", {"method": "vera"}, {"dtype": "bf16"}),
}


@pytest.mark.parametrize("case", ["dropout", "ia3", "vera-bf16", *in_full("dropout-dpo", "vera")])
def test_a_resumed_job_ends_with_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, lora, changes = RESUMED[case]
    dropped: set[float] = set()
    original = F.dropout

    def recorded(input: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        if training and p:
            dropped.add(p)
        return original(input, p, training, inplace)

    monkeypatch.setattr(F, "dropout", recorded)
    spec = spec_of(tmp_path / "whole", algorithm, lora, save_steps=2, merge_adapter=True, **changes)
    whole = losses_of(tmp_path / "whole", spec)
    part = spec.model_copy(update={"checkpoint_dir": tmp_path / "resumed"})
    resumed = losses_of(tmp_path / "resumed-run", part, spec.checkpoint_dir / "checkpoint-2")
    assert resumed == whole[2:]
    assert len(whole) > 2
    assert dropped == ({lora["dropout"]} if "dropout" in lora else set())
    for file in ("final/adapter_model.safetensors", "merged/model.safetensors"):
        assert sha256_of(spec.checkpoint_dir / file) == sha256_of(part.checkpoint_dir / file)
    if spec.compute.dtype == "fp32":
        assert_loads_as_trained(spec)
