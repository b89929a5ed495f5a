"""Answers prompts while a model trains, for methods whose rows are prompts and whose answers the model itself gives.

The random numbers of an answer follow from the seed, the step, the row and the number of the answer: a resumed job
trains on the same answers, and so do any number of ranks, which divide the prompts of an optimizer step.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig
from torch.nn.utils.rnn import pad_sequence

from ... import faults
from ...specs.job import JobSpec
from ..model.fsdp import is_sharded, reshard
from ..model.generation import Sampler, Sampling, answer_ends, answer_ids
from .pairs import PaddedPairs, set_adapter_dropout
from .reference import NoReference
from .samples import undisturbed
from .scoring import ScoresReference
from .trl_patches import PreparedDatasets


def collate_prompts(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Prompts as they are, without fillers: they are answered before they become tensors."""
    real = [prompt for prompt in prompts if prompt["row"]]
    found = {"prompts": [list(prompt["prompt_ids"]) for prompt in real], "rows": [prompt["row"][0] for prompt in real]}
    if prompts and "teacher_ids" in prompts[0]:
        found["teacher_prompts"] = [list(prompt["teacher_ids"]) for prompt in real]
    return found


def filler_of(pad: int) -> list[int]:
    """A prompt that has no answer."""
    return [pad] * 2


def padded_answers(prompts: list[list[int]], answers: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """Prompts with their answers, padded behind; `completion_mask` is 1 for the answers' tokens. Of none: one filler
    without an answer."""
    pairs = list(zip(prompts, answers, strict=True)) or [(filler_of(pad), [])]
    ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    scored = [torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt, answer in pairs]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "completion_mask": pad_sequence(scored, batch_first=True),
    }


class AnswersPrompts(PreparedDatasets, ScoresReference):
    """A mixin before `trl.DPOTrainer`: it trains on answers to prompts. Datasets have the columns prompt_ids and row.

    Args:
        spec: of a method that answers prompts.
        sampling: how tokens are chosen.
    """

    head_outputs = ()  # its head is that of the method
    answer_vocabulary: int | None = None
    """How many tokens, by their numbers, answers consist of; None: all that the model has a logit for."""
    _tokens_of_step = 0
    """Tokens of all answers of the optimizer step at hand."""
    _micro_steps = 1

    def __init__(
        self, *, spec: JobSpec, sampling: Sampling, peft_config: PeftConfig | None = None, **arguments: Any
    ) -> None:
        if spec.method.answer_tokens is None:
            raise AssertionError("a method that answers no prompts")
        self._sampling, self._most = sampling, spec.method.answer_tokens
        self._batches = PaddedPairs(spec)
        super().__init__(
            spec=spec,
            ref_model=None if peft_config else NoReference(),
            peft_config=peft_config,
            data_collator=collate_prompts,
            **arguments,
        )
        if spec.lora:
            set_adapter_dropout(self.model, spec.lora.dropout)
        self.alive: Callable[[], None] = self._writer.heartbeat
        """Called while prompts are answered and answers are rewarded."""

    @property
    def policy(self) -> Any:
        """The model that is trained, without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Trainer's, which sees all batches of an optimizer step before the first of them is computed: they are
        answered here, by the weights that the step changes. A collective."""
        self.model.train()  # as in the step itself: metrics of the first one would count as an evaluation's
        answers = self.answer_batches(batch_samples)
        faults.reach(f"answered-{self.state.global_step + 1}")
        self._tokens_of_step = self.collate_answers(batch_samples, answers)
        self._micro_steps = len(batch_samples)
        return None

    @abstractmethod
    def collate_answers(self, batches: list[dict[str, Any]], answers: list[list[list[int]]]) -> int:
        """Put the answers of an optimizer step into its batches, and note their metrics. A collective.

        Args:
            batches: of this rank, with prompts and rows.
            answers: token ids, of each batch.

        Returns:
            Tokens of the answers of all ranks.
        """

    def answer_batches(self, batches: list[dict[str, Any]]) -> list[list[list[int]]]:
        """Token ids of the answers to the prompts of each batch of an optimizer step. A collective as `answer`."""
        return [self.answer(inputs["prompts"], inputs["rows"]) for inputs in batches]

    def answer(self, prompts: list[list[int]], rows: list[int]) -> list[list[int]]:
        """Token ids of the answers to each prompt, by the weights as they are. A collective where ranks shard the
        model: those without prompts compute with the others. FSDP2 gathers weights in `generate`, with which Trainer
        registers it."""
        sharded = is_sharded(self.spec)
        if not prompts and not sharded:
            return []
        model, count = self.accelerator.unwrap_model(self.model), self.spec.sequences_per_row
        seeds = self._seeds(rows)
        given = [prompt for prompt in prompts for _ in range(count)]
        with undisturbed(model, self.args.device), self._precision(), self._alive_at_each_forward(model):
            found = answer_ids(
                model,
                given or [self._filler],
                Sampler(
                    self._sampling,
                    [random.Random(seed) for seed in seeds or [""]],
                    lambda: None,
                    self.answer_vocabulary,
                ),
                most=self._most,
                ends=self._ends(),
                pad=self.processing_class.pad_token_id,
                device=self.args.device,
                synced=sharded,
            )
            if sharded:
                reshard(model)
        return found if given else []

    def _seeds(self, rows: list[int]) -> list[str]:
        """Of the random numbers of each answer to the prompts of these rows."""
        count = self.spec.sequences_per_row
        return [
            f"{self.spec.data.seed}/{self.state.global_step}/{row}/{number}" for row in rows for number in range(count)
        ]

    @contextmanager
    def _alive_at_each_forward(self, model: Any) -> Iterator[None]:
        """While this is open, a forward counts as progress. A rank whose answers have ended chooses no more tokens."""
        plain = model.get_base_model() if is_peft_model(model) else model
        hook = plain.register_forward_pre_hook(lambda *_: self.alive())
        try:
            yield
        finally:
            hook.remove()

    @property
    def _filler(self) -> list[int]:
        """What a rank without prompts computes with."""
        return filler_of(self.processing_class.pad_token_id)

    def _ends(self) -> list[int]:
        return answer_ends(self.accelerator.unwrap_model(self.model), self.processing_class)

    def _collated(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        """As `padded_answers`, of the model's own tokens."""
        return padded_answers(prompts, answers, self.processing_class.pad_token_id)

    def _router(self) -> dict[str, bool]:
        """Arguments of a forward whose loss keeps the router of a mixture of experts balanced."""
        return {"output_router_logits": True} if self.aux_loss_enabled else {}

    def _count_tokens(self, inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Count the tokens that were trained on, of all ranks. A collective."""
        is_real = mask.any(dim=1)
        self._total_train_tokens += self.accelerator.reduce((inputs["attention_mask"].sum(dim=1) * is_real).sum())

    @property
    def _parts(self) -> int:
        """Micro batches of the optimizer step, over all ranks, whose mean Trainer takes."""
        return self._micro_steps * self.accelerator.num_processes
