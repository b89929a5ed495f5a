"""Our jobs and stock TRL on the same rows, each variant in turn in one process.

    python -m gpu_checks.many_lengths OUT SFT_SPEC DPO_SPEC [...]

Writes the seconds of each step to OUT: {"SFT, 8 a step": {"ours": [[...], ...], "stock TRL": [[...], ...]}, ...}, a
list for each round. A job's time is read from its metric points, stock TRL's after each step; both have waited for the
GPU there, the job if its `read_metrics_later` is never.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from .trainer import without_export

ROUNDS = 2


def main(arguments: list[str]) -> int:
    from llama_stack_provider_trl.recipes.train import main as train_main
    from llama_stack_provider_trl.specs.events import Progress, iter_events
    from llama_stack_provider_trl.specs.job import AttemptSpec
    from llama_stack_provider_trl.system.files import RunDir

    out, specs = Path(arguments[0]), [Path(one) for one in arguments[1:]]
    without_export()
    found: dict[str, dict[str, list[list[float]]]] = {}
    for path in specs:
        attempt = AttemptSpec.model_validate_json(path.read_text())
        rows = attempt.job.data.batch_size
        kind = f"{attempt.job.algorithm.upper()}{' LoRA' if attempt.job.lora else ''}, {rows} a step"
        times = found.setdefault(kind, {"ours": [], "stock TRL": []})
        times["stock TRL"].append(_train_with_trl(attempt.job))
        _free()
        if status := train_main(["train", str(path)]):
            return status
        points = [one.time for one in iter_events(RunDir(attempt.run_dir).events) if isinstance(one, Progress)]
        times["ours"].append([after - before for before, after in itertools.pairwise(points)])
        _free()
        out.write_text(json.dumps(found))
    return 0


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.backends.cuda.enable_cudnn_sdp(True)  # as a process of TRL's begins; ours turns it off


def _train_with_trl(job: Any) -> list[float]:
    """Seconds of each step but the first, of TRL's trainer with the same model, rows, batch, adapter and precision."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from llama_stack_provider_trl.recipes.model.loading import adapter_config

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.time())

    rows = Dataset.from_list([json.loads(line) for line in Path(job.data.dataset.path).read_text().splitlines()])
    on_gpu = torch.cuda.is_available()
    common = {
        "output_dir": str(job.checkpoint_dir / "trl"),
        "per_device_train_batch_size": job.data.batch_size,
        "num_train_epochs": job.train.n_epochs,
        "learning_rate": job.train.optimizer.learning_rate,
        "bf16": job.compute.dtype == "bf16",
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "max_length": job.data.max_seq_length,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.data.seed,
    }
    # Frozen weights in the dtype of ours: fp32 ones, TRL's default, would be cast in each pass.
    dtype = torch.bfloat16 if job.lora and job.compute.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.source.model, dtype=dtype)
    adapter = adapter_config(model, job.lora) if job.lora else None
    kinds: dict[str, Any] = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}
    trainer_class, config_class = kinds[job.algorithm]
    tokenizer = AutoTokenizer.from_pretrained(job.source.model)
    trainer = trainer_class(
        model=model,
        args=config_class(**common),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[Clock()],
    )
    trainer.train()
    return [after - before for before, after in itertools.pairwise(ends)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
