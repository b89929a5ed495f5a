"""Rows and request bodies as users send them, and the answer to one that cannot be honoured."""

from __future__ import annotations

from typing import Any

import requests

from tests.tiny import tiny_model

Json = dict[str, Any]

PAIRS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": "I would rather not say."}
    for n in range(8)
]
QUESTIONS = [{"prompt": f"What is {n} times two?", "completion": f"{2 * n}."} for n in range(8)]
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}


def promised(job_uuid: str, dataset_id: str) -> Json:
    """The payload that users were promised, as it stands: no hyperparam_search_config, logger_config, optimizer_config
    or data_format."""
    return {
        "job_uuid": job_uuid,
        "model": str(tiny_model()),
        "finetuned_model": "my-dpo-model",
        "checkpoint_dir": "results",
        "algorithm_config": {"type": "dpo", "reward_scale": 1.0, "reward_clip": 5.0},
        "training_config": {
            "n_epochs": 3,
            "max_steps_per_epoch": 100,
            "learning_rate": 5e-5,
            "data_config": {"dataset_id": dataset_id, "batch_size": 4, "shuffle": True},
        },
    }


def sft(job_uuid: str, dataset_id: str, **changes: Any) -> Json:
    """An SFT request with every field that Llama Stack's own schema requires."""
    training = {
        "n_epochs": 1,
        "data_config": {"dataset_id": dataset_id, "batch_size": 2, "shuffle": True, "data_format": "instruct"},
        "optimizer_config": {"optimizer_type": "adamw", "lr": 1e-3, "weight_decay": 0.0, "num_warmup_steps": 0},
    }
    body = {
        "job_uuid": job_uuid,
        "model": str(tiny_model()),
        "training_config": training,
        "hyperparam_search_config": {},
        "logger_config": {},
    }
    return {**body, **changes}


def refusal(answer: requests.Response, status_code: int = 400) -> str:
    """The sentence of an answer that must be a refusal."""
    assert answer.status_code == status_code, answer.text
    detail = answer.json()["detail"]
    assert isinstance(detail, str)
    return detail
