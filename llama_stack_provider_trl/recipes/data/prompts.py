"""Tokenizes the prompts of a job's `samples`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jinja2 import TemplateError

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import DroppedTurns, SamplesSpec
from .chat import Chat, default_chat_template, refuse_lost_turns
from .embedded import check_embedded
from .templates import rendered
from .tokenizer_calls import call_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SamplePrompts(NamedTuple):
    ids: list[list[int]]
    lost_turns: list[str]
    """A sentence where the chat template leaves out turns of them."""


def encode_prompts(
    samples: SamplesSpec | None,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    dropped_turns: DroppedTurns = "warn",
    embeddings: int | None = None,
) -> SamplePrompts:
    """Token ids of each prompt with the header of its answer, as the chat template writes them. Raises JobFailure:
    invalid_request, naming the prompt: the chat template refuses it, or leaves out turns where the job is not to lose
    any, or it leaves no positions for `max_new_tokens`, or the model has no embedding for one of its tokens.

    Args:
        positions: tokens that the model has positions for; None: any number.
        embeddings: tokens that it has embeddings for; None: any number.
    """
    if samples is None:
        return SamplePrompts([], [])
    # Not `ensure_chat_template`: rows of plain text leave a tokenizer without a template as it is.
    template = None if tokenizer.chat_template else default_chat_template(tokenizer)
    chat, encoded = Chat(tokenizer), []
    for number, prompt in enumerate(samples.prompts):
        name = f"provider_options.samples.prompts[{number}]"
        turns = [message.model_dump() for message in prompt]
        try:
            text = rendered(tokenizer, turns, chat_template=template, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in prompt)
            raise JobFailure(
                Reason.invalid_request,
                f"{name}: the model's chat template refuses the turns {roles}: {error}. Send other turns",
            ) from error
        if template is None:  # the default one writes every turn
            unwritten = chat.unwritten_turns(turns, text, True)
            chat.lost.add([turns[turn]["role"] for turn in unwritten], number)
        ids = call_tokenizer(tokenizer, [text], add_special_tokens=False)["input_ids"][0]
        if positions is not None and len(ids) + samples.max_new_tokens > positions:
            raise JobFailure(
                Reason.invalid_request,
                f"{name} has {len(ids)} tokens, which with max_new_tokens {samples.max_new_tokens} are more than the "
                f"{positions} positions of the model. Shorten the prompt, or send fewer max_new_tokens",
            )
        ids = ids or [tokenizer.eos_token_id]
        if embeddings is not None:
            check_embedded(ids, embeddings, tokenizer, name, Reason.invalid_request)
        encoded.append(ids)
    lost = chat.lost.message("sample prompt", len(samples.prompts), row="prompt")
    found = SamplePrompts(encoded, [lost] if lost else [])
    refuse_lost_turns(dropped_turns, found.lost_turns, "provider_options.samples: ", Reason.invalid_request)
    return found
