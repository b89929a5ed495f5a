"""An interpreter with something that takes vLLM's place: vLLM itself takes 3 GB. `TRL_VLLM_PYTHON` names one with the
real one, for the tests that need it (tests/contract/test_vllm_jobs.py)."""

from __future__ import annotations

import sys
from pathlib import Path


def played_vllm(directory: Path, *, torch: bool = False) -> Path:
    """Write the interpreter; returns its path.

    Args:
        torch: it has torch itself; else something that takes its place, too.
    """
    here = Path(__file__).parent
    modules = str(here) if torch else f"{here / 'without_torch'}:{here}"
    program = directory / ("python-with-vllm-and-torch" if torch else "python-with-vllm")
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{modules}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program
