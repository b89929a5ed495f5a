"""Reads prompts as reward models do, before these score an answer: their templates may leave out turns, and their
tokenizers may have tokens that they have no embeddings for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..specs.job import JobSpec
from ..specs.rows import Message, PromptExample
from .data.chat import Chat, refuse_lost_turns
from .data.embedded import check_embedded
from .data.prepare import read_examples
from .model.loading import load_tokenizer, vocabulary_size

_ANSWER: Message = {"role": "assistant", "content": "Yes, that is right."}
"""Stands for the answers to come: templates may write a prompt differently before one."""
_ROWS = 1000
"""Rows between two calls of `alive`."""


def lost_by_reward_models(
    spec: JobSpec, alive: Callable[[], object], rows: Iterable[tuple[int, PromptExample]] | None = None
) -> list[str]:
    """A sentence for each reward model whose chat template leaves out turns of the prompts. One that its job has not
    written yet is not read. Raises JobFailure: invalid_dataset, there are such turns, and the job's `dropped_turns` is
    refuse; invalid_model, a prompt has a token that a reward model has no embedding for.

    Args:
        rows: numbered prompts; None: all of the job's dataset.
    """
    found: list[str] = []
    models = [model for model in spec.method.reward_models if model.source and model.source.directory.is_dir()]
    prompts = list(rows) if models and rows is not None else None
    for model in models:
        tokenizer = load_tokenizer(model.own, model=model.model)
        chat, embeddings, count = Chat(tokenizer), vocabulary_size(model.model), 0
        has_more_tokens = len(tokenizer) > embeddings
        for number, prompt in (
            enumerate(read_examples(spec.data.dataset.path, "prompts", names=spec.data.dataset.names))
            if prompts is None
            else prompts
        ):
            count += 1
            turns = [*prompt.messages, _ANSWER]
            # A refusal fails the job when it scores: it may depend on the answer.
            if (text := chat.render_part(turns)) is not None:
                lost = [turn for turn in chat.unwritten_turns(turns, text, False) if turn < len(prompt.messages)]
                chat.lost.add([turns[turn]["role"] for turn in lost], number)
                if has_more_tokens:
                    name = f"the reward model of job {model.job_uuid!r}, row {number}"
                    check_embedded(chat.tokenize([text])[0], embeddings, tokenizer, name)
            if count % _ROWS == 0:
                alive()
        if message := chat.lost.message("prompt", count, f"the reward model's (job {model.job_uuid!r})"):
            found.append(message)
    refuse_lost_turns(spec.data.dropped_turns, found)
    return found
