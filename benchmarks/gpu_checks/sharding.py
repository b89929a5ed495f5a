"""FSDP2: output dtype, offloaded parts, two ranks, and HYBRID_SHARD on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from .inputs import DEEP, HALF_B, model
from .jobs import Outcome, largest_difference, problems, run, run_all, run_alone, spec
from .report import Finding
from .setting import Setting

AGREEMENT = 1e-2
"""Largest relative difference of losses in bf16 whose terms are added in another order."""
SAME_SPEED = 1.05
"""A ratio of two times on a GPU that counts as equal."""


def output_dtype(setting: Setting) -> Finding:
    """Decides what FSDP2's output dtype costs: DPO of all weights in a world of one, once with bf16, once with fp32.

    With fp32 the output head and the residual stream are computed in fp32. With bf16 (`output_dtype=None`) the policy
    against itself must have a log-ratio of exactly 0, as its reference runs under autocast.
    """
    from llama_stack_provider_trl.specs.job import ShardingSpec

    sizes: dict[str, Any] = {"steps": 4} if setting.is_dry_run else {"steps": 8, "tokens": 1024, "batch_size": 4}
    path = model(setting, HALF_B)
    jobs = [
        spec(setting, name, path, algorithm="dpo", dtype="bf16", sharding=ShardingSpec(), **sizes)
        for name in ("none", "fp32")
    ]
    recorded: dict[str, dict[str, Any]] = {}

    def run_one(setting: Setting, job: Any) -> Outcome:
        ended, recorded[job.job_uuid] = run_alone(
            setting, job, "--world-of-one", "--measure", "--output-dtype", job.job_uuid
        )
        return ended

    found = dict(zip(("none", "fp32"), run_all(setting, jobs, run_one), strict=True))
    return judge_output_dtype(found, recorded, is_measured=not setting.is_dry_run)


def judge_output_dtype(
    found: Mapping[str, Outcome], recorded: Mapping[str, Mapping[str, Any]], is_measured: bool
) -> Finding:
    if failed := problems(found):
        return Finding(False, failed)
    if not all(one.get("units", 0) > 1 for one in recorded.values()):
        return Finding(False, f"the model was not sharded: {dict(recorded)}")
    ratios = {name: _self_ratio(one) for name, one in found.items()}
    none, fp32 = found["none"], found["fp32"]
    faster = fp32.step_seconds / none.step_seconds
    default = recorded["none"].get("recipe_output_dtype")
    passed = ratios["none"] == 0.0 and default == "None" and (not is_measured or faster * SAME_SPEED >= 1.0)
    rows = {
        name: f"step {one.step_seconds:.3f} s, peak {one.peak_gib:.2f} GiB, first reward against itself "
        f"{ratios[name]:.2e}"
        for name, one in found.items()
    }
    summary = f"bf16 outputs are {faster:.2f} times as fast as fp32; the recipe's own setting: {default}"
    if ratios["none"] != 0.0:
        summary = f"with bf16 outputs the policy differs from itself by a reward of {ratios['none']:.2e}; {summary}"
    return Finding(passed, summary, rows, {"rewards": ratios, "speedup": faster, "recipe": default})


def _self_ratio(found: Outcome) -> float:
    """The larger reward of the first step, before any update: beta x log-ratio of the policy against its copy."""
    first = found.steps[0].metrics if found.steps else {}
    return max(abs(first.get(f"rewards/{side}", float("inf"))) for side in ("chosen", "rejected"))


def cpu_offload(setting: Setting) -> Finding:
    """Decides whether a job whose parts rest in CPU memory can clip its gradients and save a step checkpoint.

    Clipping reduces a norm that is in CPU memory, for which NCCL alone has no backend.
    """
    from llama_stack_provider_trl.specs.job import ShardingSpec

    path = model(setting, DEEP)
    job = spec(setting, "offload", path, sharding=ShardingSpec(cpu_offload=True), save_steps=2, steps=4)
    return judge_cpu_offload(*run_alone(setting, job, "--world-of-one"))


def judge_cpu_offload(found: Outcome, recorded: Mapping[str, Any]) -> Finding:
    if failed := problems({"cpu_offload": found}):
        return Finding(False, failed)
    norms = [step.metrics.get("grad_norm", 0.0) for step in found.steps]
    clipped, saved = bool(norms) and all(norm > 0 for norm in norms), len(found.checkpoints)
    policy = recorded.get("offload")
    passed = clipped and saved > 0 and recorded.get("units", 0) > 1 and policy == "CPUOffloadPolicy"
    summary = (
        f"{recorded.get('units', 0)} units with {policy}, {saved} step checkpoints, gradient norms "
        f"{' '.join(f'{norm:.3g}' for norm in norms)}, step {found.step_seconds:.3f} s"
    )
    return Finding(passed, summary)


def two_ranks(setting: Setting) -> Finding:
    """Decides whether two ranks train as one process does, by every way to divide a model, and resume to the bit."""
    from llama_stack_provider_trl.specs.job import LoraSpec, ShardingSpec

    path = model(setting, DEEP)
    qlora = LoraSpec(target_modules=("q_proj", "v_proj"), mlp=True, rank=8, alpha=16, quantize_base=True)
    adapters: dict[str, Any] = {"all": None, "LoRA": True, "QLoRA": qlora}
    shardings = {
        "FULL_SHARD": ("all", ShardingSpec()),
        "SHARD_GRAD_OP": ("all", ShardingSpec(strategy="SHARD_GRAD_OP")),
        "cpu_offload": ("all", ShardingSpec(cpu_offload=True)),
        "LoRA sharded": ("LoRA", ShardingSpec()),
        "QLoRA sharded": ("QLoRA", ShardingSpec()),
    }
    if find_spec("bitsandbytes") is None:  # a machine that lacks it is to show the others
        del adapters["QLoRA"], shardings["QLoRA sharded"]

    def job(name: str, kind: str, ranks: int, **changes: Any) -> Any:
        changes |= {"ranks": ranks, "batch_size": 2 // ranks, "lora": adapters[kind], "save_steps": 2, "steps": 4}
        return spec(setting, name.replace(" ", "-"), path, **changes)

    alone = dict(zip(adapters, run_all(setting, [job(f"alone-{kind}", kind, 1) for kind in adapters]), strict=True))
    jobs = [job(name, kind, 2, sharding=sharding) for name, (kind, sharding) in shardings.items()]
    divided = dict(zip(shardings, run_all(setting, jobs), strict=True))
    if not (first := divided["FULL_SHARD"]).checkpoints:
        return Finding(False, problems(divided) or "no step checkpoint was written")
    again = job("resumed", "all", 2, sharding=ShardingSpec())
    resumed = run(setting, again, resume_from=first.checkpoints[0])
    return judge_two_ranks(alone, {name: (kind, divided[name]) for name, (kind, _) in shardings.items()}, resumed)


def judge_two_ranks(
    alone: Mapping[str, Outcome], divided: Mapping[str, tuple[str, Outcome]], resumed: Outcome
) -> Finding:
    """
    Args:
        alone: one process, by what is trained.
        divided: two ranks, with what is trained; `FULL_SHARD` is what was resumed.
    """
    of_ranks = {name: found for name, (_, found) in divided.items()}
    if failed := problems({**alone, **of_ranks, "resumed": resumed}):
        return Finding(False, failed)
    apart = {name: largest_difference(found.losses, alone[kind].losses) for name, (kind, found) in divided.items()}
    first = of_ranks["FULL_SHARD"]
    is_exact = 0 < len(resumed.losses) < len(first.losses) and resumed.weights == first.weights
    rows = {
        name: f"losses within {apart[name]:.1e} of one process, step {found.step_seconds:.3f} s"
        for name, found in of_ranks.items()
    }
    summary = f"losses within {max(apart.values()):.1e}; resumed: weights {'equal' if is_exact else 'DIFFER'}"
    summary += "" if "QLoRA" in alone else "; QLoRA not tried, without bitsandbytes"
    return Finding(is_exact and max(apart.values()) < AGREEMENT, summary, rows, {"differences": apart})


def hybrid(setting: Setting) -> Finding:
    """Decides whether HYBRID_SHARD on one machine trains as FULL_SHARD does: the same losses on two ranks."""
    from llama_stack_provider_trl.specs.job import ShardingSpec

    path = model(setting, DEEP)
    jobs = [
        spec(setting, strategy, path, ranks=2, batch_size=1, sharding=ShardingSpec(strategy=strategy), steps=4)
        for strategy in ("FULL_SHARD", "HYBRID_SHARD")
    ]
    full, hybrid = run_all(setting, jobs)
    return judge_hybrid(full, hybrid)


def judge_hybrid(full: Outcome, hybrid: Outcome) -> Finding:
    if failed := problems({"FULL_SHARD": full, "HYBRID_SHARD": hybrid}):
        return Finding(False, failed)
    difference = largest_difference(hybrid.losses, full.losses)
    summary = (
        f"losses differ by {difference:.1e}; step {hybrid.step_seconds:.3f} s, FULL_SHARD {full.step_seconds:.3f} s"
    )
    return Finding(difference < 1e-3, summary)
