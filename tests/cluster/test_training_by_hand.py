"""`trl-remote nodes commands --torchrun`: its lines train on two machines that share no disk, without any service."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from llama_stack_provider_trl.specs.events import Finished, iter_events
from llama_stack_provider_trl_remote.cli.main import main
from tests.cluster.bed import Bed
from tests.required import IN_FULL
from tests.tiny import REPOSITORY, tiny_model
from tests.training import SFT_ROWS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@IN_FULL
def test_the_lines_train_on_two_machines_to_a_checkpoint(
    bed: Bed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {
        "model": str(tiny_model()),
        "training_config": {
            "n_epochs": 1,
            "max_steps_per_epoch": 3,
            "dtype": "fp32",
            "data_config": {"dataset_id": "rows", "batch_size": 2, "shuffle": True},
        },
        "provider_options": {"save_steps": 2},
    }
    (tmp_path / "job.json").write_text(json.dumps(request))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in SFT_ROWS))
    machines = [bed.machine("a"), bed.machine("b")]
    directory = tmp_path / "by hand"
    words = ["nodes", "commands", "--torchrun", str(tmp_path / "job.json"), "--data", str(tmp_path / "rows.jsonl")]
    places = [word for machine in machines for word in ("--address", machine.address)]
    given = ["--directory", str(directory), "--python", sys.executable, "--json"]
    assert main([*words, *places, *given]) == 0
    answer = json.loads(capsys.readouterr().out)

    for machine, row in zip(machines, answer["commands"], strict=True):
        own = machine.root / "copy"
        shutil.copytree(directory, own)
        line = f'mount --bind "{own}" "{directory}" && cd {REPOSITORY} && {row["command"]}'
        machine.run("sh", "-c", line)
    processes = [machine.process for machine in machines if machine.process is not None]
    bed.wait(lambda: all(process.poll() is not None for process in processes), "both machines end", 300)
    for process, machine in zip(processes, machines, strict=True):
        assert process.returncode == 0, machine.log_tail()

    first, second = (machine.root / "copy" for machine in machines)
    assert isinstance(list(iter_events(first / "run" / "events.jsonl"))[-1], Finished)
    assert {"checkpoint-2", "final"} <= {path.name for path in (first / "checkpoints" / "job").iterdir()}
    with safe_open(first / "checkpoints" / "job" / "final" / "model.safetensors", "pt") as weights:
        assert list(weights.keys())
    assert not list((second / "checkpoints").rglob("*.safetensors")), "checkpoints are on rank 0's machine"
    assert answer["checkpoint_dir"] == str(directory / "checkpoints" / "job")
