"""A model that answers prompts in batches, and what its engines have in common: the prompts' tokens and the answers'
texts."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from transformers import PreTrainedModel

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.rows import Message
from ...specs.work import Answering
from ..data.chat import Chat
from ..data.embedded import check_embedded
from ..data.tokenizer_calls import decoded
from ..model.loading import load_job_tokenizer, vocabulary_size
from ..model.positions import positions_of


class Answered(NamedTuple):
    text: str
    tokens: int
    complete: bool
    """Whether the model ended it; False: it has `max_new_tokens`."""


class Answerer(ABC):
    """A model that answers prompts in batches. A context manager, which releases the model at its end. Raises
    JobFailure: the model, or a prompt, cannot be used."""

    ends: Sequence[int]
    """Tokens that end an answer."""

    def __init__(self, spec: JobSpec, work: Answering) -> None:
        self.spec, self.work = spec, work
        self.tokenizer = load_job_tokenizer(spec)
        self.chat = Chat(self.tokenizer)
        self._positions, self._embeddings = positions_of(spec.source), vocabulary_size(spec.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 (one that has nothing to release needs no method)
        """Release the model."""

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel:
        """The model, with the adapter that the job names; without weights where another process has these."""

    def encode(self, prompt: list[Message], row: int) -> list[int]:
        """The token ids of a prompt, with the header of its answer. Raises JobFailure: it is too long."""
        ids = self.tokens_of(prompt, row)
        if not self.has_room(ids):
            raise JobFailure(
                Reason.invalid_dataset,
                f"row {row} has {len(ids)} tokens, which with max_new_tokens {self.work.max_new_tokens} are more than "
                f"the {self._positions} positions of the model. Shorten the row, or send fewer max_new_tokens",
            )
        return ids

    def tokens_of(self, prompt: list[Message], row: int) -> list[int]:
        """As `encode`, of any length. Raises JobFailure: the model has no embedding for a token."""
        (ids,) = self.chat.tokenize([self.chat.render_counted(prompt, row, add_generation_prompt=True)])
        ids = ids or [self.tokenizer.eos_token_id]
        check_embedded(ids, self._embeddings, self.tokenizer, f"row {row}")
        return ids

    def has_room(self, ids: list[int]) -> bool:
        """Whether the model has positions for a prompt and its answer."""
        return self._positions is None or len(ids) + self.work.max_new_tokens <= self._positions

    def prepare(self, prompts: Sequence[list[int]]) -> None:  # noqa: B027 (as `close`)
        """Announce all prompts that may come, before the first is answered."""

    def answer(
        self, prompts: list[list[int]], sources: list[random.Random], on_token: Callable[[], None]
    ) -> list[Answered]:
        """Answer prompts together. There may be none.

        Args:
            on_token: called while the batch is computed, as it advances.
        """
        if not prompts:
            return []
        return [self._answered(tokens) for tokens in self._answer(prompts, sources, on_token)]

    @abstractmethod
    def _answer(
        self, prompts: list[list[int]], sources: list[random.Random], on_token: Callable[[], None]
    ) -> list[list[int]]:
        """The token ids of the answers; what follows the token that ends one is ignored."""

    def _answered(self, tokens: list[int]) -> Answered:
        end = next((number for number, token in enumerate(tokens) if token in self.ends), None)
        kept = tokens if end is None else tokens[: end + 1]
        text = decoded(self.tokenizer, kept, skip_special_tokens=True)
        return Answered(text, len(kept), end is not None)
