"""Loader workers: the same batches, and processes that end with their rank."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_stack_provider_trl.launch.runner import _more_than
from llama_stack_provider_trl.recipes.memory.estimate import estimate
from llama_stack_provider_trl.recipes.memory.trace import Batch
from llama_stack_provider_trl.recipes.trainer.arguments import _trainer_arguments
from llama_stack_provider_trl.recipes.trainer.loader import num_workers
from llama_stack_provider_trl.specs.events import Prepared, Progress
from llama_stack_provider_trl.specs.job import AttemptSpec, JobSpec, ShardingSpec
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import descendants, identify, memory_of
from tests.ranks import Ranks
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import LORA, SFT_ROWS, job_spec, of_kind
from tests.zygote import ForkLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def spec_of(root: Path, **changes: Any) -> JobSpec:
    """A job whose losses show random numbers and the order of rows."""
    lora = LORA.model_copy(update={"dropout": 0.3})
    return job_spec(root, tiny_model(), **{"lora": lora, "batch_size": 1, "n_epochs": 2, "save_steps": 4, **changes})


@pytest.mark.parametrize(
    "several", [{"ranks": 2, "sharding": ShardingSpec(), "gradient_accumulation_steps": 2}, *in_full({})]
)
def test_batches_that_workers_prepare_are_the_same_also_after_a_resume(
    ranks: Ranks, tmp_path: Path, several: dict[str, Any]
) -> None:
    def trained(name: str, spec: JobSpec, resume_from: Path | None = None) -> tuple[list[dict[str, float]], str]:
        codes, events = ranks.run(tmp_path / f"run-{name}", spec, resume_from)
        assert codes == [0] * spec.ranks
        assert of_kind(events, Prepared)[0].effective["dataloader_num_workers"] == spec.data.dataloader_num_workers
        numbers = [
            {name: value for name, value in event.metrics.items() if name != "tokens_per_second"}
            for event in of_kind(events, Progress)
        ]
        final = spec.checkpoint_dir / "final" / "adapter_model.safetensors"
        return numbers, hashlib.sha256(final.read_bytes()).hexdigest()

    rows = {"rows": SFT_ROWS[:7]} if not several else {}
    expected, digest = trained("alone", spec_of(tmp_path / "alone", **several, **rows))
    spec = spec_of(tmp_path / "workers", dataloader_num_workers=2, **several, **rows)
    assert trained("whole", spec) == (expected, digest)
    (spec.checkpoint_dir / "final").rename(tmp_path / "first-final")
    # In the middle of an epoch: one process, of the second one.
    step = 4 if several else 8
    resumed = trained("resumed", spec, spec.checkpoint_dir / f"checkpoint-{step}")
    assert resumed == (expected[step:], digest)


def until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_end_with_their_rank_and_are_no_ranks(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rows=SFT_ROWS * 40, n_epochs=50, save_steps=None, dataloader_num_workers=2)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    RunDir(run_dir).spec.write_text(AttemptSpec(job=spec, attempt=1, run_dir=run_dir).model_dump_json())
    task: Any = SimpleNamespace(task_id="job-1", run_dir=run_dir)
    launcher = ForkLauncher()
    try:
        launcher.start(task)
        rank = launcher.processes["job-1"]
        assert rank is not None
        until(lambda: len(descendants(rank.pid)) == 2, 60)
        workers = descendants(rank.pid)
        assert [file.name for file in RunDir(run_dir).stacks.iterdir()] == [str(rank.pid)]  # what has a file is a rank
        together = [rank, *workers]
        counted, exact = memory_of(together), memory_of(together, exact=True)
        assert exact < 0.7 * counted  # most pages are the rank's
        assert _more_than((exact + counted) // 2, together) == 0
        assert _more_than(exact // 2, together) > exact // 2
        os.kill(rank.pid, signal.SIGKILL)
        until(lambda: all(identify(worker.pid) != worker for worker in workers), 1.5)
    finally:
        launcher.close()


def test_gpus_get_two_workers_and_copies_that_do_not_wait(tmp_path: Path) -> None:
    spec = job_spec(tmp_path, tiny_model())
    new = spec.changed(dataloader_num_workers=None)
    assert [num_workers(new, device) for device in ("cuda", "cpu", "mps")] == [2, 0, 0]
    sharded = new.model_copy(update={"ranks": 2, "sharding": ShardingSpec()})
    on_gpu, on_cpu = (_trainer_arguments(sharded, torch.device(device)) for device in ("cuda", "cpu"))
    assert (on_gpu["dataloader_num_workers"], on_gpu["dataloader_pin_memory"]) == (2, True)
    assert on_gpu["accelerator_config"]["non_blocking"] is True
    assert on_gpu["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}
    assert (on_cpu["dataloader_num_workers"], on_cpu["dataloader_pin_memory"]) == (0, False)
    assert on_cpu["accelerator_config"]["non_blocking"] is False


def test_the_estimate_counts_workers_in_cpu_memory(tmp_path: Path) -> None:
    spec, batch = job_spec(tmp_path, tiny_model(), ranks=2, sharding=ShardingSpec()), Batch(1, 16)
    with_workers = spec.changed(dataloader_num_workers=3)
    on_gpu, on_cpu = (
        (estimate(spec, batch, device), estimate(with_workers, batch, device)) for device in ("cuda", "cpu")
    )
    assert on_gpu[1].machine - on_gpu[0].machine == 2 * 3 * (128 << 20)
    assert on_gpu[1].total == on_gpu[0].total
    used = on_cpu[0].total - on_cpu[0].overhead - on_cpu[0].loading
    assert on_cpu[1].total - on_cpu[0].total == used + 3 * (
        128 << 20
    )  # pages that their rank changes stay as they were
