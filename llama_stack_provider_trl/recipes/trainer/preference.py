"""Preference methods without a reference model: ORPO, and CPO with SimPO.

TRL has trainers for them in `trl.experimental`. These take means over the tokens of a micro batch, so that their
numbers depend on the number of ranks. The losses here are ours, on the trainer and the batches that DPO has, with means
over the pairs and the tokens of a whole optimizer step: TRL's numbers in one process without accumulation
(tests/process/test_methods.py).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from ...specs.job import JobSpec
from ...specs.methods import CpoSpec, OrpoSpec
from ..fast.batches import FlatPairs
from ..fast.layout import moved
from .pairs import PaddedPairs, PairRecipe, WholePairs, real_pairs

_LN_HALF = -0.6931471805599453


def odds_ratio_loss(log_probs: torch.Tensor, spec: OrpoSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """ORPO's loss of each pair beside the chosen sequence's own, shape (pairs,), and what is reported of it.

    Args:
        log_probs: means over an answer's tokens, chosen then rejected, below 0, shape (2 * pairs,).
    """
    log_odds = log_probs - _log1mexp(log_probs)
    chosen, rejected = log_odds.chunk(2)
    ratio = F.logsigmoid(chosen - rejected)
    return -spec.beta * ratio, {"log_odds_ratio": ratio, "log_odds_chosen": chosen - rejected}


def contrastive_loss(log_probs: torch.Tensor, spec: CpoSpec) -> torch.Tensor:
    """CPO's or SimPO's loss of each pair beside the chosen answer's own, shape (pairs,).

    Args:
        log_probs: of answers, chosen then rejected, shape (2 * pairs,); `ipo` and `simpo`: means over their tokens.
    """
    chosen, rejected = log_probs.chunk(2)
    if spec.loss_type == "ipo":
        return (chosen - rejected - 1 / (2 * spec.beta)) ** 2
    margin = spec.beta * (chosen - rejected)
    if spec.loss_type == "hinge":
        return torch.relu(1 - margin)
    if spec.loss_type == "simpo":
        margin = margin - spec.gamma
    smoothing = spec.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation. Each branch gets values of its own range, since a gradient that
    is infinite would be NaN behind `where`."""
    small, large = torch.log(-torch.expm1(x.clamp(min=_LN_HALF))), torch.log1p(-torch.exp(x.clamp(max=_LN_HALF)))
    return torch.where(x < _LN_HALF, large, small)


class ReferenceFreeRecipe(PairRecipe):
    """The loss of each pair from its answers' log-probabilities, plus a weight times that of the chosen tokens."""

    averages: bool
    """Log-probabilities of answers are means over their tokens."""
    chosen_weight: float
    """Weight of the mean negative log-probability of the chosen sequences' tokens."""
    reward_factor: float
    """Of the log-probabilities that are reported as rewards."""
    _chosen_tokens_of_step: torch.Tensor | None = None

    @abstractmethod
    def pair_losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of each pair, shape (pairs,), and further metrics of each.

        Args:
            log_probs: of the answers, chosen then rejected, below 0, shape (2 * pairs,).
            lengths: their tokens, at least 1, same shape.
        """

    def _checked_losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.pair_losses(log_probs, lengths)

    def chosen_log_probs(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the tokens that `chosen_tokens` counts, per pair, shape (pairs,)."""
        return self._batches.log_probs(outputs, inputs).chunk(2)[0]

    def chosen_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Tokens of each chosen sequence whose own loss counts, shape (pairs,); of a filler 0."""
        return self._batches.lengths(inputs).chunk(2)[0]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self.chosen_weight:
            counts = [self.chosen_tokens(inputs).sum() for inputs in batch_samples]
            self._chosen_tokens_of_step = self.accelerator.reduce(moved(torch.stack(counts).sum(), device))
        return super()._get_num_items_in_batch(batch_samples, device)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> torch.Tensor:
        with self.scoring():
            outputs = model(**self._batches.forward_arguments(self.model, inputs), **self.router_arguments())
        lengths = self._batches.lengths(inputs)
        real = real_pairs(lengths)
        logps = self._batches.log_probs(outputs, inputs).float()
        if self.averages:
            logps = logps / lengths.clamp(min=1)
        # A filler has no answers: any log-probability below 0 keeps its gradient, which counts 0 times, finite.
        losses, metrics = self._checked_losses(logps.where(real.repeat(2) > 0, -1.0), lengths.clamp(min=1))
        losses = losses * real
        chosen_loss, chosen_tokens = -self.chosen_log_probs(outputs, inputs).sum(), self.chosen_tokens(inputs).sum()
        num_pairs, all_tokens = self.accelerator.reduce(torch.stack([real.sum(), chosen_tokens.float()]))
        ranks, weight = self.accelerator.num_processes, self.chosen_weight
        if self.model.training:
            # Means over the pairs and tokens of the whole step, for any batch plan. Gradients are averaged over ranks
            # and micro steps afterwards.
            loss = losses.sum() / self.rows_of_step
            if weight and self._chosen_tokens_of_step is not None:
                loss = loss + weight * chosen_loss / self._chosen_tokens_of_step.clamp(min=1)
            loss = loss * ranks * self.current_gradient_accumulation_steps
        else:
            loss = ranks * (losses.sum() / num_pairs.clamp(min=1) + weight * chosen_loss / all_tokens.clamp(min=1))
            self.add_evaluation(losses.sum(), real.sum())
            self.add_evaluation(weight * chosen_loss, chosen_tokens, part="chosen")
        loss = self.balanced(loss, outputs)
        self._note(logps.detach(), {name: value.detach() for name, value in metrics.items()}, real, num_pairs)
        sums = torch.stack([chosen_loss.detach().float(), (self._batches.num_tokens(inputs) * real).sum().float()])
        all_chosen, num_tokens = self.accelerator.reduce(sums)
        self.add_metrics({"nll_loss": all_chosen}, all_tokens)
        if self.model.training:
            self.add_tokens(num_tokens.long())
        return loss

    def _note(
        self, logps: torch.Tensor, metrics: dict[str, torch.Tensor], real: torch.Tensor, num_pairs: torch.Tensor
    ) -> None:
        chosen, rejected = logps.chunk(2)
        values = {
            "rewards/chosen": self.reward_factor * chosen,
            "rewards/rejected": self.reward_factor * rejected,
            "rewards/margins": self.reward_factor * (chosen - rejected),
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            **metrics,
        }
        sums = self.accelerator.reduce(torch.stack([(value * real).sum() for value in values.values()]))
        self.add_metrics(dict(zip(values, sums, strict=True)), num_pairs)


class OrpoRecipe(ReferenceFreeRecipe):
    """The chosen sequence's loss covers its prompt too, as in TRL and in the authors' code."""

    averages = True
    chosen_weight = 1.0

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        assert isinstance(spec.method, OrpoSpec)
        self._orpo, self.reward_factor = spec.method, spec.method.beta
        super().__init__(spec=spec, **arguments)

    def batches(self, spec: JobSpec) -> FlatPairs | PaddedPairs:
        return WholePairs(spec)

    def chosen_log_probs(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return outputs.log_probs.chunk(2)[0].sum(dim=1) * real_pairs(self._batches.lengths(inputs))

    def chosen_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        tokens = inputs["attention_mask"][:, 1:].sum(dim=1).chunk(2)[0]
        return tokens * real_pairs(self._batches.lengths(inputs)).long()

    def pair_losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return odds_ratio_loss(log_probs, self._orpo)


class CpoRecipe(ReferenceFreeRecipe):
    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        assert isinstance(spec.method, CpoSpec)
        self._cpo, self.chosen_weight, self.reward_factor = spec.method, spec.method.alpha, spec.method.beta
        self.averages = spec.method.loss_type in ("ipo", "simpo")
        super().__init__(spec=spec, **arguments)

    def pair_losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return contrastive_loss(log_probs, self._cpo), {}
