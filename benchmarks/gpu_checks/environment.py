"""What the machine has, and whether the project's own GPU tests pass on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

from .report import Finding, Skipped
from .setting import REPOSITORY, Setting

LIBRARIES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "torchao")
OLDEST = {"torch": (2, 11), "transformers": (5, 23)}
"""transformers 5.17 has no training argument `activation_checkpointing`, which the recipes set."""
_PROC = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    versions: dict[str, str]
    python: str
    cuda: str
    nccl: str
    driver: str
    gpus: tuple[str, ...]
    """Name and memory, as torch sees them."""
    counted: dict[str, int | None]
    """Number of GPUs by who counts: torch, the provider, nvidia-smi; None: there is no such source, or it does not know
    CUDA_VISIBLE_DEVICES, which is set."""
    in_proc: int | None
    """Entries of /proc/driver/nvidia/gpus: a container may see its host's there."""
    bf16: bool
    compiler: str
    python_headers: bool
    triton: str
    """`compiles`, or the error message."""
    shared_memory_mib: int
    cores: int
    memory_gib: float


def environment(setting: Setting) -> Finding:
    """Decides whether Triton compiles here, and whether all sources count the same GPUs in a container.

    TRL's output head is a Triton kernel on CUDA, which needs a C compiler and Python.h. Jobs get the GPUs that the
    provider counts, from the driver's list (NVML).
    """
    return judge_environment(_machine(), setting.is_dry_run)


def judge_environment(found: Machine, is_dry_run: bool) -> Finding:
    problems = []
    for name, oldest in OLDEST.items():
        if _release(found.versions[name]) < oldest:
            problems.append(f"{name} {found.versions[name]} is older than {'.'.join(map(str, oldest))}")
    if missing := [
        name for name in ("transformers", "trl", "peft", "accelerate", "datasets") if not found.versions[name]
    ]:
        problems.append(f"{', '.join(missing)} cannot be imported")
    if not is_dry_run:
        if found.triton != "compiles":
            problems.append(f"Triton does not compile: {found.triton}")
        if not found.bf16:
            problems.append("the GPU has no bf16")
        counts = {count for count in found.counted.values() if count is not None}
        if len(counts) > 1 or not found.gpus:
            problems.append("the sources differ in the number of GPUs, or torch finds none")
    counted = ", ".join(f"{name} {count}" for name, count in found.counted.items() if count is not None)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    described = (
        f"{'; '.join(found.gpus) or 'no GPU'}; driver {found.driver or '-'}, CUDA {found.cuda or '-'}, NCCL "
        f"{found.nccl or '-'}; python {found.python}, {versions}; GPUs by source: {counted or '-'}, in /proc "
        f"{'-' if found.in_proc is None else found.in_proc}; Triton: "
        f"{found.triton}; compiler {found.compiler or 'none'}, Python.h {'yes' if found.python_headers else 'no'}; "
        f"/dev/shm {found.shared_memory_mib} MiB; {found.cores} cores, {found.memory_gib:.0f} GiB"
    )
    summary = "; ".join([*problems, described])
    return Finding(not problems, summary, figures=asdict(found))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def tests_gpu(setting: Setting) -> Finding:
    """Decides whether what saves GPU memory saves it and changes no loss: the tests of tests/gpu."""
    done = subprocess.run(
        # torchao's source has escapes that Python warns of where it was installed without compiling.
        [
            *(sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"),
            *("-W", "ignore::SyntaxWarning"),
            f"--basetemp={setting.folder / 'pytest'}",  # jobs of tests end with this check
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    (setting.folder / "pytest.log").write_text(done.stdout + done.stderr)
    return judge_tests(done.returncode, done.stdout + done.stderr, setting.is_dry_run)


def judge_tests(exit_code: int, output: str, is_dry_run: bool) -> Finding:
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", output)}
    if exit_code == 0 and not counts.get("passed"):
        reasons = re.findall(r"SKIPPED .*?: (.+)", output)
        reason = reasons[0] if reasons else "no test ran"
        if is_dry_run:
            raise Skipped(reason)
        return Finding(False, f"no test ran on this GPU: {reason}", figures={"exit_code": exit_code, **counts})
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)", output, re.MULTILINE)
    summary = ", ".join(f"{count} {word}" for word, count in counts.items()) or output[-300:]
    return Finding(exit_code == 0, "; ".join([summary, *failed]), figures={"exit_code": exit_code, **counts})


def _machine() -> Machine:
    import torch

    from llama_stack_provider_trl.launch.devices import count_gpus

    has_gpu = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())] if has_gpu else []
    listed, is_limited = _output("nvidia-smi", "-L"), "CUDA_VISIBLE_DEVICES" in os.environ
    shared = os.statvfs("/dev/shm")
    return Machine(
        versions={name: _version(name) for name in LIBRARIES},
        python=sys.version.partition(" ")[0],
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_gpu else "",
        driver=(_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").partition("\n")[0],
        gpus=tuple(f"{gpu.name}, {gpu.total_memory / (1 << 30):.1f} GiB" for gpu in gpus),
        counted={
            "torch": len(gpus),
            "the provider": count_gpus(),
            "nvidia-smi": None if listed is None or is_limited else len(re.findall(r"^GPU \d", listed, re.MULTILINE)),
        },
        in_proc=len(list(_PROC.iterdir())) if _PROC.is_dir() else None,
        bf16=has_gpu and torch.cuda.is_bf16_supported(),
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang") or "",
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        triton=_compile_with_triton() if has_gpu else "no GPU to compile for",
        shared_memory_mib=shared.f_blocks * shared.f_frsize >> 20,
        cores=os.cpu_count() or 0,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30),
    )


def _compile_with_triton() -> str:
    """In a process of its own: a compiler that crashes ends only that."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu_checks.triton_probe"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return "compiles"
    lines = done.stderr.strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {done.returncode}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*argv: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    print(json.dumps(asdict(_machine()), indent=1))
