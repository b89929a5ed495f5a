"""How several tensors become one. The arithmetic of TIES and DARE is PEFT's."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft.utils.merge_utils import dare_linear, dare_ties, task_arithmetic, ties

from ...specs.merge import STACKED_METHODS, MergeMethod

_PRUNED = {"ties": ties, "dare_linear": dare_linear, "dare_ties": dare_ties}
_PARALLEL = 1.0 - 1e-6
"""Cosine beyond which the arc between two tensors is taken for a line: its sine vanishes."""


def merged_weight(
    method: MergeMethod,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[float],
    base: torch.Tensor | None,
    density: float,
) -> torch.Tensor:
    """One weight of a merged model.

    Args:
        tensors: this weight of each model, in fp32.
        weights: `linear` and `slerp` take their shares of the sum.
        base: this weight of the model from which those were trained; `ties` and `dare_*` merge the differences.
        density: share of the differences that `ties` and `dare_*` keep.
    """
    if method == "linear":
        return combined("linear", tensors, shares_of(weights), density)
    if method == "slerp":
        return slerp(tensors[0], tensors[1], shares_of(weights)[1])
    if base is None:
        raise AssertionError(f"{method} without a base")
    return base + combined(method, [tensor - base for tensor in tensors], weights, density)


def merged_adapter(
    method: MergeMethod,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[float],
    density: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices A and B of a merged LoRA module, as PEFT's `LoraModel.add_weighted_adapter` computes them.

    Args:
        pairs: A, shape (rank, inputs), and B, shape (outputs, rank), of each adapter.
        weights: each times the scale of its adapter; `slerp`: those of `slerp_weights`.
    """
    if method in STACKED_METHODS:
        scaled = [a * weight for (a, _), weight in zip(pairs, weights, strict=True)]
        return torch.cat(scaled, dim=0), torch.cat([b for _, b in pairs], dim=1)
    roots = [math.sqrt(abs(weight)) for weight in weights]
    signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
    return (
        combined(method, [a for a, _ in pairs], signed, density),
        combined(method, [b for _, b in pairs], roots, density),
    )


def combined(
    method: MergeMethod, tensors: Sequence[torch.Tensor], weights: Sequence[float], density: float
) -> torch.Tensor:
    """The weighted sum, or TIES (arXiv:2306.01708) or DARE (arXiv:2311.03099)."""
    given = list(tensors), torch.tensor(weights)
    if method == "linear":
        return task_arithmetic(*given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The density .* no pruning")  # 1 is a value that one may choose
        return _PRUNED[method](*given, density)


def slerp(one: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
    """The point at `share` of the way along the arc from one tensor to another (Shoemake, Animating rotation with
    quaternion curves, 1985), both as vectors; along the line where they are parallel or one is 0."""
    norms = one.norm() * other.norm()
    cosine = float((one * other).sum() / norms) if norms > 0 else 1.0
    if abs(cosine) > _PARALLEL:
        return torch.lerp(one, other, share)
    angle = math.acos(cosine)
    return (math.sin((1 - share) * angle) * one + math.sin(share * angle) * other) / math.sin(angle)


def slerp_weights(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], scales: Sequence[float], share: float
) -> list[float]:
    """The weights of two adapters' changes B A whose sum is the point at `share` of the way along the arc between
    these. The changes, each as large as a weight of the model, are not computed."""
    one, other = pairs
    norms = math.sqrt(_inner(one, one) * _inner(other, other))
    cosine = _inner(one, other) / norms * math.copysign(1.0, scales[0] * scales[1]) if norms > 0 else 1.0
    factors = [1 - share, share]
    if abs(cosine) <= _PARALLEL:
        angle = math.acos(cosine)
        factors = [math.sin(factor * angle) / math.sin(angle) for factor in factors]
    return [factor * scale for factor, scale in zip(factors, scales, strict=True)]


def _inner(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The sum of the products of two changes' values."""
    (a, b), (c, d) = ((a.double(), b.double()) for a, b in (one, other))
    return float(((b.T @ d) * (a @ c.T)).sum())


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Random numbers that depend on the seed and the weight's name only, while this is open."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        yield


def shares_of(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
