"""`nodes advise`: whether training on several nodes would help, before a second machine is set up."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.parallel import Exchange, advise
from llama_stack_provider_trl.system.hub_cache import find_snapshot

from .terminal import emit

if TYPE_CHECKING:
    from ..client import ServiceClient

_MOST_HEADER = 100 << 20
"""Bytes of the header of a safetensors file, as the library itself limits it."""


async def print_advice(client: ServiceClient, options: Namespace) -> int:
    """Print the verdict with its reason. Exit status 0: it would help, 1: it would not."""
    mbit_per_s = options.mbit_per_s
    if options.job is not None:
        if mbit_per_s is not None:
            raise InvalidRequest("--mbit-per-s", mbit_per_s, "--job has the bandwidth: name one of them.")
        mbit_per_s = await _measured(client, options.job)
    if mbit_per_s is None and options.machines != 1:
        raise InvalidRequest("--mbit-per-s", None, "name it, or with --job a job that trained over these nodes.")
    if options.machines is not None and options.machines > options.nodes:
        raise InvalidRequest("--machines", options.machines, f"expected at most --nodes, {options.nodes}.")
    total = parameters_of(options.model)
    if options.trainable is not None and options.trainable > total:
        raise InvalidRequest("--trainable", options.trainable, f"the model has {total} parameters.")
    if options.sharding == "HYBRID_SHARD" and options.ranks_per_node == 1:
        raise InvalidRequest("--sharding", options.sharding, "it shards within a node: name --ranks-per-node.")
    exchange = Exchange(
        nodes=options.nodes,
        trainable=total if options.trainable is None else options.trainable,
        total=total,
        reference=total if options.reference else 0,
        ranks_per_node=options.ranks_per_node,
        strategy=options.sharding,
        micro_steps=options.accumulation,
        keeps_whole_gradients=options.gradient_sync == "step",
        interval=options.averaging_interval,
        on_cpu=not options.gpus,
        weight_bytes=2 if options.gpus else 4,
        machines=options.machines,
    )
    # Without a link between machines its speed decides nothing: 10 Gbit/s is less than memory has.
    found = advise(exchange, options.step_seconds, mbit_per_s or 10_000.0)
    answer: dict[str, Any] = {
        "helps": found.helps,
        "speedup": round(found.speedup, 3),
        "step_seconds": round(found.step_seconds, 3),
        "bytes_per_node": round(exchange.bytes_per_node),
        "mbit_per_s": mbit_per_s,
        "reason": found.reason,
    }
    emit(options, answer, found.reason)
    return 0 if found.helps else 1


async def _measured(client: ServiceClient, job_uuid: str) -> float:
    progress = ((await client.status(job_uuid)).get("resources_allocated") or {}).get("progress") or {}
    found = progress.get("link_mbit_per_s")
    if not found:
        raise InvalidRequest("--job", job_uuid, "it measured no link: expected a job over several nodes, on CPUs.")
    return float(found)


def parameters_of(model: str) -> int:
    """Parameters of a model: a number such as 100M, a directory, or an id in this machine's cache.

    Raises:
        InvalidRequest: there is no such model here, or it is not in safetensors.
    """
    number = parameter_count(model)
    if number is not None:
        return number
    directory = Path(model).expanduser()
    if not directory.is_dir():
        cached = find_snapshot(os.environ, model, None)
        if cached is None:
            hint = "expected a directory, an id in this machine's cache, or a number of parameters such as 100M."
            raise InvalidRequest("--model", model, hint)
        directory = cached.directory
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidRequest("--model", model, f"{directory} has no .safetensors file: name its parameters, as 100M.")
    return sum(map(_elements, files))


def parameter_count(text: str) -> int | None:
    """A number of parameters with a unit, such as 20M or 1.5B; None: the text is something else."""
    number = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([KMBT])", text)
    return round(float(number[1]) * 10 ** {"K": 3, "M": 6, "B": 9, "T": 12}[number[2]]) if number else None


def _elements(file: Path) -> int:
    try:
        with open(file, "rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            if size > _MOST_HEADER:
                raise ValueError(size)
            header = json.loads(source.read(size))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (struct.error, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest("--model", str(file), "it is no safetensors file: download it again.") from error
