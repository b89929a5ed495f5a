"""Speed: the clock of the metrics, attention with and without a mask, merged micro steps, and ours against TRL."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .inputs import HALF_B, ONE_B, TINY, Shape, full_rows, model, random_model, rows_of_many_lengths
from .jobs import WARMUP_STEPS, Outcome, largest_difference, problems, run, run_all, spec, write_attempt
from .many_lengths import ROUNDS
from .recovery import SAME_LOSS
from .report import Finding
from .setting import Setting
from .sharding import SAME_SPEED

RowsOf = Callable[[str, int, int], list[dict[str, str]]]


# --- The clock of the metrics -----------------------------------------------------------------------------------------


def clock(setting: Setting) -> Finding:
    """Decides whether `tokens_per_second` is real: a GPU computes after Python has returned from a step.

    With `read_metrics_later` never a metric point is written after the loss of its step has been read, so after all
    queued work: the time between two points is a synchronized clock.
    """
    sizes = {"steps": 12, "tokens": 256 if setting.is_dry_run else 1024, "batch_size": 4, "read_metrics_later": "never"}
    return judge_clock(run(setting, spec(setting, "clock", model(setting, HALF_B), **sizes)))


def judge_clock(found: Outcome) -> Finding:
    if failed := problems({"job": found}):
        return Finding(False, failed)
    first, last, later = found.steps[WARMUP_STEPS - 1], found.steps[-1], found.steps[WARMUP_STEPS:]
    tokens = last.tokens_seen - first.tokens_seen
    actual = tokens / (last.time - first.time)
    # Each step's tokens over its reported speed is the time that the report counts.
    before = [first, *later]
    counted = sum(
        (step.tokens_seen - prior.tokens_seen) / max(step.metrics["tokens_per_second"], 1e-9)
        for prior, step in zip(before, later, strict=False)
    )
    ratio = tokens / counted / actual
    summary = f"reported {tokens / counted:.0f} tokens/s, synchronized clock {actual:.0f}: {ratio:.2f} times"
    return Finding(0.8 < ratio < 1.25, summary, figures={"reported": tokens / counted, "actual": actual})


# --- Attention: mask, no mask, packed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """A forward and backward pass over the same tokens."""

    seconds: float
    loss: float
    gradient_norm: float
    peak_gib: float


def masks(setting: Setting) -> Finding:
    """Decides what an attention mask costs on right-padded batches, and what packing costs or saves.

    A causal model needs no mask there: loss and gradients must be equal. With a mask no flash kernel can be used;
    packed rows get a mask of tokens x tokens, unless attention separates them by their positions.
    """
    shape, lengths = (TINY, (64, 128)) if setting.is_dry_run else (replace(ONE_B, layers=4), (2048, 8192))
    found = {tokens: _forwards(setting, shape, tokens) for tokens in lengths}
    return judge_masks(found, is_measured=not setting.is_dry_run)


def judge_masks(found: Mapping[int, Mapping[str, Forward]], is_measured: bool) -> Finding:
    rows, wrong = {}, []
    for tokens, cases in found.items():
        masked, plain = cases["mask"], cases["no mask"]
        if _differs(plain.loss, masked.loss) or _differs(plain.gradient_norm, masked.gradient_norm):
            wrong.append(
                f"{tokens} tokens: loss {plain.loss:.6f} and {masked.loss:.6f}, gradient norm "
                f"{plain.gradient_norm:.6f} and {masked.gradient_norm:.6f}"
            )
        if not math.isfinite(cases["packed"].loss) or not math.isfinite(cases["packed"].gradient_norm):
            wrong.append(f"{tokens} tokens: packed rows have a loss or gradient that is no number")
        if is_measured and plain.seconds > SAME_SPEED * masked.seconds:
            wrong.append(f"{tokens} tokens: slower without a mask")
        for name, one in cases.items():
            rows[f"{tokens} tokens, {name}"] = (
                f"{1000 * one.seconds:.1f} ms, {masked.seconds / one.seconds:.2f} times the speed with a mask, "
                f"peak {one.peak_gib:.2f} GiB"
            )
    return Finding(not wrong, "; ".join(wrong) or "loss and gradients are equal with and without a mask", rows)


def _differs(one: float, other: float) -> bool:
    return not abs(one - other) <= 5e-3 * abs(other)


def _forwards(setting: Setting, shape: Shape, tokens: int) -> dict[str, Forward]:
    import torch

    from llama_stack_provider_trl.recipes.trainer.trl_patches import fuse_head

    torch.manual_seed(0)
    with torch.device(setting.device):
        network = random_model(shape)
    network.to(torch.float32 if setting.is_dry_run else torch.bfloat16).train()
    fuse_head(network, outputs=("log_probs",))
    inputs = _inputs(setting.device, tokens, shape.vocabulary)
    return {name: _timed(network, given, repeats=1 if setting.is_dry_run else 5) for name, given in inputs.items()}


def _inputs(device: str, tokens: int, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Two sequences: one of all tokens, one that is padded after three quarters; packed ones hold four rows each."""
    import torch

    ids = torch.randint(1, min(vocabulary, 256), (2, tokens), device=device)
    mask = torch.ones_like(ids)
    mask[1, tokens * 3 // 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    positions = (torch.arange(tokens, device=device) % (tokens // 4)).repeat(2, 1)
    return {
        "mask": {"input_ids": ids, "labels": labels, "attention_mask": mask},
        "no mask": {"input_ids": ids, "labels": labels},
        "packed": {"input_ids": ids, "labels": ids, "position_ids": positions},
    }


def _timed(network: Any, inputs: dict[str, Any], repeats: int) -> Forward:
    import torch

    on_gpu = torch.cuda.is_available()

    def step() -> Any:
        network.zero_grad(set_to_none=True)
        outputs = network(**inputs, use_cache=False, fused_lm_head=True)
        loss = -outputs.log_probs.sum() / outputs.label_mask.sum()
        loss.backward()
        return loss

    step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(repeats):
        took.append(_seconds(step, on_gpu))
    loss = step()
    gradients = [weight.grad.float().norm() for weight in network.parameters() if weight.grad is not None]
    peak = torch.cuda.max_memory_allocated() / (1 << 30) if on_gpu else 0.0
    return Forward(sorted(took)[len(took) // 2], float(loss), float(torch.stack(gradients).norm()), peak)


def _seconds(work: Callable[[], object], on_gpu: bool) -> float:
    import torch

    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# --- Merged micro steps -----------------------------------------------------------------------------------------------

MERGED, SEPARATE, REQUESTED = "1 x 8, merged", "1 x 8, separate", "8 x 1"
WORTH_MERGING = 0.9
"""Of the speed of a request for the whole batch: what merged micro steps have to reach."""


def merged(setting: Setting) -> Finding:
    """Decides whether a request with batch_size 1 and 8 accumulation steps runs like one with batch_size 8.

    A 1B model with LoRA and rows of 512 tokens, whose micro steps a GPU computes faster than the CPU queues them. The
    memory estimate is on, without which nothing is merged.
    """
    path, sizes = model(setting, ONE_B), {"steps": 12, "tokens": 64 if setting.is_dry_run else 512, "lora": True}
    small, large = {"batch_size": 1, "gradient_accumulation_steps": 8}, {"batch_size": 8}
    kinds: dict[str, dict[str, Any]] = {
        MERGED: {**small, "merge_micro_batches": "always"},
        SEPARATE: {**small, "merge_micro_batches": "never"},
        REQUESTED: large,
    }
    jobs = [
        spec(setting, f"job-{number}", path, preflight="warn", **sizes, **changes)
        for number, changes in enumerate(kinds.values())
    ]
    return judge_merged(dict(zip(kinds, run_all(setting, jobs), strict=True)), is_measured=not setting.is_dry_run)


def judge_merged(found: Mapping[str, Outcome], is_measured: bool) -> Finding:
    if failed := problems(found):
        return Finding(False, failed)
    merged, requested = found[MERGED], found[REQUESTED]
    ratio = requested.step_seconds / max(merged.step_seconds, 1e-9)
    is_same = bool(merged.weights) and merged.weights == requested.weights
    apart = largest_difference(found[SEPARATE].losses, merged.losses)
    rows = {name: f"{one.step_seconds:.3f} s a step, peak {one.peak_gib:.2f} GiB" for name, one in found.items()}
    summary = (
        f"weights of merged micro steps and of batch_size 8 {'equal' if is_same else 'DIFFER'}, {ratio:.2f} times the "
        f"speed; losses of separate ones within {apart:.1e}"
    )
    passed = is_same and apart <= SAME_LOSS and (not is_measured or ratio >= WORTH_MERGING)
    return Finding(passed, summary, rows, {"against_requested": ratio})


# --- Metrics that are read a step later -------------------------------------------------------------------------------

LATER, IN_STEP = "read a step later", "read in their step"


def later_metrics(setting: Setting) -> Finding:
    """Decides whether metrics that are read a step later leave a training as it is, and what they gain: 0.5B with LoRA
    and 4 rows of 256 tokens a step, which a GPU computes about as fast as the CPU queues them.

    `auto` on a GPU; a dry run asks for `always`, since a CPU reads metrics in their step by itself.
    """
    kinds = {LATER: "always" if setting.is_dry_run else "auto", IN_STEP: "never"}
    path, sizes = model(setting, HALF_B), {"steps": 24, "tokens": 64 if setting.is_dry_run else 256, "batch_size": 4}
    if setting.is_dry_run:
        sizes["steps"] = 6
    jobs = [
        spec(setting, f"job-{number}", path, lora=True, read_metrics_later=value, **sizes)
        for number, value in enumerate(kinds.values())
    ]
    return judge_later_metrics(
        dict(zip(kinds, run_all(setting, jobs), strict=True)), is_measured=not setting.is_dry_run
    )


def judge_later_metrics(found: Mapping[str, Outcome], is_measured: bool) -> Finding:
    """Passes where they are read as requested, losses and weights are the same, and steps are no slower."""
    if failed := problems(found):
        return Finding(False, failed)
    later, in_step = found[LATER], found[IN_STEP]
    if later.metrics_read != "a step later" or in_step.metrics_read:
        read = ", ".join(f"{name}: {one.metrics_read or 'not named'}" for name, one in found.items())
        return Finding(False, f"metrics are not read as requested: {read}")
    ratio = in_step.step_seconds / max(later.step_seconds, 1e-9)
    is_same = bool(later.weights) and later.weights == in_step.weights
    apart = largest_difference(later.losses, in_step.losses)
    rows = {name: f"{one.step_seconds:.3f} s a step, peak {one.peak_gib:.2f} GiB" for name, one in found.items()}
    summary = (
        f"{ratio:.2f} times the speed, weights {'equal' if is_same else 'DIFFER'}, losses within {apart:.1e} of those "
        "that are read in their step"
    )
    passed = is_same and apart <= SAME_LOSS and (not is_measured or ratio * SAME_SPEED >= 1)
    return Finding(passed, summary, rows, {"speed": ratio})


# --- Against stock TRL ------------------------------------------------------------------------------------------------

WORTH_LORA = 1.4
"""Times stock TRL's speed that LoRA is to have on rows of many lengths at 1B."""


def throughput(setting: Setting) -> Finding:
    """Decides whether jobs as requests make them are as fast as stock TRL where TRL pads nothing: 1B, all weights, rows
    of 1,024 tokens, SFT of 4 and 16 and DPO of 4 a step.

    But metrics are read in their step, here and in the next checks, as a clock of single steps needs it.
    """
    kinds = [Kind("sft", 4), Kind("sft", 16), Kind("dpo", 4)]
    return _against_trl(setting, ONE_B, kinds, full_rows, steps=10, least=1 / SAME_SPEED)


def many_lengths(setting: Setting) -> Finding:
    """Decides whether jobs are faster than stock TRL on rows as people have them, of many lengths, with our defaults.

    Every shape is new to the kernels at first: half of the time of short jobs can be their preparation.
    """
    return _against_trl(setting, HALF_B, [Kind("sft", 4), Kind("dpo", 4)], rows_of_many_lengths, steps=16)


def many_lengths_at_1b(setting: Setting) -> Finding:
    """Decides the same for 1B and 8 rows a step, all weights and LoRA, and whether LoRA has 1.4 times the speed by
    medians, as a long training has it; at 0.5B and 4 rows the CPU is the limit."""
    kinds = [Kind(algorithm, 8, lora) for lora in (None, True) for algorithm in ("sft", "dpo")]
    return _against_trl(setting, ONE_B, kinds, rows_of_many_lengths, steps=10)


@dataclass(frozen=True)
class Kind:
    algorithm: str
    batch_size: int
    lora: bool | None = None


def _against_trl(
    setting: Setting, shape: Shape, kinds: Sequence[Kind], rows_of: RowsOf, steps: int, least: float = 1.0
) -> Finding:
    tokens = 1024
    if setting.is_dry_run:
        shape, steps, tokens = TINY, 6, 256
    path, out = model(setting, shape), setting.folder / "many-lengths.json"
    specs = []
    for number, kind in itertools.product(range(ROUNDS), kinds):
        rows = rows_of(kind.algorithm, kind.batch_size * steps, tokens)
        sizes = {"tokens": tokens, "steps": steps, "batch_size": kind.batch_size, "rows": rows}
        name = f"{kind.algorithm}-{kind.batch_size}-{kind.lora}-{number}"
        job = spec(setting, name, path, algorithm=kind.algorithm, lora=kind.lora, read_metrics_later="never", **sizes)
        specs.append(write_attempt(setting, job) / "spec.json")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "gpu_checks.many_lengths", str(out), *map(str, specs)],
        capture_output=True,
        text=True,
        check=False,
    )
    (setting.folder / "many-lengths.log").write_text(done.stdout + done.stderr)
    if done.returncode != 0 or not out.exists():
        return Finding(False, " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])[-600:])
    found = json.loads(out.read_text())
    return judge_against_trl(found, count=len(kinds), is_measured=not setting.is_dry_run, least=least)


def judge_against_trl(
    found: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], count: int, is_measured: bool, least: float = 1.0
) -> Finding:
    """
    Args:
        found: seconds of the steps by kind of job, variant and round.
        count: of the kinds that were to be measured.
        least: times stock TRL's speed, by means; of LoRA besides `WORTH_LORA`, by medians.
    """
    rows, ratios, medians = {}, {}, {}
    for kind, variants in found.items():
        means = {
            name: statistics.median(statistics.mean(steps[WARMUP_STEPS:]) for steps in rounds)
            for name, rounds in variants.items()
        }
        middles = {
            name: statistics.median(itertools.chain.from_iterable(steps[WARMUP_STEPS:] for steps in rounds))
            for name, rounds in variants.items()
        }
        ratios[kind] = means["stock TRL"] / means["ours"]
        medians[kind] = middles["stock TRL"] / middles["ours"]
        for name, mean in means.items():
            rows[f"{kind}, {name}"] = f"{mean:.3f} s a step (mean), {middles[name]:.3f} s (median)"
    summary = ", ".join(f"{kind} {ratio:.2f} ({medians[kind]:.2f} by medians)" for kind, ratio in ratios.items())
    passed = len(ratios) == count and (not is_measured or all(ratio > least for ratio in ratios.values()))
    slow = [kind for kind, ratio in medians.items() if "LoRA" in kind and ratio < WORTH_LORA]
    passed = passed and not (is_measured and slow)
    return Finding(passed, f"times stock TRL: {summary}", rows, {"against_stock": ratios, "by_medians": medians})
