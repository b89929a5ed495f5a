"""The optimizer's state in a step checkpoint: tensors by the names of the weights, everything else as JSON.

`optimizer/state.safetensors` holds the tensors (`<weight>/<key>`, such as `lm_head.weight/exp_avg`), each rank its own
rows (`checkpoint.shards`); `optimizer/state.json` the parameter groups, with the names of their weights, and values
that are no tensors. Any number of ranks reads its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...errors import JobFailure
from ...specs.events import Reason
from . import shards

TENSORS = "optimizer/state.safetensors"
VALUES = "optimizer/state.json"
OUTER = "optimizer/outer.safetensors"
"""The momentum of periodic averaging, by the names of the weights.

All are in a directory of their own: some readers load every safetensors file beside the model's as weights."""
_OF_WORKER = "optimizer/worker-{}.safetensors"
"""As TENSORS, of the workers after the first one, which with periodic averaging have states of their own."""


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state as it is written; of sharded tensors this rank's parts."""

    tensors: Mapping[str, torch.Tensor]
    """By `<weight>/<key>`."""
    document: str
    """The rest, as JSON."""


@dataclass(frozen=True)
class StoredOptimizer:
    tensors: Mapping[str, shards.Outline]
    """By `<weight>/<key>`."""
    values: Mapping[str, Any]
    """By `<weight>/<key>`: values that are not tensors."""
    groups: list[dict[str, Any]]
    """The parameter groups, `params` being names of weights."""
    read_into: Callable[[Mapping[str, torch.Tensor]], None]
    """Copies values into tensors, of a sharded one this rank's rows."""


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """The optimizer's state by the names of the model's weights."""
    names = _names(model)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for weight, state in optimizer.state.items():
        for key, value in state.items():
            (tensors if isinstance(value, torch.Tensor) else values)[f"{names[id(weight)]}/{key}"] = value
    groups = [
        {**group, "params": [names[id(weight)] for weight in group["params"]]} for group in optimizer.param_groups
    ]
    return OptimizerState(tensors, json.dumps({"param_groups": groups, "values": values}))


def tensors_of(worker: int) -> str:
    """The file with the tensors of a worker's optimizer; without periodic averaging all ranks are worker 0."""
    return _OF_WORKER.format(worker) if worker else TENSORS


def read_optimizer(checkpoint: Path, worker: int = 0) -> StoredOptimizer:
    """The optimizer's state in a checkpoint. Raises JobFailure where it is malformed.

    Args:
        worker: whose state; where fewer have been saved, that of one of them.
    """
    with reading(checkpoint / VALUES):
        document = json.loads((checkpoint / VALUES).read_text())
        values, groups = dict(document["values"]), [dict(group) for group in document["param_groups"]]
    saved = 1
    while (checkpoint / tensors_of(saved)).exists():
        saved += 1
    path = checkpoint / tensors_of(worker % saved)
    with reading(path):
        return StoredOptimizer(shards.outlines(path), values, groups, lambda tensors: shards.read_into(path, tensors))


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: StoredOptimizer, checkpoint: Path) -> None:
    """Load a saved state into an optimizer, each rank its parts. Raises JobFailure: invalid_request, where it is the
    state of another optimizer or of other weights, or malformed."""
    names = _names(model)
    with reading(checkpoint):
        ours = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
        if [group["params"] for group in saved.groups] != ours:
            raise JobFailure(
                Reason.invalid_request,
                f"{checkpoint} holds the optimizer of other weights: resume with the same model and LoRA settings",
            )
        states: dict[int, dict[str, Any]] = {}
        tensors: dict[str, torch.Tensor] = {}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        numbers = {names[id(weight)]: number for number, weight in enumerate(weights)}
        for name in (*saved.tensors, *saved.values):
            of, _, key = name.rpartition("/")  # a module's name has no slash
            if (number := numbers.get(of)) is None:
                continue
            if name in saved.tensors:
                tensors[name] = _empty_for(saved.tensors[name], weights[number])
                states.setdefault(number, {})[key] = tensors[name]
            else:
                states.setdefault(number, {})[key] = saved.values[name]
        saved.read_into(tensors)
        optimizer.load_state_dict({"state": states, "param_groups": _numbered(saved.groups, optimizer)})


def read_momentum(momentum: Mapping[str, torch.Tensor], checkpoint: Path) -> None:
    """Read the momentum of periodic averaging, each rank its parts; a checkpoint of another job may have none. Raises
    JobFailure: invalid_request, where it is that of other weights, or malformed."""
    path = checkpoint / OUTER
    if path.exists():
        with reading(path):
            shards.read_into(path, momentum)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While this is open, errors caused by a malformed file become a JobFailure that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError) as error:
        raise JobFailure(
            Reason.invalid_request,
            f"{path} is not what a checkpoint of this job holds ({type(error).__name__}: {error}): resume from another "
            "checkpoint",
        ) from error


def _numbered(groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups as `Optimizer.load_state_dict` expects them; JSON has lists where some optimizers have tuples."""
    found, first = [], 0
    for group, present in zip(groups, optimizer.param_groups, strict=True):
        values = {
            key: tuple(value) if isinstance(present.get(key), tuple) and isinstance(value, list) else value
            for key, value in group.items()
        }
        count = len(present["params"])
        found.append({**values, "params": list(range(first, first + count))})
        first += count
    return found


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(weight): name for name, weight in model.named_parameters()}


def _empty_for(saved: shards.Outline, weight: torch.Tensor) -> torch.Tensor:
    """A tensor to read a saved one into: sharded as its weight where it has that shape, or a part of each row of it,
    else whole on every rank."""
    if saved.shape == weight.shape:
        return torch.zeros_like(weight, dtype=saved.dtype, requires_grad=False)
    if weight.ndim > 1 and len(saved.shape) == 2 and saved.shape[0] == weight.shape[0]:
        rows = weight.detach().flatten(1)[:, : saved.shape[1]]
        if rows.shape == saved.shape:
            return torch.zeros_like(rows, dtype=saved.dtype, memory_format=torch.contiguous_format)
    return torch.empty(saved.shape, dtype=saved.dtype)
