"""Settles on a machine with an NVIDIA GPU what no CPU can show. Needs the training libraries, no service, no network.

    python benchmarks/gpu.py --results gpu.jsonl            # one GPU, under ten minutes
    python benchmarks/gpu.py --results gpu.jsonl --gpus 2   # what needs two
    python benchmarks/gpu.py --dry-run                      # every check on the CPU, with a tiny model

Each check runs in a process of its own within its time limit and appends one JSON line; a check that has a line is not
repeated. The last output is a Markdown table for RESULTS.md. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path

from gpu_checks.registry import CHECKS, Check, load
from gpu_checks.report import Finding, Result, Skipped, Status, append, read, table
from gpu_checks.setting import BENCHMARKS, GLOO, REPOSITORY, Setting
from gpu_checks.wheels import download, install
from machine import command, commit

TOTAL_SECONDS = 570.0
"""Of all checks together; what is left over is for the next call. Ten minutes have the installation of wheels, too."""
LEAST_SECONDS = 20.0
"""A check is not started with less time left: importing the libraries takes up to half of it."""
RUN_DIR_MARK = "TRL_RUN_DIR"
"""`system.process.RUN_DIR_MARK`: the processes of a check are found by it, and jobs have directories below."""
LOG_CHARACTERS = 4000
"""Of each log of a failed check that its line holds."""
DRY_RUN_PATIENCE = 3
"""Factor of the time limits on a CPU, which other programs may share."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.child:
        return run_child(options)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running check, too
    if options.download:
        download(options.download, options.python_version, options.more)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-", dir=options.scratch) as scratch:
        work = Path(scratch)
        environment = child_environment(options, work)
        run_checks(chosen_checks(options), options, work, environment)
    return print_table(options)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), help="file of results, one JSON line each")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="2: only what needs two GPUs")
    parser.add_argument(
        "--share", metavar="NCCL", help="--gpus 2 on one GPU, by this libnccl.so.2, of 2.30 or later; gloo: without"
    )
    parser.add_argument("--dry-run", action="store_true", help="every check on the CPU; nothing is measured")
    parser.add_argument("--only", nargs="+", metavar="CHECK", choices=[check.name for check in CHECKS])
    parser.add_argument("--again", action="store_true", help="repeat checks that failed, timed out or were skipped")
    parser.add_argument("--total", type=float, metavar="SECONDS", help=f"of all checks together; {TOTAL_SECONDS:.0f}")
    parser.add_argument("--scratch", type=Path, help="where models and jobs are written (40 GB)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install these wheels first, for this run only")
    parser.add_argument("--download", type=Path, metavar="DIR", help="fetch the wheels for --wheels, and end")
    parser.add_argument("--with", dest="more", nargs="+", default=[], metavar="PACKAGE", help="further wheels to fetch")
    parser.add_argument("--python-version", default="3.12", help="of the machine with the GPU, for --download")
    parser.add_argument("--child", metavar="PLACE", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.total = options.total or TOTAL_SECONDS * (DRY_RUN_PATIENCE if options.dry_run else 1)
    return options


def mode(options: argparse.Namespace) -> str:
    if options.dry_run:
        return "dry-run"
    return (
        f"2 ranks on 1 GPU{', gloo' if options.share == GLOO else ''}"
        if options.share
        else f"{options.gpus} GPU{'s' if options.gpus > 1 else ''}"
    )


def chosen_checks(options: argparse.Namespace) -> list[Check]:
    """The checks of this mode; a dry run has those of every mode."""
    gpus = 2 if options.share else options.gpus
    found = (check for check in CHECKS if options.dry_run or check.gpus == gpus)
    return [check for check in found if options.only is None or check.name in options.only]


def child_environment(options: argparse.Namespace, work: Path) -> dict[str, str]:
    """Variables of all processes that checks start."""
    paths = [str(REPOSITORY), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    if options.wheels:
        install(options.wheels.resolve(), work / "site")
        paths.insert(0, str(work / "site"))
        sys.path.insert(0, str(work / "site"))
    added = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_LOCK_DIR": str(work / "locks"),  # a service on this machine does not make the checks wait
    }
    if options.dry_run:
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **added}


def run_checks(checks: Sequence[Check], options: argparse.Namespace, work: Path, environment: dict[str, str]) -> None:
    """Run what has no line yet, until the total time is over. A dry run, which measures no time, runs two at once."""
    done = read(options.results, mode(options))
    waiting = []
    for check in checks:
        if (earlier := done.get(check.name)) and not (options.again and earlier.status != Status.passed):
            print(f"{check.name}: {earlier.status}, recorded before", flush=True)
        else:
            waiting.append(check)
    deadline = time.monotonic() + options.total
    run_one = partial(record_check, options=options, work=work, environment=environment, deadline=deadline)
    if not options.dry_run:
        for check in waiting:
            run_one(check)
        return
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_one, waiting))


def record_check(
    check: Check, options: argparse.Namespace, work: Path, environment: dict[str, str], deadline: float
) -> None:
    """Run one check and append its line. Without enough time it gets none, and the next call runs it."""
    left = deadline - time.monotonic()
    result = run_check(check, options, work, environment, left) if left > LEAST_SECONDS else None
    if result is None:
        print(f"{check.name}: not run, the {options.total:.0f} s are over; run this command again", flush=True)
        return
    append(options.results, replace(result, commit=commit()))
    print(f"{check.name}: {result.status} after {result.seconds:.0f} s: {result.summary}", flush=True)


def run_check(
    check: Check, options: argparse.Namespace, work: Path, environment: dict[str, str], left: float
) -> Result | None:
    """Run one check in a child within its time limit. None: the total time ended it."""
    folder = work / check.place.replace(":", "-")
    folder.mkdir(parents=True)
    argv = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).resolve()),
        "--child",
        check.place,
        "--work",
        str(folder),
    ]
    argv += ["--dry-run"] if options.dry_run else ["--gpus", str(options.gpus)]
    argv += ["--share", options.share] if options.share else []
    environment = {**environment, RUN_DIR_MARK: str(folder)}
    limit = check.seconds * (DRY_RUN_PATIENCE if options.dry_run else 1)
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        child.wait(min(limit, left))
        is_over = True
    except subprocess.TimeoutExpired:
        is_over = False
    except BaseException:
        end_processes(child, folder)
        raise
    seconds = time.monotonic() - began
    end_processes(child, folder)
    if not is_over and left < limit:
        return None
    result = read_result(check, options, folder, seconds, is_over)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def read_result(check: Check, options: argparse.Namespace, folder: Path, seconds: float, is_over: bool) -> Result:
    """What the child wrote, or how it ended."""
    written = folder / "result.json"
    if is_over and written.exists():
        result = Result(mode(options), check.name, seconds=seconds, **json.loads(written.read_text()))
    elif is_over:
        result = Result(mode(options), check.name, Status.failed, seconds, f"the check crashed: {log_end(folder)}")
    else:
        summary = f"not over after {seconds:.0f} s: {log_end(folder)}"
        result = Result(mode(options), check.name, Status.timed_out, seconds, summary)
    return replace(result, figures={**result.figures, "logs": logs(folder)}) if is_bad(result) else result


def end_processes(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the check's process group, and what it started in sessions of their own, as runners and torchrun do."""
    sys.path.insert(0, str(REPOSITORY))
    from llama_stack_provider_trl.system.process import tasks_below, terminate

    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    terminate(lambda: [one for processes in tasks_below(folder).values() for one in processes], grace=0)


def log_end(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    return " ".join(lines[-3:])[-600:] or "its log is empty"


def logs(folder: Path) -> dict[str, str]:
    """The ends of logs and events below a check's directory, which is removed: a machine may be gone by tomorrow."""
    found = [path for path in sorted(folder.rglob("*")) if path.name.endswith("log") or path.name == "events.jsonl"]
    return {str(path.relative_to(folder)): path.read_text(errors="replace")[-LOG_CHARACTERS:] for path in found}


def run_child(options: argparse.Namespace) -> int:
    """In the child: run one check and write its result."""
    from llama_stack_provider_trl.system.process import die_with_parent

    die_with_parent(os.getppid())
    setting = Setting(options.work / "jobs", options.work.parent / "models", options.dry_run, options.share or "")
    setting.folder.mkdir()
    try:
        finding = load(options.child)(setting)
        status = Status.passed if finding.passed else Status.failed
    except Skipped as reason:
        finding, status = Finding(True, str(reason)), Status.skipped
    except Exception as error:
        traceback.print_exc()
        finding, status = Finding(False, f"{type(error).__name__}: {error}"[:600]), Status.failed
    values = {name: value for name, value in asdict(finding).items() if name != "passed"}
    (options.work / "result.json").write_text(json.dumps({"status": status, **values}))
    return 0


def is_bad(result: Result) -> bool:
    return result.status in (Status.failed, Status.timed_out)


def print_table(options: argparse.Namespace) -> int:
    """Print the table of all results of this mode. Returns 1 where a check failed, or one that was to run has none."""
    done = read(options.results, mode(options))
    results = [done[check.name] for check in CHECKS if check.name in done]
    commits = ", ".join(dict.fromkeys(result.commit for result in results)) or commit()
    heading = f"    {command()}\n\n{mode(options)}, {date.today()} at {commits}."
    missing = [check.name for check in chosen_checks(options) if check.name not in done]
    heading += f" Without a result: {', '.join(missing)}." if missing else ""
    heading += " Of a dry run only the results count: its numbers mean nothing." if options.dry_run else ""
    print(f"\n{table(results, heading)}")
    return 1 if missing or any(is_bad(result) for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
