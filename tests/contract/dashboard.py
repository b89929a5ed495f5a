"""`trl-remote dashboard` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = (sys.executable, "-m", "llama_stack_provider_trl_remote", "dashboard", "--port", "0", "--data-dir")


@contextmanager
def dashboard(data_dir: Path, **environ: str) -> Iterator[str]:
    """The address of a running dashboard."""
    process = subprocess.Popen([*COMMAND, str(data_dir)], stdout=subprocess.PIPE, text=True, env=os.environ | environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"dashboard of {data_dir.resolve()}: http://127.0.0.1:"), line
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        with process:
            assert process.wait(60) == 0
