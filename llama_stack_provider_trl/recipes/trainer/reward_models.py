"""Rewards answers by the reward model that another job has trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import Dtype
from ...specs.rewards import RewardModel
from ...specs.rows import Message
from ..data.chat import Chat
from ..data.embedded import check_embedded
from ..data.prepare import TruncationCounter
from ..data.spans import ended_text, split_rows, tokens_behind
from ..data.turns import turn_text
from ..model.files import check_adapter_files
from ..model.loading import SCORE, WeightStorage, load_model, load_tokenizer

LARGEST = 1e30
"""Of a reward: the sum of many squares is a number in float32, too."""


class Scored(NamedTuple):
    rewards: list[float]
    without_room: list[bool]
    """Whether the prompt takes all tokens that it reads: all answers to it get the same reward."""


class RewardScorer:
    """A reward model that is ready to score, whole on each rank.

    It reads an answer as its job has read those that it was trained on: as the last turn of the conversation, by its
    own tokenizer and chat template, cut as they were, at its own `max_seq_length`. So its vocabulary need not be that
    of the model that answers. Raises JobFailure: invalid_model.

    Args:
        dtype: that of the job whose answers are rewarded; weights are in fp32 there, else in bf16.
    """

    def __init__(self, spec: RewardModel, dtype: Dtype, device: torch.device) -> None:
        self._spec, self._device = spec, device
        check_adapter_files(spec.own.directory)
        self._tokenizer = load_tokenizer(spec.own, model=spec.model)
        self._chat = Chat(self._tokenizer)
        with torch.random.fork_rng():  # a head that is read from an adapter begins at random
            model = load_model(spec.model, storage_of(dtype, has_head=not spec.is_adapter), device)
            scorer: Any = _with_adapter(model, spec, spec.own.directory) if spec.is_adapter else model
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._model = scorer.to(device).requires_grad_(False).eval()

    def score(
        self,
        prompts: Sequence[list[Message]],
        completions: Sequence[str],
        numbers: Sequence[int],
        alive: Callable[[], object],
    ) -> Scored:
        """Score completions. Raises JobFailure: a reward is no finite number, or the template refuses a prompt."""
        answers: list[list[Message]] = [[{"role": "assistant", "content": text}] for text in completions]
        rows = [*zip(prompts, answers, numbers, strict=True)]
        read = self._tokens([[*prompt, *answer] for prompt, answer, _ in rows], numbers)
        for ids, number in zip(read, numbers, strict=True):
            name = f"the reward model of job {self._spec.job_uuid!r}, row {number} with its answer"
            check_embedded(ids, self._embeddings, self._tokenizer, name)
        cut = [self._cut(ids, *row) for ids, row in zip(read, rows, strict=True)]
        sequences = [torch.tensor(ids) for ids, _ in cut]
        pad = self._tokenizer.pad_token_id
        alive()
        masks = [torch.ones_like(ids) for ids in sequences]
        with torch.no_grad():
            logits = self._model(
                input_ids=pad_sequence(sequences, batch_first=True, padding_value=pad).to(self._device),
                attention_mask=pad_sequence(masks, batch_first=True).to(self._device),
                use_cache=False,
            ).logits
        rewards: list[float] = logits.squeeze(-1).float().tolist()
        if wrong := [value for value in rewards if not abs(value) <= LARGEST]:
            raise JobFailure(
                Reason.invalid_model,
                f"the reward model of job {self._spec.job_uuid!r} gave {wrong[0]} as a reward, expected finite "
                "numbers: train it again, with a lower learning rate",
            )
        return Scored(rewards, [not has_room for _, has_room in cut])

    def _tokens(self, talks: list[list[Message]], numbers: Sequence[int]) -> list[list[int]]:
        """Conversations as far as their answer ends, as in pairs."""
        rows = [*zip(talks, numbers, strict=True)]
        if self._chat.forms.begins_thought:
            texts = [turn_text(self._chat, messages, len(messages) - 1, number) for messages, number in rows]
            return tokens_behind(self._chat, texts)
        rendered = [self._chat.render(messages, number) for messages, number in rows]
        return self._chat.tokenize(
            [ended_text(self._chat, messages, text) for messages, text in zip(talks, rendered, strict=True)]
        )

    def _cut(self, ids: list[int], prompt: list[Message], answer: list[Message], number: int) -> tuple[list[int], bool]:
        """A conversation, cut as its job has cut pairs, and whether a token of the answer is left."""
        limit = self._spec.max_seq_length
        if len(ids) <= limit:
            return ids, True
        ((before, (after,)),) = split_rows(self._chat, [prompt], [[answer]], [number])
        cutter = TruncationCounter(None, self._tokenizer.bos_token_id, limit, self._spec.truncation_side)
        if (kept := cutter.cut_answer(before, after)) is None:
            return cutter.cut(ids, ids, limit), False
        return [*kept[0], *kept[1]], True


def storage_of(dtype: Dtype, *, has_head: bool = False) -> WeightStorage:
    """How a reward model is held by a job that trains in `dtype`; `has_head`: one that is read without an adapter."""
    return WeightStorage(
        dtype=torch.float32 if dtype == "fp32" else torch.bfloat16,
        compute_dtype=dtype,
        in_4_bits=False,
        is_quantized=False,
        is_sharded=False,
        is_reward=True,
        has_head=has_head,
    )


def _with_adapter(model: Any, spec: RewardModel, path: Path) -> PeftModel:
    try:
        names = load_peft_weights(str(path), device="cpu").keys()
        if not any(name.endswith(SCORE) for name in names):
            raise _incomplete(spec, path, [SCORE])
        with warnings.catch_warnings():
            # Where weights are missing PEFT only warns, and leaves them as they begin.
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            adapted: PeftModel = PeftModel.from_pretrained(model, path)
        missing = sorted(get_peft_model_state_dict(adapted).keys() - names)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError | JobFailure):
            raise
        text = " ".join(str(error).split())[:300]
        raise JobFailure(
            Reason.invalid_model,
            f"the adapter of the reward model {path} cannot be loaded ({type(error).__name__}: {text}): train job "
            f"{spec.job_uuid!r} again",
        ) from error
    if missing:
        raise _incomplete(spec, path, missing)
    return adapted


def _incomplete(spec: RewardModel, path: Path, missing: Sequence[str]) -> JobFailure:
    return JobFailure(
        Reason.invalid_model,
        f"the adapter of the reward model {path} has no weights for {', '.join(missing[:3])}, which would be random: a "
        f"reward model's adapter has its head ({SCORE}), too. Train job {spec.job_uuid!r} again, or name another one",
    )
