"""Metrics of training and evaluation: sums over all ranks, divided when they are logged.

A mean of the batches' means would depend on the batch plan. Sums stay tensors until then, so that no step waits for the
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..distributed import ranks
from .job_trainer import JobTrainer

type Mode = Literal["train", "eval"]


class TrainingMetrics(JobTrainer):
    evaluation_sums: dict[str, list[torch.Tensor]]
    """Sum and count of each batch of an evaluation, by part of the loss."""
    kept_metrics: dict[str, list[torch.Tensor]] | None = None
    """Not None: sum and count of each batch are kept here, by metric."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_tokens: Any = 0
        """Tokens that were trained on, of all ranks: a number or a tensor."""
        self._own_tokens = torch.zeros((), dtype=torch.float64)
        """With periodic averaging, this rank's tokens that are not in `num_tokens` yet."""
        self._sums: dict[Mode, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        """By metric: sum and count."""

    @property
    def _mode(self) -> Mode:
        return "train" if self.model.training else "eval"

    def over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks. A collective; in training with periodic averaging this rank's own ones, which are summed
        over the ranks when they are logged."""
        if self.outer and self.model.training:
            return sums
        return self.accelerator.reduce(sums)

    def add_tokens(self, count: torch.Tensor) -> None:
        """Add tokens, summed by `over_ranks`, to those that were trained on."""
        if self.outer:
            self._own_tokens = self._own_tokens.to(count.device) + count
        else:
            self.num_tokens += count

    def add_metrics(self, sums: Mapping[str, torch.Tensor], count: torch.Tensor) -> None:
        """Add a batch of all ranks to the metrics.

        Args:
            sums: by metric, over `count` tokens or pairs.
        """
        sums_by_metric = self._sums[self._mode]
        for name, total in sums.items():
            of_batch = torch.stack([total.float(), count.float()])
            sums_by_metric[name] = sums_by_metric.get(name, 0) + of_batch
            if self.kept_metrics is not None:
                self.kept_metrics.setdefault(name, []).append(of_batch)

    def means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The metrics that are logged."""
        return {name: float(total / count.clamp(min=1)) for name, (total, count) in sums.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        if mode == "train" and self.outer:
            logs = self._sum_logged(logs)
        means = self.means(self._sums[mode])
        self._sums[mode].clear()
        if mode == "eval":  # into the caller's: Trainer's callbacks get those of an evaluation
            logs.update({f"eval_{name}": value for name, value in means.items()})
        else:
            logs.update(means, num_tokens=float(self.num_tokens))
        super().log(logs, start_time)

    def sum_tokens(self) -> None:
        """With periodic averaging, add what each rank has counted to `num_tokens`. A collective."""
        self._sum_logged({})

    def _sum_logged(self, logs: dict[str, float]) -> dict[str, float]:
        """Sum over the ranks what each has counted on its own since the last call. A collective. Returns the logs, with
        the mean of the gradients' norms and the bytes of the outer steps."""
        sums = self._sums["train"] if logs else {}
        norm = torch.as_tensor(logs.get("grad_norm", 0.0))
        values = [self._own_tokens, norm, *(part for pair in sums.values() for part in pair)]
        own = torch.stack([value.to(self.args.device, torch.float64) for value in values])
        tokens, norms, *parts = self.accelerator.reduce(own)
        self.num_tokens += tokens.long()
        self._own_tokens = torch.zeros_like(tokens)
        for number, name in enumerate(sums):
            sums[name] = torch.stack(parts[2 * number : 2 * number + 2])
        summed = dict(logs)
        if "grad_norm" in summed:
            summed["grad_norm"] = float(norms) / ranks.world_size()
        if "loss" in summed and self.outer:
            summed["exchanged_bytes"] = float(self.outer.take_bytes())
        return summed

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with `eval_loss` as the mean over all tokens (SFT) or pairs (DPO). Trainer takes the mean of the
        batches' means, which depends on the batches."""
        self.evaluation_sums = {}
        output = super().evaluation_loop(*args, **kwargs)
        sums = torch.stack([torch.stack(batches).sum(dim=0) for batches in self.evaluation_sums.values()])
        totals, counts = self.accelerator.reduce(sums).unbind(dim=1)
        output.metrics["eval_loss"] = float((totals / counts.clamp(min=1)).sum())
        return output

    def add_evaluation(self, loss: torch.Tensor, count: torch.Tensor, part: str = "") -> None:
        """Add a batch to the running evaluation: the sum of the losses of `count` tokens or pairs.

        Args:
            part: of a loss with several parts, whose means are added.
        """
        batches = self.evaluation_sums.setdefault(part, [])
        batches.append(torch.stack([loss.detach().float(), count.float()]))
