"""The jobs whose numbers are recorded: every method, and what changes how one is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tests.contract.stack import DPO, SFT, Json
from tests.tiny import tiny_model

GENERATE, EVALUATE, MERGE = (f"/post-training/{kind}" for kind in ("generate", "evaluate", "merge"))
SUMS = [{"prompt": f"What is {n} plus {n}?" + " Please." * (n % 3), "completion": f"It is {2 * n}."} for n in range(15)]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "I would rather not. " * (1 + n % 3)}
    for n, row in enumerate(SUMS)
]
UNPAIRED = [
    {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
    for n, row in enumerate(PAIRS)
]
GRADED = [{"prompt": row["prompt"], "answer": str(2 * n), "shape": '{"type": "object"}'} for n, row in enumerate(SUMS)]
TRAINED = 11
"""Rows of each that are trained: the last optimizer step of an epoch, of four rows, is not full."""
DATASETS = {
    **{name: rows[:TRAINED] for name, rows in (("sums", SUMS), ("pairs", PAIRS), ("unpaired", UNPAIRED))},
    **{f"{name}-held-out": rows[TRAINED:] for name, rows in (("sums", SUMS), ("pairs", PAIRS), ("unpaired", UNPAIRED))},
    "graded": GRADED[:8],
}
LORA = {
    "type": "LoRA",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "apply_lora_to_output": False,
    "rank": 4,
    "alpha": 8,
}
DDP, FSDP = ({"nproc_per_node": 2, "fsdp_config": {"sharding_strategy": name}} for name in ("NO_SHARD", "FULL_SHARD"))
SAVED = 3
"""Optimizer steps between two checkpoints: an epoch."""
KILLED = f"step-{SAVED + 2}"
DIGITS = {"check": {"type": "regex", "name": "digits", "pattern": "[0-9]"}}
LETTERS = {"check": {"type": "regex", "name": "letters", "pattern": "[ea]"}, "weight": 0.5}


@dataclass(frozen=True)
class Job:
    """A request, and the point at which a process of its training is killed once."""

    name: str
    path: str
    body: Json
    options: Json = field(default_factory=dict)
    killed_at: str = ""
    needs: tuple[str, ...] = ()
    """Jobs whose results it reads."""


def all_jobs() -> list[Job]:
    """In the order in which they run: what a job needs comes before it."""
    return [*_sft(), *_preferences(), *_answering(), *_untrained(), *_searches()]


def chosen(names: list[str]) -> list[Job]:
    """The jobs whose names match one of these patterns (empty: all), after those whose results they read."""
    known = {job.name: job for job in all_jobs()}
    wanted = {name for name in known for pattern in names if fnmatchcase(name, pattern)}
    while missing := {needed for name in wanted for needed in known[name].needs} - wanted:
        wanted |= missing
    return [job for job in known.values() if job.name in wanted or not names]


def _sft() -> Iterator[Job]:
    def job(name: str, options: Json | None = None, algorithm: Json | None = None, **more: Any) -> Job:
        more = {"data": {"dataset_id": "sums", "validation_dataset_id": "sums-held-out"}, **more}
        return _training(name, SFT, algorithm, options, **more)

    untied = str(tiny_model(tied=False))
    samples = {"prompts": ["What is 3 plus 3?"], "max_new_tokens": 8}
    packed = {"dataset_id": "sums", "packed": True}
    yield job("sft", {"samples": samples, "lr_scheduler": "cosine"})
    yield job("sft-untied-bf16", model=untied, training={"dtype": "bf16"})
    yield job("sft-padded", {"padding_free": False, "group_by_length": False})
    yield job("sft-packed", {"max_seq_length": 96}, data=packed)
    yield job(
        "sft-whole-rows", optimizer={"optimizer_type": "sgd"}, data={"dataset_id": "sums", "train_on_input": True}
    )
    yield job("sft-8bit", optimizer={"optimizer_type": "adamw_8bit"})
    yield job("sft-lora", {"merge_adapter": True}, LORA)
    yield job("sft-dora", {}, {**LORA, "use_dora": True})
    yield job("sft-qlora", {}, {**LORA, "quantize_base": True})
    yield job("sft-ia3", {"peft_method": "ia3"}, LORA)
    yield job("sft-continued", {"adapter": "continue"}, model="job:sft-lora", needs=("sft-lora",))
    yield job("sft-killed", {"retries": 1}, killed_at=KILLED)
    yield job("sft-from-checkpoint", {"resume_from": f"sft-killed/checkpoint-{SAVED}"}, needs=("sft-killed",))
    yield job("sft-ddp", DDP)
    yield job("sft-fsdp", FSDP)
    yield job("sft-fsdp-lora", {**FSDP, "merge_adapter": True}, LORA)
    yield job("sft-fsdp-qlora", FSDP, {**LORA, "quantize_base": True})
    yield job("sft-fsdp-packed", {**FSDP, "max_seq_length": 96}, data=packed)
    yield job("sft-fsdp-killed", {**FSDP, "retries": 1}, killed_at=KILLED)
    yield job("sft-averaged", {**DDP, "averaging": {"interval": 2}, "save_steps": 2})


def _preferences() -> Iterator[Job]:
    def job(name: str, algorithm: Json, options: Json | None = None, rows: str = "pairs", **more: Any) -> Job:
        data = {"dataset_id": rows, "validation_dataset_id": f"{rows}-held-out"}
        return _training(name, DPO, algorithm, options, data=data, **more)

    dpo = {"type": "dpo", "beta": 0.1}
    kto, reward = {"type": "kto", "beta": 0.3, "desirable_weight": 1.5}, {"type": "reward"}
    centered = {**reward, "center_rewards_coefficient": 0.1}
    yield job("dpo", dpo)
    yield job("dpo-padded", {**dpo, "reward_scale": 2.0, "reward_clip": 5.0}, {"padding_free": False})
    yield job("dpo-smoothed", dpo, {"label_smoothing": 0.1, "precompute_reference": True})
    for loss in ("hinge", "ipo", "kto_pair"):
        yield job(f"dpo-{loss}", {**dpo, "loss_type": loss})
    yield job("dpo-lora", dpo, {"lora": LORA})
    yield job("dpo-qlora", dpo, {"lora": {**LORA, "quantize_base": True}})
    yield job("dpo-ddp-lora", dpo, {**DDP, "lora": LORA})
    yield job("dpo-fsdp", dpo, FSDP)
    yield job("dpo-fsdp-lora", dpo, {**FSDP, "lora": LORA})
    yield job("dpo-fsdp-killed", dpo, {**FSDP, "retries": 1}, killed_at=KILLED)
    yield job("orpo", {"type": "orpo", "beta": 0.3})
    yield job("cpo", {"type": "cpo", "beta": 0.2, "alpha": 0.5})
    yield job("cpo-hinge", {"type": "cpo", "loss_type": "hinge"})
    yield job("simpo", {"type": "simpo", "gamma": 0.7, "alpha": 0.3})
    yield job("simpo-fsdp", {"type": "simpo"}, FSDP)
    yield job("kto", kto, rows="unpaired")
    yield job("kto-apo", {**kto, "loss_type": "apo_zero_unpaired"}, rows="unpaired")
    yield job("kto-fsdp", kto, FSDP, rows="unpaired")
    yield job("reward", centered)
    yield job("reward-lora", reward, {"lora": LORA})
    yield job("reward-fsdp", centered, FSDP)


def _answering() -> Iterator[Job]:
    def job(name: str, algorithm: Json, options: Json | None = None, **more: Any) -> Job:
        algorithm = {"max_completion_length": 8, **algorithm}
        return _training(name, DPO, algorithm, options, data={"dataset_id": "graded"}, **more)

    grpo = {"type": "grpo", "num_generations": 4, "rewards": [DIGITS, LETTERS]}
    judged = {**grpo, "rewards": [{"model": "job:reward"}, DIGITS]}
    learned = {"type": "distillation", "teacher": str(tiny_model(tied=False)), "beta": 0.4}
    other = {"type": "distillation", "teacher": str(tiny_model(vocabulary=330)), "use_uld_loss": True}
    yield job("grpo", {**grpo, "beta": 0.1})
    yield job("grpo-lora", {**grpo, "loss_type": "grpo", "scale_rewards": "batch"}, {"lora": LORA})
    yield job("grpo-reward-model", judged, needs=("reward",))
    yield job("grpo-ddp", grpo, DDP)
    yield job("grpo-fsdp", {**grpo, "beta": 0.1}, FSDP)
    yield job("grpo-killed", {**grpo, "beta": 0.1}, {"retries": 1, "save_steps": 2}, killed_at="step-3")
    yield job("distillation", learned)
    yield job("distillation-lora", {**learned, "beta": 1.0}, {"lora": LORA})
    yield job("distillation-fsdp", learned, FSDP)
    yield job("gold", other)
    yield job("gold-hybrid", {**other, "uld_use_hybrid_loss": True, "beta": 0.5})


def _untrained() -> Iterator[Job]:
    def job(name: str, path: str, *needs: str, options: Json | None = None, **body: Any) -> Job:
        return Job(name, path, body, {"retries": 0, **(options or {})}, needs=needs)

    tiny, held_out = str(tiny_model()), "sums-held-out"
    answers = {"model": "job:sft", "dataset_id": "graded", "max_new_tokens": 8, "batch_size": 3, "seed": 7}
    checks = [
        {"type": "exact", "column": "answer", "normalize": True},
        {"type": "json_schema", "column": "shape"},
        {"type": "judge", "name": "good", "model": tiny, "column": "answer", "scale": [1, 5], "at_least": 3},
    ]
    both = [{"model": "job:sft", "weight": 0.25}, {"model": "job:sft-padded", "weight": 0.75}]
    adapters = [{"model": f"job:{name}/final", "weight": 0.5} for name in ("sft-lora", "sft-fsdp-lora")]
    whole, tuned = ("sft", "sft-padded"), ("sft-lora", "sft-fsdp-lora")
    yield job("generate", GENERATE, "sft", **answers, output={"dataset_id": "answers"}, samples_per_prompt=2)
    yield job(
        "generate-ranks", GENERATE, "sft", **answers, output={"dataset_id": "more"}, options={"nproc_per_node": 2}
    )
    yield job("evaluate", EVALUATE, "sft", model="job:sft", dataset_id=held_out)
    yield job("evaluate-ranks", EVALUATE, "sft", model="job:sft", dataset_id=held_out, options={"nproc_per_node": 2})
    yield job("evaluate-adapter", EVALUATE, "sft-lora", model="job:sft-lora", dataset_id=held_out)
    preferences = {"algorithm": "dpo", "reference_model": tiny, "dataset_id": "pairs-held-out"}
    yield job("evaluate-pairs", EVALUATE, "dpo", model="job:dpo", **preferences)
    yield job("evaluate-ensemble", EVALUATE, *whole, models=both, dataset_id=held_out)
    yield job("evaluate-answers", EVALUATE, "sft", **answers, checks=checks)
    yield job("merge", MERGE, *whole, models=both)
    yield job("merge-ties", MERGE, *whole, models=both, method="ties", base=tiny, density=0.5)
    yield job("merge-dare", MERGE, *whole, models=both, method="dare_linear", base=tiny, density=0.5, seed=3)
    yield job("merge-slerp", MERGE, *whole, models=both, method="slerp")
    yield job("merge-adapters", MERGE, *tuned, models=adapters)


def _searches() -> Iterator[Job]:
    data = {"dataset_id": "sums", "validation_dataset_id": "sums-held-out"}
    rate = "training_config.optimizer_config.lr"
    grid = {"method": "grid", "parameters": {rate: [1e-3, 5e-3]}}
    bounds = {"min": 1e-4, "max": 1e-2, "log": True}
    bayesian = {"method": "bayesian", "parameters": {rate: bounds}, "trials": 3, "parallel": 1, "seed": 2}
    for name, search in (("search-grid", grid), ("search-bayesian", bayesian)):
        yield _training(name, SFT, LORA, {"save_steps": None}, data=data, more={"hyperparam_search_config": search})


def _training(
    name: str,
    path: str,
    algorithm: Json | None,
    options: Json | None = None,
    *,
    data: Json,
    training: Json | None = None,
    optimizer: Json | None = None,
    model: str = "",
    killed_at: str = "",
    needs: tuple[str, ...] = (),
    more: Json | None = None,
) -> Job:
    """Two epochs in optimizer steps of four rows: two in a micro batch, divided by the ranks."""
    options = {"save_steps": SAVED, "retries": 0, "seed": 42, **(options or {})}
    rows = 2 // options.get("nproc_per_node", 1)
    config = {
        "n_epochs": 2,
        "dtype": "fp32",
        "gradient_accumulation_steps": 2,
        "data_config": {"batch_size": rows, "shuffle": True, **data},
        "optimizer_config": {
            "optimizer_type": "adamw",
            "lr": 5e-3,
            "weight_decay": 0.01,
            "num_warmup_steps": 1,
            **(optimizer or {}),
        },
        **(training or {}),
    }
    body = {
        "model": model or str(tiny_model()),
        "training_config": config,
        "hyperparam_search_config": {},
        "logger_config": {},
        **(more or {}),
    }
    if algorithm is not None:
        body["algorithm_config"] = algorithm
    return Job(name, path, body, {key: value for key, value in options.items() if value is not None}, killed_at, needs)
