"""Runs Llama Stack with several workers, which uvicorn forks: `forked_workers.py PROGRAM ARGUMENTS`.

By itself it starts a Python for each, which imports Llama Stack for 3 s of CPU time. Its main process gives a worker a
minute to answer: of its own it gives 5 s, and on a busy machine it ends one worker after the other before they do,
forever.
"""

from __future__ import annotations

import functools
import multiprocessing
import runpy
import sys

import uvicorn
from uvicorn import _subprocess

if __name__ == "__main__":
    _subprocess.spawn = multiprocessing.get_context("fork")  # type: ignore[assignment]
    uvicorn.run = functools.partial(uvicorn.run, timeout_worker_healthcheck=60)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
