"""Direct Preference Optimization on TRL's DPOTrainer, with a loss of our own.

TRL's trainer has the fused head and the collator. The loss is ours, because TRL's has no `reward_scale` and no
`reward_clip`, which are request fields. Without them it gives TRL's numbers (tests/process/test_recipes.py compares the
two step by step).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...specs.job import DpoSpec, JobSpec
from .pairs import PairRecipe, real_pairs, reward_metrics
from .reference import is_needed, load_reference, precomputes
from .scoring import ScoresReference


def preference_loss(logratios: torch.Tensor, lengths: torch.Tensor, spec: DpoSpec) -> torch.Tensor:
    """Loss of each pair, shape (pairs,).

    Args:
        logratios: log pi(completion|prompt) - log pi_ref(completion|prompt), summed over the completion's tokens; the
            chosen completions first, then the rejected ones in the same order, shape (2 * pairs,).
        lengths: completion tokens, same shape; `ipo` averages by them, and pairs without any count in no mean.
        spec: margin = clip(reward_scale * beta * (chosen - rejected), +-reward_clip); `sigmoid` is eq. 7 of
            arXiv:2305.18290, with label_smoothing the conservative loss (Mitchell, A note on DPO with noisy
            preferences), `hinge` is SLiC (arXiv:2305.10425), `ipo` eq. 17 of arXiv:2310.12036 per token,
            `kto_pair` eq. 7 of the HALOs report on which arXiv:2402.01306 is based.
    """
    if spec.loss_type == "ipo":
        chosen, rejected = (logratios / lengths.clamp(min=1)).chunk(2)
        return (chosen - rejected - 1 / (2 * spec.beta)) ** 2
    chosen, rejected = logratios.chunk(2)
    if spec.loss_type == "kto_pair":
        return _kto_pair(chosen, rejected, real_pairs(lengths), spec)
    margin = _margin(chosen - rejected, spec)
    if spec.loss_type == "hinge":
        return torch.relu(1 - margin)
    smoothing = spec.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _kto_pair(chosen: torch.Tensor, rejected: torch.Tensor, real: torch.Tensor, spec: DpoSpec) -> torch.Tensor:
    """KTO on pairs as TRL first published it (0.7 releases): the mean of the losses of a pair's two completions.

    The KL divergence from the reference is estimated by the mean log-ratio, not below 0, over the pairs given: for a
    chosen completion from the rejected half and the other way round. It has a gradient, as it had there. At the first
    step it is 0 except for rounding, which decides whether its gradient counts.
    """
    num_pairs = real.sum().clamp(min=1)
    chosen_kl = ((chosen * real).sum() / num_pairs).clamp(min=0)
    rejected_kl = ((rejected * real).sum() / num_pairs).clamp(min=0)
    of_chosen = 1 - torch.sigmoid(_margin(chosen - rejected_kl, spec))
    of_rejected = 1 - torch.sigmoid(_margin(chosen_kl - rejected, spec))
    return (of_chosen + of_rejected) / 2


def _margin(difference: torch.Tensor, spec: DpoSpec) -> torch.Tensor:
    margin = spec.reward_scale * spec.beta * difference
    return margin if spec.reward_clip is None else margin.clamp(-spec.reward_clip, spec.reward_clip)


class DpoRecipe(ScoresReference, PairRecipe):
    """DPO whose reference is the base model: a frozen copy, or under LoRA the model with its adapter switched off, or
    as it was in the beginning where that was trained before.
    """

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        super().__init__(spec=spec, **arguments)
        if is_needed(spec) and not precomputes(spec):
            self.ref_model = load_reference(self)

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> torch.Tensor:
        with self.scoring():
            outputs = model(**self._batches.forward_arguments(self.model, inputs), **self.router_arguments())
        logps = self._batches.log_probs(outputs, inputs)
        logratios = logps - self.reference_logps(inputs)
        lengths = self._batches.lengths(inputs)
        real = real_pairs(lengths)
        losses = self._losses(logratios, lengths) * real
        num_pairs = self.over_ranks(real.sum())
        if self.model.training:
            # The mean over the pairs of the whole step, for any batch plan. Gradients are averaged over ranks and
            # micro steps afterwards.
            averaged = self.accelerator.num_processes * self.current_gradient_accumulation_steps
            loss = losses.sum() * averaged / self.rows_of_step
        else:
            loss = losses.sum() * self.accelerator.num_processes / num_pairs.clamp(min=1)
            self.add_evaluation(losses.sum(), real.sum())
        self.add_source_losses(losses, real, inputs.get("sources"))
        loss = self.balanced(loss, outputs)
        num_tokens = (self._batches.num_tokens(inputs) * real).sum()
        self._note(logps.detach(), logratios.detach(), real, num_pairs, num_tokens)
        return loss

    def _losses(self, logratios: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Loss of each pair of this rank, shape (pairs,)."""
        spec, ranks = self.spec.method, self.accelerator.num_processes
        assert isinstance(spec, DpoSpec)
        if spec.loss_type != "kto_pair" or ranks == 1:
            return preference_loss(logratios, lengths, spec)
        # Its means are over the pairs of all ranks, so this rank's log-ratios occur in the losses of other ranks. The
        # gradient of those losses is added here, their value is not.
        all_lengths = self._of_all_ranks(lengths)
        losses = preference_loss(self._of_all_ranks(logratios), all_lengths, spec) * real_pairs(all_lengths)
        own, real = losses.chunk(ranks)[self.accelerator.process_index], real_pairs(lengths)
        others = losses.sum() - own.sum()
        return own + (others - others.detach()) * real / real.sum().clamp(min=1)

    def _of_all_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values, shape (2 * pairs,), chosen first, from all ranks. Only this rank's have a gradient."""
        mine = values.view(2, -1).T
        parts = list(self.accelerator.gather(mine.detach().contiguous()).chunk(self.accelerator.num_processes))
        parts[self.accelerator.process_index] = mine
        return torch.cat(parts).T.reshape(-1)

    def reference_logps(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """log pi_ref(completion|prompt) of a collated batch, chosen then rejected, shape (2 * pairs,)."""
        if "ref_chosen_logps" in inputs:
            return torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        return self.score_reference(inputs)

    def _note(
        self,
        logps: torch.Tensor,
        logratios: torch.Tensor,
        real: torch.Tensor,
        num_pairs: torch.Tensor,
        num_tokens: torch.Tensor,
    ) -> None:
        method = self.spec.method
        scale = method.reward_scale * method.beta if isinstance(method, DpoSpec) else 1.0
        values = reward_metrics(scale * logratios)
        values["logps/chosen"], values["logps/rejected"] = logps.chunk(2)
        sums = torch.stack([(value * real).sum() for value in values.values()] + [num_tokens.float()])
        *sums, all_tokens = self.over_ranks(sums)
        self.add_metrics(dict(zip(values, sums, strict=True)), num_pairs)
        if self.model.training:
            self.add_tokens(all_tokens.long())
