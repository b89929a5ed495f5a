"""Norms, rotary embeddings and activations by Liger's kernels, and the jobs that compute by torch's operations."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.fast import liger
from llama_stack_provider_trl.recipes.model import quantization
from tests.training import job_spec

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.skipif(not importlib.util.find_spec("liger_kernel"), reason="the extra liger is not installed")
def test_ligers_kernels_have_the_numbers_of_torchs_operations(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.process.liger_numbers", str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == set(liger.PROVEN)
    for what, difference, tensors in found.values():
        assert what == "used in 1 of 1 blocks"
        assert 0 < difference < 1e-5  # 0: torch computed both
        assert tensors > 10


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"liger_kernels": "auto"}, "cuda", "liger_kernels is 'auto'"),
        ({"liger_kernels": "never"}, "cuda", "liger_kernels is 'never'"),
        ({}, "cpu", "the device is cpu"),
        ({"compile_blocks": "always", "dtype": "bf16"}, "cuda", "blocks are compiled"),
        ({}, "cuda", ""),
    ],
)
def test_a_job_that_computes_by_torchs_operations_has_the_reason(
    changes: dict[str, Any], device: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "missing_compiler", lambda: "")
    spec = job_spec(tmp_path, tmp_path, **{"liger_kernels": "always", **changes})
    assert liger.why_not_liger(spec, device) == reason
    monkeypatch.setattr(liger, "missing_compiler", lambda: "no C compiler was found")
    lacks_compiler = "Triton cannot compile here: no C compiler was found"
    assert liger.why_not_liger(spec, device) == (reason or lacks_compiler)


def test_models_that_are_not_proven_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_package(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(liger, "missing_compiler", lambda: "")
    monkeypatch.setattr(quantization.importlib, "import_module", no_package)
    spec = job_spec(tmp_path, tmp_path, liger_kernels="always")
    other = liger.use_liger(MistralForCausalLM(MistralConfig(**SIZES)), spec, "cuda")
    assert other == "not used: they are proven for llama, qwen2, qwen3, and this model is a mistral"
    gelu = liger.use_liger(LlamaForCausalLM(LlamaConfig(hidden_act="gelu", **SIZES)), spec, "cuda")
    assert gelu == "not used: its activation is gelu"
    with pytest.raises(
        JobFailure, match=r"liger_kernels 'always' needs liger_kernel, .*llama_stack_provider_trl\[liger\]"
    ):
        liger.use_liger(LlamaForCausalLM(LlamaConfig(**SIZES)), spec, "cuda")
