"""Answers prompts while a model trains, for methods whose rows are prompts and whose answers the model itself gives.

The random numbers of an answer follow from the seed, the step, the row and the number of the answer: a resumed job
trains on the same answers, and so do any number of ranks, which divide the prompts of an optimizer step.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig, PeftModel, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import set_seed
from trl.trainer.utils import disable_dropout_in_model

from ... import faults
from ...specs.job import JobSpec
from ..model.fsdp import answering, is_sharded
from ..model.generation import Sampler, Sampling, answer_ends, answer_ids
from .pairs import PaddedPairs, set_adapter_dropout
from .samples import undisturbed
from .scoring import ScoresReference
from .trl_patches import offloaded_activations


def collate_prompts(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Prompts as they are, without fillers: they are answered before they become tensors."""
    real = [prompt for prompt in prompts if prompt["row"]]
    batch = {"prompts": [list(prompt["prompt_ids"]) for prompt in real], "rows": [prompt["row"][0] for prompt in real]}
    if prompts and "teacher_ids" in prompts[0]:
        batch["teacher_prompts"] = [list(prompt["teacher_ids"]) for prompt in real]
    return batch


def filler_of(pad: int) -> list[int]:
    return [pad] * 2


def padded_answers(prompts: list[list[int]], answers: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """Prompts with their answers, padded behind; `completion_mask` is 1 for the answers' tokens. Of none: one filler
    without an answer."""
    pairs = list(zip(prompts, answers, strict=True)) or [(filler_of(pad), [])]
    ids = [torch.tensor(prompt + answer) for prompt, answer in pairs]
    scored = [torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt, answer in pairs]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(sequence) for sequence in ids], batch_first=True),
        "completion_mask": pad_sequence(scored, batch_first=True),
    }


def as_policy(
    spec: JobSpec, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, adapters: PeftConfig | None
) -> PreTrainedModel | PeftModel:
    """The model that a job trains, prepared as TRL's trainers prepare theirs: with new adapters, if there are any, and
    without dropout but that of adapters."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    for config in (model.config.get_text_config(), model.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
    if adapters is not None:
        set_seed(spec.data.seed)  # adapters begin at random
        model = get_peft_model(model, adapters)
    if is_peft_model(model) and spec.compute.gradient_checkpointing:
        model.enable_input_require_grads()
    model.add_model_tags(["trl", spec.algorithm])
    disable_dropout_in_model(model)
    if spec.lora:
        set_adapter_dropout(model, spec.lora.dropout)
    return model


class AnswersPrompts(ScoresReference):
    """Trains on answers to prompts. Datasets have the columns prompt_ids and row."""

    head_outputs = ()  # its head is that of the method
    loss_is_scaled_for_ga = False  # Trainer takes the mean over micro steps
    answer_vocabulary: int | None = None
    """How many tokens, by their numbers, answers consist of; None: all that the model has a logit for."""
    _tokens_of_step = 0
    """Tokens of all answers of the optimizer step at hand."""
    _micro_steps = 1

    def __init__(
        self,
        *,
        spec: JobSpec,
        sampling: Sampling,
        model: PreTrainedModel | PeftModel,
        processing_class: PreTrainedTokenizerBase,
        peft_config: PeftConfig | None = None,
        **arguments: Any,
    ) -> None:
        assert spec.method.answer_tokens is not None, "a method that answers no prompts"
        self._sampling, self._most = sampling, spec.method.answer_tokens
        self._batches: Any = PaddedPairs(spec)
        super().__init__(
            spec=spec,
            model=as_policy(spec, model, processing_class, peft_config),
            processing_class=processing_class,
            data_collator=collate_prompts,
            **arguments,
        )
        self._offloading: AbstractContextManager[Any] = nullcontext()
        if spec.compute.activation_offloading:
            self._offloading = offloaded_activations(self.model)
        config = self.policy.config.get_text_config()
        self.router_aux_loss_coef = getattr(config, "router_aux_loss_coef", 0.0)
        self.aux_loss_enabled = hasattr(config, "output_router_logits") and self.router_aux_loss_coef != 0.0
        self.alive: Callable[[], None] = self._writer.heartbeat
        """Called while prompts are answered and answers are rewarded."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._offloading:
            return super().training_step(*args, **kwargs)

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
        """Put the answers of an optimizer step into its batches, and note their metrics. A collective. Returns tokens
        of the answers of all ranks.

        Args:
            batches: of this rank, with prompts and rows.
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
        repeated = [prompt for prompt in prompts for _ in range(count)]
        gathered = answering(model, keeps_gathered=self.keeps_gathered) if sharded else nullcontext()
        with (
            undisturbed(model, self.args.device),
            self._precision(),
            self._alive_at_each_forward(model),
            self._padding_masked(model),
            gathered,
        ):
            answers = answer_ids(
                model,
                repeated or [self._filler],
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
        return answers if repeated else []

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

    @contextmanager
    def _padding_masked(self, model: Any) -> Iterator[None]:
        """While this is open, attention takes the mask of shorter prompts, which that of rows in one sequence lacks."""
        own = model.config._attn_implementation
        if not self.spec.compute.padding_free:
            yield
            return
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            model.set_attn_implementation(own)

    @property
    def _filler(self) -> list[int]:
        return filler_of(self.processing_class.pad_token_id)

    def _ends(self) -> list[int]:
        return answer_ends(self.accelerator.unwrap_model(self.model), self.processing_class)

    def _collated(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
        return padded_answers(prompts, answers, self.processing_class.pad_token_id)

    def _count_tokens(self, inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Count the tokens that were trained on, of all ranks. A collective."""
        is_real = mask.any(dim=1)
        tokens = inputs["row_tokens"] if "row_tokens" in inputs else inputs["attention_mask"].sum(dim=1)
        self.add_tokens(self.accelerator.reduce((tokens * is_real).sum()))

    @property
    def _parts(self) -> int:
        """Micro batches of the optimizer step, over all ranks, whose mean Trainer takes."""
        return self._micro_steps * self.accelerator.num_processes
