"""One training process with settings that no request has: FSDP2 in a world of one, its output dtype, no export.

    python -m gpu_checks.trainer [--world-of-one] [--output-dtype none|fp32] [--measure] [--steps] [--syncs] SPEC...

Runs `recipes.train` itself, and writes `recorded.json` beside each spec.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .jobs import free_port
from .steps import watch_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--world-of-one", action="store_true", help="shard although there is one rank")
    parser.add_argument("--output-dtype", choices=("none", "fp32"), help="of FSDP2's mixed precision, for every unit")
    parser.add_argument("--measure", action="store_true", help="record peak memory, and export nothing")
    parser.add_argument("--steps", action="store_true", help="record where the time of a step goes")
    parser.add_argument("--syncs", action="store_true", help="record the seconds until vLLM has the weights of a step")
    parser.add_argument("specs", nargs="+", type=Path)
    options = parser.parse_args()
    forget_recipes()
    sharded = watch_sharding(options.output_dtype)
    if options.world_of_one:
        enter_world_of_one()
    if options.measure:
        without_export()
    watched = [watch_steps() if options.steps else {}, watch_syncs() if options.syncs else {}]
    failed = 0
    for path in options.specs:
        status, recorded = train(path, options.measure)
        failed = failed or status
        if not status:
            for found in (*watched, sharded):
                recorded |= found
            (path.parent / "recorded.json").write_text(json.dumps(recorded))
    return failed


def forget_recipes() -> None:
    """Have the recipes imported with the names that are replaced here, in a process forked from one that has them."""
    for name in list(sys.modules):
        if name.startswith("llama_stack_provider_trl.recipes"):
            del sys.modules[name]


def train(path: Path, measure: bool) -> tuple[int, dict[str, Any]]:
    """Run one attempt; returns its exit status and what was measured."""
    from llama_stack_provider_trl.recipes.train import main as train_main

    if not measure:
        return train_main(["train", str(path)]), {}
    from .peaks import Peak

    gc.collect()
    peak = Peak()
    status = train_main(["train", str(path)])
    return status, peak.measured()


def watch_sharding(output_dtype: str | None) -> dict[str, Any]:
    """Count FSDP2's units, record the policies that the recipe gives them, and replace the output dtype on request."""
    import torch
    from torch.distributed import fsdp

    original: Callable[..., Any] = fsdp.fully_shard
    recorded: dict[str, Any] = {"units": 0, "recipe_output_dtype": None, "offload": None}

    def fully_shard(module: Any, *arguments: Any, **named: Any) -> Any:
        policy = named.get("mp_policy") or fsdp.MixedPrecisionPolicy()
        recorded["units"] += 1
        recorded["recipe_output_dtype"] = str(policy.output_dtype)
        recorded["offload"] = type(named.get("offload_policy")).__name__
        if output_dtype:
            wanted = {"none": None, "fp32": torch.float32}[output_dtype]
            named["mp_policy"] = dataclasses.replace(policy, output_dtype=wanted)
        return original(module, *arguments, **named)

    fsdp.fully_shard = fully_shard  # before the recipes and accelerate import the name
    return recorded


def watch_syncs() -> dict[str, float]:
    """Time how long it takes until vLLM has the weights of a step. Returns where the median will be, as `sync`: of all
    but the first one, before which vLLM starts."""
    import torch

    from llama_stack_provider_trl.recipes.model.vllm_process import VllmProcess
    from llama_stack_provider_trl.recipes.trainer.vllm_policy import VllmPolicy

    answer, reload = VllmPolicy.answer, VllmProcess.reload
    found, times = dict[str, float](), list[float]()
    began = [0.0]

    def answered(policy: Any, *arguments: Any, **named: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is queued before it is no part of it
        began[0] = time.perf_counter()
        return answer(policy, *arguments, **named)

    def reloaded(process: Any, *arguments: Any, **named: Any) -> None:
        reload(process, *arguments, **named)
        times.append(time.perf_counter() - began[0])
        found["sync"] = statistics.median(times[1:] or times)

    setattr(VllmPolicy, "answer", answered)  # noqa: B010
    setattr(VllmProcess, "reload", reloaded)  # noqa: B010
    return found


def enter_world_of_one() -> None:
    """Open a process group of one rank, and have the recipes shard over it as over several."""
    import torch
    import torch.distributed as dist

    from llama_stack_provider_trl.recipes.distributed.peers import backend_of
    from llama_stack_provider_trl.recipes.model import fsdp

    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    fsdp.is_sharded = lambda spec: spec.sharding is not None  # before other modules import the name
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_of(device))


def without_export() -> None:
    """End attempts with their last step: writing and reading gigabytes is no part of what is measured."""
    from llama_stack_provider_trl.recipes import session

    if not hasattr(session, "_export"):
        raise AttributeError("recipes.session has no _export, which this benchmark replaces: adapt it")
    session._export = lambda *arguments: None


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # as recipes.train: destructors of process groups sometimes hang
