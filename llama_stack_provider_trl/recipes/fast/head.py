"""Log-probabilities of tokens from the last hidden states.

TRL's head computes the logits twice, in the forward and in the backward pass, and without Triton it folds their tiles
in a dozen torch operations. Here the forward pass uses each tile's probabilities for the gradients too, as far as these
are known but for a factor: the gradient of a hidden state is its token's factor times a vector, and that of the head's
weight, where all tokens have one factor, is that factor times a matrix (Liger Kernel, arXiv 2410.10989). Where tokens
have factors of their own and the weight is trained, logits that fit into `KEPT_BYTES` are kept, as a plain cross
entropy keeps all. On GPUs tiles are as wide as the vocabulary, and kernels fold them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

KEPT_BYTES = 256 << 20
"""Logits that are kept for the backward pass where the forward pass computes no gradients; those of further tokens are
computed again."""
CHUNK_BYTES = 32 << 20
"""Logits that are computed at a time."""


TILE_BYTES = 512 << 20
"""The same where kernels fold them in place. With a trained weight the sums of its gradient are read and written once
for each tile: for 1B that takes as long as the product itself where a tile has 1,000 tokens, a half with 2,000."""
_ROUND_TOKENS = 128
"""A large tile has a multiple of so many tokens, which products on GPUs compute at a time."""


class Kernels(Protocol):
    """What a device computes with a tile of logits, shape (tokens, vocabulary), in one pass each. They scale it."""

    def fold(
        self, tile: torch.Tensor, targets: torch.Tensor, with_top1: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Log-probabilities of the targets, the logarithms of the sums that they are relative to, and whether each
        target has the largest logit; shape (tokens,)."""

    def differentiate(
        self, tile: torch.Tensor, targets: torch.Tensor, log_sums: torch.Tensor, factors: torch.Tensor
    ) -> None:
        """Put the gradient of the logits in their place, from those of the log-probabilities, shape (tokens,), fp32."""

    def add_product(self, sums: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
        """sums += one @ other, in fp32."""


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
        alike: bool = False,
        kernels: Kernels | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities, shape (tokens,), and whether each target has the largest logit.

        Args:
            hidden: shape (tokens, hidden size).
            weight: shape (vocabulary, hidden size).
            targets: token ids, shape (tokens,).
            keep: whether a backward pass follows. In `forward` itself gradients are always off.
            alike: whether all tokens are likely to have the same gradient. Where that is wrong, and the weight or the
                bias is trained, the gradients of this pass are of no use, and all logits are computed again.
            kernels: they compute in place of torch's operations, and `scale` is theirs. For whether all tokens have the
                same gradient a GPU would have to be waited for: where they have not, those of weight and bias are NaN.
        """
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.scale, ctx.kept, ctx.kernels = scale, [], kernels
        ctx.save_for_backward(hidden, weight, bias, targets)
        is_ahead = keep and (alike or not any(ctx.needs_input_grad[1:3]))
        ctx.unscaled = _Gradients.begin(weight, bias, ctx.needs_input_grad, kernels) if is_ahead else None
        if kernels is not None:
            return _fold_tiles(ctx, kernels, hidden, weight, bias, targets, with_top1)
        log_probs, top1, budget = [], [], KEPT_BYTES if keep and ctx.unscaled is None else -1
        for part, wanted in zip(_chunks(hidden, weight), _chunks(targets, weight), strict=True):
            found = _log_softmax(part, weight, bias, scale, ctx.dtype)
            log_probs.append(found.gather(1, wanted[:, None])[:, 0])
            if with_top1:
                top1.append(found.argmax(dim=1) == wanted)
            budget -= found.nbytes
            ctx.kept.append(found if budget >= 0 else None)
            if ctx.unscaled is not None:
                ctx.unscaled.add(_of_logits(found, wanted, None, scale, ctx.dtype), part, weight)
        hits = torch.cat(top1) if with_top1 else None
        if hits is not None:
            ctx.mark_non_differentiable(hits)
        return torch.cat(log_probs), hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        of_log_probs = gradients[0]
        if of_log_probs is None:
            return (None,) * 9
        of_log_probs = of_log_probs.float()
        found: _Gradients | None = ctx.unscaled
        ctx.unscaled = None  # a second backward pass of the same graph computes them again
        if found is not None and (ctx.kernels is not None or found.has_no_sums or _are_alike(of_log_probs)):
            found.multiply(-of_log_probs, hidden.dtype)
        elif ctx.kernels is not None:
            found = _Gradients.begin(weight, bias, ctx.needs_input_grad, ctx.kernels)
            cast = weight.to(ctx.dtype)
            parts = (tensor.split(_tile_tokens(cast)) for tensor in (hidden, targets, of_log_probs))
            for part, wanted, factors in zip(*parts, strict=True):
                tile = _logits(part, cast, bias, 1.0, ctx.dtype)
                _, log_sums, _ = ctx.kernels.fold(tile, wanted, False)
                ctx.kernels.differentiate(tile, wanted, log_sums, factors)
                found.add(tile, part, cast)
        else:
            found = None  # two matrices of the weight's size do not exist at a time
            found = _Gradients.begin(weight, bias, ctx.needs_input_grad)
            parts = (_chunks(tensor, weight) for tensor in (hidden, targets, of_log_probs))
            for number, (part, wanted, factors) in enumerate(zip(*parts, strict=True)):
                log_softmax, ctx.kept[number] = ctx.kept[number], None
                if log_softmax is None:
                    log_softmax = _log_softmax(part, weight, bias, ctx.scale, ctx.dtype)
                found.add(_of_logits(log_softmax, wanted, factors, ctx.scale, ctx.dtype), part, weight)
        return (
            torch.cat(found.of_hidden).to(hidden.dtype) if found.of_hidden is not None else None,
            found.of_weight.to(weight.dtype) if found.of_weight is not None else None,
            found.of_bias.to(bias.dtype) if found.of_bias is not None else None,
            *(None,) * 6,
        )


def _fold_tiles(
    ctx: Any,
    kernels: Kernels,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    with_top1: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward pass by kernels, with the gradients where `ctx.unscaled` is not None."""
    cast = weight.to(ctx.dtype)
    size = _tile_tokens(cast)
    space = cast.new_empty(min(size, len(hidden)), len(cast))
    log_probs, top1 = [], []
    for part, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        tile = torch.mm(part.to(ctx.dtype), cast.t(), out=space[: len(part)])
        if bias is not None:
            tile += bias.to(ctx.dtype)
        found, log_sums, hits = kernels.fold(tile, wanted, with_top1)
        log_probs.append(found)
        if hits is not None:
            top1.append(hits)
        if ctx.unscaled is not None:
            kernels.differentiate(tile, wanted, log_sums, torch.full_like(log_sums, -1.0))
            ctx.unscaled.add(tile, part, cast)
    together = torch.cat(top1) if with_top1 else None
    if together is not None:
        ctx.mark_non_differentiable(together)
    return torch.cat(log_probs), together


def _tile_tokens(weight: torch.Tensor) -> int:
    """Tokens of a tile, for a weight in the dtype of its logits."""
    tokens = max(1, TILE_BYTES // (weight.itemsize * len(weight)))
    return tokens if tokens < _ROUND_TOKENS else tokens // _ROUND_TOKENS * _ROUND_TOKENS


@dataclass
class _Gradients:
    """Those of the head's inputs, from those of its logits."""

    of_hidden: list[torch.Tensor] | None
    """Of the tokens so far, each of shape (tokens, hidden size)."""
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None
    """Sums over tokens in fp32. What is None is not wanted."""
    kernels: Kernels | None = None

    @classmethod
    def begin(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Sequence[bool], kernels: Kernels | None = None
    ) -> _Gradients:
        to_hidden, to_weight, to_bias, *_ = wanted
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if to_weight else None
        of_bias = None
        if bias is not None and to_bias:
            of_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        return cls([] if to_hidden else None, of_weight, of_bias, kernels)

    @property
    def has_no_sums(self) -> bool:
        return self.of_weight is None and self.of_bias is None

    def add(self, of_logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """Add tokens.

        Args:
            of_logits: shape (tokens, vocabulary), in the dtype of the product with the weight.
            hidden: shape (tokens, hidden size).
        """
        if self.of_hidden is not None:
            self.of_hidden.append(of_logits @ weight.to(of_logits.dtype))
        if self.of_weight is not None and self.kernels is not None:
            self.kernels.add_product(self.of_weight, of_logits.t(), hidden.to(of_logits.dtype))
        elif self.of_weight is not None:
            self.of_weight.addmm_(of_logits.float().t(), hidden.float())
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(dim=0, dtype=torch.float32)

    def multiply(self, factors: torch.Tensor, dtype: torch.dtype) -> None:
        """Multiply those of hidden states by each token's factor, shape (tokens,), fp32; sums by that of all."""
        if self.of_hidden:
            by_part = factors.split([len(part) for part in self.of_hidden])
            self.of_hidden = [
                part.to(dtype).mul_(of_part[:, None]) for part, of_part in zip(self.of_hidden, by_part, strict=True)
            ]
        if self.has_no_sums or not len(factors):
            return
        common = factors[0]
        if self.kernels is not None:
            common = torch.where((factors == common).all(), common, torch.nan)
        for summed in (self.of_weight, self.of_bias):
            if summed is not None:
                summed *= common


def _of_logits(
    log_softmax: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of logits, shape (tokens, vocabulary), in the place of `log_softmax`.

    d log p(target) / d logit_j = 1[j = target] - p_j

    Args:
        factors: gradients of the log-probabilities, shape (tokens,); None: -1, which needs no multiplication.
    """
    gradient = log_softmax.exp_()
    if factors is None:
        factors = gradient.new_full(targets.shape, -1.0)
    else:
        gradient.mul_(-factors[:, None])
    gradient.scatter_add_(1, targets[:, None], factors[:, None])
    if scale != 1.0:
        gradient.mul_(scale)
    return gradient.to(dtype)


def _are_alike(factors: torch.Tensor) -> bool:
    """Whether all tokens have one factor. A trace has no values: there they have."""
    return is_fake(factors) or bool((factors == factors[:1]).all())


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
