"""What the benchmarks have in common: their options, the machine, the report, and a spread."""

from __future__ import annotations

import argparse
import json
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


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser for the options of a program with this docstring; each has `--json`."""
    made = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    made.add_argument("--json", type=Path, metavar="OUT", help="a file for all figures")
    return made


def begin(*packages: str, options: argparse.Namespace | None = None, **described: Any) -> dict[str, Any]:
    """A report with the command, the machine (with `packages` and what else is `described`) and the options. Prints
    them, a line each but the options."""
    report: dict[str, Any] = {"command": command(), "machine": {**machine(*packages), **described}}
    print(f"$ {report['command']}")
    for name, value in report["machine"].items():
        print(f"  {name}: {value}")
    if options is not None:
        own = {name: value for name, value in vars(options).items() if name != "json"}
        report["options"] = {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}
    return report


def finish(report: dict[str, Any], file: Path | None) -> None:
    """Add the load of the machine to a report, print it, and write the report to a file, where one is named."""
    report["machine"]["load_after"] = os.getloadavg()
    print(f"\nload average before {report['machine']['load_before']}, after {report['machine']['load_after']}")
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n")


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
