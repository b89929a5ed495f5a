"""What a training may see: computed from its specification, its environment and the hidden directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION, Isolation, spec_paths
from llama_stack_provider_trl.launch.namespaces import View
from llama_stack_provider_trl.specs.job import AttemptSpec, DpoSpec, ReferenceSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec, OrpoSpec
from llama_stack_provider_trl.specs.model_source import ModelName, ModelSource
from llama_stack_provider_trl.specs.preflight import PreflightSpec
from llama_stack_provider_trl.specs.rewards import RewardModel, RewardSource
from llama_stack_provider_trl.specs.serving import ServeSpec
from llama_stack_provider_trl.specs.work import GenerateSpec
from llama_stack_provider_trl.system.files import RunDir
from tests.fakes import job_spec


def generated_by(python: Path) -> GenerateSpec:
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 1}
    return GenerateSpec(output_dataset_id="d", engine="vllm", vllm_python=python, **sampling)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "jobs" / "mine").mkdir(parents=True)
    return tmp_path / "data"


def view(data: Path, job: dict[str, Any], environ: dict[str, str] | None = None, **attempt: Any) -> View:
    """The view of a task; `job`, `attempt`: fields of its specification."""
    task = TaskSpec("mine-1", data / "jobs" / "mine", ("cpu",), python="/usr/bin/python3")
    spec = AttemptSpec(job=job_spec("mine", **job), attempt=1, run_dir=task.run_dir, **attempt)
    RunDir(task.run_dir).spec.write_text(spec.model_dump_json())
    found = Isolation("root", "", (data,)).view(task, environ or {})
    assert found is not None
    assert View.from_json(json.loads(json.dumps(found.to_json()))) == found
    return found


def below(data: Path, paths: tuple[str, ...]) -> list[str]:
    return sorted(str(Path(path).relative_to(data)) for path in paths if Path(path).is_relative_to(data))


def test_a_training_without_isolation_has_no_view(data: Path) -> None:
    assert NO_ISOLATION.view(TaskSpec("mine-1", data, ()), {}) is None


def test_below_the_data_directory_only_what_the_specification_names_is_seen(data: Path) -> None:
    for path in ("datasets/rows.jsonl", "datasets/others.jsonl", "checkpoints/first/final/config.json"):
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).write_text("{}")
    for path in ("checkpoints/mine/checkpoint-3", "checkpoints/other"):
        (data / path).mkdir(parents=True)
    job = {
        "model": str(data / "checkpoints/first/final"),
        "checkpoint_dir": str(data / "checkpoints/mine"),
        "dataset": {
            "dataset_id": "rows",
            "path": data / "datasets/rows.jsonl",
            "sha256": "0" * 64,
            "num_rows": 1,
        },
        "token_cache": str(data / "tokens"),
        "method": DpoSpec(reference=ReferenceSpec(cache=data / "reference", source=ModelSource(model="org/name"))),
    }
    found = view(data, job, resume_from=data / "checkpoints/mine/checkpoint-3")
    assert str(data) in found.covers
    assert below(data, found.write) == ["checkpoints/mine", "jobs/mine", "reference", "tokens"]
    # The checkpoint is in a directory that is writable: as a mount of its own it could not be renamed.
    assert below(data, found.read) == ["checkpoints/first/final", "datasets/rows.jsonl"]


def test_links_that_a_training_may_have_left_in_its_checkpoint_open_nothing_to_the_next_one(data: Path) -> None:
    model, cached = data / "checkpoints/first/final", data.with_name("models")
    for directory in (model, cached, data / "jobs/other"):
        directory.mkdir(parents=True)
    (data / "jobs.sqlite3").touch()
    for directory in (model, cached):
        (directory / "config.json").write_text("{}")
        (directory / "database").symlink_to(data / "jobs.sqlite3")
        (directory / "runs").symlink_to(data / "jobs/other")
    for path in (model, cached):
        found = view(data, {"model": str(path)})
        assert not {"jobs.sqlite3", "jobs/other"} & set(below(data, found.read))


def test_a_cache_behind_a_symbolic_link_is_writable(data: Path) -> None:
    home, disk = data.with_name("home"), data.with_name("disk")
    (home / ".cache").mkdir(parents=True)
    disk.mkdir()
    (home / ".cache" / "huggingface").symlink_to(disk)
    assert str(disk) in view(data, {}, {"HOME": str(home)}).write


def test_without_home_the_cache_of_the_user_is_writable(data: Path) -> None:
    assert str(Path("~/.cache").expanduser().resolve()) in view(data, {}).write


def test_a_task_that_serves_sees_its_base_model_and_no_result_of_another_job(data: Path) -> None:
    for path in ("checkpoints/whole/final/config.json", "checkpoints/other/final/config.json"):
        (data / path).parent.mkdir(parents=True)
        (data / path).write_text("{}")
    run_dir, adapters = data / "serving/one/run", data / "serving/one/adapters"
    for directory in (run_dir, adapters):
        directory.mkdir(parents=True)
    source = ModelSource(model=str(data / "checkpoints/whole/final"))
    spec = ServeSpec(source=source, device="cpu", adapters=adapters, idle_seconds=1.0)
    RunDir(run_dir).spec.write_text(spec.model_dump_json())
    found = Isolation("root", "", (data,)).view(TaskSpec("serving-one", run_dir, ("cpu",), serves=True), {})
    assert found is not None
    assert below(data, found.read) == ["checkpoints/whole/final", "serving/one/adapters"]
    assert below(data, found.write) == ["serving/one/run"]


def test_what_keeps_device_locks_in_the_cache_is_covered(data: Path) -> None:
    assert str(Path("~/.cache/llama-stack-trl").expanduser().resolve()) in view(data, {}).covers


def test_a_preflight_writes_tokens_and_neither_creates_nor_sees_the_checkpoint_directory(data: Path) -> None:
    job = {
        "checkpoint_dir": str(data / "checkpoints/mine"),
        "token_cache": str(data / "tokens"),
        "method": DpoSpec(reference=ReferenceSpec(cache=data / "reference")),
    }
    found = view(data, job, preflight=PreflightSpec(device="cpu"))
    assert below(data, found.write) == ["jobs/mine", "tokens"]
    assert not (data / "checkpoints").exists()


@pytest.mark.parametrize(
    ("job", "attempt", "compiled"),
    [
        ({"compile_blocks": "always"}, {"age": 7}, ["jobs/mine/compiled/7"]),
        ({"compile_blocks": "always"}, {"age": 8}, ["jobs/mine/compiled/8"]),
        ({"compile_blocks": "always"}, {"preflight": PreflightSpec(device="cpu")}, []),
        ({"compile_blocks": "always", "method": DpoSpec()}, {"age": 7}, ["jobs/mine/compiled/7"]),
        ({"compile_blocks": "always", "method": OrpoSpec()}, {}, []),
        ({"compile_blocks": "always", "work": generated_by(Path("/usr/bin/python3"))}, {}, []),
        ({"compile_blocks": "auto"}, {}, []),
    ],
)
def test_compiled_code_has_a_directory_that_no_other_job_of_its_name_writes(
    job: dict[str, Any], attempt: dict[str, Any], compiled: list[str], data: Path
) -> None:
    run_dir = data / "jobs" / "mine" / "attempts" / "2"
    spec = AttemptSpec(job=job_spec("mine", **job), attempt=2, run_dir=run_dir, **attempt)
    written = below(data, tuple(map(str, spec_paths(spec, [data]).write)))
    assert [path for path in written if "compiled" in path] == compiled


def test_a_preflight_sees_the_model_whose_sizes_a_reward_model_will_have(data: Path) -> None:
    small = data / "checkpoints/first/final"
    small.mkdir(parents=True)
    (small / "config.json").write_text("{}")
    written = ModelSource(model=str(data / "checkpoints/judge/final"))
    judge = RewardModel(job_uuid="judge", source=written, trained_from=ModelName(model=str(small)))
    method = GrpoSpec(rewards=(RewardSource(name="judge", model=judge),))
    found = view(data, {"method": method}, preflight=PreflightSpec(device="cpu"))
    assert "checkpoints/first/final" in below(data, found.read)


def test_caches_stay_writable_also_where_the_data_directory_is_the_home_directory(data: Path) -> None:
    (data / "hf").mkdir()
    found = view(data, {}, {"HOME": str(data), "HF_HOME": str(data / "hf")})
    assert below(data, found.write) == [".cache", "hf", "jobs/mine"]


def test_device_locks_are_hidden_although_their_directory_is_in_the_environment(data: Path) -> None:
    locks = data.with_name("locks")
    found = view(data, {}, {"TRL_LOCK_DIR": str(locks)})
    assert str(locks) in found.covers
    assert str(locks) not in (*found.read, *found.write)


def test_a_symbolic_link_below_the_data_directory_is_kept_and_its_target_seen(data: Path) -> None:
    disk = data.with_name("disk")
    (disk / "checkpoints").mkdir(parents=True)
    (data / "checkpoints").symlink_to(disk / "checkpoints")
    found = view(data, {"checkpoint_dir": data / "checkpoints/mine"})
    assert str(disk / "checkpoints") in found.covers
    assert str(disk / "checkpoints/mine") in found.write
    assert found.links == ((str(data / "checkpoints"), str(disk / "checkpoints")),)


@pytest.mark.parametrize("is_link", [False, True])
def test_a_job_sees_the_prefix_of_its_other_interpreter_below_a_hidden_directory(data: Path, is_link: bool) -> None:
    """Such as conda's, which has no pyvenv.cfg. A program alone has no prefix."""
    for path in ("conda/bin/python", "conda/lib/python3.12/os.py", "tools/bin/python", "tools/lib/notes"):
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).touch()
    (data / "link").symlink_to(data / "conda/bin/python")
    python = data / ("link" if is_link else "conda/bin/python")
    found = view(data, {"work": generated_by(python)})
    assert "conda" in below(data, found.read)
    found = view(data, {"work": generated_by(data / "tools/bin/python")})
    assert below(data, found.read) == ["tools/bin/python"]
