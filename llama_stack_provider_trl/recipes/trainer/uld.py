"""Universal logit distillation (arXiv:2402.12030), and its hybrid form: how far a model's distributions of spans of
text are from those of a teacher with another vocabulary.

The losses are those of TRL's ULDLoss with the strategy `bayesian` (tests/process/test_uld.py). That copies a whole
gradient for every span, and holds the probabilities of all tokens; here a few spans are computed at a time, and again
in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ...specs.methods import UldSpec
from ..fast.head import Head
from .alignment import Span

TILE_BYTES = 32 << 20
"""Logits that are computed at a time, of one model; those of a long span may be more."""
_SMALLEST = 1e-8
"""Probabilities below it count as this: TRL's bound."""


@dataclass(frozen=True)
class Vocabularies:
    """The tokens of a model and of its teacher."""

    sizes: tuple[int, int]
    """Rows of the embeddings; those beyond the tokens are compared too, as TRL does, by their rank."""
    shared: tuple[torch.Tensor, torch.Tensor] | None = None
    """Numbers of the tokens of both, in each; None: they are not compared as they are."""
    rests: tuple[torch.Tensor, torch.Tensor] | None = None
    """The other numbers."""

    @staticmethod
    def of(sizes: tuple[int, int], pairs: Sequence[tuple[int, int]], device: torch.device) -> Vocabularies:
        """Those that share the tokens of `pairs`."""
        shared = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        rests = (sorted(set(range(size)).difference(used)) for size, used in zip(sizes, shared, strict=True))
        own, theirs, own_rest, their_rest = (
            torch.tensor(numbers, dtype=torch.long, device=device) for numbers in (*shared, *rests)
        )
        return Vocabularies(sizes, (own, theirs), (own_rest, their_rest))


@dataclass(frozen=True)
class Side:
    head: Head
    tokens: torch.Tensor
    """Their numbers, shape (tokens,)."""
    temperature: float


class UniversalDistance:
    """The distance of two models for spans of text.

    Args:
        beta: of the generalized Jensen-Shannon divergence of tokens of both vocabularies.
        counting: opened around what is computed of logits.
    """

    def __init__(
        self,
        spec: UldSpec,
        beta: float,
        vocabularies: Vocabularies,
        counting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._spec, self._beta, self._vocabularies, self._counting = spec, beta, vocabularies, counting

    def between(self, own: Side, teacher: Side, spans: Sequence[Span]) -> torch.Tensor:
        """Shape (3, spans): the distance of each, and its parts: of tokens of both vocabularies, and of the others.

        Args:
            spans: by the numbers of the tokens of the sides, in their order.
        """
        most = max(1, TILE_BYTES // (4 * max(self._vocabularies.sizes)))
        # Connected with the model where there is none, too: a rank with fillers only goes through its backward.
        tiles = _tiles(spans, most) or [[]]
        return torch.cat([self._tile(own, teacher, tile) for tile in tiles], dim=1)

    def _tile(self, own: Side, teacher: Side, spans: Sequence[Span]) -> torch.Tensor:
        pairs = [[span[:2] for span in spans], [span[2:] for span in spans]]
        (rows, of_own), (their_rows, of_teacher) = (_within(of, own.head.hidden.device) for of in pairs)
        other = teacher.head.hidden[their_rows]

        def compute(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            with self._counting():
                one = of_own.merged(_probabilities(own, hidden, weight, bias), own.tokens[rows])
                with torch.no_grad():
                    head = teacher.head
                    found = _probabilities(teacher, other, head.weight, head.bias)
                    two = of_teacher.merged(found, teacher.tokens[their_rows])
                return self._distance(one, two)

        return checkpoint(
            compute,
            own.head.hidden[rows],
            own.head.weight,
            own.head.bias,
            use_reentrant=False,
            preserve_rng_state=False,
        )

    def _distance(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        shared, rests = self._vocabularies.shared, self._vocabularies.rests
        if shared is None or rests is None:
            found = _by_rank(one, two)
            return torch.stack([found, torch.zeros_like(found), found.detach()])
        matched = _divergence(one.index_select(1, shared[0]), two.index_select(1, shared[1]), self._beta)
        if len(rests[0]) and len(rests[1]):
            unmatched = _by_rank(one.index_select(1, rests[0]), two.index_select(1, rests[1]))
        else:
            unmatched = torch.zeros_like(matched)
        weights = self._spec.matched_weight, self._spec.unmatched_weight
        if weights[0] is None or weights[1] is None:
            share = len(shared[1]) / self._vocabularies.sizes[1]
            weights = share, 1.0 - share
        total = weights[0] * matched + weights[1] * unmatched
        return torch.stack([total, matched.detach(), unmatched.detach()])


@dataclass(frozen=True)
class _Merge:
    """How the tokens of spans become one distribution for each, by their numbers in a tile."""

    last: torch.Tensor
    """Of each span, its last token."""
    earlier: torch.Tensor | None
    """The other tokens; None: there are none."""
    owner: torch.Tensor | None
    """The span of each of those."""

    def merged(self, probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """By the chain rule: the distribution of the last token times the probabilities of the earlier ones."""
        found = probabilities[self.last]
        if self.earlier is None or self.owner is None:
            return found
        given = probabilities[self.earlier].gather(1, tokens[self.earlier][:, None])[:, 0]
        logs = given.clamp_min(_SMALLEST).log()
        factors = logs.new_zeros(len(self.last)).index_add(0, self.owner, logs).exp()
        return found * factors[:, None]


def _within(spans: Sequence[Sequence[int]], device: torch.device) -> tuple[slice, _Merge]:
    """The rows of spans, and how they are merged."""
    first = spans[0][0] if spans else 0
    rows = slice(first, spans[-1][1] if spans else 0)

    def numbers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    earlier = [(at - first, number) for number, (begin, end) in enumerate(spans) for at in range(begin, end - 1)]
    owner = numbers([number for _, number in earlier]) if earlier else None
    last = numbers([end - 1 - first for _, end in spans])
    return rows, _Merge(last, numbers([at for at, _ in earlier]) if earlier else None, owner)


def _tiles(spans: Sequence[Span], most: int) -> list[list[Span]]:
    """Spans that have at most `most` rows of each model together, or one."""
    found: list[list[Span]] = []
    for span in spans:
        first = found[-1][0] if found else span
        if found and max(span[1] - first[0], span[3] - first[2]) <= most:
            found[-1].append(span)
        else:
            found.append([span])
    return found


def _probabilities(side: Side, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Shape (rows, vocabulary), fp32."""
    head = side.head
    logits = hidden.to(head.dtype) @ weight.to(head.dtype).t()
    if bias is not None:
        logits = logits + bias.to(head.dtype)
    logits = logits.float() * head.scale
    if head.cap is not None:
        logits = torch.tanh(logits / head.cap) * head.cap
    return torch.softmax(logits / side.temperature, dim=1)


def _by_rank(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Of each row, the sum of the differences of the probabilities of the same rank."""
    size = max(one.shape[1], two.shape[1])
    ranked = (pad(each.sort(dim=1, descending=True).values, (0, size - each.shape[1])) for each in (one, two))
    return torch.stack(list(ranked)).diff(dim=0)[0].abs().sum(dim=1)


def _divergence(one: torch.Tensor, two: torch.Tensor, beta: float) -> torch.Tensor:
    """Of each row: beta 0: KL(two, one), 1: KL(one, two), between: the generalized Jensen-Shannon divergence. Rows need
    not have the sum 1."""
    own, theirs = one.clamp_min(_SMALLEST).log(), two.clamp_min(_SMALLEST).log()
    if beta == 0:
        return _kl(theirs, own)
    if beta == 1:
        return _kl(own, theirs)
    mixture = (beta * theirs.exp() + (1 - beta) * own.exp()).log()
    return beta * _kl(theirs, mixture) + (1 - beta) * _kl(own, mixture)


def _kl(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return (one.exp() * (one - two)).sum(dim=1)
