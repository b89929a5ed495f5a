"""Keeps an answer within a JSON schema: at each token those that cannot continue it are left out (llguidance)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ...errors import JobFailure
from ...specs.events import Reason
from .grammar_check import CPU_SECONDS, grammar_of, matcher_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PACKAGE = "llguidance"
_CHECK = "llama_stack_provider_trl.recipes.serving.grammar_check"
_SECONDS = 60.0
"""For which the process of a check may live, however busy the machine is."""
_CHECKED = 64
"""Schemas whose check is remembered."""
_LONGEST = 300
"""Characters of the library's message."""


def check_schema(schema: str) -> None:
    """Return if a schema can be compiled within limits, here. Raises JobFailure: invalid_request."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise _refused(
            f"it needs the package {_PACKAGE} in the environment that trains, which lacks it: install "
            "'llama_stack_provider_trl[schemas]' there, or leave it out"
        )
    if problem := _problem_of(schema):
        raise _refused(problem)


@lru_cache(_CHECKED)
def _problem_of(schema: str) -> str:
    """Why a schema cannot be used; empty: it can."""
    argv = [sys.executable, "-m", _CHECK]
    try:
        done = subprocess.run(argv, input=schema.encode(), capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"the schema took more than {_SECONDS:g} s to be compiled: send a simpler one"
    if done.returncode:
        return (
            f"the schema takes more than {CPU_SECONDS} s or 1 GiB to be compiled: send one with fewer patterns, and "
            "without allOf of several"
        )
    return done.stdout.decode("utf-8", "replace").partition("\n")[0][:_LONGEST]


def tokenizer_of(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> Any:
    """The tokens as the library reads them, which is to be kept: of 150,000 tokens it takes a second. Raises
    JobFailure: invalid_request, the tokenizer is not one of the library tokenizers."""
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _refused("the model's tokenizer is not one of the library tokenizers: leave it out")
    return from_tokenizer(tokenizer, eos_token=ends)


class SchemaMatcher:
    """The state of one answer within a schema. Raises JobFailure: invalid_request."""

    def __init__(self, tokenizer: Any, schema: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar_of(schema), limits=matcher_limits(), log_level=0)
        self._check()

    def masked(self, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The logits, shape (1, tokens), with -inf for what cannot follow. What can end the answer is a token that
        ends it."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        bits = ((packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        known = min(len(bits), len(allowed))
        allowed[:known] = bits[:known]
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def add(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(f"an answer cannot be kept within the schema: {self._matcher.get_error()[:_LONGEST]}")


def _refused(why: str) -> JobFailure:
    return JobFailure(Reason.invalid_request, f"response_format: {why}.")
