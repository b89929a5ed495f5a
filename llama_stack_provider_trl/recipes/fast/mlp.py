"""Feed-forward networks and norms of long batches in tiles of tokens.

Between its two products a network holds several tensors of tokens x intermediate size: of 8B with 128k tokens 3.5 GiB
each. A norm holds several of tokens x hidden size in fp32: seven of 2 GiB in its backward pass. In tiles the forward
pass keeps the input alone, and the backward pass computes one tile after the other again, so that those of one tile are
there at a time (arXiv:2506.13996). That is one more forward pass of the networks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...specs.job import JobSpec
from ..model.fsdp import blocks_of

LONG = 16_384
"""Tokens of a batch, beyond which it is computed in tiles: micro steps are merged up to these."""
TILE = 8_192
"""Tokens of a tile at most. Products of so many rows keep a GPU as busy as larger ones."""
_NORMS = ("RMSNorm", "LayerNorm")
"""Ends of the names of classes whose modules compute each token, or each head of a token, by itself."""


def why_whole(spec: JobSpec, device: str) -> str:
    """Why the networks of a job's model compute a whole batch at a time; empty: they compute long ones in tiles.

    Args:
        device: its type.
    """
    option = spec.compute.tile_mlp
    if not spec.tiles_mlp(device):
        return f"tile_mlp is {option!r}" + (f" and the device is {device}" if option == "auto" else "")
    if option == "auto" and spec.data.max_seq_length <= LONG:
        return f"rows have at most {spec.data.max_seq_length:,} tokens"
    return ""


def tile_mlp(model: PreTrainedModel, spec: JobSpec, device: str) -> str:
    """Have the networks of a model's blocks, and all norms, compute batches of more than `LONG` tokens in tiles.

    Networks of other than linear layers stay as they are: those of experts choose these for a whole batch.

    Args:
        model: without adapters.
        device: its type.

    Returns:
        What was done, for the job's record.
    """
    if reason := why_whole(spec, device):
        return f"not used: {reason}"
    blocks = blocks_of(model).values()
    networks: list[Any] = [network for block in blocks if is_of_tokens(network := getattr(block, "mlp", None))]
    norms = [module for module in model.modules() if type(module).__name__.endswith(_NORMS)]
    for module in (*networks, *norms):
        module.forward = partial(_forward, module.forward)
    if not networks:
        return "not used: no block has an mlp of linear layers alone"
    return f"used in {len(networks)} of {len(blocks)} blocks for batches of more than {LONG:,} tokens"


def is_of_tokens(network: Any) -> bool:
    """Whether each token's output depends on its own input alone."""
    if not isinstance(network, torch.nn.Module) or not any(True for _ in network.children()):
        return False
    # Adapters have layers of their own, or dictionaries of factors.
    kinds = torch.nn.Linear | Conv1D | torch.nn.ParameterDict
    return all(isinstance(one, kinds) for one in network.modules() if one._parameters)


def _forward(whole: Callable[..., torch.Tensor], *given: torch.Tensor, **named: Any) -> torch.Tensor:
    """
    Args:
        given: states of shape (sequences, tokens, ...). Whatever else a module is called with is computed whole.
    """
    states = given[0] if len(given) == 1 and not named and given[0].dim() > 2 else None
    if states is None or states.shape[0] * states.shape[1] <= LONG:
        return whole(*given, **named)
    tiles = states.chunk(-(-states.shape[1] // max(1, TILE // states.shape[0])), dim=1)
    return torch.cat([checkpoint(whole, tile, use_reentrant=False) for tile in tiles], dim=1)
