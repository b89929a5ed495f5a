"""Chooses the tokens of answers, each with random numbers of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from ...errors import JobFailure
from ...specs.events import Reason

_AT_ONCE = 16
"""Sequences whose tokens are chosen at a time: their numbers in fp64 take 7 times 20 MB with 152,000 tokens."""
_LEAST_TEMPERATURE = 1e-6
"""Below it logits are divided to infinity; a token that is 0.001 less likely has no chance already."""


class Sampling(Protocol):
    """How a token is chosen."""

    @property
    def temperature(self) -> float:
        """Divides the logits; 0: the most likely token each time."""

    @property
    def top_p(self) -> float:
        """A token is chosen among the most likely ones whose probabilities together reach this."""


class Sampler(LogitsProcessor):
    """Chooses the next token of each sequence of a batch with random numbers of its own, whatever the others are.

    It leaves the chosen token as the only possible one, and greedy decoding takes it.

    The number is located in the sums of the probabilities in the order of the token ids. Ordered by probability, tokens
    that are nearly as probable would change places with the rounding of a batch, or of another number of ranks: with
    differences of 1e-5 between logits 2 % of the choices of an untrained model changed.

    Args:
        tokens: how many tokens, by their numbers, can be chosen; None: all that the model has a logit for.
    """

    def __init__(
        self,
        work: Sampling,
        sources: list[random.Random],
        on_token: Callable[[], None],
        tokens: int | None = None,
    ) -> None:
        self._work, self._sources, self._on_token, self._tokens = work, sources, on_token, tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._on_token()
        if self._tokens is not None and self._tokens < scores.shape[-1]:
            scores = scores.clone()
            scores[:, self._tokens :] = -torch.inf
        if not self._work.temperature:
            return scores
        # There on a GPU: a CPU takes longer than the model where the vocabulary is large. MPS has no fp64.
        place = scores.device if scores.device.type == "cuda" else torch.device("cpu")
        numbers = torch.tensor([[source.random()] for source in self._sources], dtype=torch.float64, device=place)
        parts = zip(scores.detach().split(_AT_ONCE), numbers.split(_AT_ONCE), strict=True)
        tokens = torch.cat([self._chosen(part.to(place, torch.float64), those) for part, those in parts])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.to(scores.device), 0.0)

    def _chosen(self, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The tokens where the numbers are located, shape (sequences, 1)."""
        scaled = scores / max(self._work.temperature, _LEAST_TEMPERATURE)
        reached = self._kept(torch.softmax(scaled, dim=-1)).cumsum(dim=-1)
        total = reached[:, -1:].clone()
        if not bool((total > 0).all()):  # NaN neither
            raise JobFailure(
                Reason.diverged,
                "the model's numbers are not finite, so that no token can be chosen: lower the learning rate that it "
                "is trained with, or use dtype bf16 or fp32 in place of fp16",
            )
        tokens = torch.searchsorted(reached, numbers * total, right=True)
        # Where rounding makes the product the total: the last token that is kept.
        return torch.minimum(tokens, torch.searchsorted(reached, total))

    def _kept(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Probabilities, but 0 of the tokens beyond the fewest that reach `top_p`; shape (sequences, tokens)."""
        if self._work.top_p >= 1:
            return probabilities
        ordered, tokens = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        before = torch.nn.functional.pad(ordered.cumsum(dim=-1)[:, :-1], (1, 0))
        is_beyond = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, tokens, before >= self._work.top_p)
        return probabilities.masked_fill(is_beyond, 0.0)


def answer_ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer. Chat models name that of a turn in their generation configuration."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in (*several, tokenizer.eos_token_id) if token is not None})


def answer_ids(
    model: Any,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    *,
    most: int,
    ends: list[int],
    pad: int,
    device: torch.device,
    synced: bool = False,
) -> list[list[int]]:
    """Token ids of the answers to prompts, which are answered together: each with the token that ends it.

    Args:
        pad: stands before shorter prompts.
        synced: ranks compute every forward together, until the answers of all ranks have ended. A collective then.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    # In place of the model's own, whose penalties and limits would change the answers. What it leaves open would be
    # read from the model's own, so that is put aside.
    config = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=ends, pad_token_id=pad, use_cache=True)
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = [(one, one.generation_config) for one in dict.fromkeys((model, plain)) if hasattr(one, "generation_config")]
    try:
        for one, _ in own:
            one.generation_config = config
        with torch.no_grad():
            found = model.generate(
                generation_config=config,
                input_ids=ids,
                attention_mask=mask,
                logits_processor=LogitsProcessorList([sampler]),
                synced_gpus=synced,
            )
    finally:
        for one, before in own:
            one.generation_config = before
    return [_until_end(tokens, ends) for tokens in found[:, longest:].tolist()]


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    end = next((number for number, token in enumerate(tokens) if token in ends), None)
    return tokens if end is None else tokens[: end + 1]
