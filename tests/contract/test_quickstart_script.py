"""The README's first command, as it stands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.programs import smollm2
from tests.required import IN_FULL
from tests.tiny import REPOSITORY, tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1800)]


def run(out: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of scripts/quickstart.sh, and what it printed."""
    ports = {name: str(free_port()) for name in ("LLAMA_STACK_PORT", "TRL_SERVICE_PORT")}
    command = [str(REPOSITORY / "scripts" / "quickstart.sh"), *arguments]
    environ = {**os.environ, **ports, "QUICKSTART_DIR": str(out)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    ) as started:
        try:
            printed = started.communicate()[0]
        except BaseException:
            os.killpg(started.pid, signal.SIGTERM)
            raise
    return started.returncode, printed


@IN_FULL
def test_it_trains_by_both_calls_with_the_model_in_its_own_directory(tmp_path: Path) -> None:
    """A model of random weights learns no orders in that time: that is the only complaint, at the end."""
    model = tmp_path / "base-model"
    shutil.copytree(tiny_model(), model)
    status, printed = run(tmp_path, "--model", str(model))
    assert "the model did not improve as it must" in printed, printed
    assert status == 1
    assert "DPO merged" in printed, printed
    assert "The same job, first 3 steps: 1 process, and " in printed, printed
    chat = printed.partition("== A chat with both")[2]
    assert (chat.count("\n  base "), chat.count("\n  after DPO ")) == (3, 3), printed


@IN_FULL
def test_it_shows_what_the_model_has_learned(tmp_path: Path) -> None:
    smollm2()  # from PyPI; the script makes its own copy
    status, printed = run(tmp_path)
    assert status == 0, printed
    assert "The model changed as intended." in printed
    chat = printed.partition("== A chat with both")[2]
    assert (chat.count("  base "), chat.count("  after DPO ")) == (3, 3), printed
