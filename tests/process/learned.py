"""Models whose replies are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.job import OptimizerSpec
from tests.tiny import tiny_model
from tests.training import job_spec, run


def learned(root: Path, answers: dict[str, str], **changes: Any) -> Path:
    """A model that has learned answers by heart."""
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in answers.items()]
    optimizer = OptimizerSpec(learning_rate=1e-2, scheduler="constant")
    fields = {"n_epochs": 60, "save_steps": 1000, "logging_steps": 60, "optimizer": optimizer, **changes}
    spec = job_spec(root, tiny_model(), rows=rows, **fields)
    assert run(root / "run", spec)[0] == 0
    return spec.checkpoint_dir / "final"
