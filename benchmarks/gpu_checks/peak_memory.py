"""The memory estimate against measured peaks, offloaded activations, and what processes take on GPUs beside tensors."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import DEEP, HALF_B, ONE_B, TINY, Shape, model
from .jobs import Job, Outcome, free_port, largest_difference, problems, run_all, spec, train_in_one_process
from .report import Finding, Skipped
from .setting import Setting

if TYPE_CHECKING:
    from llama_stack_provider_trl.specs.job import JobSpec

GIB = 1 << 30
SAME_GRADIENTS = 0.1
"""Fraction by which gradient norms of two equal jobs may differ: more noise would hide a wrong gradient."""
MARGIN = 1.1
"""`fits` means estimate x 1.1 <= limit: a higher peak may run out of memory."""
LARGEST = 1.5
"""Estimate over peak, at most: the preflight would refuse a job that takes two thirds of the GPU."""
SPARE = 128 << 20
"""Bytes that the resident memory of a CPU process may exceed this by in a dry run, where tensors are small."""


@dataclass(frozen=True)
class Case:
    """A job whose peak is estimated and measured."""

    name: str
    shape: Shape
    batch: int
    tokens: int
    algorithm: str = "sft"
    changes: Mapping[str, Any] | None = None


CASES = (
    Case("SFT full", HALF_B, 4, 1024),
    Case("SFT full, checkpointing", HALF_B, 8, 2048, changes={"gradient_checkpointing": True}),
    Case("SFT full, packed", HALF_B, 4, 2048, changes={"packed": True}),
    Case("SFT full, checkpointing", ONE_B, 4, 1024, changes={"gradient_checkpointing": True}),
    Case("SFT LoRA", ONE_B, 4, 2048, changes={"lora": True}),
    Case("SFT LoRA, checkpointing", ONE_B, 8, 2048, changes={"lora": True, "gradient_checkpointing": True}),
    Case("DPO full", HALF_B, 2, 1024, "dpo"),
    Case("DPO LoRA", ONE_B, 2, 1024, "dpo", {"lora": True}),
)
DRY_CASES = (Case("SFT full", TINY, 4, 256), Case("DPO LoRA", TINY, 4, 128, "dpo", {"lora": True}))


@dataclass(frozen=True)
class Measured:
    name: str
    estimate: int
    peak: int = 0
    context: int = 0
    """Of the peak: what the driver counts beyond torch's reserved memory."""
    slack: float = 0.0
    """Reserved memory above allocated memory, as a fraction."""
    problem: str = ""
    """Why the job failed; nothing was measured then."""


def estimate(setting: Setting) -> Finding:
    """Decides whether the estimate of eight job shapes holds on a GPU, and what context and fragmentation really take.

    The estimate adds 768 MiB for context and workspaces and 5 % for the allocator, neither of which was measured.
    """
    cases = DRY_CASES if setting.is_dry_run else CASES
    jobs = [_job(setting, number, case) for number, case in enumerate(cases)]
    process = train_in_one_process(setting, jobs, "--measure")
    estimates = [_estimated(job, case, setting) for job, case in zip(jobs, cases, strict=True)]
    found = [
        _measured(case, TINY if setting.is_dry_run else case.shape, estimated, *ended)
        for case, estimated, ended in zip(cases, estimates, process.wait(), strict=True)
    ]
    return judge_estimate(found, _gpu_bytes(), SPARE if setting.is_dry_run else 0)


def _measured(case: Case, shape: Shape, estimated: int, ended: Outcome, recorded: Mapping[str, Any]) -> Measured:
    name = f"{case.name}, {shape.name}, {case.batch} x {case.tokens}"
    if not ended.finished or not recorded:
        return Measured(name, estimated, problem=ended.problem or "nothing was recorded")
    slack = recorded["reserved"] / recorded["allocated"] - 1 if recorded["allocated"] else 0.0
    return Measured(name, estimated, recorded["peak"], recorded["context"], slack)


def _gpu_bytes() -> float:
    """Memory of the first GPU, from the driver: torch would open a context in this process."""
    from llama_stack_provider_trl.launch.gpus import gpus

    found = gpus()
    return float(found[0].memory_bytes or math.inf) if found else math.inf


def _job(setting: Setting, number: int, case: Case) -> JobSpec:
    return spec(
        setting,
        f"case-{number}",
        model(setting, case.shape),
        algorithm=case.algorithm,
        batch_size=case.batch,
        tokens=case.tokens,
        steps=4 if case.changes and case.changes.get("packed") else 2,
        **(case.changes or {}),
    )


def _estimated(job: JobSpec, case: Case, setting: Setting) -> int:
    from llama_stack_provider_trl.recipes.memory.estimate import estimate as estimated
    from llama_stack_provider_trl.recipes.memory.trace import Batch

    sequences = case.batch * (2 if case.algorithm == "dpo" else 1)
    return estimated(job, Batch(sequences, case.tokens), setting.device).total


def judge_estimate(found: Sequence[Measured], limit: float = math.inf, spare: int = 0) -> Finding:
    """Fails where a peak exceeds its margin, an estimate is far too high, or a job failed that the preflight would have
    let through.

    Args:
        limit: bytes of the GPU.
        spare: bytes by which peak and estimate may differ besides.
    """
    measured = [one for one in found if not one.problem]
    over = [one.name for one in measured if one.peak > MARGIN * one.estimate + spare]
    over += [one.name for one in found if one.problem and MARGIN * one.estimate <= limit]
    high = [one.name for one in measured if one.estimate > LARGEST * one.peak + spare]
    errors = [100 * (one.estimate / one.peak - 1) for one in measured]
    rows = {one.name: f"estimate {one.estimate / GIB:.2f} GiB, {_described(one)}" for one in found}
    spread = f"error {min(errors):+.0f} % to {max(errors):+.0f} %" if errors else "nothing was measured"
    summary = f"{spread}; above estimate x {MARGIN}, or failed: {over or 'none'}"
    summary += f"; estimate above peak x {LARGEST}: {high}" if high else ""
    return Finding(not over and not high and bool(measured), summary, rows, {"cases": [asdict(one) for one in found]})


def _described(one: Measured) -> str:
    if one.problem:
        return f"failed: {one.problem[:200]}"
    error = 100 * (one.estimate / one.peak - 1)
    parts = f"of it context {one.context / GIB:.2f}; reserved above allocated {100 * one.slack:.0f} %"
    return f"peak {one.peak / GIB:.2f} ({error:+.0f} %), {parts}"


def offloading(setting: Setting) -> Finding:
    """Decides whether activations that wait in CPU memory change a gradient, and what they cost.

    A side stream copies them while storages may be freed: 20 steps with and without, compared by gradient norms.
    Kernels may add in an order of their own: a second job without it shows how far two equal ones differ.
    """
    if setting.is_dry_run:
        raise Skipped("activations are offloaded from a GPU: on a CPU the recipe has nothing to copy")
    path = model(setting, DEEP)
    jobs = [
        spec(setting, name, path, steps=20, tokens=1024, batch_size=8, activation_offloading=name == "offloaded")
        for name in ("plain", "again", "offloaded")
    ]
    return judge_offloading(*run_all(setting, jobs))


def judge_offloading(plain: Outcome, again: Outcome, offloaded: Outcome) -> Finding:
    if failed := problems({"without": plain, "without, again": again, "with": offloaded}):
        return Finding(False, failed)
    difference, noise = _gradients_differ(offloaded, plain), _gradients_differ(again, plain)
    summary = (
        f"losses and gradient norms within {difference:.1e} over {len(plain.steps)} steps, of two equal jobs within "
        f"{noise:.1e}; peak "
        f"{plain.peak_gib:.2f} to {offloaded.peak_gib:.2f} GiB, "
        f"step {plain.step_seconds:.3f} to {offloaded.step_seconds:.3f} s"
    )
    is_equal = difference <= max(3 * noise, 1e-3) and noise < SAME_GRADIENTS
    return Finding(is_equal and offloaded.peak_gib < plain.peak_gib, summary)


def _gradients_differ(one: Outcome, other: Outcome) -> float:
    """The largest relative difference of losses and gradient norms."""
    norms, others = ([step.metrics.get("grad_norm", math.nan) for step in job.steps] for job in (one, other))
    return max(largest_difference(one.losses, other.losses), largest_difference(norms, others))


def contexts(setting: Setting) -> Finding:
    """Decides whether each rank has a context on its own GPU only, while checkpoints are saved in the background."""
    if setting.is_dry_run:
        raise Skipped("a CPU has no contexts: nvidia-smi lists the processes of GPUs only")
    from llama_stack_provider_trl.specs.job import ShardingSpec

    path = model(setting, HALF_B)
    job = Job(setting, spec(setting, "contexts", path, ranks=2, save_steps=2, steps=6, sharding=ShardingSpec()))
    seen: dict[int, set[str]] = defaultdict(set)
    while not job.is_over():
        for pid, gpu in parse_processes(_list_processes()):
            seen[pid].add(gpu)
        time.sleep(0.5)
    return judge_contexts(job.wait(), seen)


def _list_processes() -> str:
    argv = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def parse_processes(listed: str) -> list[tuple[int, str]]:
    """Pid and GPU of each line of nvidia-smi's list."""
    fields = [[part.strip() for part in line.split(",")] for line in listed.splitlines()]
    return [(int(one[0]), one[1]) for one in fields if len(one) == 2 and one[0].isdigit()]


def judge_contexts(found: Outcome, seen: Mapping[int, set[str]]) -> Finding:
    if failed := problems({"job": found}):
        return Finding(False, failed)
    several = {pid: sorted(gpus) for pid, gpus in seen.items() if len(gpus) > 1}
    summary = f"{len(seen)} processes; on more than one GPU: {several or 'none'}"
    if not seen:
        summary = "nvidia-smi listed no process: in a container it may not see their pids"
    return Finding(len(seen) >= 2 and not several, summary)


def nccl_memory(setting: Setting) -> Finding:
    """Decides what NCCL takes on each GPU beside torch's memory, with and without NVLS, for the estimate's constant."""
    if setting.is_dry_run:
        raise Skipped("NCCL needs GPUs: gloo's buffers are in CPU memory")
    if setting.nccl:
        raise Skipped("what each of two ranks takes is not seen on a GPU that they share")
    from llama_stack_provider_trl.recipes.memory.estimate import _CUDA_CONTEXT

    grown = {name: _nccl_bytes(setting, value) for name, value in (("NVLS", "1"), ("no NVLS", "0"))}
    return judge_nccl_memory(grown, _CUDA_CONTEXT)


def _nccl_bytes(setting: Setting, nvls: str) -> int:
    """The largest growth of a GPU's memory by the first all-reduce of two ranks; negative where they failed."""
    import os

    environment = {**os.environ, "NCCL_NVLS_ENABLE": nvls}
    argv = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    script = Path(__file__).with_name("nccl_probe.py")
    done = subprocess.run(
        [sys.executable, *argv, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    (setting.folder / f"nvls-{nvls}.log").write_text(done.stdout + done.stderr)
    numbers = [int(line.partition("=")[2]) for line in done.stdout.splitlines() if line.startswith("grown=")]
    return max(numbers) if done.returncode == 0 and numbers else -1


def judge_nccl_memory(grown: Mapping[str, int], limit: int) -> Finding:
    """
    Args:
        limit: bytes that the estimate adds for NCCL and the libraries of CUDA.
    """
    rows = {name: f"{size / GIB:.2f} GiB per GPU" for name, size in grown.items()}
    failed = [name for name, size in grown.items() if size < 0]
    summary = (
        f"two ranks failed with {failed}"
        if failed
        else f"beside torch and the context, after an all-reduce of 256 MiB; the estimate adds {limit / GIB:.2f} GiB"
    )
    return Finding(not failed and max(grown.values()) <= limit, summary, rows, {"bytes": dict(grown)})
