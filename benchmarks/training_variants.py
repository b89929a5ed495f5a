"""The ways of training that `recipe_throughput.py` and `training.py` compare, and the one clock that times them."""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import itertools
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training_inputs import model_of, read_rows

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import Algorithm, ReferenceSpec

STOCK, OURS, BARE, AGAIN, CAREFUL = "stock TRL", "our recipe", "bare loop", "stock again", "ours, plain"
"""`CAREFUL` is our recipe without two of its defaults: it passes the mask of right-padded batches, and LoRA layers cast
their inputs to fp32, both as stock TRL does."""
WARMUP_STEPS = 2
"""Steps left out of the `steady` figures: they pay for first touches of memory and for kernels being set up."""

Result = dict[str, Any]


class Clock:
    """CPU seconds (user + system, all threads), wall seconds and page faults between its readings.

    On a GPU a reading waits until all queued work is done.
    """

    def __init__(self) -> None:
        self.readings: list[tuple[float, float, int]] = []

    def read(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.readings.append((usage.ru_utime + usage.ru_stime, time.perf_counter(), usage.ru_minflt))

    def result(self, tokens: list[int]) -> Result:
        """From readings at the start, after each step, and at the end."""
        start, warm, end = self.readings[0], self.readings[WARMUP_STEPS], self.readings[-1]
        return {
            "tokens": sum(tokens),
            "steady_tokens": sum(tokens[WARMUP_STEPS:]),
            "cpu_s": end[0] - start[0],
            "wall_s": end[1] - start[1],
            "page_faults": end[2] - start[2],
            "steady_cpu_s": end[0] - warm[0],
            "steady_wall_s": end[1] - warm[1],
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def measure(variant: str, folder: Path, algorithm: Algorithm, options: argparse.Namespace, out: Path) -> None:
    """In a child: run one variant; it writes its own result and ends the process after its last step."""
    import torch
    from transformers.trainer_utils import set_seed

    torch.set_num_threads(options.threads)
    set_seed(42)
    if variant == BARE:
        _, clock, losses = train_bare(folder, algorithm, options)
        logged = [statistics.fmean(chunk) for chunk in itertools.batched(losses, options.logging_steps)]
        return report_run(out, clock, bare_batches(folder, algorithm, options), logged)
    time_training(lambda trainer, clock, losses: report_run(out, clock, trainer.get_train_dataloader(), losses))
    if variant in (OURS, CAREFUL):
        from llama_stack_provider_trl.recipes import session

        careful = variant == CAREFUL
        if careful:
            session._without_casts = lambda run: contextlib.nullcontext()
        # Batches as those of TRL and of the bare loop.
        fields = {"padding_free": False, "group_by_length": False, "dataloader_num_workers": 0}
        run_ours(*(folder, algorithm, options, out.parent), **fields, attention_mask="always" if careful else "auto")
    else:
        run_stock(folder, algorithm, options, out.parent)
    raise RuntimeError("train() was never called")


def time_training(report: Callable[[Any, Clock, list[float]], None]) -> None:
    """Make every `Trainer.train` measure itself, report and end the process: all trainers are timed by one code."""
    from transformers import Trainer, TrainerCallback

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.read()

    train, clock = Trainer.train, Clock()

    def timed(trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.add_callback(Steps())
        clock.read()
        train(trainer, *args, **kwargs)
        clock.read()
        report(trainer, clock, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        os._exit(0)

    Trainer.train = timed


def report_run(out: Path, clock: Clock, batches: Iterable[dict[str, Any]], losses: list[float]) -> None:
    """The measurement, and what was trained on: tokens per step and a digest over all batches in their order."""
    import torch

    measured_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    measured_gpu = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_initialized() else 0.0
    digest, tokens = hashlib.sha256(), []
    for batch in batches:
        tokens.append(int(batch["attention_mask"].sum()))
        for name in ("input_ids", "attention_mask", "labels", "completion_mask"):
            if name in batch:
                digest.update(name.encode() + str(batch[name].tolist()).encode())
    result = clock.result(tokens) | {"peak_rss_mb": measured_rss, "peak_gpu_mb": measured_gpu, "steps": len(tokens)}
    out.write_text(json.dumps(result | {"losses": losses, "batches": digest.hexdigest()}))


def run_ours(
    folder: Path,
    algorithm: Algorithm,
    options: argparse.Namespace,
    run_dir: Path,
    reference: ReferenceSpec | None = None,
    **fields: Any,
) -> None:
    """The training process of a job, from spec to events.jsonl: `train_attempt` itself, on one device.

    Args:
        reference: of DPO; None: the model as it is.
        fields: of JobSpec.
    """
    from llama_stack_provider_trl.recipes.session import train_attempt
    from llama_stack_provider_trl.specs.events import EventWriter
    from llama_stack_provider_trl.specs.job import (
        AttemptSpec,
        DatasetRef,
        DpoSpec,
        JobSpec,
        LoraSpec,
        OptimizerSpec,
        ReferenceSpec,
        SftSpec,
    )
    from llama_stack_provider_trl.system.files import RunDir, put_rows

    blob = put_rows(run_dir / "datasets", read_rows(folder))
    spec = JobSpec.of(
        **{"job_uuid": "benchmark", "output_name": "benchmark", "model": str(model_of(folder))},
        checkpoint_dir=run_dir / "checkpoints",
        dataset=DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows),
        n_epochs=1,
        shuffle=False,
        max_seq_length=options.max_length,
        dtype=options.dtype,
        optimizer=OptimizerSpec(learning_rate=options.learning_rate),
        method=DpoSpec(reference=reference or ReferenceSpec()) if algorithm == "dpo" else SftSpec(),
        lora=LoraSpec(**lora_fields(options)) if options.lora else None,
        logging_steps=options.logging_steps,
        device=options.device,
        num_threads=options.threads,
        **{"batch_size": options.batch, **fields},
    )
    attempt = AttemptSpec(job=spec, attempt=1, run_dir=run_dir)
    train_attempt(attempt, EventWriter(RunDir(run_dir).events))


def lora_fields(options: argparse.Namespace) -> dict[str, Any]:
    """For our LoraSpec and, under PEFT's names, for stock TRL."""
    return {"rank": options.lora, "alpha": 2 * options.lora, "target_modules": ("q_proj", "v_proj")}


def run_stock(folder: Path, algorithm: Algorithm, options: argparse.Namespace, run_dir: Path, **arguments: Any) -> None:
    """TRL as its documentation calls it, with what would change the work set as on our side.

    Args:
        arguments: of TRL, in place of those of `stock_arguments`.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    model = AutoModelForCausalLM.from_pretrained(model_of(folder), dtype=torch.float32)
    lora = lora_fields(options)
    adapter = LoraConfig(
        r=lora["rank"], lora_alpha=lora["alpha"], target_modules=list(lora["target_modules"]), task_type="CAUSAL_LM"
    )
    trainer_class, config_class = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[algorithm]
    trainer = trainer_class(
        model=model,
        args=config_class(**{**stock_arguments(options, run_dir), **arguments}),
        train_dataset=Dataset.from_list(read_rows(folder)),
        processing_class=AutoTokenizer.from_pretrained(model_of(folder)),
        peft_config=adapter if options.lora else None,
    )
    trainer.train()


def stock_arguments(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Arguments of TRL's trainers: its defaults, but for what would change the work."""
    return {
        "output_dir": str(run_dir / "checkpoints"),
        "num_train_epochs": 1,
        "per_device_train_batch_size": options.batch,
        "max_length": options.max_length,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        # TRL's own defaults are bf16 and gradient checkpointing.
        "bf16": options.dtype == "bf16",
        "gradient_checkpointing": None,
        "activation_checkpointing": False,
        "use_cpu": options.device == "cpu",
        "dataloader_pin_memory": options.device != "cpu",
        "train_sampling_strategy": "sequential",
        "logging_steps": options.logging_steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train_bare(folder: Path, algorithm: Algorithm, options: argparse.Namespace) -> tuple[Any, Clock, list[float]]:
    """The loop that one would write by hand: forward, loss, backward, clip, fused AdamW, linear schedule.

    Returns:
        The model, the clock, and the loss of each step.
    """
    import torch
    from transformers import AutoModelForCausalLM

    batches = bare_batches(folder, algorithm, options)
    model = AutoModelForCausalLM.from_pretrained(model_of(folder), dtype=torch.float32).to(options.device)
    loss_of = bare_sft_loss(model) if algorithm == "sft" else bare_dpo_loss(model)
    clock, losses = Clock(), []
    clock.read()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    for batch in batches:
        batch = {name: value.to(options.device) for name, value in batch.items()}
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.read()
    clock.read()
    return model, clock, losses


def bare_batches(folder: Path, algorithm: Algorithm, options: argparse.Namespace) -> Any:
    """A DataLoader over our tokenized rows with TRL's collator: the very batches of the other two."""
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from llama_stack_provider_trl.recipes.data.prepare import read_examples, tokenize_dpo, tokenize_sft

    tokenizer = AutoTokenizer.from_pretrained(model_of(folder))
    rows, pad = folder / "rows.jsonl", tokenizer.pad_token_id
    if algorithm == "sft":
        dataset, _ = tokenize_sft(read_examples(rows, "sft"), tokenizer, options.max_length).collect()
        collate = DataCollatorForLanguageModeling(pad_token_id=pad)
    else:
        dataset, _ = tokenize_dpo(read_examples(rows, "dpo"), tokenizer, options.max_length).collect()
        collate = DataCollatorForPreference(pad_token_id=pad)
    return DataLoader(dataset, batch_size=options.batch, shuffle=False, collate_fn=collate)


def bare_sft_loss(model: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda batch: model(**batch, use_cache=False).loss


def bare_dpo_loss(model: Any) -> Callable[[dict[str, Any]], Any]:
    import torch
    import torch.nn.functional as F

    reference = copy.deepcopy(model).eval().requires_grad_(False)

    def logps(network: Any, batch: dict[str, Any]) -> Any:
        logits = network(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
        targets = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)[:, 1:]
        return -F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").sum(dim=1)

    def loss(batch: dict[str, Any]) -> Any:
        with torch.no_grad():
            expected = logps(reference, batch)
        chosen, rejected = (logps(model, batch) - expected).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return loss
