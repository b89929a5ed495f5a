"""Answers computed by transformers, in this process."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ...specs.job import JobSpec
from ...specs.work import Answering
from ..model.adapters import load_to_infer
from ..model.generation import Sampler, answer_ends
from .answerer import Answerer


class TransformersAnswerer(Answerer):
    """See `Answerer`. A batch has padding before its shorter prompts."""

    def __init__(self, spec: JobSpec, work: Answering, device: torch.device) -> None:
        super().__init__(spec, work)
        self.device = device
        self._model = load_to_infer(spec, device)
        self.ends = answer_ends(self._model, self.tokenizer)
        # In place of the model's own, whose penalties and limits would change the answers.
        self._generation = GenerationConfig(
            max_new_tokens=work.max_new_tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
        )
        # What it leaves open is read from the model's own.
        for model in (self.model, self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model):
            model.generation_config = self._generation

    @property
    def model(self) -> PreTrainedModel:
        return self._model

    def _answer(
        self, prompts: list[list[int]], sources: list[random.Random], on_token: Callable[[], None]
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampler = Sampler(self.work, sources, on_token)
        with torch.no_grad():
            found = self.model.generate(
                generation_config=self._generation,
                input_ids=ids,
                attention_mask=mask.to(self.device),
                logits_processor=LogitsProcessorList([sampler]),
            )
        return found[:, longest:].tolist()
