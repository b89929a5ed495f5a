"""Proves on the model to train that the rows of a packed sequence do not see each other.

Where transformers is given position ids that restart in every row, and no attention mask, it builds a block-diagonal
one from them. Not every architecture uses them: of 26 tried with transformers 5.23, OPT, BLOOM, Falcon, MPT, Mamba and
LFM2 let rows see each other. Sliding windows (Mistral, Gemma 3) and mixtures of experts are right.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...errors import JobFailure
from ...specs.events import Reason


def check_isolation(model: PreTrainedModel, sequences: int = 2) -> None:
    """Refuse a model in which the rows of a sequence see each other, or count their positions through.

    Runs it on two rows of a few tokens. What comes out for the second must have no gradient at all in the first (a
    masked score is exactly 0 in every dtype, however small a leak is), and must be what comes out for that row alone.
    Raises JobFailure: invalid_request.

    Args:
        sequences: of a batch. Flash kernels separate rows by their positions only in a batch of one.
    """
    first, second = _probes(model)
    together, embedded = _logits(model, sequences, first, second)
    (gradient,) = torch.autograd.grad(together.float().sum(), embedded)
    together, alone = together.detach(), _logits(model, sequences, second)[0].detach()
    error = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-6))
    if gradient[:, : len(first)].any() or not gradient[:, len(first) :].any():
        problem = "a row sees the one before it"
    elif not error <= (1e-4 if together.dtype == torch.float32 else 5e-2):
        problem = f"a row's place in the sequence changes its logits, by {error:.1e} of the largest"
    else:
        return
    raise JobFailure(
        Reason.invalid_request,
        f"data_config.packed is true, and {type(model).__name__} with attention implementation "
        f"{model.config._attn_implementation!r} does not keep the rows of a sequence apart: {problem}. "
        "Set packed to false: each row is then padded on its own.",
    )


def _probes(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    size = model.get_input_embeddings().num_embeddings
    ids = torch.arange(1, 22, device=model.device) * 7919 % size  # arbitrary tokens
    return ids[:12], ids[12:]


def _logits(model: PreTrainedModel, sequences: int, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last of several rows in a sequence, (sequences, its tokens, vocabulary), and the embeddings."""
    embedded: list[torch.Tensor] = []

    def cut_off(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])
    training = model.training
    hook = model.get_input_embeddings().register_forward_hook(cut_off)
    try:
        batch = {"input_ids": torch.cat(rows).repeat(sequences, 1), "position_ids": positions.repeat(sequences, 1)}
        outputs = model.eval()(**batch, use_cache=False)
    finally:
        hook.remove()
        model.train(training)
    return outputs.logits[:, -len(rows[-1]) :], embedded[0]
