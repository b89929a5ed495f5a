"""Supervised fine-tuning on TRL's SFTTrainer, over rows that `recipes.data.prepare` tokenized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from trl import SFTTrainer

from ...specs.job import JobSpec
from ..data.images import Images
from ..data.tables import IMAGES
from ..distributed.workers import Workers
from ..fast.batches import collate_rows, forward_arguments
from ..fast.context_parallel import collate_share
from ..fast.layout import moved
from ..model.attention import passes_padding_mask
from .base import RecipeTrainer


def in_one_sequence(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Packed sequences, each tensor of shape (sequences, tokens), as one of shape (1, sequences * tokens).

    Position ids restart in every row, also of the next sequence, and the first token of a row has no label. Flash
    kernels get the boundaries of rows; otherwise transformers finds them in each block, and waits for the GPU there.
    """
    flat = {name: value.reshape(1, -1) if value.dim() == 2 else value for name, value in inputs.items()}
    positions = flat["position_ids"][0]
    starts = (positions == 0).nonzero().flatten()
    boundaries = torch.cat([starts, starts.new_tensor([len(positions)])]).int()
    longest = int(boundaries.diff().max())
    lengths = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    return {**flat, **lengths, "max_length_q": longest, "max_length_k": longest}


def collate_images(images: Images, collate: Callable[[Any], dict[str, Any]], rows: Sequence[Any]) -> dict[str, Any]:
    """A batch of rows with the column `IMAGES`: the inputs of `collate`, and the features of their images, which are
    decoded here."""
    inputs = collate([{name: value for name, value in row.items() if name != IMAGES} for row in rows])
    features = images.features([row[IMAGES] for row in rows], inputs["input_ids"].tolist())
    return {**inputs, **features}


def _collator(spec: JobSpec) -> Callable[[Sequence[Any]], dict[str, Any]] | None:
    """What collates rows without padding; None: batches are padded."""
    if spec.context_parallel_size > 1:
        size = spec.context_parallel_size
        return partial(collate_share, size, Workers(size).position)
    return collate_rows if spec.compute.padding_free else None


class SftRecipe(RecipeTrainer, SFTTrainer):
    """Computes the token-level cross entropy over the whole (accumulated) batch: TRL's loss and numbers.

    Datasets have the columns input_ids and labels; -100 is outside the loss. Packed ones also have seq_lengths.
    """

    head_outputs = ("log_probs", "is_top1")

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        super().__init__(spec=spec, data_collator=_collator(spec), **arguments)
        if not spec.compute.padding_free:
            self.data_collator.return_position_ids = spec.data.packed
        if spec.data.has_images:
            self.data_collator = partial(collate_images, Images(spec.source), self.data_collator)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the negative log-probabilities of the trained tokens, over `num_items_in_batch` of them."""
        sources, scored = inputs.pop("sources", None), inputs.pop("scored_tokens", ())
        with self.scoring():
            outputs = model(**self.forward_arguments(inputs, self.model), **self.router_arguments())
        trained = outputs.label_mask.sum()
        count = trained if num_items_in_batch is None else num_items_in_batch
        losses = self.losses_of_tokens(outputs)
        summed = losses.sum()
        loss = summed / torch.as_tensor(count).clamp(min=1)
        if num_items_in_batch is not None:
            loss = loss * self.workers.size  # the count is over all ranks whose gradients are averaged
        loss = self.balanced(
            loss, outputs, 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
        )
        if not self.model.training:
            self.add_evaluation(summed, trained)
        if sources is not None:
            self.add_source_losses(*self._losses_of_rows(losses, outputs.label_mask, scored), sources)
        self._note(torch.stack([outputs.is_top1.sum(), trained, self._num_tokens(inputs, outputs)]))
        return loss

    def losses_of_tokens(self, outputs: Any) -> torch.Tensor:
        """Loss of each token, 0 where it covers none, in the shape of the log-probabilities."""
        return -outputs.log_probs

    def _losses_of_rows(
        self, losses: torch.Tensor, mask: torch.Tensor, scored: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses of each row's trained tokens, and their number, each of shape (rows,).

        Args:
            mask: which of them are trained, same shape.
        """
        counts = moved(torch.tensor(scored), losses.device)
        if self.spec.compute.padding_free:
            of_tokens = losses[0, : sum(scored)]
        elif len(losses) == len(scored):
            return losses.sum(dim=1), counts
        else:  # packed sequences, which flash kernels get as one
            of_tokens = losses[mask]
        return torch.stack([part.sum() for part in of_tokens.split(list(scored))]), counts

    def forward_arguments(self, inputs: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
        if self.spec.compute.padding_free:
            return forward_arguments(inputs)
        # Without an attention mask transformers separates the rows of a packed sequence by their positions, and takes
        # each padding token for a row.
        has_mask = self.spec.data.has_images or passes_padding_mask(self.spec, model, self.args.device.type)
        if self.spec.data.packed or not has_mask:
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        if self.spec.data.packed and self.spec.uses_flash_kernels:
            inputs = in_one_sequence(inputs)
        return {**inputs, "use_cache": False, "fused_lm_head": True}

    def _num_tokens(self, inputs: dict[str, Any], outputs: Any) -> torch.Tensor:
        """Tokens of the batch, padding and fillers left out."""
        if self.spec.compute.padding_free:
            return inputs["num_tokens"]
        fillers = ~outputs.label_mask.any(dim=1, keepdim=True)
        return inputs["attention_mask"].masked_fill(fillers, 0).sum()

    def _note(self, counts: torch.Tensor) -> None:
        hits, trained, num_tokens = self.over_ranks(counts.detach())
        self.add_metrics({"mean_token_accuracy": hits}, trained)
        if self.model.training:
            self.add_tokens(num_tokens)
