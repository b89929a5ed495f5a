"""Two ranks on one GPU, which exchange by gloo: before 2.30 NCCL refuses that. Skipped where there is no NVIDIA GPU.

`TRL_SHARED_NCCL` names a libnccl.so.2 of 2.30 or later, by which they exchange then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_checks import recovery, sharding
from gpu_checks.setting import GLOO, Setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch finds no CUDA device"),
]


@pytest.mark.parametrize("check", [sharding.hybrid, recovery.hang], ids=["they train the same", "one is stopped"])
def test_two_ranks_share_a_gpu(check, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    setting = Setting(tmp_path / "jobs", tmp_path / "models", False, os.environ.get("TRL_SHARED_NCCL") or GLOO)
    setting.folder.mkdir()
    found = check(setting)
    assert found.passed, found.summary
