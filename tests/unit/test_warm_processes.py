"""Which tasks start warm, when a warm process is replaced, and what changes the digest of the installed code."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch import warm_processes
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.installed import digest, searched
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.torchrun import training_environment
from llama_stack_provider_trl.launch.warm_processes import IDLE, RETRY, WarmProcesses
from llama_stack_provider_trl.recipes import imports, train
from llama_stack_provider_trl.specs.job import AttemptSpec, LoraSpec, QatSpec
from llama_stack_provider_trl.specs.work import EnsembleMember, EvaluateSpec
from llama_stack_provider_trl.system import fork
from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.start import worker_settings
from tests.fakes import FakeClock, job_spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="every task starts cold there")
PYTHON, CWD = "/venv/bin/python", Path("/run")


@dataclass
class FakeProcess:
    """A warm process that the test controls."""

    python: str
    environ: Mapping[str, str]
    is_ready: bool = True
    ends: str = ""
    outdated: str = ""
    other_interpreter: str = ""
    exit_code: int | None = 0
    closed: bool = False
    started: list[Mapping[str, str]] = field(default_factory=list)

    def ended(self) -> str:
        return self.ends

    def problem(self) -> str:
        return self.ends or self.outdated or self.other_interpreter

    def start(self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path, output: int) -> int | None:
        self.started.append(environ)
        return self.exit_code

    def close(self) -> str:
        self.closed = True
        return "its last line"


class Warm(WarmProcesses):
    """WarmProcesses with fake processes, in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[FakeProcess] = []
        self.clock = FakeClock(1000.0)
        super().__init__(self._fake, self.clock)  # type: ignore[arg-type]

    def _fake(self, python: str, environ: Mapping[str, str]) -> FakeProcess:
        self.made.append(FakeProcess(python, environ))
        return self.made[-1]

    def run(self, environ: Mapping[str, str] | None = None, python: str = PYTHON) -> bool:
        """Whether a task was started warm."""
        return self.start(python, ["-m", "module"], environ or {}, CWD, 1) is not None


def test_a_task_starts_cold_until_the_imports_are_done() -> None:
    warm = Warm()
    warm.prepare(PYTHON, {})
    warm.made[0].is_ready = False
    assert not warm.run()
    warm.made[0].is_ready = True
    assert warm.run()
    assert len(warm.made) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("OMP_NUM_THREADS", "4,2"), ("MKL_NUM_THREADS", "2"), ("KMP_AFFINITY", "compact"), ("HF_HOME", "/elsewhere")),
        *(("MALLOC_ARENA_MAX", "1"), ("CUDA_VISIBLE_DEVICES", "0"), ("TOKENIZERS_PARALLELISM", "false")),
        *(("PYTHONPATH", "/elsewhere"), ("LD_LIBRARY_PATH", "/elsewhere"), ("TORCH_LOGS", "all")),
    ],
)
def test_a_variable_that_is_read_at_the_import_takes_another_process(name: str, value: str) -> None:
    warm = Warm()
    assert warm.run()
    warm.run({name: value})
    assert [dict(process.environ) for process in warm.made] == [{}, {name: value}]


def test_variables_that_are_read_later_share_a_process() -> None:
    warm = Warm()
    ranks = TaskSpec("job-1-1", Path("/data/jobs/job/attempts/1"), ("cpu",), ranks=2, master_port=29500)
    one = TaskSpec("job-2-1", Path("/data/jobs/job-2/attempts/1"), ("cpu",))
    for task in (ranks, one, TaskSpec("", Path("/"), ())):
        assert warm.run(training_environment(task, {"PATH": "/bin"}))
    (process,) = warm.made
    assert "TRL_TASK_ID" not in process.environ
    assert [environ["TRL_TASK_ID"] for environ in process.started] == ["job-1-1", "job-2-1", ""]


def test_another_interpreter_and_other_limits_take_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Warm()
    assert warm.run()
    assert warm.run(python="/other/bin/python")
    other = os.getpriority(os.PRIO_PROCESS, 0) + 1
    monkeypatch.setattr(os, "getpriority", lambda *_: other)
    assert warm.run()
    assert [process.python for process in warm.made] == [PYTHON, "/other/bin/python", PYTHON]


def test_the_least_recently_used_process_makes_way_for_a_third_one() -> None:
    warm = Warm()
    for home in ("a", "b", "a", "c"):
        warm.run({"HF_HOME": home})
    assert [(process.environ["HF_HOME"], process.closed) for process in warm.made] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]


def test_a_second_process_that_is_not_used_is_ended() -> None:
    warm = Warm()
    warm.run({"HF_HOME": "a"})
    warm.run()
    warm.clock.advance(IDLE + 1)
    warm.replace_ended()
    assert [process.closed for process in warm.made] == [True, False]


@pytest.mark.parametrize("problem", ["ends", "outdated"])
def test_a_process_that_ended_or_is_outdated_is_replaced(problem: str) -> None:
    warm = Warm()
    warm.run()
    setattr(warm.made[0], problem, "reason")
    warm.run()
    assert warm.made[0].closed
    assert len(warm.made[0].started) == 1
    assert len(warm.made) == 2


def test_one_that_ended_is_replaced_before_the_next_task() -> None:
    warm = Warm()
    warm.run()
    warm.replace_ended()
    warm.made[0].ends = "it ended with -9"
    warm.replace_ended()
    assert [process.closed for process in warm.made] == [True, False]
    assert warm.run()


@pytest.mark.parametrize(("field_name", "value"), [("is_ready", False), ("other_interpreter", "/usr/bin/python3")])
def test_an_interpreter_that_cannot_be_warm_is_tried_again_a_minute_later(field_name: str, value: object) -> None:
    warm = Warm()
    warm.prepare(PYTHON, {})
    setattr(warm.made[0], field_name, value)
    warm.made[0].ends = "it ended with 1"
    assert not warm.run()
    assert not warm.run()
    assert len(warm.made) == 1
    warm.clock.advance(RETRY + 1)
    assert warm.run()


def test_no_process_is_started_after_the_end_of_the_launcher() -> None:
    warm = Warm()
    warm.run()
    warm.close()
    assert warm.made[0].closed
    assert not warm.run()
    assert len(warm.made) == 1


def test_an_environment_that_does_not_fit_into_the_process_is_started_cold() -> None:
    warm = Warm()
    assert not warm.run({"LANG": "x" * fork.ROOM_BYTES})


def test_elsewhere_than_on_linux_every_task_starts_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    warm = Warm()
    assert not warm.run()
    assert not warm.made


def test_tasks_on_gpus_start_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = Warm()
    cold: list[Sequence[str]] = []

    class Started:
        def __init__(self, argv: Sequence[str], **_: object) -> None:
            cold.append(argv)

        def wait(self, timeout: float) -> int:
            return 0

    monkeypatch.setattr("llama_stack_provider_trl.launch.local.subprocess.Popen", Started)
    launcher = LocalLauncher({}, warm=warm)
    for name, devices in (("cpu", ("cpu",)), ("gpu", ("cuda:0",)), ("preflight", ())):
        (tmp_path / name).mkdir()
        launcher.start(TaskSpec(name, tmp_path / name, devices))
    (process,) = warm.made
    assert [environ["TRL_TASK_ID"] for environ in process.started] == ["cpu", "preflight"]
    assert [argv[-1] for argv in cold] == [str(tmp_path / "gpu" / "task.json")]


def test_a_runner_that_the_warm_process_could_not_start_is_started_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = Warm()
    monkeypatch.setattr(warm_processes, "ANSWER_TIME", 0.0)
    warm.prepare(sys.executable, training_environment(TaskSpec("", Path("/"), ()), {}))
    for exit_code in (None, 1):
        warm.made[0].exit_code = exit_code
        cold: list[object] = []
        monkeypatch.setattr(
            "llama_stack_provider_trl.launch.local.subprocess.Popen",
            lambda argv, cold=cold, **_: cold.append(argv) or _Waited(),
        )
        LocalLauncher({}, warm=warm).start(TaskSpec("a", tmp_path, ()))
        assert len(cold) == 1


class _Waited:
    def wait(self, timeout: float) -> int:
        return 0


def test_the_digest_changes_with_what_is_installed_and_with_our_modules(tmp_path: Path) -> None:
    site, own = tmp_path / "site-packages", tmp_path / "own"
    for directory in (site / "torch-2.13.0.dist-info", own / "__pycache__"):
        directory.mkdir(parents=True)
    (own / "module.py").write_text("1")
    paths = searched([str(site), "", str(tmp_path / "missing.zip")])
    assert str(site) in paths
    assert sys.executable in paths
    seen = [digest(paths, own)]
    (own / "__pycache__" / "module.pyc").write_text("bytecode")
    (site / "unrelated.log").write_text("a log")
    assert digest(paths, own) == seen[0]
    (site / "torch-2.13.0.dist-info").rename(site / "torch-2.13.1.dist-info")
    seen.append(digest(paths, own))
    (own / "module.py").write_text("12")
    seen.append(digest(paths, own))
    (own / "new.py").write_text("")
    seen.append(digest(paths, own))
    assert len(set(seen)) == 4


def test_a_fork_becomes_programs_of_its_own_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fork.can_become([sys.executable, "-m", "module"])  # it has imported nothing
    prepared = fork.ForkableProcess(sys.executable, (0, 0), (0, 0), {}, None, 0, 5 << 20)
    monkeypatch.setattr(fork, "_prepared", prepared)
    assert fork.can_become((sys.executable, "-m", "module"))
    assert fork.can_become([sys.executable, "-u", "-m", "module", "spec.json"])
    assert not fork.can_become(["/other/bin/python", "-m", "module"])
    assert not fork.can_become([sys.executable, "-c", "pass"])
    assert fork.imported_memory() == 5 << 20


QLORA = LoraSpec(target_modules=("q_proj",), rank=1, alpha=1, quantize_base=True)
QAT = QatSpec(quantizer_name="Int8DynActInt4WeightQATQuantizer", group_size=32)


MEMBERS = (EnsembleMember(model="a", weight=0.5), EnsembleMember(model="b", weight=0.5, lora=QLORA))


@pytest.mark.parametrize("changes", [{"lora": QLORA}, {"qat": QAT}, {"work": EvaluateSpec(members=MEMBERS)}])
def test_a_job_that_quantizes_leaves_the_fork_for_a_new_interpreter(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = AttemptSpec(job=job_spec(), attempt=1, run_dir=tmp_path)
    quantizing = plain.model_copy(update={"job": plain.job.changed(**changes)})
    assert not train.needs_cold_start(quantizing)
    monkeypatch.setattr(fork, "_prepared", fork.ForkableProcess(sys.executable, (0, 0), (0, 0), {}, None, 0, 0))
    assert train.needs_cold_start(quantizing)
    assert not train.needs_cold_start(plain)


def test_an_agent_has_a_switch_on_its_command_line_and_in_its_environment() -> None:
    environ = {"TRL_SERVICE_TOKEN": "t", "TRL_NODE_DEVICE": "cpu", "TRL_NODE_ADDRESS": "10.0.0.9"}

    def switched(given: str | None = None, **more: str) -> bool:
        return worker_settings("http://10.0.0.1:8322", {**environ, **more}, warm_start=given).warm_start

    assert switched()
    assert not switched(TRL_NODE_WARM_START="off")
    assert switched("on", TRL_NODE_WARM_START="off")
    with pytest.raises(NodeError, match=r"warm_start='no': use on or off \(--warm-start, TRL_NODE_WARM_START\)"):
        switched(TRL_NODE_WARM_START="no")


def test_imports_run_without_the_garbage_collector_and_read_only_the_distributions_that_they_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, list[str]]] = []

    def read() -> dict[str, list[str]]:
        calls.append({"yaml": ["PyYAML"], "pytest": ["other"]})
        return calls[-1]

    monkeypatch.setattr(importlib.metadata, "packages_distributions", read)
    try:
        with imports.quick_imports():
            assert not gc.isenabled()
            installed = importlib.metadata.packages_distributions()
            assert installed["pytest"] == ["pytest"]
            assert not calls
            assert installed["yaml"] == installed.get("yaml") == ["PyYAML"]
            assert installed.get("never_installed", ["default"]) == ["default"]
            assert len(calls) == 1
            with pytest.raises(KeyError, match="never_installed"):
                installed["never_installed"]
    finally:
        gc.unfreeze()
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is read
