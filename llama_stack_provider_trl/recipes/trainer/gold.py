"""On-policy distillation from a teacher with another vocabulary (TRL's GOLD): spans of the answers' text are compared.

The teacher reads the prompt as its own chat template writes it, then the text of the answer. TRL's GOLDTrainer gives
it the prompt as the student's template writes it, and the student's end of an answer as text
(docs/reference/methods.md has the other differences). On the same answers the losses are TRL's.
"""

from __future__ import annotations

from typing import Any

import torch

from ...specs.events import Warned
from ...specs.job import JobSpec
from ..data.tokenizer_calls import call_tokenizer
from ..distributed import ranks
from ..fast.head import Head
from ..model.fsdp import is_sharded
from ..model.loading import vocabulary_size
from .alignment import Aligned, align
from .answering import padded_answers
from .distillation import DistillationRecipe
from .divergence import head_of
from .reference import check_pieces
from .trl_patches import computing_heads
from .uld import Side, UniversalDistance, Vocabularies

_PAD = 0
"""The teacher's token behind a sequence, which nothing attends to."""
NOTHING_COMPARED = (
    "no token of the answers of a step could be compared with the teacher's: nothing is learned from such a step. The "
    "metric completions/compared_ratio has the share of each step; where it stays 0, the teacher's tokenizer writes "
    "other text than it reads: choose another teacher"
)


class GoldRecipe(DistillationRecipe):
    """Trains on one answer to each prompt. Datasets have the columns prompt_ids, row and teacher_ids."""

    _answers_of_step = 0
    """Answers of the optimizer step at hand, of all ranks."""
    _has_warned = False
    """Whether a step was reported in which nothing was compared."""

    def __init__(self, *, spec: JobSpec, **arguments: Any) -> None:
        super().__init__(spec=spec, **arguments)
        assert self._method.uld is not None, "a teacher with the same vocabulary"
        self._uld = self._method.uld
        self.answer_vocabulary = None  # the teacher reads the answers' text
        self._own, self._theirs, self._teacher_tokenizer = check_pieces(spec, self.processing_class)
        if not self._teacher_tokenizer.chat_template:
            message = "the teacher's tokenizer has no chat template: it was given a plain one (### User: ...)"
            self._writer.write(Warned(message=message))
        sizes = vocabulary_size(spec.source), vocabulary_size(spec.reference_source)
        vocabularies = Vocabularies(sizes)
        if self._uld.hybrid:
            vocabularies = Vocabularies.of(sizes, self._own.shared_with(self._theirs), self.args.device)
        self._distance = UniversalDistance(self._uld, self._method.beta, vocabularies)

    def align(self, prompt: list[int], ids: list[int]) -> Aligned:
        """An answer as the teacher reads it."""
        return align(
            ids,
            self._own,
            self._theirs,
            self._encode,
            most=min(2 * self._most, self.spec.data.max_seq_length - len(prompt)),
            has_ended=ids[-1] in self._ends(),
            end=None if self._uld.skip_end else self._teacher_tokenizer.eos_token_id,
        )

    def _encode(self, text: str) -> list[int]:
        # The text of a special token that an answer has spelled out is text.
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return call_tokenizer(self._teacher_tokenizer, [text], **options)["input_ids"][0]

    def collate_answers(self, batches: list[dict[str, Any]], answers: list[list[list[int]]]) -> int:
        prompts = [inputs["teacher_prompts"] for inputs in batches]
        tokens = super().collate_answers(batches, answers)
        own = [0, 0]
        for inputs, of_batch, ids in zip(batches, prompts, answers, strict=True):
            aligned = [self.align(*each) for each in zip(of_batch, ids, strict=True)]
            read = padded_answers(of_batch, [each.teacher_ids for each in aligned], _PAD)
            inputs.update({f"teacher_{name}": tensor for name, tensor in read.items()})
            inputs["spans"] = _numbered(aligned, ids)
            own = [own[0] + len(ids), own[1] + sum(each.compared for each in aligned)]
        self._answers_of_step, compared = (sum(counts) for counts in zip(*ranks.gather_all(own), strict=True))
        if not compared and not self._has_warned:
            self._has_warned = True
            self._writer.write(Warned(message=NOTHING_COMPARED))
        self.add_metrics(
            {"completions/compared_ratio": torch.tensor(float(compared), device=self.args.device)},
            torch.tensor(float(tokens), device=self.args.device),
        )
        return tokens

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The distance of a micro batch's answers, divided so that Trainer's mean over micro steps and ranks is the
        step's."""
        read = {name.removeprefix("teacher_"): inputs[name] for name in inputs if name.startswith("teacher_")}
        with self.as_reference() as teacher:
            forward = self._batches.forward_arguments(teacher, read)
            head = head_of(lambda: teacher(**forward), copied=is_sharded(self.spec))
        other = _side(head, read, self._uld.teacher_temperature)
        numbers = inputs["spans"].tolist()
        spans, weights = [tuple(each[:4]) for each in numbers], _mean_weights([each[4] for each in numbers])
        parts = torch.zeros(2, device=self.args.device)

        def compare(own: Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            side = _side(own, inputs, self._uld.student_temperature)
            distances = self._distance.between(side, other, spans) * weights.to(own.hidden.device)
            parts.copy_(distances[1:].detach().sum(dim=1))
            last = torch.tensor([end - 1 for _, end, _, _ in spans], dtype=torch.long, device=distances.device)
            if len(own.hidden) != len(side.tokens):  # heads leave out what is not scored on GPUs only
                last = _scored(inputs).nonzero()[:, 0][last]
            weighted = distances[0] * self._uld.distillation_weight
            losses = distances.new_zeros(len(own.hidden)).index_add(0, last, weighted)
            return losses, torch.zeros_like(targets, dtype=torch.bool)

        with computing_heads(compare):
            loss = self.loss_in_head(model, inputs, max(1, self._answers_of_step))
        if self._uld.hybrid:
            totals = self.accelerator.reduce(parts)
            count = torch.tensor(self._answers_of_step / self._micro_steps, device=self.args.device)
            self.add_metrics({"matched_loss": totals[0], "unmatched_loss": totals[1]}, count)
        return loss


def _numbered(aligned: list[Aligned], answers: list[list[int]]) -> torch.Tensor:
    """The spans of a micro batch, by the numbers of the tokens of all its answers, and the number of each one's answer;
    shape (spans, 5)."""
    numbered, own, theirs = [], 0, 0
    for number, (answer, ids) in enumerate(zip(aligned, answers, strict=True)):
        numbered += [(own + a, own + b, theirs + c, theirs + d, number) for a, b, c, d in answer.spans]
        own, theirs = own + len(ids), theirs + len(answer.teacher_ids)
    return torch.tensor(numbered, dtype=torch.long).view(-1, 5)


def _mean_weights(answers: list[int]) -> torch.Tensor:
    """What makes the sum over spans that of the means over each answer's spans."""
    numbers = torch.tensor(answers, dtype=torch.long)
    return 1.0 / numbers.bincount().clamp_min(1)[numbers].float()


def _scored(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return inputs["completion_mask"][:, 1:].flatten() != 0


def _side(head: Head, inputs: dict[str, torch.Tensor], temperature: float) -> Side:
    scored = _scored(inputs)
    tokens = inputs["input_ids"][:, 1:].flatten()[scored]
    return Side(head.of_rows(scored) if len(head.hidden) == len(scored) else head, tokens, temperature)
