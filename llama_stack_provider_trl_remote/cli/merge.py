"""`trl-remote merge`: models or adapters of this machine into one, in a process of it. It calls no service."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path

_MODULE = "llama_stack_provider_trl.recipes.merge"
METHODS = ("linear", "slerp", "ties", "dare_linear", "dare_ties", "cat")


def add_options(command: ArgumentParser) -> None:
    command.add_argument(
        "models", nargs="+", metavar="MODEL[=WEIGHT]", type=_weighted, help="directories, or model ids; all weights 1"
    )
    command.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="a new directory")
    command.add_argument("--method", choices=METHODS, default="linear", help="(linear)")
    command.add_argument("--base", metavar="M", help="ties, dare of whole models: what they were trained from")
    command.add_argument("--density", type=_density, metavar="D", help="ties, dare: share of the differences to keep")
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="dare: of its random choice (0)")
    command.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), help="(that of the first model)")
    command.add_argument("--json", action="store_true", help="what was written as JSON")


def merge(options: Namespace) -> int:
    """Merge models, and print what was written."""
    from llama_stack_provider_trl.launch.interpreter import check_interpreter
    from llama_stack_provider_trl.specs.merge import MergeInput, MergeSpec
    from llama_stack_provider_trl.specs.model_source import ModelSource

    from .recipe_process import run_recipe
    from .terminal import emit, gib

    check_interpreter(None)
    spec = MergeSpec(
        inputs=tuple(MergeInput(model=model, weight=weight) for model, weight in options.models),
        output=options.output.expanduser().absolute(),
        method=options.method,
        base=None if options.base is None else ModelSource(model=options.base),
        density=options.density,
        seed=options.seed,
        dtype=options.dtype,
    )
    found = {"output": str(spec.output), **run_recipe(_MODULE, spec.model_dump_json(), "merge")}
    parameters, size = found["parameters"], gib(found["bytes"])
    emit(options, found, f"{spec.output}: {found['kind']} of {parameters:,} parameters, {size}")
    return 0


def _weighted(text: str) -> tuple[str, float]:
    """A model, and its weight behind the last `=`; a name may contain one itself."""
    model, separator, number = text.rpartition("=")
    if not separator:
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        return text, 1.0
    if not model or not math.isfinite(weight):
        raise argparse.ArgumentTypeError(f"{text!r} is no model with a weight: expected MODEL or MODEL=0.5")
    return model, weight


def _density(text: str) -> float:
    try:
        density = float(text)
    except ValueError:
        density = math.nan
    if not 0 < density <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: expected more than 0 and at most 1")
    return density


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: expected 0 to 4294967295")
    return int(text)
