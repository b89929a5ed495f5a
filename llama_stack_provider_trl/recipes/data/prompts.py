"""Tokenizes the prompts of a job's `samples`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import TemplateError

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import SamplesSpec
from .chat import call_tokenizer, default_chat_template
from .templates import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompts(samples: SamplesSpec, tokenizer: PreTrainedTokenizerBase, positions: int | None) -> list[list[int]]:
    """Token ids of each prompt with the header of its answer, as the chat template writes them.

    Args:
        positions: tokens that the model has positions for; None: any number.

    Raises:
        JobFailure: invalid_request, naming the prompt: the chat template refuses it, or it leaves no positions for
            `max_new_tokens`.
    """
    # Not `ensure_chat_template`: rows of plain text leave a tokenizer without a template as it is.
    template = None if tokenizer.chat_template else default_chat_template(tokenizer)
    encoded = []
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
        ids = call_tokenizer(tokenizer, [text], add_special_tokens=False)["input_ids"][0]
        if positions is not None and len(ids) + samples.max_new_tokens > positions:
            raise JobFailure(
                Reason.invalid_request,
                f"{name} has {len(ids)} tokens, which with max_new_tokens {samples.max_new_tokens} are more than the "
                f"{positions} positions of the model. Shorten the prompt, or send fewer max_new_tokens",
            )
        encoded.append(ids or [tokenizer.eos_token_id])
    return encoded
