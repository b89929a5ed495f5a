"""Whether Triton can compile here, on machines that lack a part of what it needs."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.recipes.trainer import trl_patches
from llama_stack_provider_trl.recipes.trainer.trl_patches import choose_head_kernels
from llama_stack_provider_trl.system.compiler import missing_for_triton


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs that has no compiler; Python's headers are there."""
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(headers))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def compiler(path: Path, script: str = "exit 0") -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_machine_without_a_compiler_is_named_as_that(machine: Path) -> None:
    assert missing_for_triton({"PATH": str(machine)}) == "no C compiler was found: neither CC nor gcc nor clang"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_either_compiler_on_the_path_will_do(machine: Path, name: str) -> None:
    compiler(machine / name)
    assert missing_for_triton({"PATH": str(machine)}) == ""


def test_a_compiler_that_the_environment_names_goes_before_the_path(machine: Path, tmp_path: Path) -> None:
    compiler(machine / "gcc", "exit 1")
    chosen = compiler(tmp_path / "mycc")
    assert missing_for_triton({"PATH": str(machine), "CC": str(chosen)}) == ""
    assert missing_for_triton({"PATH": str(machine), "CC": "/no/cc"}) == "CC='/no/cc' is no program"


def test_missing_headers_of_python_are_named_with_their_directory(machine: Path, tmp_path: Path) -> None:
    compiler(machine / "gcc")
    (tmp_path / "include" / "Python.h").unlink()
    assert missing_for_triton({"PATH": str(machine)}) == f"{tmp_path / 'include'} has no Python.h"


def test_a_compiler_without_the_headers_of_c_is_found_out_by_compiling(machine: Path) -> None:
    compiler(machine / "gcc", "echo 'probe.c:1:10: fatal error: stdlib.h: No such file or directory' >&2; exit 1")
    found = missing_for_triton({"PATH": str(machine)})
    assert found.startswith(f"{machine / 'gcc'} cannot compile: probe.c:1:10: fatal error: stdlib.h")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for TRL's module of the fused head's kernels."""

    def use_triton(device: Any) -> bool:
        return bool(device == "cuda")

    found = SimpleNamespace(_TRITON_AVAILABLE=True, _use_triton=use_triton)
    found.divergence = SimpleNamespace(_use_triton=use_triton)  # which has the function by a name of its own
    package = SimpleNamespace(chunked_logprob=found, chunked_divergence=found.divergence)
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(kernels=package))
    monkeypatch.setitem(sys.modules, "trl.kernels", package)
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_logprob", found)
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_divergence", found.divergence)
    return found


def test_a_gpu_without_a_compiler_computes_the_head_in_torch_with_a_warning(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_patches, "missing_compiler", lambda: "no C compiler was found")
    chosen, warning = choose_head_kernels("cuda")
    assert (chosen, kernels._use_triton("cuda")) == ("torch", False)
    assert not kernels.divergence._use_triton("cuda")
    assert "no C compiler was found" in warning
    assert "install gcc" in warning


@pytest.mark.parametrize(
    ("kind", "installed", "missing", "expected"),
    [
        ("cuda", True, "", "triton"),
        ("cuda", False, "no C compiler was found", "torch"),
        ("cpu", True, "no C compiler was found", "torch"),
    ],
)
def test_the_kernels_are_trl_s_own_choice_where_nothing_is_missing_for_them(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str, installed: bool, missing: str, expected: str
) -> None:
    kernels._TRITON_AVAILABLE = installed
    monkeypatch.setattr(trl_patches, "missing_compiler", lambda: missing)
    assert choose_head_kernels(kind) == (expected, "")
    assert kernels._use_triton("cuda"), "TRL's own function"
