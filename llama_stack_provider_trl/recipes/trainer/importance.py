"""Corrects the loss of answers that another program has chosen: its log-probabilities of their tokens differ from those
of training. The arithmetic and the metrics are those of TRL's GRPOTrainer (tests/process/test_grpo_vllm.py)."""

from __future__ import annotations

import torch

from ...specs.methods import VllmSpec


class Correction:
    """The ratios of an optimizer step."""

    def __init__(self, spec: VllmSpec) -> None:
        self._spec = spec
        self._differences: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []
        self.micro_batches = 0

    def ratios(self, log_probs: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the losses of a micro batch are multiplied by, shape (answers, tokens) or (answers, 1).

        Args:
            log_probs: of training, shape (answers, tokens).
            sampling: of the program that chose the tokens; NaN, where it has none: not corrected.
            mask: 1 for the answers' tokens.
        """
        real, differences = mask.bool(), log_probs.detach() - sampling
        known = torch.nan_to_num(differences * mask, nan=0.0)
        is_whole = self._spec.importance_sampling_mode.startswith("sequence")
        found = self._bounded(torch.exp(known.sum(dim=1, keepdim=True) if is_whole else known))
        self._differences.append(differences.abs()[real & ~differences.isnan()])
        self._ratios.append(found[real.any(dim=1)].flatten() if is_whole else found[real])
        self.micro_batches += 1
        return found

    def metrics(self) -> dict[str, torch.Tensor]:
        """Of all micro batches, by TRL's names."""
        differences = _summary(torch.cat(self._differences))
        ratios = _summary(torch.cat(self._ratios))
        return {
            **{f"sampling/sampling_logp_difference/{name}": differences[name] for name in ("mean", "max")},
            **{f"sampling/importance_sampling_ratio/{name}": ratios[name] for name in ("min", "mean", "max")},
        }

    def _bounded(self, ratios: torch.Tensor) -> torch.Tensor:
        most, least = self._spec.importance_sampling_clip_max, self._spec.importance_sampling_clip_min
        if self._spec.importance_sampling_mode.endswith("truncate"):
            return ratios.clamp(min=least, max=most)
        is_beyond = ratios > most
        if least is not None:
            is_beyond |= ratios < least
        return ratios.masked_fill(is_beyond, 0.0)


def _summary(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """0 of no values, as in TRL."""
    some = values if len(values) else values.new_zeros(1)
    return {"min": some.min(), "mean": some.mean(), "max": some.max()}
