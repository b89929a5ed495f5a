"""The models that graders of type score_model and label_model ask about the answers of a job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from ...specs.grading.asking import Question, Reply, Replying
from ...specs.grading.errors import GradingError
from ...specs.job import JobSpec
from ...specs.work import FurtherModel
from ..data.chat import Chat, LostTurns
from ..data.embedded import check_embedded
from ..data.forms import THINK, opens_thought
from ..data.tokenizer_calls import decoded
from ..model.adapters import load_to_infer
from ..model.generation import Sampler, answer_ends, answer_ids
from ..model.loading import load_job_tokenizer, vocabulary_size
from ..model.positions import positions_of

MOST_AT_ONCE = 64
"""Questions that are answered together at most; half as many from then on where a GPU's memory is not enough."""


class GradingModel:
    """A model that is ready to reply, whole on each rank, in the dtype in which the job computes.

    It reads a question by its own tokenizer and chat template, so that its vocabulary need not be that of the model
    that is trained. Raises JobFailure: invalid_model.
    """

    def __init__(self, spec: JobSpec, model: FurtherModel, device: torch.device) -> None:
        # The chat template that the job sets is that of the model that it trains.
        own = spec.model_copy(update={**model.as_own(), "data": spec.data.model_copy(update={"chat_template": None})})
        self._name, self._device = model.model if model.adapter is None else model.adapter.model, device
        self._tokenizer = load_job_tokenizer(own)
        self._chat = Chat(self._tokenizer)
        self._positions, self._embeddings = positions_of(own.source), vocabulary_size(own.source)
        with torch.random.fork_rng():
            self._model = load_to_infer(own, device).requires_grad_(False)
        self._ends = answer_ends(self._model, self._tokenizer)
        pad = self._tokenizer.pad_token_id
        self._pad = self._ends[0] if pad is None else pad
        self._asked, self._at_once = 0, MOST_AT_ONCE
        self._warned: set[str] = set()

    def replies(
        self, questions: Sequence[tuple[Question, int]], replying: Replying, alive: Callable[[], object]
    ) -> list[Reply | GradingError]:
        """The replies to some questions, each about an answer to the row of a number.

        In bf16 the most likely token may be another one where a question stands in another batch: after a shortage of
        memory, or with another number of ranks. Raises JobFailure: the chat template refuses a question.
        """

        def on_token() -> None:
            alive()

        encoded = [self._tokens(question, row) for question, row in questions]
        self._asked += len(questions)
        found: list[Reply | GradingError] = [self._without_room(ids, replying) for ids in encoded]
        fitting = [number for number, ids in enumerate(encoded) if self._has_room(ids, replying)]
        while fitting:
            numbers = fitting[: self._at_once]
            sampler = Sampler(replying, [random.Random(questions[number][0].seed) for number in numbers], on_token)
            try:
                ids = answer_ids(
                    self._model,
                    [encoded[number] for number in numbers],
                    sampler,
                    most=replying.most,
                    ends=self._ends,
                    pad=self._pad,
                    device=self._device,
                )
            except torch.OutOfMemoryError:
                # Another attempt would have smaller batches of the training, which would not help here.
                if len(numbers) == 1:
                    raise
                self._at_once = len(numbers) // 2
                continue
            fitting = fitting[len(numbers) :]
            for number, tokens in zip(numbers, ids, strict=True):
                text = f"{self._begins(encoded[number])}{decoded(self._tokenizer, tokens, skip_special_tokens=True)}"
                found[number] = Reply(text, bool(tokens) and tokens[-1] in self._ends)
        return found

    def warnings(self) -> Iterator[str]:
        """Sentences about its chat template that were not said before."""
        lost = self._chat.lost.message("question", self._asked, f"the grading model {self._name}'s")
        for kind, message in (("template", self._chat.template_warning), ("lost", lost)):
            if message and kind not in self._warned:
                self._warned.add(kind)
                yield message if kind == "lost" else f"the grading model {self._name}: {message}"
        self._chat.lost = LostTurns()
        self._asked = 0

    def _tokens(self, question: Question, row: int) -> list[int]:
        text = self._chat.render_counted(question.messages, row, add_generation_prompt=True)
        (ids,) = self._chat.tokenize([text])
        ids = ids or [self._ends[0]]
        check_embedded(ids, self._embeddings, self._tokenizer, f"the grading model {self._name}, row {row}")
        return ids

    def _begins(self, ids: list[int]) -> str:
        """With what a reply begins that the model has not written itself."""
        return THINK if opens_thought(self._tokenizer, ids) else ""

    def _has_room(self, ids: list[int], replying: Replying) -> bool:
        return self._positions is None or len(ids) + replying.most <= self._positions

    def _without_room(self, ids: list[int], replying: Replying) -> GradingError:
        return GradingError(
            "model_grader_server_error",
            f"the model reads {len(ids)} tokens, which with {replying.most} of its reply are more than its "
            f"{self._positions} positions: shorten the grader's messages, or lower max_completions_tokens",
        )
