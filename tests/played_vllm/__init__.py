"""An interpreter with something that takes vLLM's place: vLLM itself takes 3 GB. `TRL_VLLM_PYTHON` names one with the
real one, for the tests that need it (tests/contract/test_vllm_jobs.py, process/test_grpo_vllm.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.tiny import VOCABULARY, save_llama, tiny_tokenizer

REAL = os.environ.get("TRL_VLLM_PYTHON")


def saved(path: Path, *, tied: bool) -> str:
    """A model whose heads are as large as vLLM's kernels for the CPU need them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"tie_word_embeddings": True} if tied else {}
    save_llama(path, tiny_tokenizer(), vocab_size=VOCABULARY, max_position_embeddings=512, **sizes, **more)
    return str(path)


def played_vllm(directory: Path, *, torch: bool = False) -> Path:
    """Write the interpreter; returns its path.

    Args:
        directory: has `plays.json`, too.
        torch: it has torch itself; else something that takes its place, too.
    """
    here = Path(__file__).parent
    modules = str(here) if torch else f"{here / 'without_torch'}:{here}"
    program = directory / ("python-with-vllm-and-torch" if torch else "python-with-vllm")
    # Ranks that were forked before a test have no variable of it.
    program.write_text(f'#!/bin/sh\nTRL_FAULTS="{directory}" PYTHONPATH="{modules}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program
