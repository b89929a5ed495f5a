"""benchmarks/gpu.py on the CPU: its checks run on real jobs, a second call repeats none, and limits end children.

Here one check of each kind runs; `TRL_TESTS=full ./scripts/test.sh tests/process/test_gpu_benchmark.py` runs them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.system.process import RUN_DIR_MARK, identify, tasks_below
from tests import forked
from tests.required import FULL

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu  # noqa: E402
from gpu_checks.registry import CHECKS, Check  # noqa: E402
from gpu_checks.report import read  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
NEEDS_GPU = {
    "tests/gpu",
    "activation offloading",
    "contexts",
    "NCCL memory",
    "weights for vLLM at 8B",
    "Liger's kernels",
}
IN_CI = {*NEEDS_GPU, "environment", "HYBRID_SHARD", "tokens per second", "export", "SIGTERM", "host time of LoRA at 8B"}
"""One of each module of benchmarks/gpu_checks, the last one without its export; those that compile take minutes."""
NAMES = [check.name for check in CHECKS if FULL or check.name in IN_CI]


def benchmark(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", f"--scratch={folder}", "--only", *NAMES],
        cwd=folder,
        env={**os.environ, **forked.environment(with_site=True), "TRL_VLLM_PYTHON": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]


def test_the_dry_run_passes_its_checks_and_a_second_call_repeats_none(tmp_path: Path) -> None:
    done = benchmark(tmp_path)
    found = {line["check"]: line for line in lines(tmp_path)}
    assert {name for name, line in found.items() if line["status"] == "skipped"} == NEEDS_GPU
    assert all(found[name]["summary"] for name in NEEDS_GPU)
    assert [line for line in found.values() if line["status"] not in ("passed", "skipped")] == []
    assert done.returncode == 0, done.stderr
    assert set(found) == set(NAMES)
    assert {check.name for check in CHECKS} > IN_CI
    assert all(f"| {name} | " in done.stdout for name in NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.jsonl"]
    assert tasks_below(tmp_path) == {}

    again = benchmark(tmp_path)
    assert again.stdout.count("recorded before") == len(NAMES)
    assert len(lines(tmp_path)) == len(NAMES)
    assert again.returncode == 0


CHECKS_THAT_END = """
import os, subprocess, time
from pathlib import Path
from gpu_checks.report import Finding, Skipped
def right(setting): return Finding(True, f"{setting.device} {setting.folder.is_dir()}")
def wrong(setting): return Finding(False, "2 is not 3", rows={"case": "1 s"})
def absent(setting): raise Skipped("no such library")
def raises(setting): raise ValueError("a bug")
def dies(setting): os.write(2, b"corrupted"); os._exit(9)
def sleeps(setting):
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)
def imports(setting):
    import from_a_wheel
    return Finding(True, from_a_wheel.__file__)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module of checks, each of which ends in another way."""
    (tmp_path / "ends.py").write_text(CHECKS_THAT_END)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path


def run(work: Path, names: str, *arguments: str, seconds: float = 60.0) -> dict[str, Any]:
    """Run checks of the module; returns their results by name."""
    options = gpu.parse_options([f"--results={work / 'gpu.jsonl'}", *arguments])
    checks = [Check(name, f"ends:{name}", seconds) for name in names.split()]
    gpu.run_checks(checks, options, work, gpu.child_environment(options, work))
    return read(options.results, gpu.mode(options))


def test_a_check_has_its_line_however_it_ends(work: Path) -> None:
    found = run(work, "right wrong absent raises dies")
    assert {name: (one.status, one.summary) for name, one in found.items()} == {
        "right": ("passed", "cuda True"),
        "wrong": ("failed", "2 is not 3"),
        "absent": ("skipped", "no such library"),
        "raises": ("failed", "ValueError: a bug"),
        "dies": ("failed", "the check crashed: corrupted"),
    }
    assert found["wrong"].rows == {"case": "1 s"}
    assert 'raise ValueError("a bug")' in found["raises"].figures["logs"]["log"]
    assert "logs" not in found["right"].figures


def test_a_check_at_its_limit_is_killed_with_its_children_and_counts_as_timed_out(work: Path) -> None:
    assert gpu.RUN_DIR_MARK == RUN_DIR_MARK
    found = run(work, "sleeps right", seconds=3.0)
    assert found["sleeps"].status == "timed out"
    assert found["right"].status == "passed"
    for pid in (work / "pids").read_text().split():
        assert identify(int(pid)) is None


def test_what_the_total_time_cuts_off_gets_no_line_and_is_repeated(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.5)
    assert set(run(work, "sleeps right", "--total=3")) == set()
    assert set(run(work, "right")) == {"right"}


def test_a_check_that_did_not_pass_is_repeated_only_on_request(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(work, "right wrong absent")
    run(work, "right wrong absent")
    assert len(lines(work)) == 3
    run(work, "right wrong absent", "--again")
    assert [line["check"] for line in lines(work)] == ["right", "wrong", "absent", "wrong", "absent"]
    assert all(line["commit"] for line in lines(work))
    assert "right: passed, recorded before" in capfd.readouterr().out


def test_libraries_come_from_a_directory_of_wheels(work: Path) -> None:
    folder = work / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "from_a_wheel-1-py3-none-any.whl", "w") as wheel:
        info = "from_a_wheel-1.dist-info"
        wheel.writestr("from_a_wheel.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: from_a_wheel\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"from_a_wheel.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    found = run(work, "imports", f"--wheels={folder}")
    assert found["imports"].summary == str(work / "site" / "from_a_wheel.py")


def test_the_benchmark_of_memory_measures_padded_rows_as_its_cases_are_made(tmp_path: Path) -> None:
    import memory

    tiny = memory.Shape(64, 1, 512)
    spec = memory.prepare(tmp_path, memory.Case("sft", tiny, False, False, 2, 64))
    assert (spec.compute.padding_free, spec.data.group_by_length, spec.compute.attention_mask) == (
        False,
        False,
        "always",
    )
