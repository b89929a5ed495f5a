"""On-policy distillation (arXiv:2306.13649): the model answers prompts, and learns a teacher's view of its own answers.

TRL's DistillationTrainer keeps batches in a buffer of its own, which a checkpoint does not hold, and divides by the
tokens of a micro batch's answers where it has no count. Here an optimizer step answers the prompts of its rows
(`recipes.trainer.answering`), and the loss is the mean over all tokens of its answers. The losses are TRL's, on given
answers (tests/process/test_on_policy_distillation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ...specs.answer_rows import RowsOnDemand
from ...specs.events import RolloutAnswer
from ...specs.job import JobSpec
from ...specs.methods import DistillationSpec
from ..distributed import ranks
from ..model.fsdp import is_sharded
from .answering import AnswersPrompts
from .divergence import Divergence, head_of
from .reference import load_reference
from .rollouts import is_reported, rolled_out
from .trl_patches import fuse_head


class DistillationRecipe(AnswersPrompts):
    """Trains on one answer to each prompt. Datasets have the columns prompt_ids and row."""

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        assert isinstance(spec.method, DistillationSpec)
        self._method = spec.method
        super().__init__(spec=spec, sampling=spec.method, **arguments)
        fuse_head(self.policy, outputs=("log_probs",))
        self.ref_model = load_reference(self)
        # A student may have more rows of embeddings than its teacher, which reads the answers.
        self.answer_vocabulary = self.ref_model.get_input_embeddings().weight.shape[0]

    def collate_answers(self, batches: list[dict[str, Any]], answers: list[list[list[int]]]) -> int:
        ends = self._ends()
        self._report_rollout(batches, answers)
        of_rank = [ids for of_batch in answers for ids in of_batch]
        own = [len(of_rank), sum(map(len, of_rank)), sum(ids[-1] not in ends for ids in of_rank)]
        number, tokens, unended = (sum(counts) for counts in zip(*ranks.gather_all(own), strict=True))
        of_answers = {"completions/mean_length": tokens, "completions/clipped_ratio": unended}
        self.add_metrics(
            {name: torch.tensor(float(total), device=self.args.device) for name, total in of_answers.items()},
            torch.tensor(float(number), device=self.args.device),
        )
        for inputs, ids in zip(batches, answers, strict=True):
            prompts = inputs["prompts"]
            inputs.clear()
            inputs.update(self._collated(prompts, ids))
        return tokens

    def _report_rollout(self, batches: Sequence[dict[str, Any]], answers: Sequence[list[list[int]]]) -> None:
        """Report the answer to the first prompt of the optimizer step, at some of the steps."""
        step, total = self.state.global_step + 1, self.state.max_steps
        first = next((number for number, inputs in enumerate(batches) if inputs["rows"]), None)
        if first is None or not is_reported(step, total) or not self.accelerator.is_main_process:
            return
        row, ids = batches[first]["rows"][0], answers[first][0]
        text = self.processing_class.decode(ids, skip_special_tokens=True)
        answer = RolloutAnswer(text=text, tokens=len(ids), complete=ids[-1] in self._ends())
        messages = self._rows.checked(row).messages
        self._writer.write(rolled_out(step, step * self.spec.train.n_epochs / total, row, messages, [answer]))

    @cached_property
    def _rows(self) -> RowsOnDemand:
        return RowsOnDemand(self.spec.data.dataset.path, (), self.spec.data.dataset.names, were_read=True)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The divergence of a micro batch's answers, divided so that Trainer's mean over micro steps and ranks is the
        step's."""
        mask = inputs["completion_mask"][:, 1:]
        divergence = Divergence(self._method.beta, self._method.temperature, mask.flatten() != 0)
        with self.as_reference() as teacher:
            forward = self._batches.forward_arguments(teacher, inputs)
            head = head_of(lambda: teacher(**forward), copied=is_sharded(self.spec))
        with divergence.in_head(head):
            loss = self.loss_in_head(model, inputs, max(1, self._tokens_of_step))
        entropy, count = self.accelerator.reduce(torch.stack([divergence.entropy, mask.sum().float()]))
        self.add_metrics({"entropy": entropy}, count)
        return loss

    def loss_in_head(self, model: Any, inputs: dict[str, torch.Tensor], count: int) -> torch.Tensor:
        """The sum of what the head gives for the answers' tokens, in a micro batch, divided by `count`, that of the
        optimizer step. A collective."""
        mask = inputs["completion_mask"][:, 1:]
        outputs = model(**self._batches.forward_arguments(self.model, inputs), **self.router_arguments())
        loss: torch.Tensor = (outputs.log_probs * mask).sum() * self._parts / count
        self._count_tokens(inputs, mask)
        return self.balanced(loss, outputs)
