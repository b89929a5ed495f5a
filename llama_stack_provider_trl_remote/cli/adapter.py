"""`trl-remote adapter merge`: an adapter of this machine and its base into one model. It calls no service."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest

_MODULE = "llama_stack_provider_trl.recipes.merge_adapter"
CONFIG = "adapter_config.json"
_MOST_CONFIG = 1 << 20
"""Bytes."""


def add_options(group: ArgumentParser) -> None:
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="an adapter into its base model; calls no service")
    merge.add_argument("adapter", metavar="DIR", help="PEFT's directory, such as a pulled checkpoint `final`")
    merge.add_argument("-o", "--output", required=True, type=Path, metavar="MODEL", help="a new directory")
    merge.add_argument("--base", metavar="M", help="its base model, a directory or a model id (that in its files)")
    merge.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), help="(that of the base)")
    merge.add_argument("--json", action="store_true", help="what was written as JSON")


def merge(options: Namespace) -> int:
    """Merge an adapter, and print what was written."""
    from llama_stack_provider_trl.launch.interpreter import check_interpreter
    from llama_stack_provider_trl.specs.merge import AdapterMergeSpec
    from llama_stack_provider_trl.specs.model_source import ModelSource

    from .recipe_process import run_recipe
    from .terminal import emit, gib

    adapter = Path(options.adapter).expanduser().absolute()
    config = _config(adapter)
    check_interpreter(None)
    spec = AdapterMergeSpec(
        adapter=adapter,
        base=ModelSource(model=_base(options, config)),
        is_reward=config.get("task_type") == "SEQ_CLS",
        output=options.output.expanduser().absolute(),
        dtype=options.dtype,
    )
    found = {"output": str(spec.output), **run_recipe(_MODULE, spec.model_dump_json(), "merge")}
    emit(options, found, f"{spec.output}: model of {found['parameters']:,} parameters, {gib(found['bytes'])}")
    return 0


def is_adapter(model: str) -> bool:
    """Whether a directory holds an adapter and no model."""
    return Path(model, CONFIG).is_file() and not Path(model, "config.json").is_file()


def _config(adapter: Path) -> dict[str, Any]:
    file = adapter / CONFIG
    if not file.is_file():
        raise InvalidRequest("DIR", str(adapter), f"it has no {CONFIG}: name a directory that PEFT has saved.")
    try:
        found = json.loads(file.read_bytes()[:_MOST_CONFIG])
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest("DIR", str(adapter), f"its {CONFIG} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest("DIR", str(adapter), f"its {CONFIG} is no JSON object: save the adapter again.")
    return found


def _base(options: Namespace, config: dict[str, Any]) -> str:
    from llama_stack_provider_trl.specs.names import problem_of_name  # late: with pydantic

    if options.base is not None:
        return str(options.base)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InvalidRequest("--base", None, f"the adapter's {CONFIG} names no base model: name it.")
    if problem := problem_of_name(base):
        raise InvalidRequest("DIR", options.adapter, f"base_model_name_or_path in its {CONFIG} is {base!r}: {problem}.")
    if Path(base).is_absolute() and not Path(base).is_dir():
        hint = f"the adapter was trained on {base}, which this machine lacks: name the same model as it is here."
        raise InvalidRequest("--base", None, hint)
    return base
