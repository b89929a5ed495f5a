"""A pytest process that is killed leaves neither a server behind nor its trainings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from llama_stack_provider_trl.system.process import TASK_MARK
from tests.contract.stack import poll
from tests.left_behind import left
from tests.required import IN_FULL
from tests.tiny import REPOSITORY

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of processes"),
]

PROGRAM = """
import signal
import sys
from pathlib import Path
from tests.contract.payloads import sft
from tests.contract.service import TrainingService

class Started(TrainingService):
    is_forked = False  # by Popen: a fork of tests.forked ends with that

service = Started(Path(sys.argv[1]))
service.start()
service.register("rows", [{"prompt": "a", "completion": "b"}] * 4)
body = sft("endless", "rows")
body["training_config"]["n_epochs"] = 10**5
service.submit("/post-training/supervised-fine-tune", body)
service.wait_state("endless", "in_progress")
print("ready", flush=True)
signal.pause()
"""


def is_task(pid: int) -> bool:
    return f"\0{TASK_MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()


@IN_FULL  # of tests alone, and no behaviour of the product
def test_a_killed_process_group_leaves_no_service_and_no_training(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, "PYTHONPATH": "."}
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            kinds = {is_task(pid) for pid in left([tmp_path])}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert kinds == {False, True}  # the service, and its training
    poll(lambda: not left([tmp_path]), "nothing is left", timeout=120)
