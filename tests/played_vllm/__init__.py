"""An interpreter with something that takes vLLM's place: vLLM itself takes 3 GB. `TRL_VLLM_PYTHON` names one with the
real one, for the tests that need it (tests/contract/test_vllm_jobs.py)."""

from __future__ import annotations

import sys
from pathlib import Path


def played_vllm(directory: Path) -> Path:
    """Write the interpreter; returns its path."""
    program = directory / "python-with-vllm"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{Path(__file__).parent}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program
