"""Answers the prompts of a job's `samples` while it trains, without a change to the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...errors import JobFailure
from ...specs.events import Answer, Reason
from ..checkpoint import random_state
from ..data.tokenizer_calls import decoded
from ..distributed import ranks
from ..model.fsdp import answering, is_sharded
from ..model.generation import answer_ends

if TYPE_CHECKING:
    from .base import RecipeTrainer


class PromptAnswers:
    """Answers prompts with the model as it is trained, adapters included: greedily, one prompt at a time.

    A prompt alone needs no padding and no mask, so every kind of attention that trains can answer it, that of batches
    in one sequence too; and its keys and values take little memory. Ranks that each hold the whole model divide the
    prompts. Ranks that shard it compute every forward together, with the tokens that rank 0 chooses.
    """

    def __init__(
        self, trainer: RecipeTrainer, prompts: list[list[int]], max_new_tokens: int, heartbeat: Callable[[], None]
    ) -> None:
        self._trainer, self._prompts, self._most, self._heartbeat = trainer, prompts, max_new_tokens, heartbeat

    def take_first(self) -> list[Answer]:
        """As `take`, before the first step: a model that cannot answer prompts is found here, not after hours. Raises
        JobFailure: invalid_request."""
        try:
            return self.take()
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            text = " ".join(str(error).split())[:300]
            raise JobFailure(
                Reason.invalid_request,
                f"provider_options.samples: model {self._trainer.spec.source.model!r} cannot answer prompts while it "
                f"trains ({type(error).__name__}: {text}). Leave the option out",
            ) from error

    def take(self) -> list[Answer]:
        """Answer all prompts. A collective."""
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        with torch.no_grad(), undisturbed(model, trainer.args.device):
            if is_sharded(trainer.spec):
                with answering(model, keeps_gathered=trainer.keeps_gathered):
                    return [self._answer(model, ids) for ids in self._prompts]
            own = [self._answer(model, ids) for ids in self._prompts[ranks.rank() :: ranks.world_size()]]
        parts = ranks.gather_all([answer.model_dump() for answer in own])
        by_prompt = [parts[number % len(parts)][number // len(parts)] for number in range(len(self._prompts))]
        return [Answer.model_validate(answer) for answer in by_prompt]

    def _answer(self, model: Any, prompt: list[int]) -> Answer:
        tokenizer = self._trainer.processing_class
        ends = answer_ends(model, tokenizer)
        tokens: list[int] = []
        complete = False
        forward = _Forward(model, self._trainer.args.device)
        while len(tokens) < self._most and not complete:
            logits = forward.logits(prompt if not tokens else [tokens[-1]], [*prompt, *tokens])
            token = int(logits.argmax())
            if is_sharded(self._trainer.spec):  # ranks on unlike devices may round differently
                token = ranks.broadcast_number(token)
            tokens.append(token)
            complete = token in ends
            self._heartbeat()
        text = decoded(tokenizer, tokens, skip_special_tokens=True)
        return Answer(text=text, tokens=len(tokens), complete=complete)


class _Forward:
    """The forward of one answer, with the keys and values of the tokens before where the model keeps them."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._past: Any = None
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        # All logits of a long prompt may take gigabytes.
        keeps_last = "logits_to_keep" in inspect.signature(type(plain).forward).parameters
        self._arguments: dict[str, Any] = {"logits_to_keep": 1} if keeps_last else {}

    def logits(self, new: list[int], all_tokens: list[int]) -> torch.Tensor:
        """Logits of the next token, shape (vocabulary,).

        Args:
            new: tokens since the last call.
            all_tokens: these and all before, which are computed where the model keeps nothing.
        """
        ids = torch.tensor([new if self._past is not None else all_tokens], device=self._device)
        past = {} if self._past is None else {"past_key_values": self._past}
        output = self._model(input_ids=ids, use_cache=True, **past, **self._arguments)
        self._past = getattr(output, "past_key_values", None)
        return output.logits[0, -1]


@contextmanager
def undisturbed(model: Any, device: torch.device) -> Iterator[None]:
    """While this is open, the model evaluates; then its mode, the random numbers and what rotary embeddings remember
    of the longest sequence are as before."""
    random = random_state.capture(device)
    modes = [(module, module.training) for module in model.modules()]
    rotary = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    remembered = [(module.max_seq_len_cached, dict(module._buffers)) for module in rotary]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, (length, buffers) in zip(rotary, remembered, strict=True):
            module.max_seq_len_cached = length
            module._buffers.update(buffers)
        random_state.restore(random, device)
