"""Rows and request bodies as users send them, and the answer to one that cannot be honoured."""

from __future__ import annotations

from typing import Any

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


def original_example(job_uuid: str, dataset_id: str) -> Json:
    """The example of the original providers, field by field, as their users have it in scripts."""
    return {
        "job_uuid": job_uuid,
        "finetuned_model": str(tiny_model()),
        "algorithm_config": {"reward_scale": 0.0, "reward_clip": 0.0, "epsilon": 0.0, "gamma": 0.0},
        "training_config": {
            "n_epochs": 3,
            "max_steps_per_epoch": 50,
            "gradient_accumulation_steps": 1,
            "optimizer_config": {
                "optimizer_type": "adamw",
                "weight_decay": 0.01,
                "num_warmup_steps": 0,
                "lr": 5e-5,
                "warmup_ratio": 0.1,
            },
            "data_config": {
                "data_format": "instruct",
                "dataset_id": dataset_id,
                "batch_size": 2,
                "train_split_percentage": 0.9,
                "shuffle": True,
            },
        },
        "hyperparam_search_config": {},
        "logger_config": {},
    }


def assert_original_example_is_honoured(status: Json) -> None:
    """Of three rows two are trained on and one is held out; the warnings name the fields without meaning."""
    allocated = status["resources_allocated"]
    recipe = allocated["effective_config"]
    assert (recipe["dataset"]["num_rows"], recipe["validation"]["num_rows"]) == (2, 1)
    assert (recipe["optimizer"]["warmup_ratio"], recipe["method"]["reward_scale"]) == (0.1, 1.0)
    assert all(checkpoint["training_metrics"]["validation_loss"] > 0 for checkpoint in status["checkpoints"])
    warnings = " ".join(allocated["warnings"])
    assert "reward_scale and reward_clip are both 0.0, which is read as not set" in warnings
    assert "epsilon" in warnings
    assert "gamma" in warnings


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
