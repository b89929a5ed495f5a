"""How long a POST takes that submits a job over 10,000 rows, and what our provider adds to Llama Stack's memory.

    .venv/bin/python benchmarks/post_latency.py --json out.json

Starts Llama Stack with run.yaml, once without the post_training provider and once with it, in a directory of its own.
No training runs: this program holds the lock of the device, so the first job waits for it and the others are queued
behind that job. Linux only, since memory is read from /proc. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import yaml
from machine import REPOSITORY, command, machine, print_header, spread

sys.path.insert(0, str(REPOSITORY))

from llama_stack_provider_trl.system.process import FileLock

DATASET = "benchmark-rows"
START_TIMEOUT = 180.0


def main() -> None:
    options = parse_options()
    report: dict[str, Any] = {"command": command(), "machine": machine("llama-stack", "pandas", "pydantic")}
    print_header(report)
    rows = synthetic_rows(options.rows, options.row_bytes)
    with tempfile.TemporaryDirectory(prefix="post-latency-") as scratch:
        work = Path(scratch)
        report["without_provider"] = measure_without_provider(work / "without", rows)
        report["with_provider"] = measure_with_provider(work / "with", rows, options.repeats)
    report["summary"] = summarize(report)
    print_report(report, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="POSTs that are timed")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--row-bytes", type=int, default=600, help="size of one row as JSON")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args()


def synthetic_rows(count: int, size: int) -> list[dict[str, str]]:
    """Rows of words, each different and about `size` bytes as JSON."""
    rng = random.Random(0)
    words = [f"{head}{tail}" for head in ("ka", "lo", "mi", "nu", "re") for tail in ("dor", "fen", "gal", "hus", "tim")]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 6 + 1))[:length]

    frame = len(json.dumps({"prompt": "", "completion": ""}))
    requested = (size - frame) // 3
    return [{"prompt": text(requested), "completion": text(size - frame - requested)} for _ in range(count)]


# --- The two servers --------------------------------------------------------------------------------------------------


def measure_without_provider(folder: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    with LlamaStack(folder, post_training=False) as stack:
        memory = {"started": stack.memory()}
        stack.register(rows)
        memory["registered"] = stack.memory()
        stack.read_all_rows()
        memory["rows_read"] = stack.memory()
        return {"memory": memory, "torch_libraries": stack.torch_libraries()}


def measure_with_provider(folder: Path, rows: list[dict[str, str]], repeats: int) -> dict[str, Any]:
    with LlamaStack(folder, post_training=True) as stack:
        memory = {"started": stack.memory()}
        stack.register(rows)
        memory["registered"] = stack.memory()
        with device_held(stack.locks):
            first = stack.submit("first")
            memory["first_post"] = stack.memory()
            stack.wait_until_held("first")
            seconds, idle = [], []
            for number in range(repeats):
                idle.append(stack.time_get_jobs())
                seconds.append(stack.submit(f"queued-{number}"))
                stack.check_queued(f"queued-{number}")
                stack.cancel(f"queued-{number}")
            memory["posts"] = stack.memory()
            stack.cancel("first")
            stack.wait_until_over("first")
        return {
            "memory": memory,
            "first_post_s": first,
            "post_s": seconds,
            "get_jobs_s": idle,
            "torch_libraries": stack.torch_libraries(),
        }


class LlamaStack:
    """A Llama Stack of this repository's run.yaml on a free port, with its data below `folder`."""

    def __init__(self, folder: Path, *, post_training: bool) -> None:
        folder.mkdir()
        self.folder, self.locks = folder, folder / "locks"
        self.locks.mkdir()
        self.model = _model_directory(folder / "model")
        self.config = folder / "run.yaml"
        self.config.write_text(_run_config(post_training))
        self.log = folder / "server.log"
        self.url = f"http://127.0.0.1:{(port := _free_port())}"
        self._command = [str(_llama()), "stack", "run", str(self.config), "--port", str(port)]
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "LLAMA_STACK_PORT": str(port),
            "TRL_OUTPUT_DIR": str(folder / "data"),
            "TRL_LOCK_DIR": str(self.locks),
        }

    def __enter__(self) -> LlamaStack:
        (self.folder / "data").mkdir()
        with open(self.log, "wb") as output:
            self._server = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._server.terminate()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def memory(self) -> dict[str, float]:
        """MB resident now and at most so far, of the server's process."""
        time.sleep(1.0)  # whatever the last request left to do
        lines = Path(f"/proc/{self._server.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}

    def torch_libraries(self) -> list[str]:
        """Names of PyTorch's shared libraries in the server's address space."""
        lines = Path(f"/proc/{self._server.pid}/maps").read_text().splitlines()
        return sorted({Path(line.split()[-1]).name for line in lines if "/libtorch" in line})

    def register(self, rows: list[dict[str, str]]) -> None:
        source = {"type": "rows", "rows": rows}
        self._call(
            "POST", "/v1/datasets", {"dataset_id": DATASET, "purpose": "post-training/messages", "source": source}
        )

    def read_all_rows(self) -> None:
        self._call("GET", f"/v1/datasetio/iterrows/{DATASET}?limit=-1")

    def submit(self, job_uuid: str) -> float:
        """Seconds from sending the POST to having its answer."""
        return self._call(
            "POST",
            "/v1/post-training/supervised-fine-tune",
            {
                "job_uuid": job_uuid,
                "model": str(self.model),
                "training_config": {
                    "n_epochs": 1,
                    "data_config": {"dataset_id": DATASET, "batch_size": 4, "shuffle": True},
                },
                "hyperparam_search_config": {},
                "logger_config": {},
            },
        )

    def time_get_jobs(self) -> float:
        """Seconds of the cheapest call, as a measure of what HTTP itself takes here."""
        return self._call("GET", "/v1/post-training/jobs")

    def cancel(self, job_uuid: str) -> None:
        self._call("POST", "/v1/post-training/job/cancel", {"job_uuid": job_uuid})

    def check_queued(self, job_uuid: str) -> None:
        """A job that had started would have taken the CPU from the next POST."""
        status = self._status(job_uuid)
        if status["resources_allocated"]["state"] != "scheduled":
            raise RuntimeError(f"job {job_uuid} was to be queued, but is {status}")

    def wait_until_held(self, job_uuid: str) -> None:
        """Until the first job's runner stands at the device's lock and nothing of it computes any more."""
        self._wait(job_uuid, lambda status: "held by" in (status["resources_allocated"]["detail"] or ""))

    def wait_until_over(self, job_uuid: str) -> None:
        self._wait(job_uuid, lambda status: status["status"] in ("cancelled", "failed", "completed"))

    def _wait(self, job_uuid: str, reached: Any, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not reached(status := self._status(job_uuid)):
            if time.monotonic() > deadline:
                raise RuntimeError(f"job {job_uuid} did not get there in {seconds:.0f} s: {status}")
            time.sleep(0.1)

    def _status(self, job_uuid: str) -> dict[str, Any]:
        url = f"{self.url}/v1/post-training/job/status"
        answer = requests.get(url, params={"job_uuid": job_uuid}, timeout=30)
        answer.raise_for_status()
        return dict(answer.json())

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> float:
        data = json.dumps(body).encode() if body is not None else None
        began = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        answer = requests.request(method, self.url + path, data=data, headers=headers, timeout=300)
        seconds = time.perf_counter() - began
        if not answer.ok:
            raise RuntimeError(f"{method} {path} was answered {answer.status_code}: {answer.text[:1000]}")
        return seconds

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                if requests.get(self.url + "/v1/health", timeout=5).ok:
                    return
            except requests.ConnectionError:
                time.sleep(0.2)
        raise RuntimeError(f"Llama Stack did not come up:\n{self.log.read_text(errors='replace')[-3000:]}")


@contextmanager
def device_held(locks: Path) -> Iterator[None]:
    """Hold the lock of every device kind that a job could get, as a training of another program would."""
    held = [FileLock(locks / f"{name}.lock") for name in ("cpu", "mps", *(f"cuda-{index}" for index in range(16)))]
    for lock in held:
        if not lock.acquire("benchmarks/post_latency.py"):
            raise RuntimeError(f"{lock.path} is held by {lock.holder()}")
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def _run_config(post_training: bool) -> str:
    """run.yaml on the CPU (one device, so one job holds up the others), with or without our provider."""
    config = yaml.safe_load((REPOSITORY / "run.yaml").read_text())
    if post_training:
        config["providers"]["post_training"][0]["config"]["device"] = "cpu"
    else:
        config["apis"].remove("post_training")
        del config["providers"]["post_training"]
    return yaml.safe_dump(config, sort_keys=False)


def _model_directory(path: Path) -> Path:
    """What a POST checks of a base model is that it has a config.json; no process here gets as far as loading it."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}\n')
    return path


def _llama() -> Path:
    program = Path(sys.executable).parent / "llama"
    if not program.exists():
        sys.exit(f"post_latency: {program} is missing: run ./scripts/prepare-env.sh, and this with .venv/bin/python.")
    return program


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- Figures ----------------------------------------------------------------------------------------------------------


def summarize(report: dict[str, Any]) -> dict[str, Any]:
    ours, plain = report["with_provider"], report["without_provider"]
    rss = {name: values["VmRSS"] for name, values in ours["memory"].items()}
    base = {name: values["VmRSS"] for name, values in plain["memory"].items()}
    return {
        "post_s": spread(ours["post_s"]),
        "get_jobs_s": statistics.median(ours["get_jobs_s"]),
        "added_mb": {
            "after start": rss["started"] - base["started"],
            "after the POSTs, against rows read once": rss["posts"] - base["rows_read"],
            "after the POSTs, against rows registered": rss["posts"] - base["registered"],
        },
    }


def print_report(report: dict[str, Any], options: argparse.Namespace) -> None:
    summary, ours = report["summary"], report["with_provider"]
    post = summary["post_s"]
    print(f"\nPOST supervised-fine-tune, {options.rows} rows of {options.row_bytes} bytes")
    print(f"  {options.repeats} queued jobs: {post['median']:.3f} s (median), {post['min']:.3f} to {post['max']:.3f} s")
    print(f"  the first job of all: {ours['first_post_s']:.3f} s (imports, and the start of its runner)")
    print(f"  for comparison, GET jobs: {summary['get_jobs_s'] * 1000:.1f} ms (median)")
    print(f"\n{'Resident memory of Llama Stack, MB':38}{'now':>8}{'peak':>8}")
    for title, moment, memory in _moments(report):
        print(f"{title:18}{moment:20}{memory['VmRSS']:8.1f}{memory['VmHWM']:8.1f}")
    print("\nAdded by our provider, MB")
    for title, value in summary["added_mb"].items():
        print(f"  {title:42}{value:8.1f}")
    for title in ("without_provider", "with_provider"):
        found = ", ".join(report[title]["torch_libraries"]) or "no"
        print(f"libtorch in the process, {title.replace('_', ' ')}: {found}")


def _moments(report: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    for title in ("without_provider", "with_provider"):
        for moment, memory in report[title]["memory"].items():
            yield title.replace("_", " "), moment.replace("_", " "), memory


if __name__ == "__main__":
    main()
