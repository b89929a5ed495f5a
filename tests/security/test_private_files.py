"""What other users of the machine can read, and which directories a client of the service can take."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running
from tests.contract.stack import SFT

pytestmark = pytest.mark.contract
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """On a data directory that an operator has made readable for all users."""
    root = tmp_path_factory.mktemp("service")
    (root / "exports").mkdir()
    service = TrainingService(root, checkpoint_roots=[str(root / "exports")])
    service.data_dir.mkdir()
    service.data_dir.chmod(0o755)
    (service.data_dir / "llama-stack").mkdir()
    with running(service):
        service.register("questions", QUESTIONS)
        yield service


def readable(root: Path) -> set[str]:
    """Names of files below a directory that other users could read, were they let in."""
    found = (path for path in root.rglob("*") if path.is_file() and stat.S_IMODE(path.stat().st_mode) & OTHERS)
    return {str(path.relative_to(root)) for path in found}


def test_nothing_of_a_job_can_be_read_by_other_users(service: TrainingService) -> None:
    job = service.submit(SFT, sft("private", "questions"))
    service.wait(job, "completed")
    assert stat.S_IMODE(service.data_dir.stat().st_mode) & OTHERS == 0
    assert readable(service.data_dir) <= {"checkpoints/.private.owner"}  # a record names its data directory to all
    assert (service.data_dir / "checkpoints" / "private" / "final" / "config.json").exists()


def test_what_is_exported_outside_the_data_directory_has_the_users_own_modes(service: TrainingService) -> None:
    body = sft("shown", "questions", checkpoint_dir=str(service.root / "exports"))
    service.wait(service.submit(SFT, body), "completed")
    final = service.root / "exports" / "shown" / "final"
    os.umask(umask := os.umask(0o077))
    assert stat.S_IMODE((final / "config.json").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(final.stat().st_mode) == 0o777 & ~umask


def test_a_client_cannot_have_a_foreign_directory_renamed_or_removed(service: TrainingService) -> None:
    foreign = service.root / "exports" / "production"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"weights")
    body = sft("production", "questions", checkpoint_dir=str(service.root / "exports"))
    assert "was not written by a job of this data directory" in refusal(service.post(SFT, body), 409)
    assert service.get(f"{JOBS}/production/status").status_code == 404
    assert (foreign / "model.safetensors").read_bytes() == b"weights"
    assert not list(foreign.parent.glob("production.*"))
