"""Log-probabilities of tokens from the last hidden states, for devices whose kernels are torch's own.

TRL's head computes the logits twice, in the forward and in the backward pass, and folds their tiles in a dozen torch
operations. Where they fit into `KEPT_BYTES` these are kept instead, as a plain cross entropy does: a third less
arithmetic, and less memory than the tiles' intermediate results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

KEPT_BYTES = 256 << 20
"""Logits that are kept for the backward pass; those of further tokens are computed again."""
CHUNK_BYTES = 32 << 20
"""Logits that are computed at a time."""


class LogProbs(torch.autograd.Function):
    """log softmax(scale * (hidden @ weight.T + bias))[targets], in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        with_top1: bool,
        keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities, shape (tokens,), and whether each target has the largest logit.

        Args:
            hidden: shape (tokens, hidden size).
            weight: shape (vocabulary, hidden size).
            targets: token ids, shape (tokens,).
            keep: whether a backward pass follows. In `forward` itself gradients are always off.
        """
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.scale, ctx.kept = scale, []
        ctx.save_for_backward(hidden, weight, bias, targets)
        log_probs, top1, budget = [], [], KEPT_BYTES
        for part, wanted in zip(_chunks(hidden, weight), _chunks(targets, weight), strict=True):
            found = _log_softmax(part, weight, bias, scale, ctx.dtype)
            log_probs.append(found.gather(1, wanted[:, None])[:, 0])
            if with_top1:
                top1.append(found.argmax(dim=1) == wanted)
            budget -= found.nbytes
            ctx.kept.append(found if keep and budget >= 0 else None)
        hits = torch.cat(top1) if with_top1 else None
        if hits is not None:
            ctx.mark_non_differentiable(hits)
        return torch.cat(log_probs), hits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        of_log_probs = gradients[0]
        if of_log_probs is None:
            return (None,) * 7
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        of_hidden = []
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if to_weight else None
        of_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if to_bias else None
        parts = (_chunks(tensor, weight) for tensor in (hidden, targets, of_log_probs.float()))
        for number, (part, wanted, gradient) in enumerate(zip(*parts, strict=True)):
            found, ctx.kept[number] = ctx.kept[number], None
            if found is None:
                found = _log_softmax(part, weight, bias, ctx.scale, ctx.dtype)
            # d log p(target) / d logit_j = 1[j = target] - p_j
            of_logits = found.exp_().mul_(-gradient[:, None])
            of_logits.scatter_add_(1, wanted[:, None], gradient[:, None])
            if ctx.scale != 1.0:
                of_logits.mul_(ctx.scale)
            of_logits = of_logits.to(ctx.dtype)
            if to_hidden:
                of_hidden.append((of_logits @ weight.to(ctx.dtype)).to(hidden.dtype))
            if of_weight is not None:
                of_weight.addmm_(of_logits.float().t(), part.float())
            if of_bias is not None:
                of_bias += of_logits.float().sum(dim=0)
        return (
            torch.cat(of_hidden) if to_hidden else None,
            of_weight.to(weight.dtype) if of_weight is not None else None,
            of_bias.to(bias.dtype) if of_bias is not None else None,
            *(None, None, None, None),
        )


@dataclass(frozen=True)
class Head:
    """What a model computes the logits of tokens from."""

    hidden: torch.Tensor
    """Shape (tokens, hidden size)."""
    weight: torch.Tensor
    """Shape (vocabulary, hidden size)."""
    bias: torch.Tensor | None
    scale: float
    """The logits are multiplied by it."""
    cap: float | None
    """After that they are bounded by this: cap * tanh(logits / cap). None: they are not."""
    dtype: torch.dtype
    """Of the product with the weight."""

    def of_rows(self, rows: torch.Tensor) -> Head:
        """That of some of the tokens.

        Args:
            rows: whether each is one of them, shape (tokens,).
        """
        return replace(self, hidden=self.hidden[rows])

    def log_softmax(self, begin: int, end: int) -> torch.Tensor:
        """Of the tokens from `begin` to `end`, shape (tokens, vocabulary), fp32."""
        part = self.hidden[begin:end]
        if self.cap is None:
            return _log_softmax(part, self.weight, self.bias, self.scale, self.dtype)
        logits = _logits(part, self.weight, self.bias, self.scale, self.dtype).float()
        return torch.log_softmax(logits.div_(self.cap).tanh_().mul_(self.cap), dim=1)


def averaged(
    heads: Sequence[Head], log_weights: Sequence[float], targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens under the weighted mean of several models' probabilities, computed in fp32.

    A token that a model has no logit for has probability 0 in that model.

    Args:
        heads: of each model, for the same tokens.
        log_weights: of each model; the weights have the sum 1.
        targets: token ids, shape (tokens,).

    Returns:
        The log-probabilities, shape (tokens,), and whether each target is the most probable token.
    """
    size = max(len(head.weight) for head in heads)
    step = max(1, CHUNK_BYTES // (4 * size))
    log_probs, top1 = [], []
    for begin in range(0, max(1, len(targets)), step):  # on GPUs a batch may have no tokens
        wanted = targets[begin : begin + step]
        mean: torch.Tensor | None = None
        for head, log_weight in zip(heads, log_weights, strict=True):
            found = head.log_softmax(begin, begin + step).add_(log_weight)
            found = pad(found, (0, size - found.shape[1]), value=-torch.inf)
            mean = found if mean is None else torch.logaddexp(mean, found)
        assert mean is not None
        log_probs.append(mean.gather(1, wanted[:, None])[:, 0])
        top1.append(mean.argmax(dim=1) == wanted)
    return torch.cat(log_probs), torch.cat(top1)


def _chunks(tensor: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.split(max(1, CHUNK_BYTES // (4 * len(weight))))


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Shape (tokens, vocabulary), fp32."""
    return torch.log_softmax(_logits(hidden, weight, bias, scale, dtype), dim=1, dtype=torch.float32)


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Shape (tokens, vocabulary)."""
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        logits += bias.to(dtype)
    if scale != 1.0:
        logits = logits.float().mul_(scale)  # as TRL's head does: bf16 would round again
    return logits
