"""KTO on TRL's KTOTrainer, with a loss of our own.

TRL estimates the KL divergence over each micro batch of each rank, so that its numbers depend on how a step is divided.
Here the estimate is over the whole optimizer step: the prompts of its rows with answers of other rows of the step
(`MismatchingSampler`), scored before the first micro batch. In one process without accumulation both are the same
(tests/process/test_methods.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import Trainer
from trl import KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from ...specs.job import JobSpec
from ...specs.methods import KtoSpec
from ..data.sampling import EpochSampler, MismatchingSampler, pair_of_number
from ..fast.batches import FlatAnswers
from .pairs import PaddedPairs, set_adapter_dropout
from .reference import NoReference, is_needed, load_reference
from .scoring import ScoresReference, no_recomputation
from .trl_patches import PreparedDatasets


def kto_loss(logratios: torch.Tensor, labels: torch.Tensor, kl: torch.Tensor | float, spec: KtoSpec) -> torch.Tensor:
    """Loss of each row, shape (rows,): eq. 8 of arXiv:2402.01306; `apo_zero_unpaired` has a KL of 0.

    Args:
        logratios: log pi(answer|prompt) - log pi_ref(answer|prompt), summed over the answer's tokens, shape (rows,).
        labels: whether the answer is desirable, same shape.
        kl: the estimated KL divergence, at least 0.
    """
    margins = spec.beta * (logratios - kl)
    weights = torch.where(labels, spec.desirable_weight, spec.undesirable_weight)
    return weights * (1 - torch.sigmoid(torch.where(labels, margins, -margins)))


class PaddedAnswers(PaddedPairs):
    """The reference for `FlatAnswers`, and for models that cannot be trained on those: one answer per prompt."""

    def __init__(self, spec: JobSpec, pad_token_id: int) -> None:
        super().__init__(spec)
        self._collate = DataCollatorForUnpairedPreference(pad_token_id=pad_token_id)

    def collate(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
        batch = self._collate(
            [{"prompt_ids": prompt, "completion_ids": answer, "label": False} for prompt, answer in rows]
        )
        return {name: value for name, value in batch.items() if name != "label"}


class MismatchedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows by the numbers that `MismatchingSampler` yields, with another row's answer as `other_ids`.

    Args:
        rows: with the columns prompt_ids, completion_ids and label.
        limit: tokens of a prompt with an answer; the other answer loses its end.
    """

    def __init__(self, rows: Dataset, num_rows: int, limit: int) -> None:
        self._rows, self._num_rows, self._limit = rows, num_rows, limit

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        number_of_row, number_of_other = pair_of_number(number, self._num_rows)
        row = dict(self._rows[number_of_row])
        free = self._limit - len(row["prompt_ids"]) if row["completion_ids"] else 0
        return {**row, "other_ids": self._rows[number_of_other]["completion_ids"][:free]}


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class KtoRecipe(PreparedDatasets, ScoresReference, KTOTrainer):
    """KTO whose reference is that of DPO. Datasets have the columns prompt_ids, completion_ids and label."""

    head_outputs = ("log_probs",)

    def __init__(
        self, *, spec: JobSpec, processing_class: Any, peft_config: PeftConfig | None = None, **arguments: Any
    ) -> None:
        assert isinstance(spec.method, KtoSpec)
        self._kto = spec.method
        padding = processing_class.pad_token_id
        padding = processing_class.eos_token_id if padding is None else padding
        self._batches = FlatAnswers() if spec.compute.padding_free else PaddedAnswers(spec, padding or 0)
        self._kl_of_step = torch.zeros(())
        self._scored: list[torch.Tensor] = []
        """Of the running evaluation: log-ratios, labels and whether it is no filler, of each batch."""
        self._sources: list[int] = []
        """Of the running evaluation of a mixture: the numbers of the datasets of the rows."""
        self._kl_sums: list[torch.Tensor] = []
        """Of the running evaluation: the sum of the mismatched log-ratios of each batch, and their number."""
        if self._kto.estimates_kl:
            self.sampler_class = MismatchingSampler
        super().__init__(
            spec=spec,
            processing_class=processing_class,
            ref_model=None if peft_config else NoReference(),
            peft_config=peft_config,
            data_collator=self._collate,
            **arguments,
        )
        self.ref_model = load_reference(self) if is_needed(spec) else None
        if spec.lora:
            set_adapter_dropout(self.model, spec.lora.dropout)

    def _collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inputs of a batch, and under `mismatched` those of its prompts with other answers."""
        batch = self._batches.collate([(row["prompt_ids"], row["completion_ids"]) for row in rows])
        batch["label"] = torch.tensor([row["label"] for row in rows])
        batch["real"] = torch.tensor([float(bool(row["completion_ids"])) for row in rows])
        batch["row_tokens"] = torch.tensor([len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows])
        if self._kto.estimates_kl:
            batch["mismatched"] = self._batches.collate([(row["prompt_ids"], row["other_ids"]) for row in rows])
        return batch

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if self._kto.estimates_kl:
            dataset = MismatchedRows(dataset, self.rows_of(dataset), self.spec.data.max_seq_length)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        return super()._get_train_sampler()  # of the prepared rows, which have lengths

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self._kto.estimates_kl and batch_samples:
            sums = torch.stack([self._mismatched_sums(inputs) for inputs in batch_samples]).sum(dim=0)
            self._kl_of_step = _kl(self.accelerator.reduce(sums))
        return super()._get_num_items_in_batch(batch_samples, device)

    def _mismatched_sums(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Sum of the log-ratios of prompts with answers of other rows, and the number of these rows, shape (2,)."""
        inputs = self._prepare_inputs(inputs)
        mismatched, real = inputs["mismatched"], inputs["real"]
        forward = self._batches.forward_arguments(self.model, mismatched)
        with self._scoring_mismatched():
            logps = self._batches.log_probs(self.model(**forward), mismatched).float()
        logratios = logps - self.score_reference(mismatched)
        return torch.stack([(logratios * real).sum(), real.sum()])

    def rehearse(self, arguments: dict[str, Any], *, training: bool) -> None:
        super().rehearse(arguments, training=training)
        if training and self._kto.estimates_kl:
            with self._scoring_mismatched():
                self.model(**arguments)

    @contextmanager
    def _scoring_mismatched(self) -> Iterator[None]:
        """While this is open, forwards are those that the KL divergence is estimated by."""
        with torch.no_grad(), evaluating(self.model), no_recomputation(self.model), self._precision(), self.scoring():
            yield

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> torch.Tensor:
        with self.scoring():
            outputs = model(**self._batches.forward_arguments(self.model, inputs), **self.router_arguments())
        logps = self._batches.log_probs(outputs, inputs)
        logratios = logps - self.score_reference(inputs)
        labels, real = inputs["label"], inputs["real"]
        kl = self._kl_of_step.to(logps.device) if self.model.training else 0.0
        losses, sources = kto_loss(logratios, labels, kl, self._kto) * real, inputs.get("sources")
        loss = losses.sum()
        if self.model.training:
            self.add_source_losses(losses, real, sources)
            # The mean over the rows of the whole step, for any batch plan. Gradients are averaged over ranks and micro
            # steps afterwards.
            loss = loss * self.accelerator.num_processes * self.current_gradient_accumulation_steps / self.rows_of_step
        else:  # the loss follows when the KL divergence is known
            self._scored.append(torch.stack([logratios.detach().float(), labels.float(), real]))
            self._sources.extend(sources or ())
            if self._kto.estimates_kl:
                self._kl_sums.append(self._mismatched_sums(inputs))
        loss = self.balanced(loss, outputs)
        self._note(logps.detach(), logratios.detach(), inputs)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with `eval_loss` as the mean over all rows, whose KL divergence is estimated over all of them."""
        self._scored, self._kl_sums, self._sources = [], [], []
        output = Trainer.evaluation_loop(self, *args, **kwargs)
        kl = torch.zeros((), device=self.args.device)
        if self._kl_sums:
            kl = _kl(self.accelerator.reduce(torch.stack(self._kl_sums).sum(dim=0)))
            output.metrics["eval_kl"] = float(kl)
        logratios, labels, real = torch.cat(self._scored, dim=1)
        losses = kto_loss(logratios, labels > 0, kl, self._kto) * real
        total, count = self.accelerator.reduce(torch.stack([losses.sum(), real.sum()]))
        output.metrics["eval_loss"] = float(total / count.clamp(min=1))
        output.metrics.update(self.evaluated_sources(losses, real, self._sources or None))
        return output

    def _note(self, logps: torch.Tensor, logratios: torch.Tensor, inputs: dict[str, Any]) -> None:
        real, desirable = inputs["real"], inputs["label"].float()
        parts = {"chosen": desirable * real, "rejected": (1 - desirable) * real}
        sums = [(value * mask).sum() for mask in parts.values() for value in (self._kto.beta * logratios, logps)]
        counts = [mask.sum() for mask in parts.values()]
        tokens = (inputs["row_tokens"] * real).sum()
        *totals, num_chosen, num_rejected, num_tokens = self.accelerator.reduce(torch.stack([*sums, *counts, tokens]))
        for name, count, reward, logp in zip(parts, (num_chosen, num_rejected), totals[::2], totals[1::2], strict=True):
            self.add_metrics({f"rewards/{name}": reward, f"logps/{name}": logp}, count)
        if self.model.training:
            num_rows = num_chosen + num_rejected
            if self._kto.estimates_kl:
                self.add_metrics({"kl": self._kl_of_step * num_rows}, num_rows)
            self.add_tokens(num_tokens.long())

    def means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The metrics that are logged; those of a label that no row had are left out."""
        means = super().means({name: pair for name, pair in sums.items() if pair[1] > 0})
        if "rewards/chosen" in means and "rewards/rejected" in means:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means


def _kl(sums: torch.Tensor) -> torch.Tensor:
    """The estimated KL divergence: the mean log-ratio, at least 0."""
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0)
