"""The model that is exported, as transformers and peft compute it, and its answers to fixed prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import align_special_tokens

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from ...specs.rows import Message
from ...system.process import available_memory
from ..data.templates import rendered
from ..model.adapters import check_adapter
from ..model.files import has_tokenizer_files
from ..model.generation import answer_ends
from ..model.loading import WeightStorage, load_job_tokenizer, load_model, load_tokenizer, parameter_counts
from ..model.positions import positions_of

GREEDY_TOKENS = 64
"""Of each answer."""
_CONVERSATIONS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi, how can I help?"},
        {"role": "user", "content": "def f(x):\n\treturn x  # Zwölf Boxkämpfer, 你好 😊"},
    ],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "12345 + 678.9 = ?\n\n"}],
)
_TEXTS = (
    "The capital of France is",
    "def add(one, other):\n    return one + other\n\n\nprint(add(12345, 678))",
    "Zwölf Boxkämpfer jagen Viktor, 你好 😊. It's  what we'll",
)
"""Prompts of a model without a chat template."""
_SAME = 1e-6
"""Of their scale: logits that differ by less are equal."""


class Prompt(NamedTuple):
    messages: list[Message] | None
    """None: it is a text, and the tokenizer's own special tokens belong to it."""
    text: str
    ids: list[int]


class Expected(NamedTuple):
    prompt: Prompt
    tokens: list[int]
    """At most GREEDY_TOKENS, with the one that ends the answer."""
    logits: torch.Tensor
    """[tokens, vocabulary], fp32: those that each token was chosen by."""


class Trained:
    """The model of an export job: the base model, and the adapter where the job names one. Raises JobFailure: it cannot
    be loaded."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.storage = WeightStorage.as_stored(spec.source)
        if spec.adapter is not None:
            check_adapter(spec.adapter.directory, spec.source)
        self.tokenizer = _tokenizer(spec)
        self.model = self._load(self.storage.dtype)
        """With weights in the dtype of their files, which are mapped into memory."""
        self.ends = answer_ends(self.plain, self.tokenizer)
        """Tokens that end an answer."""
        self.compared_in = torch.float32
        """The dtype that `answers` has computed in."""

    @property
    def plain(self) -> PreTrainedModel:
        model: Any = self.model
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def prompts(self) -> list[Prompt]:
        """The prompts that exports are compared by, as far as the template takes them."""
        found = list[Prompt]()
        if not self.tokenizer.chat_template:
            return [Prompt(None, text, list(self.tokenizer(text)["input_ids"])) for text in _TEXTS]
        refused = ""
        for messages in _CONVERSATIONS:
            try:
                text = rendered(self.tokenizer, messages, add_generation_prompt=True)
            except (TemplateError, TypeError, ValueError) as error:
                refused = str(error)
                continue
            found.append(Prompt(messages, text, tokens_of(self.tokenizer, text)))
        if not found:
            raise JobFailure(Reason.invalid_model, f"its chat template refuses every prompt: {refused[:300]}.")
        return found

    def answers(
        self, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[list[Expected], float | None]:
        """The greedy answers to the prompts, computed in fp32 where that fits into memory; and how much the adapter
        changes, as a fraction of the scale of the logits (None: there is none). Raises JobFailure: export_failed, where
        the adapter changes nothing; out_of_memory."""
        _, count = parameter_counts(self.plain)
        self.compared_in = torch.float32 if count * 5 < available_memory() else self.storage.dtype
        model = self.model if self.compared_in == self.storage.dtype else self._load(self.compared_in)
        prompts, found, changes = self.prompts(), list[Expected](), list[float]()
        most = _room(self.spec.source, prompts)
        for number, prompt in enumerate(prompts):
            tokens, logits = greedy(model, prompt.ids, most, self.ends)
            found.append(Expected(prompt, tokens, logits))
            if isinstance(model, PeftModel):
                with model.disable_adapter():
                    _, bare = greedy(model, prompt.ids, 1, self.ends)
                changes.append(difference(logits[:1], bare))
            progress(number + 1, len(prompts))
        if changes and max(changes) < _SAME:
            assert self.spec.adapter is not None
            raise JobFailure(
                Reason.export_failed,
                f"the adapter {self.spec.adapter.model!r} changes nothing: with it and without it the logits of all "
                f"{len(changes)} prompts are equal. Nothing was written; train it for more steps, or with a higher "
                "learning rate.",
            )
        return found, max(changes) if changes else None

    def _load(self, dtype: torch.dtype) -> PreTrainedModel | PeftModel:
        base = load_model(self.spec.source, self.storage.with_dtype(dtype), torch.device("cpu"))
        align_special_tokens(base, self.tokenizer)  # as Trainer does
        model: PreTrainedModel | PeftModel = base
        if self.spec.adapter is not None:
            model = PeftModel.from_pretrained(base, str(self.spec.adapter.directory))
        return model.eval()


def _tokenizer(spec: JobSpec) -> PreTrainedTokenizerBase:
    """That of the adapter, where one lies beside it, as the model was trained with."""
    adapter = spec.adapter
    if adapter is not None and has_tokenizer_files(adapter.directory):
        return load_tokenizer(ModelSource(model=adapter.model, path=adapter.path), model=spec.source)
    return load_job_tokenizer(spec)


def _room(source: ModelSource, prompts: Sequence[Prompt]) -> int:
    positions, longest = positions_of(source), max(len(prompt.ids) for prompt in prompts)
    if positions is None:
        return GREEDY_TOKENS
    if positions <= longest:
        raise JobFailure(
            Reason.invalid_model, f"the model has {positions} positions, and the longest prompt takes {longest}."
        )
    return min(GREEDY_TOKENS, positions - longest)


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a rendered prompt, which has its special tokens in it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def greedy(model: Any, ids: list[int], most: int, ends: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """The likeliest token each time, up to one of `ends`; and the logits of each, fp32 [tokens, vocabulary]."""
    tokens, logits, cache = list[int](), list[torch.Tensor](), None
    inputs = torch.tensor([ids or [0]])
    with torch.no_grad():
        while len(tokens) < most and (not tokens or tokens[-1] not in ends):
            out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0, -1].float())
            tokens.append(int(logits[-1].argmax()))
            inputs = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits)


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of the logits of a token [tokens, vocabulary], as a fraction of their spread."""
    one, other = (part - part.mean(dim=-1, keepdim=True) for part in (expected, found))
    return float(((one - other).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-6)).max())
