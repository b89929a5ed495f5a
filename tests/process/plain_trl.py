"""What TRL alone logs for the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_stack_provider_trl.specs.job import LoraSpec

DORA = LoraSpec(target_modules=("q_proj", "v_proj"), mlp=True, rank=4, alpha=8, use_dora=True)


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


def plain_arguments(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of every trainer of TRL, so that it does what our job does."""
    return {
        "output_dir": str(tmp_path / "trl"),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": None,
        "activation_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }


def as_chat(row: dict[str, str], *answers: str) -> dict[str, Any]:
    chat: dict[str, Any] = {"prompt": [{"role": "user", "content": row["prompt"]}]}
    return chat | {answer: [{"role": "assistant", "content": row[answer]}] for answer in answers}


def logged_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
