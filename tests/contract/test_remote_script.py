"""`scripts/run-remote-fsdp-server.sh` and `trl-remote`, as they are installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.cli.main import main
from tests.contract.stack import poll
from tests.tiny import REPOSITORY

pytestmark = pytest.mark.contract

SCRIPT = REPOSITORY / "scripts" / "run-remote-fsdp-server.sh"


def test_a_worker_reports_what_it_lacks_in_one_sentence() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TRL_", "MASTER_"))}
    for environ, status, message in (
        ({"NODE_RANK": "abc"}, 2, "NODE_RANK='abc' is not a number"),
        ({"NODE_RANK": "-1"}, 2, "NODE_RANK='-1' is not a number"),
        ({}, 2, "set MASTER_ADDR to the address of the machine that runs the service"),
        ({"MASTER_ADDR": "10.255.255.1"}, 1, "a worker needs a token of the service"),
        ({"MASTER_ADDR": "::1", "TRL_SERVICE_NODE_TOKEN": "t"}, 1, "the service's address ::1 is this machine's own"),
    ):
        done = subprocess.run([SCRIPT], capture_output=True, text=True, env={**plain, "NODE_RANK": "1", **environ})
        assert done.returncode == status
        assert done.stderr.count("\n") == 1
        assert message in done.stderr


def test_the_script_serves_in_the_foreground_until_it_receives_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a configuration named relative to where the user stands."""
    (tmp_path / "mine.yaml").write_text((REPOSITORY / "run_fsdp.yaml").read_text().replace("auto\n", "cpu\n"))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRL_SERVICE_")},
        "TRL_SERVICE_CONFIG": "mine.yaml",
        "TRL_SERVICE_DATA_DIR": str(tmp_path / "data"),
        "TRL_LOCK_DIR": str(tmp_path / "locks"),
    }
    log = tmp_path / "log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [SCRIPT, "--port", "0"], stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path, env=environ
        )
    try:
        found = poll(
            lambda: re.search(r"address +(\S+)", log.read_text()), "the service prints its address", timeout=60
        )
        assert found is not None
        assert f"config  {tmp_path}/mine.yaml" in log.read_text()
        assert main(["nodes", "--url", found[1]]) == 0
        _, device, state, *_, mode = capsys.readouterr().out.splitlines()[1].split()  # between them is the load
        assert (device, state, mode) == ("cpu", "free", "open")
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
