"""Packed rows under flash kernels, export, fp16, QLoRA and QAT."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .inputs import DEEP, ONE_B, model
from .jobs import Outcome, largest_difference, problems, run, run_all, run_alone, spec
from .report import Finding, Skipped
from .setting import Setting

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import JobSpec

PACKED_ROWS = 48
"""Rows of the jobs that compare packed attention."""


IN_ONE_SEQUENCE = "rows_in_one_sequence"
"""What begins the name of the attention of batches without padding, in the record of a job."""


def padding_free(setting: Setting) -> Finding:
    """Decides whether batches without padding train as padded ones do on a GPU, and what they save.

    A third of the rows is half as long, and of a pair the rejected answer is. Both answers attend to one prompt.
    """
    sizes: dict[str, Any] = {"steps": 8, "tokens": 64 if setting.is_dry_run else 1024, "batch_size": 4}
    path = model(setting, DEEP)
    found: dict[str, Outcome] = {}
    for algorithm in ("sft", "dpo"):
        names = {f"{algorithm}, {name}": name == "one sequence" for name in ("padded", "one sequence")}
        jobs = [
            spec(setting, name.replace(", ", "-"), path, algorithm=algorithm, padding_free=is_flat, **sizes)
            for name, is_flat in names.items()
        ]
        found |= dict(zip(names, run_all(setting, jobs), strict=True))
    return judge_padding_free(found, agreement=1e-4 if setting.is_dry_run else AGREEMENT)


def judge_padding_free(found: Mapping[str, Outcome], agreement: float) -> Finding:
    """Losses agree as a fraction, and the jobs trained on the batches that they name."""
    if failed := problems(found):
        return Finding(False, failed)
    rows, wrong, differences = {}, [], []
    for algorithm in ("sft", "dpo"):
        padded, flat = found[f"{algorithm}, padded"], found[f"{algorithm}, one sequence"]
        differences.append(largest_difference(flat.losses, padded.losses))
        if not differences[-1] <= agreement:
            wrong.append(f"{algorithm}: losses differ by {differences[-1]:.1e}")
        if [one.attention.startswith(IN_ONE_SEQUENCE) for one in (padded, flat)] != [False, True]:
            wrong.append(f"{algorithm}: trained with attention {padded.attention!r} and {flat.attention!r}")
        rows[algorithm] = (
            f"padded {padded.step_seconds:.3f} s a step, {padded.peak_gib:.2f} GiB; in one sequence "
            f"{flat.step_seconds:.3f} s, {flat.peak_gib:.2f} GiB"
        )
    return Finding(not wrong, "; ".join(wrong) or f"losses agree within {max(differences):.1e}", rows)


def packed_attention(setting: Setting) -> Finding:
    """Decides whether flash kernels train packed rows as sdpa does, and what they save.

    sdpa separates the rows of a sequence by a mask of tokens x tokens, flash kernels by their positions. A dry run
    compares eager attention with sdpa: there are no flash kernels for CPUs.
    """
    other, tokens = ("eager", 64) if setting.is_dry_run else ("flash_attention_2", 512)
    if not setting.is_dry_run:
        _require("flash_attn")
    # A batch of one: flash kernels separate the rows of no other.
    sizes: dict[str, Any] = {"packed": True, "batch_size": 1, "tokens": tokens, "max_seq_length": 8 * tokens}
    sizes["padding_free"] = False  # which has an attention of its own
    path = model(setting, DEEP)
    names = ("sdpa", other)
    jobs = [spec(setting, name, path, attn_implementation=name, steps=PACKED_ROWS, **sizes) for name in names]
    sdpa, compared = run_all(setting, jobs)
    return judge_packed(sdpa, compared, other, agreement=1e-4 if setting.is_dry_run else 2e-2)


def judge_packed(sdpa: Outcome, compared: Outcome, name: str, agreement: float) -> Finding:
    """Losses agree as a fraction, sequences hold several rows, and each job trained with the attention it names."""
    if failed := problems({"sdpa": sdpa, name: compared}):
        return Finding(False, failed)
    used = (sdpa.attention, compared.attention)
    difference = largest_difference(compared.losses, sdpa.losses)
    falls = all(one.losses[-1] < one.losses[0] for one in (sdpa, compared))
    is_packed = 2 * len(sdpa.steps) <= PACKED_ROWS
    rows = {one.attention: f"step {one.step_seconds:.3f} s, peak {one.peak_gib:.2f} GiB" for one in (sdpa, compared)}
    summary = (
        f"{' and '.join(used)}: losses within {difference:.1e} over {len(sdpa.steps)} sequences of {PACKED_ROWS} rows"
        f"{'' if falls else ', and they do NOT fall'}"
    )
    return Finding(used == ("sdpa", name) and is_packed and falls and difference <= agreement, summary, rows)


def export(setting: Setting) -> Finding:
    """Decides whether a model of 1B that a GPU trained in bf16 passes the read-back on the CPU, and what that takes.

    The export compares every weight, and logits of the model loaded from disk with those of the trained one: kernels of
    GPU and CPU round bf16 otherwise.
    """
    sizes: dict[str, Any] = {"steps": 2, "tokens": 64 if setting.is_dry_run else 512, "batch_size": 1}
    path = model(setting, ONE_B)
    names = ("full", "LoRA")
    found = run_all(setting, [spec(setting, name, path, lora=name == "LoRA" or None, **sizes) for name in names])
    return judge_export(dict(zip(names, found, strict=True)))


def judge_export(found: Mapping[str, Outcome]) -> Finding:
    if failed := problems(found):
        return Finding(False, failed)
    rows = {
        name: f"verified by {one.verified or 'nothing'}, logits within "
        f"{one.logits_difference if one.logits_difference is not None else math.nan:.2e} of their scale, "
        f"{one.export_seconds:.1f} s"
        for name, one in found.items()
    }
    passed = all(one.verified == "logits" and one.weights for one in found.values())
    return Finding(passed, f"{'all' if passed else 'NOT all'} exports were verified by their logits", rows)


AGREEMENT = 1e-2
"""Fraction by which losses of FSDP2 and of one process may differ: the rounding of bf16, 4e-3, and in fp16 a step that
one of them skips for an overflow, 3e-3 of these losses."""


def fp16(setting: Setting) -> Finding:
    """Decides whether loss scaling trains in fp16, alone and under FSDP2 in a world of one."""
    from llama_stack_provider_trl.specs.job import ShardingSpec

    sizes: dict[str, Any] = {"dtype": "fp16", "steps": 8, "tokens": 256, "batch_size": 4}
    path = model(setting, DEEP)
    jobs = [spec(setting, "alone", path, **sizes), spec(setting, "sharded", path, sharding=ShardingSpec(), **sizes)]
    alone, sharded = run_all(setting, jobs, _run_here)
    return judge_falling({"one process": alone, "FSDP2": sharded}, agreement=AGREEMENT)


def qlora(setting: Setting) -> Finding:
    """Decides whether a base in 4 bits trains, and whether its FSDP2 shards have the losses of one process."""
    _require("bitsandbytes")
    from llama_stack_provider_trl.specs.job import LoraSpec, OptimizerSpec, ShardingSpec

    lora = LoraSpec(target_modules=("q_proj", "v_proj"), mlp=True, rank=8, alpha=16, quantize_base=True)
    path = model(setting, DEEP)
    sizes: dict[str, Any] = {"lora": lora, "steps": 5, "optimizer": OptimizerSpec(learning_rate=1e-2)}
    jobs = [
        spec(setting, "alone", path, **sizes),
        spec(setting, "sharded", path, sharding=ShardingSpec(), **sizes),
    ]
    alone, sharded = run_all(setting, jobs, _run_here)
    return judge_falling({"one process": alone, "FSDP2": sharded}, agreement=AGREEMENT)


def qat(setting: Setting) -> Finding:
    """Decides whether torchao's fake quantization trains on this device."""
    _require("torchao")
    from llama_stack_provider_trl.specs.job import QatSpec

    quantizer = QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)
    found = run(setting, spec(setting, "qat", model(setting, DEEP), qat=quantizer, steps=5))
    return judge_falling({"QAT": found}, agreement=math.inf)


def _run_here(setting: Setting, job: JobSpec) -> Outcome:
    """Run a job on one GPU: one that shards, in a world of one. Where nothing is sharded, it counts as failed."""
    if not job.sharding:
        return run(setting, job)
    ended, recorded = run_alone(setting, job, "--world-of-one")
    return require_shards(ended, recorded)


def require_shards(ended: Outcome, recorded: Mapping[str, Any]) -> Outcome:
    if not ended.finished or recorded.get("units", 0) > 1:
        return ended
    return replace(ended, finished=False, problem=f"the model was not sharded: {dict(recorded)}")


def judge_falling(found: Mapping[str, Outcome], agreement: float) -> Finding:
    """Losses fall and agree with those of the first job, as a fraction."""
    if failed := problems(found):
        return Finding(False, failed)
    first, *others = found.values()
    falls = all(math.isfinite(one.losses[-1]) and one.losses[-1] < one.losses[0] for one in found.values())
    difference = max((largest_difference(one.losses, first.losses) for one in others), default=0.0)
    losses = "; ".join(f"{name}: loss {one.losses[0]:.4f} to {one.losses[-1]:.4f}" for name, one in found.items())
    summary = f"{losses}{f'; within {difference:.1e}' if others else ''}"
    return Finding(falls and difference <= agreement, summary)


def _require(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise Skipped(f"{library} is not installed")
