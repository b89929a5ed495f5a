"""`trl-remote nodes commands --torchrun`: the job that it writes, its lines, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.launch import interface
from llama_stack_provider_trl.specs.job import AttemptSpec
from llama_stack_provider_trl_remote.cli.main import main

Call = Callable[..., tuple[int, str, str]]
"""Options -> exit status, standard output and standard error."""
ROW = {"prompt": "What is 1 plus 1?", "completion": "2"}


def request(**changes: Any) -> dict[str, Any]:
    data = {"dataset_id": "rows", "batch_size": 2, **changes.pop("data", {})}
    training = {"n_epochs": 1, "dtype": "fp32", "data_config": data}
    return {"model": "org/name", "training_config": training, "provider_options": {"device": "cpu"}, **changes}


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 4)

    def run(*words: str, given: Any = None) -> tuple[int, str, str]:
        (tmp_path / "job.json").write_text(json.dumps(given or request()))
        files = ["--data", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "d")]
        code = main(["nodes", "commands", "--torchrun", str(tmp_path / "job.json"), *files, *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_job_is_written_with_its_rows_and_each_machine_gets_a_line(call: Call, tmp_path: Path) -> None:
    code, printed, _ = call("--address", "10.0.0.1", "--address", "10.0.0.2", "--sharding", "NO_SHARD", "--json")
    answer = json.loads(printed)
    assert code == 0
    attempt = AttemptSpec.model_validate_json((tmp_path / "d" / "run" / "spec.json").read_text())
    assert (attempt.world_size, attempt.job.device, attempt.job.nodes) == (2, "cpu", 2)
    assert attempt.job.sharding is not None
    assert attempt.job.sharding.strategy == "NO_SHARD"
    assert attempt.job.data.dataset.path.is_relative_to(tmp_path / "d")
    assert attempt.job.data.dataset.path.read_text().count("\n") == 4
    assert answer["checkpoint_dir"] == str(attempt.job.checkpoint_dir) == str(tmp_path / "d" / "checkpoints" / "job")
    first, second = (row["command"] for row in answer["commands"])
    assert first.startswith(
        "i=$(python -m llama_stack_provider_trl.launch.interface 10.0.0.1) && CUDA_VISIBLE_DEVICES="
    )
    for rank, line in enumerate((first, second)):
        assert f"--nnodes=2 --node-rank={rank} --nproc-per-node=1 " in line
        assert "--master-addr=10.0.0.1 --master-port=29500" in line
        assert f"--local-addr=10.0.0.{rank + 1} " in line
        assert "GLOO_SOCKET_IFNAME=$i" in line
        assert line.endswith(f"-m llama_stack_provider_trl.recipes.train {tmp_path}/d/run/spec.json")


@pytest.mark.parametrize(("words", "ranks", "threads"), [([], 1, 6), ([], 4, 1), (["--threads", "3"], 2, 3)])
def test_all_ranks_have_as_many_threads_whatever_machine_they_are_on(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: list[str], ranks: int, threads: int
) -> None:
    monkeypatch.setattr("llama_stack_provider_trl_remote.cli.torchrun_lines.usable_cpus", lambda: 6)
    given = request(provider_options={"device": "cpu", "nproc_per_node": ranks})
    code, printed, _ = call("--address", "10.0.0.1", "--address", "10.0.0.2", *words, given=given)
    assert code == 0
    assert printed.count(f" OMP_NUM_THREADS={threads} ") == 2
    assert f"# Each rank has {threads} threads (OMP_NUM_THREADS)" in printed


def test_ranks_on_gpus_get_an_interface_for_nccl_and_see_all_gpus(call: Call) -> None:
    given = request(provider_options={"device": "cuda", "nproc_per_node": 4})
    code, printed, _ = call("--address", "10.0.0.1", "--port", "3000", "--python", "/o p/python", given=given)
    assert code == 0
    line = next(line for line in printed.splitlines() if line.startswith("i="))
    assert "'/o p/python' -m llama_stack_provider_trl.recipes.distributed.torchrun --nnodes=1" in line
    assert "NCCL_SOCKET_IFNAME==$i" in line
    assert "--nproc-per-node=4" in line
    assert "CUDA_VISIBLE_DEVICES" not in line
    assert "--master-port=3000" in line


def test_one_rank_is_one_process(call: Call, tmp_path: Path) -> None:
    code, printed, _ = call()
    assert code == 0
    spec = tmp_path / "d" / "run" / "spec.json"
    line = f"CUDA_VISIBLE_DEVICES= python -m llama_stack_provider_trl.recipes.train {spec}"
    assert line in printed.splitlines()
    assert "must be at this path on every machine" not in printed


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        (["--address", "head"], request(), "expected a literal address"),
        (["--address", "0.0.0.0"], request(), "expected the address of one machine"),
        (["--address", "10.0.0.1", "--address", "127.0.0.1"], request(), "other machines cannot reach this address"),
        (["--address", "10.0.0.1", "--address", "10.0.0.1"], request(), "name each machine once"),
        (["--discover"], request(), "with --torchrun the machines are named by --address"),
        (["--nodes", "2"], request(), "with --torchrun the machines are named by --address"),
        (["--validation", "more.jsonl"], request(), "the request names no validation_dataset_id"),
        ([], request(data={"validation_dataset_id": "others"}), "name the rows of validation_dataset_id 'others'"),
        ([], request(provider_options={"retries": 2}), r"provider_options.retries=2 .*only a service acts on it"),
        ([], request(provider_options={"resources": {"nodes": 2}}), "only a service acts on it"),
        ([], request(provider_options={"keep_last": 1}), "only a service acts on it"),
        ([], request(provider_options={"device": "cuda:1"}), "provider_options.device='cuda:1' .*each rank takes"),
        ([], request(provider_options={"device": "auto"}), "provider_options.device='auto'"),
        ([], request(provider_options={"speed": 2}), "there is no such option"),
        ([], request(training_config={"n_epochs": "x"}), "training_config.n_epochs='x'"),
        ([], request(data={"batch_size": 0}), "batch_size"),
        ([], request(logger_config={"tensorboard": True}), "logger_config"),
    ],
)
def test_what_cannot_be_a_job_without_a_service_is_one_sentence(
    call: Call, tmp_path: Path, words: list[str], given: Any, message: str
) -> None:
    code, printed, written = call(*words, given=given)
    assert (code, printed, written.count("\n")) == (1, "", 1), written
    assert re.search(message, written), written
    assert not (tmp_path / "d" / "run").exists()


def test_a_directory_with_content_and_options_without_torchrun_are_refused(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").touch()
    code, _, written = call()
    assert code == 1
    assert "it is there, and not empty: name a new directory" in written
    assert main(["nodes", "commands", "--data", "rows.jsonl", "--url", "http://10.0.0.1:8322"]) == 1
    assert "it belongs to --torchrun" in capsys.readouterr().err
    assert main(["nodes", "commands", "--torchrun", "job.json"]) == 1
    assert "--data is missing: --torchrun needs it" in capsys.readouterr().err


@pytest.mark.parametrize(("address", "code"), [("127.0.0.1", 0), ("203.0.113.9", 1), ("head", 1)])
def test_the_interface_of_an_address_is_printed(capsys: pytest.CaptureFixture[str], address: str, code: int) -> None:
    assert interface.main([address]) == code
    printed = capsys.readouterr()
    assert (printed.err == "", bool(printed.out.strip())) == (code == 0, code == 0)
    assert printed.err.count("\n") <= 1
