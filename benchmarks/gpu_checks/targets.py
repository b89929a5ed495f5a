"""The speed that one H100 is to reach, host time, long rows, and weights for vLLM, in jobs as requests make them.

Each runs in a process of its own and exports nothing. What is reported besides: operations per second by two
countings, and where the time of a step goes (`gpu_checks.steps`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .inputs import EIGHT_B, ONE_B, TINY, Shape, full_rows, model
from .jobs import Outcome, problems, run_alone, spec
from .report import Finding, Skipped
from .setting import Setting
from .steps import TRACED, WARMUP

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "4090": 165e12,
}
"""Dense bf16 operations per second by the makers' data sheets; the first name that a GPU's own name contains."""
GIB = 1 << 30
EIGHTY_GB = 79.1 * GIB
"""What an H100 of 80 GB has."""
HOST_SECONDS = 5e-3
SYNC_SECONDS = 1.0
STEPS = WARMUP + TRACED + 6


@dataclass(frozen=True)
class Target:
    """A job, and the speed that it is to reach on an H100."""

    name: str
    shape: Shape
    batch: int
    tokens: int
    algorithm: str = "sft"
    lora: bool = False
    percent: float = 0.0
    """Of the GPU's operations per second."""
    tokens_per_second: float = 0.0

    @property
    def tokens_of_a_step(self) -> int:
        return self.batch * self.tokens * (2 if self.algorithm == "dpo" else 1)


@dataclass(frozen=True)
class Ran:
    """How a job ran."""

    outcome: Outcome
    steps: Mapping[str, float]
    """By `gpu_checks.steps`, and of `--measure`."""


Variants = Mapping[str, Ran]
REQUESTED, COMPILED = "as requested", "compiled"
VARIANTS: dict[str, dict[str, Any]] = {REQUESTED: {}, COMPILED: {"compile_blocks": "always"}}


def sft_at_1b(setting: Setting) -> Finding:
    """Decides whether SFT of all weights of 1B uses 33 % of the GPU with 4 rows of 1,024 tokens a step, and 42 % with
    16 rows, with blocks that are compiled or not."""
    targets = [
        Target("4,096 tokens", ONE_B, 4, 1024, percent=33),
        Target("16,384 tokens", ONE_B, 16, 1024, percent=42),
    ]
    return _reach(setting, targets)


def dpo_at_1b(setting: Setting) -> Finding:
    """Decides whether DPO of all weights of 1B uses 38 % of the GPU with 4 pairs of 1,024 tokens each a step."""
    return _reach(setting, [Target("4 pairs", ONE_B, 4, 1024, "dpo", percent=38)])


def lora_at_8b(setting: Setting) -> Finding:
    """Decides whether LoRA on 8B trains 12,000 tokens a second in 4 rows of 1,024 tokens a step."""
    return _reach(setting, [Target("4 x 1,024", EIGHT_B, 4, 1024, lora=True, tokens_per_second=12_000)])


def lora_at_8b_longer(setting: Setting) -> Finding:
    """Decides whether LoRA on 8B trains 12,500 tokens a second in a row of 4,096 tokens a step."""
    return _reach(setting, [Target("1 x 4,096", EIGHT_B, 1, 4096, lora=True, tokens_per_second=12_500)])


def _reach(setting: Setting, targets: Sequence[Target]) -> Finding:
    variants = VARIANTS
    if setting.is_dry_run:  # its compiler takes minutes, which the check of compiled blocks takes, too
        targets, variants = targets[:1], {REQUESTED: {}}
    found = {
        target: {name: _run(setting, f"{number}-{name}", target, **changes) for name, changes in variants.items()}
        for number, target in enumerate(targets)
    }
    return judge_targets(found, _peak_flops())


def _run(setting: Setting, name: str, target: Target, steps: int = STEPS, **changes: Any) -> Ran:
    tokens = min(target.tokens, 64) if setting.is_dry_run else target.tokens
    rows = full_rows(target.algorithm, steps * target.batch, tokens)
    sizes = {"algorithm": target.algorithm, "batch_size": target.batch, "tokens": tokens, "steps": steps, "rows": rows}
    path = model(setting, target.shape)
    # With the memory check of requests, by which micro steps, attention and its order of additions are decided.
    job = spec(
        setting,
        name.replace(" ", "-"),
        path,
        preflight="refuse",
        lora=target.lora or None,
        num_threads=None,
        **sizes,
        **changes,
    )
    return Ran(*run_alone(setting, job, "--measure", "--steps"))


def judge_targets(found: Mapping[Target, Variants], peak_flops: float | None) -> Finding:
    """Passes where the fastest variant of each job reaches its target.

    Args:
        peak_flops: of the GPU; None: it has none, or is not known, and no speed is compared.
    """
    if failed := _problems(found):
        return Finding(False, failed)
    rows, missed, parts, figures = {}, [], [], {}
    for target, variants in found.items():
        for name, ran in variants.items():
            rows[f"{target.name}, {name}"] = _described(target, ran, peak_flops)
            figures[f"{target.name}, {name}"] = dict(ran.steps)
        name, ran = min(variants.items(), key=lambda pair: pair[1].outcome.step_seconds)
        speed = _speed(target, ran)
        if not peak_flops:
            parts.append(f"{target.name}: {name} is faster")
            continue
        percent = 100 * speed * operations(target)[0] / peak_flops
        # An H100's own speed; another GPU is to use as much of what it has.
        least = target.tokens_per_second * peak_flops / PEAK_FLOPS["H100"]
        if percent < target.percent or speed < least:
            missed.append(target.name)
        asked = f"{target.percent:.0f} %" if target.percent else f"{least:.0f} tokens/s"
        parts.append(f"{target.name}: {name}, {speed:.0f} tokens/s, MFU {percent:.1f} % (target {asked})")
    summary = "; ".join(parts) + (f"; missed: {', '.join(missed)}" if missed else "")
    return Finding(not missed, summary, rows, figures)


def _problems(found: Mapping[Target, Variants]) -> str:
    """What failed, and what was not compiled although it was requested, or not watched."""
    each = {f"{target.name}, {name}": ran for target, variants in found.items() for name, ran in variants.items()}
    if failed := problems({name: ran.outcome for name, ran in each.items()}):
        return failed
    if unwatched := [name for name, ran in each.items() if "busy" not in ran.steps]:
        return f"no step was traced: {', '.join(unwatched)}"
    eager = [
        f"{target.name}: {variants[COMPILED].outcome.compiled or 'no record'}"
        for target, variants in found.items()
        if COMPILED in variants and not variants[COMPILED].outcome.compiled.startswith("used")
    ]
    return f"nothing is compiled: {'; '.join(eager)}" if eager else ""


def _described(target: Target, ran: Ran, peak_flops: float | None) -> str:
    found, outcome, speed = ran.steps, ran.outcome, _speed(target, ran)
    parts = [f"{speed:.0f} tokens/s, {outcome.step_seconds:.3f} s a step, peak {outcome.peak_gib:.2f} GiB"]
    if peak_flops:
        every, needed = (100 * speed * count / peak_flops for count in operations(target))
        parts.append(f"MFU {every:.1f} % by 6 operations a weight")
        if target.lora:
            parts.append(f"{needed:.1f} % by 4 of a frozen one")
    if "busy" in found:
        busy, idle, host = (1000 * found[name] for name in ("busy", "idle", "host"))
        parts.append(
            f"GPU busy {busy:.0f} ms, idle {idle:.0f} ms, host {host:.0f} ms of {1000 * found['step']:.0f} traced, "
            f"{found['kernels']:.0f} kernels"
        )
    if outcome.compile_seconds:
        parts.append(f"compiling {outcome.compile_seconds:.0f} s")
    return "; ".join(parts)


def _speed(target: Target, ran: Ran) -> float:
    return target.tokens_of_a_step / max(ran.outcome.step_seconds, 1e-9)


def operations(target: Target) -> tuple[float, float]:
    """Floating-point operations of a token: 6 per weight, and 4 per weight that is frozen, with causal attention. DPO's
    reference adds a forward."""
    shape = target.shape
    weights = 2 * shape.multiplied
    attention = 2 * shape.layers * shape.hidden * target.tokens
    passes = 4 if target.algorithm == "dpo" else 3
    every = passes * (weights + attention)
    return every, every - (weights if target.lora else 0)


# --- Host time --------------------------------------------------------------------------------------------------------


def host_time(setting: Setting) -> Finding:
    """Decides whether Python takes at most 5 ms a step of 8B with LoRA outside forward and backward.

    A row of 64 tokens: the GPU is done before Python, which waits for nothing.
    """
    target = Target("1 x 64", EIGHT_B, 1, 64, lora=True)
    ran = _run(setting, "host", target, steps=STEPS + 20)
    return judge_host_time(target, ran, is_measured=not setting.is_dry_run)


def judge_host_time(target: Target, ran: Ran, is_measured: bool) -> Finding:
    if failed := _problems({target: {REQUESTED: ran}}):
        return Finding(False, failed)
    outside = ran.steps.get("outside")
    if outside is None:
        return Finding(False, "no step was timed")
    summary = f"{1000 * outside:.1f} ms outside forward and backward (at most {1000 * HOST_SECONDS:.0f})"
    rows = {target.name: _described(target, ran, None)}
    return Finding(not is_measured or outside <= HOST_SECONDS, summary, rows, dict(ran.steps))


# --- Long rows --------------------------------------------------------------------------------------------------------


def long_rows(setting: Setting) -> Finding:
    """Decides whether LoRA on 8B trains on a row of 32,768 and one of 65,536 tokens within 80 GB."""
    return _long(setting, 32_768, 65_536)


def longest_row(setting: Setting) -> Finding:
    """Decides whether LoRA on 8B trains on a row of 131,072 tokens within 80 GB."""
    return _long(setting, 131_072)


def _long(setting: Setting, *lengths: int) -> Finding:
    # A GPU with more memory would keep outputs of attention, too, where one of 80 GB has no memory for them.
    changes = {"gradient_checkpointing": True, "keep_attention": "never"}
    found = {}
    for tokens in lengths:
        target = Target(f"{tokens:,} tokens", EIGHT_B, 1, tokens, lora=True)
        found[target] = _run(setting, str(tokens), target, steps=3, **changes)
    return judge_long_rows(found, _peak_flops())


def judge_long_rows(found: Mapping[Target, Ran], peak_flops: float | None) -> Finding:
    """Passes where all are trained, and no peak is above that of a GPU of 80 GB."""
    if failed := problems({target.name: ran.outcome for target, ran in found.items()}):
        return Finding(False, failed)
    rows, above = {}, []
    for target, ran in found.items():
        peak = ran.steps.get("peak", float("inf"))
        if peak > EIGHTY_GB:
            above.append(target.name)
        rows[target.name] = (
            f"{_described(target, ran, peak_flops)}; of the driver {peak / GIB:.1f} GiB; the job repeats "
            f"{ran.outcome.repeats or 'by no record'}"
        )
    longest = max(found, key=lambda target: target.tokens)
    summary = f"{longest.name} within {found[longest].steps.get('peak', 0.0) / GIB:.1f} GiB"
    return Finding(not above, f"{summary}; above 80 GB: {', '.join(above)}" if above else summary, rows)


# --- Weights for vLLM -------------------------------------------------------------------------------------------------


def weights_for_vllm(setting: Setting) -> Finding:
    """Decides whether vLLM has the adapter of a step of 8B within a second: gathered, written, read, the base back."""
    python = os.environ.get("TRL_VLLM_PYTHON", "")
    if not python:
        raise Skipped("TRL_VLLM_PYTHON names no interpreter with vLLM")
    from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
    from llama_stack_provider_trl.specs.methods import GrpoSpec, VllmSpec
    from llama_stack_provider_trl.specs.rewards import RewardSource

    letters = RewardSource(name="letters", check=AnswerCheck(type="regex", pattern="[a-m]{2}"))
    vllm = VllmSpec(python=Path(python), sync="adapter", gpu_memory_utilization=0.4)
    method = GrpoSpec(rewards=(letters,), num_generations=4, max_completion_length=16, vllm=vllm)
    sizes: dict[str, Any] = {"batch_size": 4, "tokens": 128, "steps": 6, "lora": True, "method": method}
    prompts = [{"prompt": f"{number} and then?"} for number in range(6 * 4)]
    job = spec(setting, "grpo", model(setting, TINY if setting.is_dry_run else EIGHT_B), rows=prompts, **sizes)
    ran = Ran(*run_alone(setting, job, "--measure", "--syncs"))
    return judge_weights_for_vllm(ran, is_measured=not setting.is_dry_run)


def judge_weights_for_vllm(ran: Ran, is_measured: bool) -> Finding:
    if failed := problems({"GRPO": ran.outcome}):
        return Finding(False, failed)
    if "sync" not in ran.steps:
        return Finding(False, "no weights were sent")
    seconds = ran.steps["sync"]
    summary = f"{seconds:.2f} s a step (at most {SYNC_SECONDS:.0f}), {ran.outcome.step_seconds:.2f} s the whole step"
    return Finding(not is_measured or seconds <= SYNC_SECONDS, summary)


def _peak_flops() -> float | None:
    """Of the first GPU, after the jobs: torch opens a context for its name."""
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)
