"""deploy/slurm/agents.sh, with programs in place of `srun` and `trl-remote`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "agents.sh"
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
for SLURM_PROCID in 0 1; do SLURM_PROCID=$SLURM_PROCID "$@" & done
wait
"""
AGENT = """#!/bin/bash
trap 'echo "left $4" >> "$LOG"; exit 0' USR1
echo "$@" >> "$LOG"
while [ "$(grep -c ^agent "$LOG")" -lt 2 ]; do sleep 0.05; done  # the signal ends what is not an agent yet
kill -USR1 $SLURM_BATCH  # Slurm's signal before the time limit
for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1 & wait $!; done
"""


def test_a_batch_job_of_slurm_runs_agents_that_leave_before_its_time_limit(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("trl-remote", AGENT)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    given = {"TRL_SERVICE_URL": "http://10.0.0.1:8322", "TRL_SERVICE_NODE_TOKEN_FILE": "/etc/trl/token"}
    environ = {
        **{"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "LOG": str(tmp_path / "log"), **given},
        "TRL_NODE_HOME": str(tmp_path / "nodes"),
    }
    start = 'export SLURM_BATCH=$$; exec bash "$0"'
    words = ["bash", "-c", start, str(SCRIPT)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert sorted(lines) == [
        *(f"agent --name slurm-17-{n} --data-dir {tmp_path}/nodes/17-{n}/agent" for n in (0, 1)),
        *("left --data-dir",) * 2,
    ]
    assert list((tmp_path / "nodes").iterdir()) == []  # no file is left
    del environ["TRL_SERVICE_URL"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert "TRL_SERVICE_URL: set the address of the service" in done.stderr
