"""Reads exports as their users do: by transformers, and GGUF by llama.cpp where the package xllamacpp is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from ...specs.exports import GGUF_FILE
from ...specs.rows import Message
from ..data.templates import rendered
from ..model.generation import answer_ends
from ..model.saving import UNLOADABLE, describe
from .gguf_file import metadata
from .proof import AnsweredToken, failed
from .reference import greedy, tokens_of

_ENDS = ("eos", "eot", "eom")
_UNREAD = ("head_dim", "query_pre_attn_scalar")
"""Settings for which transformers has a default of its own, whatever a GGUF file says."""


class _LoadedHere:
    """A model that this process computes, with its tokenizer."""

    tokenizer: Any
    model: Any
    _ends: list[int]

    def rendered(self, messages: list[Message]) -> str:
        if not self.tokenizer.chat_template:
            raise failed("it has no chat template")
        return rendered(self.tokenizer, messages, add_generation_prompt=True)

    def tokens(self, text: str, *, is_rendered: bool) -> list[int]:
        return tokens_of(self.tokenizer, text) if is_rendered else list(self.tokenizer(text)["input_ids"])

    def ends(self) -> list[int]:
        return self._ends

    def close(self) -> None:
        self.model = None

    def answer(self, ids: list[int], most: int) -> list[AnsweredToken]:
        tokens, logits = greedy(self.model, ids, most, self._ends)
        logprobs = torch.log_softmax(logits, dim=-1)
        every = list(range(logits.shape[-1]))
        return [AnsweredToken(token, every, logprobs[at].tolist()) for at, token in enumerate(tokens)]


class TransformersReader(_LoadedHere):
    """An export that transformers has loaded. Raises JobFailure: export_failed, it cannot be loaded.

    Args:
        trained: of a GGUF file, which has weights, tokenizer and settings: the configuration of the trained model, of
            which `_UNREAD` is taken; None: it is none.
        dtype: that the trained model's answers were computed in.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trained: Any = None,
        trust_remote_code: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name = f"transformers {transformers.__version__}"
        is_gguf = trained is not None
        given: dict[str, Any] = {"gguf_file": GGUF_FILE} if is_gguf else {"trust_remote_code": trust_remote_code}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory, **given)
            if is_gguf:
                given["config"] = config = AutoConfig.from_pretrained(directory, gguf_file=GGUF_FILE)
                for name in _UNREAD:
                    if hasattr(config, name):
                        setattr(config, name, getattr(trained, name))
            self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **given).eval()
        except UNLOADABLE as error:
            raise failed(f"{self.name} cannot load it: {describe(error)}") from error
        self._ends = stop_tokens(directory / GGUF_FILE) if is_gguf else answer_ends(self.model, self.tokenizer)


class AdapterReader(_LoadedHere):
    """An adapter in a directory that peft has loaded on its base model, with the tokenizer beside it. Raises
    JobFailure: export_failed, it cannot be loaded.

    Args:
        base: the model without an adapter, which gets it.
    """

    def __init__(self, directory: Path, base: PreTrainedModel) -> None:
        self.name = f"peft {peft.__version__}"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
            base.generation_config = GenerationConfig.from_pretrained(directory)
            self._ends = answer_ends(base, self.tokenizer)
            self.model = PeftModel.from_pretrained(base, str(directory)).eval()
        except UNLOADABLE as error:
            raise failed(f"{self.name} cannot load it: {describe(error)}") from error


def stop_tokens(path: Path) -> list[int]:
    """The tokens that a GGUF file names as those that end an answer, sorted."""
    found = metadata(path)
    named = [found.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    return sorted({int(token) for token in named if token is not None})
