"""How long rows are prepared and in how much memory, and when a resumed attempt does its first step.

    .venv/bin/python benchmarks/data.py --json out.json

Prepares the rows of a job with a token cache and, with --in-memory, as before; then trains a tiny model on few and on
many rows, and resumes it. Every measurement is a process of its own. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from machine import REPOSITORY, begin, finish, parser_of

LIMIT_MB, LIMIT_TREE_MB = 600, 1024
"""Memory above the import that many rows may take, and that of all processes with what they import."""
STEPS = 2


def main() -> None:
    options = parse_options()
    sys.path.insert(0, str(REPOSITORY))
    if options.child:
        json.dump(CHILDREN[options.child](options), sys.stdout)
        return
    report = begin("torch", "transformers", "tokenizers", "datasets", "pyarrow", options=options)
    with tempfile.TemporaryDirectory(prefix="data-", dir=options.scratch) as scratch:
        options.scratch = Path(scratch)
        for rows in (options.few, options.rows):
            child(options, "rows", rows)
        report["prepare"] = {}
        for kind in kinds(options):
            found = report["prepare"][kind] = child(options, kind, options.rows)
            print(f"{kind}: " + ", ".join(f"{name} {value:,}" for name, value in found.items()), flush=True)
        for rows in (options.few, options.rows):
            child(options, "train", rows)
        rounds = [{rows: resume(options, rows) for rows in (options.few, options.rows)} for _ in range(options.rounds)]
        report["resume"] = {
            rows: {name: [round(one[rows][name], 3) for one in rounds] for name in rounds[0][rows]}
            for rows in (options.few, options.rows)
        }
        for rows, found in report["resume"].items():
            shown = ", ".join(f"{name} {statistics.median(of):.2f} s" for name, of in found.items())
            print(f"resumed with {rows:,} rows: {shown} (medians of {options.rounds})")
    finish(report, options.json)
    kept = report["prepare"]["kept"]
    for name, limit in (("mb_above_import", LIMIT_MB), ("mb_resident_with_workers", LIMIT_TREE_MB)):
        if kept[name] > limit:
            sys.exit(f"the target is missed: {options.rows:,} rows take {kept[name]} ({name}), not {limit}")


def kinds(options: argparse.Namespace) -> list[str]:
    return ["kept", "found", *(["in-memory"] if options.in_memory else []), *(["packed"] if options.packed else [])]


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=10_000, help="rows of the job that the large one is compared with")
    parser.add_argument("--rounds", type=int, default=5, help="resumed attempts of each")
    parser.add_argument("--in-memory", action="store_true", help="prepare the rows without a cache, too")
    parser.add_argument("--packed", action="store_true", help="pack the rows, too")
    parser.add_argument("--scratch", type=Path, help="where rows and tokens are; left out: the temporary directory")
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    return parser.parse_args()


def child(options: argparse.Namespace, kind: str, rows: int) -> Any:
    """The result of one measurement."""
    arguments = [f"--child={kind}", f"--rows={rows}", f"--scratch={options.scratch}"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments], check=True, stdout=subprocess.PIPE, env=environment()
    )
    return json.loads(done.stdout.splitlines()[-1])  # a training prints before it


def environment() -> dict[str, str]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}


def write_rows(options: argparse.Namespace) -> None:
    from llama_stack_provider_trl.system.files import put_rows

    rows = (
        {"prompt": f"What is {n} plus {n % 97}?", "completion": f"{n} plus {n % 97} is {n + n % 97}."}
        for n in range(options.rows)
    )
    blob = put_rows(options.scratch, rows)
    blob.path.rename(options.scratch / f"{options.rows}.jsonl")
    (options.scratch / f"{options.rows}.sha256").write_text(blob.sha256)


def spec_of(options: argparse.Namespace, **changes: Any) -> Any:
    from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, OptimizerSpec
    from tests.tiny import tiny_model

    name = str(options.rows)
    rows = DatasetRef(
        dataset_id="rows",
        path=options.scratch / f"{name}.jsonl",
        sha256=(options.scratch / f"{name}.sha256").read_text(),
        num_rows=options.rows,
    )
    fields = {
        "job_uuid": "benchmark",
        "model": str(tiny_model()),
        "output_name": "benchmark",
        "checkpoint_dir": options.scratch / f"checkpoints-{name}",
        "dataset": rows,
        "n_epochs": 1,
        "max_steps_per_epoch": 2 * STEPS,
        "save_steps": STEPS,
        "batch_size": 4,
        "max_seq_length": 512,
        "dtype": "fp32",
        "device": "cpu",
        "padding_free": True,
        "group_by_length": True,
        "optimizer": OptimizerSpec(learning_rate=1e-3),
        "token_cache": options.scratch / "tokens",
    }
    return JobSpec.of(**{**fields, **changes})


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    import llama_stack_provider_trl.recipes.session  # noqa: F401  what a training imports
    from llama_stack_provider_trl.recipes.data.lengths import num_rows, row_lengths
    from llama_stack_provider_trl.recipes.data.prepared import Preparation
    from llama_stack_provider_trl.recipes.model.loading import load_tokenizer
    from llama_stack_provider_trl.specs.events import EventWriter

    kept = {} if options.child != "in-memory" else {"token_cache": None}
    spec = spec_of(options, packed=options.child == "packed", **kept)
    tokenizer, writer = load_tokenizer(spec.source), EventWriter(options.scratch / f"{options.child}.jsonl")
    with peak_memory() as peak:
        began, worked = time.perf_counter(), cpu_seconds()
        prepared = Preparation(spec, tokenizer, writer, spec.data.dataset).rows(spec.data.dataset)
        seconds, worked = time.perf_counter() - began, cpu_seconds() - worked
        longest = int(row_lengths(prepared.dataset).max())
    files = [path.stat().st_size for path in (options.scratch / "tokens").glob("*/rows*.arrow")]
    return {
        "rows": num_rows(prepared.dataset),
        "longest": longest,
        "tokens": prepared.report.total_tokens,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(worked, 2),
        "mb_above_import": peak["all"],
        "mb_without_files": peak["own"],
        "mb_resident_with_workers": peak["tree"],
        "mb_on_disk": sum(files) >> 20,
        "events": (options.scratch / f"{options.child}.jsonl").read_text().count('"tokenizing"'),
    }


def cpu_seconds() -> float:
    """Of this process and of those that it has started and that have ended: other work on the machine does not
    lengthen them much."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """MB that this process takes while this is open beyond what it has before (all, and without mapped files), and what
    it and the processes that it starts take at once, pages that they share counted once."""
    peak, over = {"all": 0, "own": 0, "tree": 0}, threading.Event()
    before = resident("self")

    def watch() -> None:
        while not over.wait(0.1):
            now = resident("self")
            beyond = {name: now[name] - before[name] for name in now}
            tree = sum(proportional(process) for process in ("self", *children()))
            for name, size in {"all": beyond["VmRSS:"], "own": beyond["RssAnon:"], "tree": tree}.items():
                peak[name] = max(peak[name], size >> 10)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    over.set()
    thread.join()


def resident(process: str) -> dict[str, int]:
    """KiB of a process; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    found = (line.split() for line in lines)
    return {words[0]: int(words[1]) for words in found if words[0] in ("VmRSS:", "RssAnon:")}


def proportional(process: str) -> int:
    """KiB of a process, of a page that N processes have an Nth; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def children() -> list[str]:
    with suppress(OSError):
        return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return []


def train(options: argparse.Namespace) -> None:
    from llama_stack_provider_trl.recipes.train import main as train_main

    status = train_main(["train", str(attempt(options, "trained"))])
    assert status == 0, (options.scratch / f"trained-{options.rows}" / "events.jsonl").read_text()


def attempt(options: argparse.Namespace, name: str, resume_from: Path | None = None) -> Path:
    """The file of an attempt's specification."""
    from llama_stack_provider_trl.specs.job import AttemptSpec
    from llama_stack_provider_trl.system.files import RunDir

    run_dir = options.scratch / f"{name}-{options.rows}"
    run_dir.mkdir()
    paths = RunDir(run_dir)
    spec = AttemptSpec(job=spec_of(options), attempt=1, run_dir=run_dir, resume_from=resume_from)
    paths.spec.write_text(spec.model_dump_json())
    return paths.spec


def resume(options: argparse.Namespace, rows: int) -> dict[str, float]:
    """Seconds from the start of a resumed attempt's process, and from its `started` event, to its first step."""
    there = argparse.Namespace(**{**vars(options), "rows": rows})
    checkpoint = options.scratch / f"checkpoints-{rows}" / f"checkpoint-{STEPS}"
    spec = attempt(there, f"resumed-{time.monotonic_ns()}", checkpoint)
    module = "llama_stack_provider_trl.recipes.train"
    began = time.time()
    with open(spec.with_name("log"), "wb") as log:
        subprocess.run([sys.executable, "-m", module, str(spec)], check=True, env=environment(), stdout=log, stderr=log)
    events = [json.loads(line) for line in spec.with_name("events.jsonl").read_text().splitlines()]
    at = {kind: next(event["time"] for event in events if event["type"] == kind) for kind in ("started", "progress")}
    first = next(event for event in events if event["type"] == "progress")
    assert first["step"] == STEPS + 1, first
    return {"from the process": at["progress"] - began, "from started": at["progress"] - at["started"]}


CHILDREN = {"rows": write_rows, "train": train, **dict.fromkeys(("kept", "found", "in-memory", "packed"), prepare)}


if __name__ == "__main__":
    main()
