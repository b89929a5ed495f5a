"""The losses. Imported where jobs are trained only."""

import torch
import torch.nn.functional as F

from llama_stack_provider_trl.recipes.trainer.custom import CustomPairTrainer, CustomRowTrainer


class RobustTrainer(CustomPairTrainer):
    """The loss of rDPO (arXiv:2403.00409, eq. 12), unbiased where `flip_rate` of the labels are wrong, on the mean
    log-probability of an answer's tokens in place of the reference's log-ratio."""

    averages = True

    def pair_losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        chosen, rejected = log_probs.chunk(2)
        margin, flipped = self.parameters.beta * (chosen - rejected), self.parameters.flip_rate
        losses = -(1 - flipped) * F.logsigmoid(margin) + flipped * F.logsigmoid(-margin)
        return losses / (1 - 2 * flipped), {"margin": margin}


class FocalTrainer(CustomRowTrainer):
    """The focal loss (arXiv:1708.02002) of each trained token: (1 - p)^gamma * -log p."""

    def token_losses(self, log_probs: torch.Tensor) -> torch.Tensor:
        # Without the floor, a power below 1 of exactly 0 would have an infinite gradient.
        unsure = -torch.expm1(log_probs.clamp(max=-1e-6))
        return unsure**self.parameters.gamma * -log_probs
