"""What jobs compute in fewer operations or less memory, against the same jobs without it: steps, peaks and losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from .inputs import EIGHT_B_WIDE, ONE_B, full_rows, model
from .jobs import Outcome, largest_difference, problems, run, run_all, spec
from .recovery import SAME_LOSS
from .report import Finding, Skipped
from .setting import Setting
from .sharding import SAME_SPEED

WITH, WITHOUT = "with", "without"
SAME_LOSS_IN_8_BITS = 0.02
"""Largest relative difference of losses, whose products have 4 digits: 0.6 % was measured on a CPU."""


def fused_lora(setting: Setting) -> Finding:
    """Decides whether LoRA layers as one operation are faster than PEFT's: 1B, rows of 1,024 tokens, 4 a step."""
    jobs = {WITH: {"fuse_lora": "always"}, WITHOUT: {"fuse_lora": "never"}}
    sizes = {"steps": 16, "tokens": 64 if setting.is_dry_run else 1024, "batch_size": 4, "lora": True}
    return judge_speed(_run(setting, jobs, sizes), is_measured=not setting.is_dry_run)


def head_gradients(setting: Setting) -> Finding:
    """Decides whether a head whose forward pass computes its gradients is faster than TRL's: 1B, all weights, rows of
    1,024 tokens, 4 a step."""
    jobs = {WITH: {"head_gradients": "forward"}, WITHOUT: {"head_gradients": "backward"}}
    sizes = {"steps": 12, "tokens": 64 if setting.is_dry_run else 1024, "batch_size": 4}
    return judge_speed(_run(setting, jobs, sizes), is_measured=not setting.is_dry_run)


def ligers_kernels(setting: Setting) -> Finding:
    """Decides whether Liger's kernels are faster than torch's operations: 1B, all weights, rows of 1,024 tokens, 4 a
    step."""
    if setting.is_dry_run:
        raise Skipped("Liger's kernels need a GPU")
    if find_spec("liger_kernel") is None:
        raise Skipped("liger-kernel is not installed")
    jobs = {WITH: {"liger_kernels": "always"}, WITHOUT: {"liger_kernels": "never"}}
    return judge_speed(_run(setting, jobs, {"steps": 16, "tokens": 1024, "batch_size": 4}), is_measured=True)


def mlp_tiles(setting: Setting) -> Finding:
    """Decides whether networks in tiles take less memory, and what they cost: 1B with LoRA and activation
    checkpointing, two rows of 16,000 tokens a step."""
    jobs = {WITH: {"tile_mlp": "always"}, WITHOUT: {"tile_mlp": "never"}}
    sizes = {"steps": 6, "tokens": 64 if setting.is_dry_run else 16_000, "lora": True, "gradient_checkpointing": True}
    return judge_memory(_run(setting, jobs, sizes), is_measured=not setting.is_dry_run)


def kept_attention(setting: Setting) -> Finding:
    """Decides whether a backward pass that computes no attention again is faster, and what it holds for that: 1B with
    LoRA and activation checkpointing, two rows of 16,000 tokens a step."""
    jobs = {WITH: {"keep_attention": "always"}, WITHOUT: {"keep_attention": "never"}}
    sizes = {"steps": 6, "tokens": 64 if setting.is_dry_run else 16_000, "lora": True, "gradient_checkpointing": True}
    return judge_speed(_run(setting, jobs, sizes), is_measured=not setting.is_dry_run)


RESUMED = "1B, 4,096 tokens, resumed"


def compiled_blocks(setting: Setting) -> Finding:
    """Decides whether compiled blocks are faster than eager ones, what compiling takes without and with its cache, and
    whether a resume has the same bits: 1B with all weights, 4 rows of 1,024 tokens a step."""
    kinds = {"1B, 4,096 tokens": 4}
    path, tokens = model(setting, ONE_B), 64 if setting.is_dry_run else 1024
    sizes = {"steps": 12, "tokens": tokens, "rows": full_rows("sft", 12 * 4, tokens)}
    jobs = {
        (name, how): spec(setting, f"{rows}-{how}", path, compile_blocks=how, batch_size=rows, **sizes)
        for name, rows in kinds.items()
        for how in ("always", "never")
    }
    first, *_ = jobs
    jobs[first] = jobs[first].changed(save_steps=6)
    ended = dict(zip(jobs, run_all(setting, list(jobs.values())), strict=True))
    found = {name: {WITH: ended[name, "always"], WITHOUT: ended[name, "never"]} for name in kinds}
    saved = ended[first].checkpoints
    resumed = run(setting, jobs[first], saved[0]) if saved else ended[first]
    return judge_compiled(found, resumed, is_measured=not setting.is_dry_run)


def judge_compiled(found: Mapping[str, Mapping[str, Outcome]], resumed: Outcome, is_measured: bool) -> Finding:
    """Passes where blocks are compiled, losses are the same, no kind of job is slower, and the first kind ends with the
    same weights where it is resumed."""
    both = {f"{name}, {how}": one for name, kinds in found.items() for how, one in kinds.items()}
    if failed := problems({**both, RESUMED: resumed}):
        return Finding(False, failed)
    if eager := [name for name, kinds in found.items() if not kinds[WITH].compiled.startswith("used")]:
        return Finding(False, f"nothing is compiled: {eager[0]}: {found[eager[0]][WITH].compiled}")
    each = {name: judge_speed(kinds, is_measured) for name, kinds in found.items()}
    whole = next(iter(found.values()))[WITH]
    is_same = bool(whole.weights) and whole.weights == resumed.weights
    rows = {f"{name}, {how}": text for name, one in each.items() for how, text in one.rows.items()}
    rows |= {f"{name}, compiling": f"{kinds[WITH].compile_seconds:.0f} s" for name, kinds in found.items()}
    rows[f"{RESUMED}, compiling"] = f"{resumed.compile_seconds:.0f} s, from its cache"
    summary = "; ".join(f"{name}: {one.summary}" for name, one in each.items())
    summary += f"; weights after a resume {'equal' if is_same else 'DIFFER'}"
    return Finding(is_same and all(one.passed for one in each.values()), summary, rows, {"resumed_equal": is_same})


def float8(setting: Setting) -> Finding:
    """Decides whether products in 8 bits are faster than compiled blocks alone, and what they do to losses: blocks of
    8B with all weights, 16 rows of 1,024 tokens a step."""
    compiled = {"compile_blocks": "always", "steps": 12, "tokens": 64 if setting.is_dry_run else 1024, "batch_size": 16}
    path = model(setting, EIGHT_B_WIDE)
    jobs = [spec(setting, how, path, float8=how, **compiled) for how in ("always", "never")]
    found = dict(zip((WITH, WITHOUT), run_all(setting, jobs), strict=True))
    return judge_float8(found, is_measured=not setting.is_dry_run)


def judge_float8(found: Mapping[str, Outcome], is_measured: bool) -> Finding:
    """Passes where layers multiply in 8 bits, losses are nearly those without it, and steps are no slower."""
    if not problems(found) and not found[WITH].float8.startswith("used"):
        return Finding(False, f"nothing multiplies in 8 bits: {found[WITH].float8}")
    is_gain = lambda speed, memory: not is_measured or speed * SAME_SPEED >= 1  # noqa: E731
    one = _judge(found, is_gain, SAME_LOSS_IN_8_BITS)
    rows = {name: f"{text}, last loss {found[name].losses[-1]:.4f}" for name, text in one.rows.items()}
    return replace(one, rows=rows)


def _run(setting: Setting, kinds: Mapping[str, dict[str, Any]], sizes: dict[str, Any]) -> dict[str, Outcome]:
    path = model(setting, ONE_B)
    jobs = [spec(setting, name, path, **sizes, **changes) for name, changes in kinds.items()]
    return dict(zip(kinds, run_all(setting, jobs), strict=True))


def judge_speed(found: Mapping[str, Outcome], is_measured: bool) -> Finding:
    """Passes where the losses are the same and steps are no slower."""
    return _judge(found, lambda speed, memory: not is_measured or speed * SAME_SPEED >= 1)


def judge_memory(found: Mapping[str, Outcome], is_measured: bool) -> Finding:
    """Passes where the losses are the same and the peak is lower."""
    return _judge(found, lambda speed, memory: not is_measured or memory < 1)


def _judge(found: Mapping[str, Outcome], is_gain: Any, same_loss: float = SAME_LOSS) -> Finding:
    if failed := problems(found):
        return Finding(False, failed)
    ours, other = found[WITH], found[WITHOUT]
    speed = other.step_seconds / max(ours.step_seconds, 1e-9)
    memory = ours.peak_gib / max(other.peak_gib, 1e-9)
    apart = largest_difference(ours.losses, other.losses)
    rows = {name: f"{one.step_seconds:.3f} s a step, peak {one.peak_gib:.2f} GiB" for name, one in found.items()}
    summary = f"{speed:.2f} times the speed, {memory:.2f} times the peak, losses within {apart:.1e}"
    passed = apart <= same_loss and is_gain(speed, memory)
    return Finding(passed, summary, rows, {"speed": speed, "peak": memory})
