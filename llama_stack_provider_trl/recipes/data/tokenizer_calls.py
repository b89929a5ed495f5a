"""Calls of a tokenizer, whose files may be damaged or malicious: a regular expression in `tokenizer.json` may not end,
or stop the library that computes it.

Nothing interrupts that library: a timer of the kernel ends the process, whose end `specs.chat_templates.UNENDED`
explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import JobFailure
from ...specs.chat_templates import RENDER_SECONDS
from ...specs.events import Reason
from ...system.cpu_timer import CpuTimer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = RENDER_SECONDS
SECONDS_PER_CHARACTER = 20e-6
"""Of CPU time. A byte-level BPE takes 0.4 to 1.4 us, also for a million equal characters (measured)."""


def call_tokenizer(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
    """Tokenize texts as they are. Raises JobFailure: invalid_model, where the tokenizer cannot, such as a word."""
    # verbose=False: a sequence longer than the model takes is cut and counted here; a further warning is redundant.
    options |= {"return_attention_mask": False, "truncation": False, "verbose": False}
    with _bounded(tokenizer, "tokenize a text", sum(map(len, texts)), of_all=len(texts) > 1):
        return tokenizer(texts, **options)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], **options: Any) -> str:
    """The text of tokens. Raises JobFailure: invalid_model, where the tokenizer cannot decode them."""
    with _bounded(tokenizer, "decode tokens", len(ids)):
        return str(tokenizer.decode(list(ids), **options))


@contextmanager
def _bounded(tokenizer: PreTrainedTokenizerBase, does: str, size: int, *, of_all: bool = False) -> Iterator[None]:
    """End the process where the block takes more CPU time than so many characters need.

    Args:
        of_all: several texts, which the library gives to threads of its own.
    """
    try:
        with CpuTimer(SECONDS + size * SECONDS_PER_CHARACTER, of_all=of_all):
            yield
    except BaseException as error:
        # The library raises no class of its own, and this one for what its authors did not expect.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise JobFailure(
            Reason.invalid_model,
            f"the tokenizer of {tokenizer.name_or_path!r} cannot {does}: {error}. Name a model whose tokenizer.json "
            "and tokenizer_class (in tokenizer_config.json) belong together.",
        ) from error
