"""Each check of benchmarks/gpu.py passes on what a right training does, and fails on what each fault would do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

import gpu  # noqa: E402
from gpu_checks import (  # noqa: E402
    environment,
    inputs,
    methods,
    numerics,
    operations,
    peak_memory,
    recovery,
    registry,
    report,
    sharding,
    speed,
    steps,
    targets,
    wheels,
)
from gpu_checks.inputs import EIGHT_B, ONE_B  # noqa: E402
from gpu_checks.jobs import Outcome, Step, digest  # noqa: E402
from gpu_checks.report import Finding, Result, Status  # noqa: E402
from gpu_checks.setting import Setting  # noqa: E402

GIB = 1 << 30
METRICS = {"tokens_per_second": 100.0, "grad_norm": 1.0, "rewards/chosen": 0.0, "rewards/rejected": 0.0}


def job(**changes: Any) -> Outcome:
    """A job of 8 steps, a second and 100 tokens each, whose loss falls from 8 to 1."""
    steps = tuple(Step(n, float(n), 9.0 - n, METRICS, 100 * n, 4 * GIB) for n in range(1, 9))
    right = Outcome(True, steps=steps, checkpoints=("a",), weights="bits", verified="logits", logits_difference=0.0)
    return replace(right, **changes)


def with_metrics(**metrics: float) -> Outcome:
    return job(steps=tuple(replace(step, metrics={**METRICS, **metrics}) for step in job().steps))


FAILED = job(finished=False, problem="out of memory", steps=())
DIVERGED = job(steps=tuple(replace(step, loss=9.0 + step.step) for step in job().steps))
LONG = job(steps=tuple(replace(job().steps[0], step=n, loss=99.0 - n) for n in range(1, 49)))
SHORT = job(steps=job().steps[:3])
LAST = job(steps=job().steps[4:])
SHARDED = {"none": {"units": 8, "recipe_output_dtype": "None"}, "fp32": {"units": 8}}
STEPS_OF_BOTH = {"ours": [[9.0, 9.0, 0.1, 0.1], [9.0, 9.0, 0.1, 0.2]], "stock TRL": [[0.2] * 4, [0.2] * 4]}
"""Seconds; the first two steps of a round do not count."""
OFFLOADED = {"units": 4, "offload": "CPUOffloadPolicy"}
MERGED_STEPS = {name: job() for name in (speed.MERGED, speed.SEPARATE, speed.REQUESTED)}
READ = {speed.LATER: job(metrics_read="a step later"), speed.IN_STEP: job()}
SLOW = job(steps=tuple(replace(step, time=2.0 * step.step) for step in job().steps))
SMALL = job(steps=tuple(replace(step, peak_bytes=GIB) for step in job().steps))
COMPILED = {"1B": {operations.WITH: job(compiled="used in 2 of 2 blocks"), operations.WITHOUT: job()}}
OPERATIONS: Any = (
    operations.judge_speed,
    ({operations.WITH: job(), operations.WITHOUT: job()}, True),
    {
        "it is slower": ({operations.WITH: SLOW, operations.WITHOUT: job()}, True),
        "other losses": ({operations.WITH: job(), operations.WITHOUT: DIVERGED}, True),
    },
)
MACHINE = environment.Machine(
    versions={**dict.fromkeys(environment.LIBRARIES, "1.0"), "torch": "2.11.0+cu130", "transformers": "5.23.0"},
    python="3.12.3",
    cuda="13.0",
    nccl="2.29.7",
    driver="580",
    gpus=("H100, 80 GiB",),
    counted={"torch": 1, "the provider": 1, "nvidia-smi": 1},
    in_proc=8,
    bf16=True,
    compiler="/usr/bin/gcc",
    python_headers=True,
    triton="compiles",
    shared_memory_mib=64,
    cores=16,
    memory_gib=128,
)
MEASURED = peak_memory.Measured("SFT", estimate=10 * GIB, peak=10 * GIB, context=GIB, slack=0.05)
FORWARD = speed.Forward(seconds=1.0, loss=2.0, gradient_norm=3.0, peak_gib=1.0)
FLAT = numerics.IN_ONE_SEQUENCE
BATCHES = {
    f"{algorithm}, {name}": job(attention=FLAT if name == "one sequence" else "sdpa")
    for algorithm in ("sft", "dpo")
    for name in ("padded", "one sequence")
}
MASKS = {"mask": FORWARD, "no mask": FORWARD, "packed": FORWARD}
BY_METHOD = {"ORPO": job(), "KTO": job()}
ANSWERED = job(steps=job().steps[: methods.STEPS])
TWICE = {f"{name}, {turn}": ANSWERED for name in ("GRPO", "GOLD") for turn in (methods.FIRST, methods.SECOND)}
NOT_A_NUMBER = replace(ANSWERED, steps=(*ANSWERED.steps[:-1], replace(ANSWERED.steps[-1], loss=float("nan"))))
GENERATED = {"here": job(steps=()), "on a CPU": job(steps=())}
TEXTS = [*"abcdefghij"]
HUNG = recovery.Hung(job(ended="hung"), seconds=25.0, timeout=20.0, stacks="Current thread")
TERMINATED = recovery.Terminated(0.5, job(exit_code=-signal.SIGTERM), job())


Judge = Callable[..., Finding]
RESUMED: Any = (
    recovery.judge_resume,
    (job(), job(), LAST),
    {"the resumed job has other weights": (job(), job(), replace(LAST, weights="other"))},
)
TRACE = {"busy": 0.2, "idle": 0.1, "host": 0.1, "step": 0.3, "kernels": 2000.0, "outside": 0.005, "peak": 70.0 * GIB}
OF_1B = targets.Target("4,096 tokens", ONE_B, 4, 1024, percent=33)
OF_8B = targets.Target("4 x 1,024", EIGHT_B, 4, 1024, lora=True, tokens_per_second=12_000)
OF_128K = targets.Target("131,072 tokens", EIGHT_B, 1, 131_072, lora=True)


def ran(tokens_per_second: float, target: targets.Target = OF_1B, **changes: Any) -> targets.Ran:
    """A job of this speed, whose blocks are compiled."""
    seconds = target.tokens_of_a_step / tokens_per_second
    steps = tuple(replace(step, time=seconds * step.step) for step in job().steps)
    return targets.Ran(job(**{"steps": steps, "compiled": "used in 16 of 16 blocks", **changes}), TRACE)


def reached(target: targets.Target, requested: float, compiled: float) -> tuple[Any, ...]:
    variants = {targets.REQUESTED: ran(requested, target), targets.COMPILED: ran(compiled, target)}
    return ({target: variants}, 989e12)


SPEED_OF_1B: Any = (
    targets.judge_targets,
    reached(OF_1B, 30_000, 45_000),  # 42,000 tokens a second are 33 % of an H100
    {
        "both are slower": reached(OF_1B, 30_000, 40_000),
        "nothing is compiled": (
            {OF_1B: {targets.REQUESTED: ran(45_000), targets.COMPILED: ran(45_000, compiled="off: MoE")}},
            989e12,
        ),
        "no step was traced": ({OF_1B: {targets.REQUESTED: targets.Ran(job(), {})}}, 989e12),
    },
)
SPEED_OF_8B: Any = (
    targets.judge_targets,
    reached(OF_8B, 11_000, 12_100),
    {"both are slower": reached(OF_8B, 11_000, 11_900)},
)
LONG_ROW: Any = (
    targets.judge_long_rows,
    ({OF_128K: ran(1000, OF_128K)}, 989e12),
    {
        "it takes more than 80 GB": (
            {OF_128K: targets.Ran(job(), {**TRACE, "peak": 80.0 * GIB})},
            989e12,
        ),
        "its peak is not known": ({OF_128K: targets.Ran(job(), {})}, 989e12),
    },
)
MANY_LENGTHS: Any = (
    speed.judge_against_trl,
    ({"SFT": STEPS_OF_BOTH, "DPO": STEPS_OF_BOTH}, 2, True),
    {
        "DPO is slower than stock TRL": (
            {"SFT": STEPS_OF_BOTH, "DPO": {**STEPS_OF_BOTH, "ours": [[1.0] * 8]}},
            2,
            True,
        ),
        "DPO is missing": ({"SFT": STEPS_OF_BOTH}, 2, True),
        "LoRA is less than 1.4 times as fast": ({"SFT LoRA": {**STEPS_OF_BOTH, "ours": [[0.15] * 8]}}, 1, True),
    },
)

FAULTS: dict[str, tuple[Judge, tuple[Any, ...], dict[str, tuple[Any, ...]]]] = {
    "environment": (
        environment.judge_environment,
        (MACHINE, False),
        {
            "torch is too old": (replace(MACHINE, versions={**MACHINE.versions, "torch": "2.10.1"}), False),
            "transformers is too old": (
                replace(MACHINE, versions={**MACHINE.versions, "transformers": "5.17.0"}),
                False,
            ),
            "trl is missing": (replace(MACHINE, versions={**MACHINE.versions, "trl": ""}), False),
            "no compiler": (replace(MACHINE, triton="Failed to find C compiler"), False),
            "the provider counts others": (replace(MACHINE, counted={**MACHINE.counted, "the provider": 8}), False),
            "no bf16": (replace(MACHINE, bf16=False), False),
            "no GPU": (replace(MACHINE, gpus=()), False),
        },
    ),
    "tests/gpu": (
        environment.judge_tests,
        (0, "3 passed in 12.1s", False),
        {
            "a test fails": (1, "FAILED tests/gpu/test_gpu_memory.py::test_x - assert\n1 failed, 2 passed", False),
            "none runs on a GPU": (
                0,
                "SKIPPED [3] tests/gpu/test_gpu_memory.py: needs an NVIDIA GPU\n3 skipped",
                False,
            ),
        },
    ),
    "FSDP2 output dtype": (
        sharding.judge_output_dtype,
        ({"none": job(), "fp32": SLOW}, SHARDED, True),
        {
            "the policy differs from itself": (
                {"none": with_metrics(**{"rewards/chosen": 1e-6}), "fp32": SLOW},
                SHARDED,
                True,
            ),
            "bf16 is slower": ({"none": SLOW, "fp32": job()}, SHARDED, True),
            "nothing was sharded": ({"none": job(), "fp32": SLOW}, {**SHARDED, "none": {"units": 0}}, True),
            "the recipe has fp32 outputs": (
                {"none": job(), "fp32": SLOW},
                {**SHARDED, "none": {"units": 8, "recipe_output_dtype": "torch.float32"}},
                True,
            ),
        },
    ),
    "cpu_offload": (
        sharding.judge_cpu_offload,
        (job(), OFFLOADED),
        {
            "no checkpoint": (job(checkpoints=()), OFFLOADED),
            "gradients are not clipped": (with_metrics(grad_norm=0.0), OFFLOADED),
            "nothing was sharded": (job(), {**OFFLOADED, "units": 0}),
            "nothing was offloaded": (job(), {**OFFLOADED, "offload": "OffloadPolicy"}),
        },
    ),
    "tokens per second": (
        speed.judge_clock,
        (job(),),
        {"the clock stops too early": (with_metrics(tokens_per_second=300.0),), "the job fails": (FAILED,)},
    ),
    "attention mask": (
        speed.judge_masks,
        ({2048: MASKS}, True),
        {
            "another loss": ({2048: {**MASKS, "no mask": replace(FORWARD, loss=2.1)}}, True),
            "other gradients": ({2048: {**MASKS, "no mask": replace(FORWARD, gradient_norm=3.3)}}, True),
            "not a number": ({2048: {**MASKS, "no mask": replace(FORWARD, loss=float("nan"))}}, True),
            "packed rows are not a number": ({2048: {**MASKS, "packed": replace(FORWARD, loss=float("nan"))}}, True),
            "slower without": ({2048: {**MASKS, "no mask": replace(FORWARD, seconds=1.2)}}, True),
        },
    ),
    "padding-free batches": (
        numerics.judge_padding_free,
        (BATCHES, 1e-2),
        {
            "other losses": ({**BATCHES, "sft, one sequence": replace(DIVERGED, attention=FLAT)}, 1e-2),
            "a pair has other losses": ({**BATCHES, "dpo, one sequence": replace(DIVERGED, attention=FLAT)}, 1e-2),
            "it was padded": ({**BATCHES, "dpo, one sequence": job(attention="sdpa")}, 1e-2),
            "both are in one sequence": ({**BATCHES, "sft, padded": job(attention=FLAT)}, 1e-2),
        },
    ),
    "packed attention": (
        numerics.judge_packed,
        (job(attention="sdpa"), job(attention="flash_attention_2"), "flash_attention_2", 2e-2),
        {
            "other losses": (
                job(attention="sdpa"),
                replace(DIVERGED, attention="flash_attention_2"),
                "flash_attention_2",
                2e-2,
            ),
            "both diverge": (
                replace(DIVERGED, attention="sdpa"),
                replace(DIVERGED, attention="flash_attention_2"),
                "flash_attention_2",
                2e-2,
            ),
            "both used sdpa": (job(attention="sdpa"), job(attention="sdpa"), "flash_attention_2", 2e-2),
            "a sequence holds one row": (
                replace(LONG, attention="sdpa"),
                replace(LONG, attention="flash_attention_2"),
                "flash_attention_2",
                2e-2,
            ),
        },
    ),
    "activation offloading": (
        peak_memory.judge_offloading,
        (SLOW, SLOW, replace(SLOW, steps=tuple(replace(step, peak_bytes=GIB) for step in SLOW.steps))),
        {
            "it saves nothing": (SLOW, SLOW, SLOW),
            "equal jobs differ too much to compare": (
                job(),
                with_metrics(grad_norm=1.5),
                job(steps=tuple(replace(step, peak_bytes=GIB) for step in job().steps)),
            ),
            "other gradients": (
                job(),
                job(),
                job(steps=tuple(replace(one, metrics={"grad_norm": 1.1}, peak_bytes=GIB) for one in job().steps)),
            ),
        },
    ),
    "repeat and resume": (
        recovery.judge_resume,
        (job(), job(), LAST),
        {
            "the resumed job has other weights": (job(), job(), replace(LAST, weights="other")),
            "it began again": (job(), job(), job()),
            "there are no weights": (job(weights=""), job(weights=""), replace(LAST, weights="")),
            "two equal jobs differ, whatever their record says": (
                job(repeats="up to rounding"),
                job(weights="other"),
                LAST,
            ),
        },
    ),
    **dict.fromkeys(("repeat at 1B", "repeat of all weights", "repeat of a long row"), RESUMED),
    "memory estimate": (
        peak_memory.judge_estimate,
        ([MEASURED, MEASURED],),
        {
            "a peak is above the margin": ([MEASURED, replace(MEASURED, peak=12 * GIB)],),
            "an estimate is far too high": ([MEASURED, replace(MEASURED, peak=6 * GIB)],),
            "a job fails that should fit": ([MEASURED, replace(MEASURED, problem="out of memory")], 80.0 * GIB),
            "every job fails": ([replace(MEASURED, problem="out of memory")], 8.0 * GIB),
        },
    ),
    "export": (
        numerics.judge_export,
        ({"full": job(), "LoRA": job()},),
        {
            "only weights were compared": ({"full": job(), "LoRA": job(verified="weights")},),
        },
    ),
    "fp16": (
        numerics.judge_falling,
        ({"one process": job(), "FSDP2": job()}, 0.05),
        {
            "the loss rises": ({"one process": job(), "FSDP2": DIVERGED}, 0.05),
            "FSDP2 has other losses": ({"one process": job(), "FSDP2": SHORT}, 0.05),
        },
    ),
    "SIGTERM": (
        recovery.judge_sigterm,
        (TERMINATED,),
        {
            "it is killed": (replace(TERMINATED, interrupted=job(exit_code=-signal.SIGKILL)),),
            "it is slow": (replace(TERMINATED, seconds=11.0),),
            "it begins again": (replace(TERMINATED, saved_at=4),),
            "there is no checkpoint": (replace(TERMINATED, resumed=None),),
        },
    ),
    "QLoRA": (
        numerics.judge_falling,
        ({"one process": job()}, 0.05),
        {"not sharded": ({"a": job(), "b": SHORT}, 0.05)},
    ),
    "QAT": (numerics.judge_falling, ({"QAT": job()}, 0.05), {"the loss rises": ({"QAT": DIVERGED}, 0.05)}),
    "methods": (
        methods.judge_methods,
        (BY_METHOD, BY_METHOD),
        {
            "other losses": (BY_METHOD, {**BY_METHOD, "KTO": DIVERGED}),
        },
    ),
    "own answers": (
        methods.judge_answers,
        (TWICE,),
        {
            "other weights": ({**TWICE, "GOLD, second": replace(ANSWERED, weights="others")},),
            "a loss is no number": ({**TWICE, "GOLD, first": NOT_A_NUMBER},),
            "a step is missing": ({**TWICE, "GRPO, first": SHORT},),
        },
    ),
    "answers": (
        methods.judge_generated,
        (GENERATED, TEXTS, [*"abcdefghi", "z"]),
        {
            "other answers": (GENERATED, TEXTS, [*"abcdefgh", "y", "z"]),
            "a row without an answer": (GENERATED, TEXTS[1:], TEXTS),
            "no answers": (GENERATED, [], []),
        },
    ),
    "speed on rows of many lengths": MANY_LENGTHS,
    "speed on rows of many lengths at 1B": MANY_LENGTHS,
    "merged micro steps": (
        speed.judge_merged,
        (MERGED_STEPS, True),
        {
            "it is slower": ({**MERGED_STEPS, speed.MERGED: SLOW}, True),
            "other weights": ({**MERGED_STEPS, speed.MERGED: job(weights="others")}, True),
            "other losses": ({**MERGED_STEPS, speed.SEPARATE: DIVERGED}, True),
        },
    ),
    "metrics a step later": (
        speed.judge_later_metrics,
        (READ, True),
        {
            "it is slower": ({**READ, speed.LATER: replace(SLOW, metrics_read="a step later")}, True),
            "other weights": ({**READ, speed.IN_STEP: job(weights="others")}, True),
            "other losses": ({**READ, speed.IN_STEP: DIVERGED}, True),
            "a step is missing": ({**READ, speed.IN_STEP: SHORT}, True),
            "nothing is read later": ({**READ, speed.LATER: job()}, True),
            "both are read later": (dict.fromkeys(READ, READ[speed.LATER]), True),
        },
    ),
    "LoRA as one operation": OPERATIONS,
    "gradients of the head": OPERATIONS,
    "Liger's kernels": OPERATIONS,
    "networks in tiles": (
        operations.judge_memory,
        ({operations.WITH: SMALL, operations.WITHOUT: job()}, True),
        {
            "it takes as much": ({operations.WITH: job(), operations.WITHOUT: job()}, True),
            "other losses": ({operations.WITH: SMALL, operations.WITHOUT: DIVERGED}, True),
        },
    ),
    "kept attention": OPERATIONS,
    "compiled blocks": (
        operations.judge_compiled,
        (COMPILED, job(), True),
        {
            "it is slower": ({"1B": {**COMPILED["1B"], operations.WITH: replace(SLOW, compiled="used")}}, job(), True),
            "other losses": ({"1B": {**COMPILED["1B"], operations.WITHOUT: DIVERGED}}, job(), True),
            "a resume has other weights": (COMPILED, job(weights="others"), True),
            "nothing is compiled": ({"1B": dict.fromkeys(COMPILED["1B"], job())}, job(), True),
        },
    ),
    "float8": (
        operations.judge_float8,
        ({operations.WITH: job(float8="used in 2 of 2"), operations.WITHOUT: job()}, True),
        {
            "it is slower": ({operations.WITH: replace(SLOW, float8="used"), operations.WITHOUT: job()}, True),
            "other losses": ({operations.WITH: job(float8="used"), operations.WITHOUT: DIVERGED}, True),
            "nothing is in 8 bits": (dict.fromkeys((operations.WITH, operations.WITHOUT), job()), True),
            "one fails": ({operations.WITH: FAILED, operations.WITHOUT: job()}, True),
        },
    ),
    "speed at 1B": MANY_LENGTHS,
    "SFT at 1B": SPEED_OF_1B,
    "DPO at 1B": SPEED_OF_1B,
    "LoRA at 8B, rows of 1,024": SPEED_OF_8B,
    "LoRA at 8B, rows of 4,096": SPEED_OF_8B,
    "host time of LoRA at 8B": (
        targets.judge_host_time,
        (OF_8B, ran(12_000, OF_8B), True),
        {
            "it takes longer": (OF_8B, targets.Ran(job(), {**TRACE, "outside": 0.006}), True),
            "no step was timed": (OF_8B, targets.Ran(job(), {"busy": 0.0}), True),
        },
    ),
    "rows of 32k and 64k at 8B": LONG_ROW,
    "a row of 128k at 8B": LONG_ROW,
    "weights for vLLM at 8B": (
        targets.judge_weights_for_vllm,
        (targets.Ran(job(), {"sync": 0.9}), True),
        {
            "it takes longer": (targets.Ran(job(), {"sync": 1.1}), True),
            "none were sent": (targets.Ran(job(), {}), True),
        },
    ),
    "two ranks": (
        sharding.judge_two_ranks,
        ({"all": job()}, {"FULL_SHARD": ("all", job())}, LAST),
        {
            "other losses": ({"all": job()}, {"FULL_SHARD": ("all", DIVERGED)}, LAST),
            "one fails": ({"all": job()}, {"FULL_SHARD": ("all", job()), "LoRA": ("all", FAILED)}, LAST),
            "the resumed one has other weights": (
                {"all": job()},
                {"FULL_SHARD": ("all", job())},
                replace(LAST, weights="other"),
            ),
            "nothing was resumed": ({"all": job()}, {"FULL_SHARD": ("all", job())}, job()),
        },
    ),
    "NCCL hang": (
        recovery.judge_hang,
        (HUNG,),
        {
            "it is not found": (replace(HUNG, outcome=FAILED),),
            "it is found late": (replace(HUNG, seconds=50.0),),
            "there are no stacks": (replace(HUNG, stacks=""),),
        },
    ),
    "contexts": (
        peak_memory.judge_contexts,
        (job(), {1: {"GPU-a"}, 2: {"GPU-b"}}),
        {
            "rank 1 is on both GPUs": (job(), {1: {"GPU-a"}, 2: {"GPU-a", "GPU-b"}}),
            "no process is listed": (job(), {}),
        },
    ),
    "NCCL memory": (
        peak_memory.judge_nccl_memory,
        ({"NVLS": GIB // 2, "no NVLS": GIB // 4}, GIB // 2),
        {
            "it takes more": ({"NVLS": GIB // 2 + 1, "no NVLS": 0}, GIB // 2),
            "the ranks fail": ({"NVLS": -1, "no NVLS": 0}, GIB // 2),
        },
    ),
    "HYBRID_SHARD": (
        sharding.judge_hybrid,
        (job(), job()),
        {"other losses": (job(), DIVERGED), "it fails": (job(), FAILED)},
    ),
}
"""Check -> how it judges, what a right training gives, and fault -> what that fault gives."""


def test_every_check_has_its_faults_here() -> None:
    assert list(FAULTS) == [check.name for check in registry.CHECKS]
    # A machine that is lent may end a command after ten minutes.
    assert max(check.seconds for check in registry.CHECKS) <= 540 < gpu.TOTAL_SECONDS < 600
    assert all((registry.load(check.place).__doc__ or "").startswith("Decides") for check in registry.CHECKS)


def test_the_readme_names_every_check_in_its_order() -> None:
    page = (REPOSITORY / "benchmarks" / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page.partition("## gpu.py")[2], re.MULTILINE)
    assert rows[1:] == [check.name for check in registry.CHECKS]


@pytest.mark.parametrize("check", FAULTS)
def test_a_check_passes_on_a_right_training(check: str) -> None:
    judge, right, _ = FAULTS[check]
    assert judge(*right).passed, judge(*right).summary


@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check in FAULTS for fault in FAULTS[check][2]])
def test_a_check_fails_on_each_fault(check: str, fault: str) -> None:
    judge, _, faults = FAULTS[check]
    found = judge(*faults[fault])
    assert not found.passed
    assert found.summary


def failing(value: Any) -> Iterator[Any]:
    """What a check judges, with each of its jobs failed in turn."""
    if isinstance(value, Outcome):
        yield FAILED
    elif isinstance(value, targets.Ran):
        yield targets.Ran(FAILED, value.steps)
    elif isinstance(value, dict):
        yield from ({**value, key: one} for key, inner in value.items() for one in failing(inner))
    elif isinstance(value, tuple):
        yield from ((*value[:at], one, *value[at + 1 :]) for at, inner in enumerate(value) for one in failing(inner))


@pytest.mark.parametrize("check", FAULTS)
def test_a_check_fails_where_one_of_its_jobs_has(check: str) -> None:
    judge, right, _ = FAULTS[check]
    for judged in failing(right):
        assert not judge(*judged).passed


def test_tests_that_are_all_skipped_are_no_success() -> None:
    with pytest.raises(report.Skipped, match="needs an NVIDIA GPU"):
        environment.judge_tests(0, "SKIPPED [3] tests/gpu/test_gpu_memory.py: needs an NVIDIA GPU\n3 skipped", True)


def test_a_machine_without_a_gpu_passes_in_a_dry_run_only() -> None:
    found = replace(MACHINE, gpus=(), bf16=False, triton="no GPU to compile for", counted={"torch": 0})
    assert environment.judge_environment(found, is_dry_run=True).passed
    assert not environment.judge_environment(found, is_dry_run=False).passed


def test_a_job_that_the_preflight_would_refuse_may_run_out_of_memory() -> None:
    large = replace(MEASURED, name="large", estimate=90 * GIB, problem="out of memory")
    found = peak_memory.judge_estimate([MEASURED, large], limit=80.0 * GIB)
    assert found.passed
    assert found.rows["large"] == "estimate 90.00 GiB, failed: out of memory"


def test_the_self_ratio_is_compared_before_the_first_update_only() -> None:
    later = (job().steps[0], *(replace(step, metrics={**METRICS, "rewards/chosen": 0.5}) for step in job().steps[1:]))
    found = sharding.judge_output_dtype({"none": job(steps=later), "fp32": SLOW}, SHARDED, is_measured=True)
    assert found.passed


def test_a_job_that_was_to_be_sharded_and_was_not_counts_as_failed() -> None:
    assert numerics.require_shards(job(), {"units": 4}).finished
    whole = numerics.require_shards(job(), {"units": 0})
    assert not numerics.judge_falling({"one process": job(), "FSDP2": whole}, agreement=1.0).passed


@pytest.mark.parametrize("check", ["clock", "many_lengths"])
def test_where_metric_points_are_a_clock_metrics_are_read_in_their_step(
    check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def spec(*given: Any, **changes: Any) -> Any:
        asked.append(changes.get("read_metrics_later"))
        raise EOFError

    monkeypatch.setattr(speed, "model", lambda *_: tmp_path)
    monkeypatch.setattr(speed, "spec", spec)
    with pytest.raises(EOFError):
        getattr(speed, check)(Setting(tmp_path, tmp_path, is_dry_run=True))
    assert asked == ["never"]


def test_a_checkpoint_without_weights_has_no_digest(tmp_path: Path) -> None:
    assert digest(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert len(digest(tmp_path)) == 64


def test_the_operations_of_a_step_are_those_of_its_weights_and_attention() -> None:
    assert ONE_B.parameters == pytest.approx(1.236e9, rel=1e-3)
    # 6 x parameters, and 6 x layers x hidden x tokens for causal attention; DPO's reference adds a third.
    sft = 6 * ONE_B.parameters + 6 * 16 * 2048 * 1024
    assert targets.operations(OF_1B) == pytest.approx((sft, sft))
    assert targets.operations(replace(OF_1B, algorithm="dpo"))[0] == pytest.approx(4 / 3 * sft)
    # The table of embeddings is no head, and frozen weights get no gradients.
    assert EIGHT_B.parameters == pytest.approx(8.030e9, rel=1e-3)
    multiplied, attention = EIGHT_B.parameters - 128_256 * 4096, 6 * 32 * 4096 * 1024
    assert targets.operations(OF_8B) == pytest.approx((6 * multiplied + attention, 4 * multiplied + attention))


def test_rows_are_as_many_tokens_as_their_target_counts(tmp_path: Path) -> None:
    for row in (*inputs.full_rows("sft", 3, 500), *inputs.full_rows("dpo", 3, 500)):
        assert all(len(text) > 500 for name, text in row.items() if name != "prompt")
        assert len({*row.values()}) == len(row)


def test_a_trace_has_the_time_of_the_gpu_and_of_python() -> None:
    def span(category: str, name: str, begin: int, length: int) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}

    events = [
        span("kernel", "gemm", 0, 400_000),
        span("kernel", "gemm", 200_000, 400_000),  # another stream's, half of it beside the first
        span("gpu_memcpy", "Memcpy DtoH", 700_000, 100_000),
        span("cuda_runtime", "cudaLaunchKernel", 0, 10),
        span("cuda_runtime", "cudaStreamSynchronize", 500_000, 300_000),
        span("cpu_op", "aten::mm", 0, 900_000),
        {"ph": "i", "cat": "kernel", "name": "a mark", "ts": 0},
    ]
    found = steps.totals(events, seconds=1.0, steps=2)
    assert found == pytest.approx({"step": 0.5, "busy": 0.35, "idle": 0.15, "host": 0.35, "kernels": 1.0})


def test_processes_on_gpus_are_read_from_nvidia_smi() -> None:
    listed = "4711, GPU-a\n4712, GPU-b\n[N/A], GPU-a\n\n"
    assert peak_memory.parse_processes(listed) == [(4711, "GPU-a"), (4712, "GPU-b")]


def test_results_are_read_by_mode_and_the_last_line_of_a_check_counts(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    report.append(path, Result("1 GPU", "export", Status.failed, 3.0, "first"))
    report.append(path, Result("1 GPU", "export", Status.passed, 4.0, "second", {"full": "1 s"}))
    report.append(path, Result("2 GPUs", "NCCL hang", Status.passed, 5.0, ""))
    with path.open("a") as file:
        file.write('{"mode": "1 GPU", "chec')  # the machine was taken away
    report.append(path, Result("1 GPU", "fp16", Status.passed, 1.0, "after the cut line", commit="abc"))
    found = report.read(path, "1 GPU")
    assert found.pop("fp16").commit == "abc"
    assert found == {"export": Result("1 GPU", "export", Status.passed, 4.0, "second", {"full": "1 s"})}
    assert report.read(tmp_path / "none", "1 GPU") == {}


def test_a_call_that_leaves_a_check_without_a_result_fails_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    options = gpu.parse_options(["--dry-run", f"--results={path}", "--only", "fp16", "QAT"])
    report.append(path, Result("dry-run", "fp16", Status.passed, 1.0, "", commit="abc"))
    assert gpu.print_table(options) == 1
    assert "at abc. Without a result: QAT." in capsys.readouterr().out
    report.append(path, Result("dry-run", "QAT", Status.skipped, 1.0, "no torchao", commit="abc"))
    assert gpu.print_table(options) == 0


def test_the_table_is_markdown_whatever_a_check_found() -> None:
    results = [Result("1 GPU", "export", Status.failed, 3.4, "a | b\nc", {"full": "1 s"})]
    lines = report.table(results, "    python gpu.py").splitlines()
    assert lines[:2] == ["    python gpu.py", ""]
    assert lines[4:] == ["| export | failed | 3 | a \\| b c |", "| export: full | | | 1 s |"]


def test_wheels_have_the_versions_of_this_environment_and_install_without_a_network(tmp_path: Path) -> None:
    argv = wheels.download_command(tmp_path, "3.12", ["pyarrow"], installed=lambda name: f"1-{name}")
    assert "pydantic-core==1-pydantic-core" in argv
    assert argv[-1] == "pyarrow==1-pyarrow"
    assert {"--no-deps", "--python-version=3.12", f"--dest={tmp_path}"} < set(argv)
    with pytest.raises(SystemExit, match="expected wheels there"):
        wheels.install_command(tmp_path, tmp_path / "site")
    (tmp_path / "a-1-py3-none-any.whl").touch()
    argv = wheels.install_command(tmp_path, tmp_path / "site")
    assert {"--no-index", "--no-deps", str(tmp_path / "a-1-py3-none-any.whl")} < set(argv)


def test_the_program_starts_without_a_single_library() -> None:
    """Before the wheels are installed there is no pydantic, and perhaps no torch."""
    code = "import sys; sys.path.insert(0, 'benchmarks'); import gpu; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert not {"torch", "pydantic", "psutil", "llama_stack_provider_trl"} & set(done.stdout.split())
