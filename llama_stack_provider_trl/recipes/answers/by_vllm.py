"""Answers computed by vLLM, in a process of its own (`recipes.model.vllm_process`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from ...specs.events import EventWriter
from ...specs.job import JobSpec
from ...specs.work import Answering
from ..model.agreement import read_generation_config
from ..model.generation import answer_ends
from ..model.loading import DTYPES, check_weights, load_config, outline
from ..model.vllm_process import MOST_AT_ONCE, VllmProcess
from .answerer import Answerer


class VllmAnswerer(Answerer):
    """See `Answerer`. The model is loaded by `prepare`.

    The answers to a batch follow from its prompts, their order and their random numbers: no other batch has a part in
    them.

    Args:
        spec: whose model is a whole one: an adapter is merged into it before.
        writer: gets heartbeats while the model is loaded.
    """

    def __init__(self, spec: JobSpec, work: Answering, device: torch.device, batch: int, writer: EventWriter) -> None:
        super().__init__(spec, work)
        check_weights(spec.source)
        assert work.vllm_python is not None
        self._batch = batch
        self._vllm = VllmProcess(
            work.vllm_python,
            device,
            writer,
            todo="Leave engine out, and transformers answers",
            less="Use fewer prompts per batch_size, fewer max_new_tokens, or a device with more memory",
        )
        self._outline: PreTrainedModel = outline(spec.source, load_config(spec.source), torch.float32)
        generation = read_generation_config(spec.source).config
        self.ends = answer_ends(SimpleNamespace(generation_config=generation), self.tokenizer)

    @property
    def model(self) -> PreTrainedModel:
        return self._outline

    def prepare(self, prompts: Sequence[list[int]]) -> None:
        """Start vLLM with the model. Raises JobFailure: it cannot be started, or cannot load the model."""
        source = self.spec.source
        self._vllm.start(
            {
                "model": source.location,
                "revision": source.revision,
                "trust_remote_code": source.trust_remote_code,
                "dtype": str(DTYPES[self.spec.compute.dtype]).removeprefix("torch."),
                "max_model_len": max(map(len, prompts)) + self.work.max_new_tokens,
                "max_num_seqs": min(self._batch, MOST_AT_ONCE),
            }
        )

    def close(self) -> None:
        self._vllm.close()

    def _answer(
        self, prompts: list[list[int]], sources: list[random.Random], on_token: Callable[[], None]
    ) -> list[list[int]]:
        batch = {
            "prompts": prompts,
            "seeds": [source.getrandbits(31) for source in sources],
            "temperature": self.work.temperature,
            "top_p": self.work.top_p,
            "max_tokens": self.work.max_new_tokens,
            "ends": list(self.ends),
        }
        answers: list[list[int]] = self._vllm.answer(batch, on_token)["answers"]
        return answers
