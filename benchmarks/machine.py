"""How the benchmarks describe the machine and a spread."""

from __future__ import annotations

import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def machine(*packages: str) -> dict[str, Any]:
    """Processor, memory, system, commit, load, and the versions of `packages`."""
    versions = [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "versions": ", ".join(versions),
        "commit": commit(),
        "load_before": os.getloadavg(),
    }


def print_header(report: dict[str, Any]) -> None:
    """The command, then the machine, a line each."""
    print(f"$ {report['command']}")
    for name, value in report["machine"].items():
        print(f"  {name}: {value}")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        except OSError:  # no git, as on a machine that got a copy of the tree
            return ""
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "llama_stack_provider_trl")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with local changes" if changed else "")


def command() -> str:
    return shlex.join([os.path.relpath(sys.executable), os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def spread(ratios: list[float], resamples: int = 10_000) -> dict[str, float]:
    """Median, extremes, and the central 90 % of the medians of resamples with replacement."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "low90": medians[math.floor(0.05 * (resamples - 1))],
        "high90": medians[math.ceil(0.95 * (resamples - 1))],
    }
