"""A package that adds training methods is built, installed beside a running service, and trained by."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_stack_provider_trl.launch.warm import CHANNEL
from tests.contract.payloads import PAIRS
from tests.contract.service import TrainingService, refusal, running
from tests.contract.stack import DPO, Json, poll
from tests.plugins import EXAMPLE, install
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
LOSSES = ("loss", "eval_loss")
REFUSED_IMPORT = "it imports torch, which only its trainer's module may"


class ServiceWithPackages(TrainingService):
    """With a directory of packages on its path, and a warm process of its own."""

    @property
    def site(self) -> Path:
        return self.root / "site"

    def spawn(self, *arguments: Any, **environ: str) -> subprocess.Popen[bytes]:
        return super().spawn(*arguments, PYTHONPATH=str(self.site), **environ)


def warm_process(service: TrainingService) -> int | None:
    """The pid of the service's warm process once that is ready: its channel is no longer asynchronous, and it waits."""
    for process in psutil.Process(service.pid).children():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            channel = [part.removeprefix(CHANNEL) for part in process.cmdline() if part.startswith(CHANNEL)]
            if channel and "libtorch" in Path(f"/proc/{process.pid}/maps").read_text():
                flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/{process.pid}/fdinfo/{channel[0]}").read_text())
                is_imported = flags is not None and not int(flags[1], 8) & os.O_ASYNC
                if is_imported and process.status() == psutil.STATUS_SLEEPING:
                    return process.pid
    return None


def install_example(root: Path, site: Path) -> None:
    """As a user does, without a network. The build writes into its directory."""
    shutil.copytree(EXAMPLE, root / "source")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(root / "source")], check=True, cwd=root)


def request(job_uuid: str, method: Json, dataset_id: str = "pairs", batch_size: int = 4, **options: Any) -> Json:
    data = {"dataset_id": dataset_id, "batch_size": batch_size, "shuffle": True, "validation_dataset_id": "pairs"}
    return {
        "job_uuid": job_uuid,
        "model": str(tiny_model()),
        "algorithm_config": method,
        "training_config": {"n_epochs": 2, "learning_rate": 5e-3, "data_config": data},
        "provider_options": {"preflight": "off", **options},
    }


def points(service: TrainingService, job_uuid: str) -> list[tuple[int, float]]:
    found = service.get(f"/post-training/jobs/{job_uuid}/metrics").json()["data"]
    return [(point["step"], value) for point in found for name, value in point["metrics"].items() if name in LOSSES]


def test_a_package_is_installed_beside_a_running_service_and_trains_on_one_and_two_ranks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    service = ServiceWithPackages(tmp_path, warm_start=True)
    service.site.mkdir()
    install(service.site, "heavy", {"heavy": "heavy_method:method"}, {"heavy_method": "import torch"})
    with running(service):
        unusable = f"method 'heavy' of heavy 1.0 cannot be imported: ImportError: {REFUSED_IMPORT}"
        poll(lambda: unusable in service.log.read_text(), "the package that cannot be used is in the log", timeout=60)
        service.register("pairs", PAIRS)
        same = {"prompt": "a", "chosen": "b", "rejected": "b"}
        service.register("same", [*PAIRS[:2], same])
        robust = {"type": "robust", "beta": 1.0}
        assert "installed packages add heavy" in refusal(service.post(DPO, request("early", robust)))
        install_example(tmp_path, service.site)
        assert "Robust preferences has no such field" in refusal(
            service.post(DPO, request("bad", {"type": "robust", "gamma": 1}))
        )
        assert "algorithm_config.flip_rate=0.7" in refusal(
            service.post(DPO, request("bad", {"type": "robust", "flip_rate": 0.7}))
        )
        assert "dataset 'same', row 2: chosen and rejected are the same" in refusal(
            service.post(DPO, request("bad", robust, "same"))
        )
        assert REFUSED_IMPORT in refusal(service.post(DPO, request("bad", {"type": "heavy"})))
        if sys.platform == "linux":  # elsewhere every task starts cold
            poll(lambda: warm_process(service), "the warm process is ready", timeout=60)
        service.arm("step-1", "hold")
        service.submit(DPO, request("one", robust))
        service.submit(DPO, request("two", robust, batch_size=2, nproc_per_node=2))
        listed = {job["job_uuid"]: job["algorithm"] for job in service.get("/post-training/queue").json()["data"]}
        assert listed == {"one": "robust", "two": "robust"}
        service.wait_taken("step-1", 60)
        if sys.platform == "linux":  # since a package was installed the first job has started cold, and another one
            poll(lambda: warm_process(service), "the warm process is ready", timeout=60)
        service.go("step-1")
        for job_uuid in ("one", "two"):
            status = service.wait(job_uuid, "completed")
            effective = status["resources_allocated"]["effective_config"]
            assert effective["method"] == {
                "algorithm": "custom_pairs",
                "type": "robust",
                "package": "custom-trainer-example",
                "version": "1.0.0",
                "parameters": {"beta": 1.0, "flip_rate": 0.1},
            }
            assert effective["recipe"]["effective"]["method"]["version"] == "1.0.0"
            model = AutoModelForCausalLM.from_pretrained(status["checkpoints"][-1]["path"])
            assert model.config.model_type == "llama"
        one, two = points(service, "one"), points(service, "two")
        assert len(one) > 4
        for (step, loss), (other_step, other) in zip(one, two, strict=True):
            assert (step, loss) == (other_step, pytest.approx(other, rel=1e-4))
        maps = Path(f"/proc/{service.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text()
        # A change of the package is trained by the next job, also where processes are forked from a warm one.
        trainers = service.site / "custom_trainer_example" / "trainers.py"
        trainers.write_text(trainers.read_text().replace("losses / (1 - 2 * flipped)", "0 * losses + 7.0"))
        service.submit(DPO, request("changed", robust))
        service.wait("changed", "completed")
        assert {loss for _, loss in points(service, "changed")} == {7.0}
        shutil.rmtree(service.site / "custom_trainer_example-1.0.0.dist-info")
        assert "installed packages add heavy" in refusal(service.post(DPO, request("late", robust)))
