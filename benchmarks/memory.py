"""Compares the memory estimate (`recipes.memory.trace`) with the peak resident memory of real trainings on the CPU.

    .venv/bin/python benchmarks/memory.py --write docs/reference/memory-measurements.md

Each configuration is estimated first, in one process, and then trained for a few steps in a process of its own, from a
random model that is written for it. The baseline, resident memory after the imports, is subtracted from the peak.

    .venv/bin/python benchmarks/memory.py --long-rows

estimates 8B with LoRA and one row of 32k, 64k and 128k tokens for a GPU of 80 GB, as its memory check does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import REPOSITORY, begin

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import JobSpec

GIB = 1 << 30
STEPS = 2
"""The optimizer has its state from the second one on, and so is the copy for the first one's checkpoint."""
MARKERS = ("<!-- measured -->", "<!-- /measured -->")


LONG_ROWS = (32_768, 65_536, 131_072)
GPU_BYTES = int(79.1 * GIB)
"""What torch reports of an H100 of 80 GB."""


@dataclass(frozen=True)
class Shape:
    """A Llama, or with experts a Mixtral, that is as wide and as deep as it takes."""

    hidden: int
    layers: int
    vocabulary: int = 8192
    kv_heads: int | None = None
    experts: int = 0
    """Of each block, two of which compute a token; 0: one MLP."""

    @property
    def name(self) -> str:
        experts = f", {self.experts} experts" if self.experts else ""
        return f"h{self.hidden} x {self.layers}, v{self.vocabulary}{experts}"


@dataclass(frozen=True)
class Case:
    algorithm: str
    shape: Shape
    lora: bool
    checkpointing: bool
    batch: int
    tokens: int
    accumulation: int = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    every: int = 1
    """Of so many blocks one is recomputed."""
    packed: bool = False
    qat: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.algorithm,
            "LoRA" if self.lora else "full",
            "checkpointing" if self.checkpointing else "",
            f"of 1 in {self.every}" if self.every > 1 else "",
            "packed" if self.packed else "",
            "QAT" if self.qat else "",
            self.dtype if self.dtype != "fp32" else "",
            self.optimizer if self.optimizer != "adamw" else "",
        ]
        return " ".join(part for part in parts if part)


SMALL, MIDDLE, LARGE = Shape(512, 8, 4096), Shape(768, 8), Shape(1280, 6)
DEEP, WIDE = Shape(640, 20, 4096, 2), Shape(768, 6, 32000)
HUGE = Shape(1536, 6, 16384)
EXPERTS = Shape(512, 6, 4096, experts=8)

CASES = [
    Case("sft", LARGE, False, False, 2, 256),
    Case("sft", LARGE, False, True, 4, 512),
    Case("sft", MIDDLE, False, False, 4, 512),
    Case("sft", MIDDLE, False, True, 8, 512),
    Case("sft", SMALL, False, False, 8, 512),
    Case("sft", DEEP, False, False, 4, 384, accumulation=2),
    Case("sft", DEEP, False, True, 8, 512, accumulation=2),
    Case("sft", WIDE, False, False, 4, 512),
    Case("sft", LARGE, False, True, 2, 256, optimizer="sgd"),
    Case("sft", HUGE, True, False, 2, 256),
    Case("sft", HUGE, True, True, 4, 512),
    Case("sft", MIDDLE, True, False, 4, 768),
    Case("sft", SMALL, True, False, 8, 1024),
    Case("sft", WIDE, True, True, 8, 512),
    Case("dpo", MIDDLE, False, False, 2, 384),
    Case("dpo", MIDDLE, False, True, 4, 512),
    Case("dpo", LARGE, False, True, 1, 256),
    Case("dpo", SMALL, False, False, 4, 512),
    Case("dpo", DEEP, False, True, 4, 384),
    Case("dpo", WIDE, False, False, 2, 384),
    Case("dpo", HUGE, True, False, 1, 256),
    Case("dpo", HUGE, True, True, 2, 512),
    Case("dpo", MIDDLE, True, False, 2, 512),
    Case("dpo", DEEP, True, False, 2, 512),
    Case("dpo", WIDE, True, True, 4, 512),
    Case("sft", MIDDLE, False, True, 4, 512, every=2),
    Case("sft", MIDDLE, False, False, 4, 512, packed=True),
    Case("sft", MIDDLE, False, False, 4, 512, qat=True),
    Case("sft", EXPERTS, False, False, 4, 512),
    Case("sft", EXPERTS, False, True, 4, 512),
    Case("sft", EXPERTS, True, False, 4, 512),
    Case("dpo", EXPERTS, False, True, 2, 384),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of the configurations to run")
    parser.add_argument("--estimates", action="store_true", help="train nothing")
    parser.add_argument("--long-rows", action="store_true", help="estimate 8B with LoRA on a GPU of 80 GB, and no more")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks of this file")
    parser.add_argument("--child", metavar="SPEC", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if options.child:
        return measure(Path(options.child))
    report = begin("torch", "trl", "transformers", "peft")
    if options.long_rows:
        return estimate_long_rows()
    numbers = options.only or range(1, len(CASES) + 1)
    results = []
    for result in run([(number, CASES[number - 1]) for number in numbers], not options.estimates):
        results.append(result)
        print(row(result), flush=True)
        if options.write and not options.estimates:  # after each: a run that is cut short has shown what it has
            write_table(options.write, summary(results, report))
    if not options.estimates:
        print(summary(results, report))
    return None


def estimate_long_rows() -> None:
    """Print what jobs of 8B with LoRA and one long row take on a GPU, and what its memory check decides."""
    from datasets import Dataset

    from llama_stack_provider_trl.recipes.data.sampling import BatchPlan
    from llama_stack_provider_trl.recipes.memory.nearest import Capacity
    from llama_stack_provider_trl.recipes.micro_steps import RowsOnDevice, fix_order
    from llama_stack_provider_trl.recipes.preflight import check
    from llama_stack_provider_trl.specs.methods import SftSpec

    capacity = Capacity(GPU_BYTES)
    print("| tokens | in CPU memory | activations | estimate | fits | keeps attention | repeats |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="trl-memory-") as name:
        write_8b(Path(name) / "model")
        for tokens in LONG_ROWS:
            dataset = Dataset.from_dict({"input_ids": [[1] * tokens], "labels": [[1] * tokens]})
            on_device = RowsOnDevice(dataset, "cuda", lambda: (capacity, GPU_BYTES))
            for offloads in (False, True):
                spec = long_row(Path(name), SftSpec(), tokens, offloads)
                plan = BatchPlan.of_job(spec)
                spec, repeats = fix_order(spec, plan, on_device)
                found = check(spec, on_device.largest_batch(spec, plan), "cuda", capacity)
                cells = [
                    f"{tokens:,}",
                    *(f"{found[part] / GIB:.1f}" for part in ("host_offloaded_bytes", "activations_bytes")),
                    f"{found['estimate_bytes'] / GIB:.1f}",
                    *("yes" if found[part] else "no" for part in ("fits", "kept_attention")),
                    repeats.partition(":")[0],
                ]
                print("| " + " | ".join(cells) + " |", flush=True)


def write_8b(directory: Path) -> None:
    """The configuration of Llama 3.1 8B, without weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONG_ROWS[-1],
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(directory)


def long_row(folder: Path, method: Any, tokens: int, offloads: bool) -> JobSpec:
    """A job of one row with adapters on every linear layer."""
    from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, LoraSpec, OptimizerSpec

    return JobSpec.of(
        job_uuid="benchmark",
        method=method,
        model=str(folder / "model"),
        output_name="benchmark",
        checkpoint_dir=folder / "checkpoints",
        dataset=DatasetRef(dataset_id="rows", path=folder / "rows", sha256="0" * 64, num_rows=1),
        n_epochs=1,
        batch_size=1,
        max_seq_length=tokens,
        dtype="bf16",
        gradient_checkpointing=True,
        activation_offloading=offloads,
        optimizer=OptimizerSpec(learning_rate=1e-4),
        lora=LoraSpec(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"), mlp=True, rank=16, alpha=32),
        device="cuda",
    )


def write_table(path: Path, table: str) -> None:
    """Put a table between the marks of a file."""
    head, _, rest = path.read_text().partition(MARKERS[0])
    path.write_text(f"{head}{MARKERS[0]}\n{table}\n{MARKERS[1]}{rest.partition(MARKERS[1])[2]}")


def run(cases: list[tuple[int, Case]], train: bool) -> Iterator[dict[str, Any]]:
    from llama_stack_provider_trl.recipes.memory.estimate import estimate
    from llama_stack_provider_trl.recipes.memory.trace import Batch

    for number, case in cases:
        with tempfile.TemporaryDirectory(prefix="trl-memory-") as name:
            spec = prepare(Path(name), case)
            sequences = case.batch * (1 if case.algorithm == "sft" else 2)
            memory = estimate(spec, Batch(sequences, case.tokens), "cpu")
            result = {"number": number, "case": case, "memory": memory, "estimate": memory.total}
            if train:
                result |= train_one(Path(name))
            yield result


def train_one(folder: Path) -> dict[str, int]:
    from llama_stack_provider_trl.system.malloc import FRUGAL

    environment = {**os.environ, **FRUGAL, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(folder / "run" / "spec.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the training ended with {done.returncode}:\n{done.stderr[-4000:]}")
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def prepare(folder: Path, case: Case) -> JobSpec:
    """A random model, rows of which every one is exactly as long as the job lets it be, and the spec of the job."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    from llama_stack_provider_trl.specs.job import (
        AttemptSpec,
        DatasetRef,
        DpoSpec,
        JobSpec,
        LoraSpec,
        OptimizerSpec,
        QatSpec,
    )
    from llama_stack_provider_trl.specs.methods import SftSpec
    from llama_stack_provider_trl.system.files import put_rows

    heads = case.shape.hidden // 64
    sizes: dict[str, Any] = {
        "vocab_size": case.shape.vocabulary,
        "hidden_size": case.shape.hidden,
        "intermediate_size": case.shape.hidden * 11 // 4 // 64 * 64,
        "num_hidden_layers": case.shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": case.shape.kv_heads or heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    if case.shape.experts:
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=case.shape.experts, num_experts_per_tok=2))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(folder / "model")
    del model
    tokenizer().save_pretrained(folder / "model")
    text = "word " * (2 * case.tokens)
    # Every third row is shorter: as in real batches, some rows are padded, and attention gets a mask.
    short = text[: case.tokens // 2]
    rows = [
        {"prompt": f"{n} a", "completion": text if n % 3 != 1 else short}
        if case.algorithm == "sft"
        else {"prompt": f"{n} a", "chosen": text + "good", "rejected": "bad " + (text if n % 3 != 1 else short)}
        for n in range((STEPS + case.packed) * case.batch * case.accumulation)
    ]
    blob = put_rows(folder / "datasets", rows)
    spec = JobSpec.of(
        job_uuid="benchmark",
        model=str(folder / "model"),
        output_name="benchmark",
        checkpoint_dir=folder / "checkpoints",
        dataset=DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows),
        n_epochs=1,
        batch_size=case.batch,
        gradient_accumulation_steps=case.accumulation,
        max_seq_length=case.tokens,
        save_steps=1,
        dtype=case.dtype,
        gradient_checkpointing=case.checkpointing,
        checkpoint_every=case.every,
        packed=case.packed,
        qat=QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32) if case.qat else None,
        optimizer=OptimizerSpec(name=case.optimizer, learning_rate=1e-5),  # type: ignore[arg-type]
        # LoRA adapts no experts.
        lora=LoraSpec(target_modules=("q_proj", "v_proj"), mlp=not case.shape.experts, rank=8, alpha=16)
        if case.lora
        else None,
        method=DpoSpec() if case.algorithm == "dpo" else SftSpec(),
        padding_free=False,  # as the rows above
        group_by_length=False,
        attention_mask="always",
        device="cpu",
        preflight="off",  # without an estimate malloc gives back what is freed, as where memory is scarce
    )
    (folder / "run").mkdir()
    attempt = AttemptSpec(job=spec, attempt=1, run_dir=folder / "run")
    (folder / "run" / "spec.json").write_text(attempt.model_dump_json())
    return spec


def tokenizer() -> Any:
    """Bytes alone: every character of our rows is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")


def measure(spec: Path) -> None:
    """In a child: the whole attempt, as the training process runs it; prints baseline and peak."""
    from llama_stack_provider_trl.recipes.session import train_attempt
    from llama_stack_provider_trl.recipes.trainer.callbacks import JobCallback
    from llama_stack_provider_trl.specs.events import EventWriter
    from llama_stack_provider_trl.specs.job import AttemptSpec
    from llama_stack_provider_trl.system.files import RunDir

    attempt = AttemptSpec.model_validate_json(spec.read_text())
    baseline = resident()
    marks: dict[str, int] = {}
    began, ended = JobCallback.on_train_begin, JobCallback.on_train_end

    def on_train_begin(self: Any, *arguments: Any, **named: Any) -> None:
        marks["before_training"] = peak()
        began(self, *arguments, **named)

    def on_train_end(self: Any, *arguments: Any, **named: Any) -> None:
        marks["after_training"] = peak()
        ended(self, *arguments, **named)

    JobCallback.on_train_begin = on_train_begin  # type: ignore[method-assign]
    JobCallback.on_train_end = on_train_end
    train_attempt(attempt, EventWriter(RunDir(attempt.run_dir).events))
    print(json.dumps({"baseline": baseline, "peak": peak(), **marks}), flush=True)
    os._exit(0)


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def row(result: dict[str, Any]) -> str:
    case, parts = result["case"], result["memory"]
    cells = [
        result["number"],
        case.name,
        case.shape.name,
        f"{case.batch} x {case.tokens}" + (f" x {case.accumulation}" if case.accumulation > 1 else ""),
        *(f"{value / GIB:.2f}" for value in (parts.weights, parts.gradients, parts.optimizer, parts.activations)),
        *(f"{value / GIB:.2f}" for value in (parts.logits, parts.reference, parts.checkpoint_copy)),
        f"{(parts.overhead + parts.loading) / GIB:.2f}",
        f"{result['estimate'] / GIB:.2f}",
    ]
    if "peak" in result:
        measured = result["peak"] - result["baseline"]
        cells += [f"{measured / GIB:.2f}", f"{100 * (result['estimate'] / measured - 1):+.1f} %"]
        if os.environ.get("TRL_MEMORY_MARKS"):
            cells += [
                f"{(result[name] - result['baseline']) / GIB:.2f}" for name in ("before_training", "after_training")
            ]
    return "| " + " | ".join(map(str, cells)) + " |"


def summary(results: list[dict[str, Any]], report: dict[str, Any]) -> str:
    errors = [result["estimate"] / (result["peak"] - result["baseline"]) - 1 for result in results]
    lowest = min(result["peak"] - result["baseline"] for result in results)
    over = sum(result["peak"] - result["baseline"] > 1.1 * result["estimate"] for result in results)
    described = report["machine"]
    return "\n".join(
        [
            f"`{report['command']}` on {described['cpu']}, {described['cores']} cores, {described['versions']}.",
            "",
            f"{len(results)} configurations, from {lowest / GIB:.2f} GiB above the baseline on. Error of the estimate: "
            f"{100 * min(errors):+.1f} % to {100 * max(errors):+.1f} %. Peaks above estimate x 1.1, so that a job that "
            f"`fits` could exceed its limit: {over}.",
            "",
            "| | job | model | batch x tokens | weights | gradients | optimizer | activations | logits | reference "
            "| copy | other | estimate | measured | error |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(row(result) for result in results),
        ]
    )


if __name__ == "__main__":
    main()
