"""A base model in memory with adapters of it, which answers several requests in turns.

The numbers are those of transformers for the same files: the weights have the dtype that they are stored in, an adapter
is loaded by PEFT, and each request is a call of `generate` without padding. The calls advance in turns: each computes a
token while it has the model, with the adapter of its request.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.model_source import ModelSource
from ...specs.serving import (
    CALL_BEGIN,
    Answer,
    AnswerBegun,
    AnswerEnd,
    AnswerPart,
    AnswerReading,
    ChosenToken,
    ServeRequest,
    ServeSpec,
    TokenLogprob,
)
from ...system.fork import THREADS
from ...system.process import usable_cpus
from ..data.chat import Chat
from ..data.embedded import check_embedded
from ..data.forms import opens_thought
from ..data.tokenizer_calls import call_tokenizer
from ..model.adapters import check_adapter
from ..model.files import has_tokenizer_files
from ..model.generation import Sampler, answer_ends
from ..model.loading import WeightStorage, choose_device, load_model, load_tokenizer, vocabulary_size
from ..model.positions import positions_of
from .grammar import SchemaMatcher, check_schema, tokenizer_of
from .text import AnswerText, written_token
from .turns import Turns

MOST_ADAPTERS = 16
"""Adapters that are kept in memory."""
_WITHOUT_POSITIONS = 4096
"""Tokens of an answer at most where neither the request nor the model has a limit."""


class _LeftEarly(Exception):
    """Raised through `generate` when an answer has ended before its last token."""


class _Voice:
    """A tokenizer with its template, and the tokens that end an answer: those of the base, or of an adapter."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: list[int], adapter: str | None) -> None:
        self.tokenizer, self.ends, self.adapter = tokenizer, ends, adapter
        self.chat = Chat(tokenizer)
        self.users = 0
        """Answers that are being computed."""
        self._for_schemas: Any = None

    def matcher(self, schema: str) -> SchemaMatcher:
        """What keeps an answer within a JSON schema. Raises JobFailure."""
        if self._for_schemas is None:
            self._for_schemas = tokenizer_of(self.tokenizer, self.ends)
        return SchemaMatcher(self._for_schemas, schema)


class ServedModel:
    """Loads the model. Its method `answer` may be called from any number of threads. Raises JobFailure: the model
    cannot be used."""

    def __init__(self, spec: ServeSpec) -> None:
        self._source, self._directory = spec.source, spec.adapters
        self._device = choose_device(spec.device)
        if self._device.type == "cpu" and not os.environ.get(THREADS):
            # One core for everything else. On 2 cores that others used, too, a token of a 135M model took 1.3 s with 2
            # threads, which wait for each other at every layer, and 0.07 s with 1.
            torch.set_num_threads(1 if spec.beside else max(1, usable_cpus() - 1))
        self._model: Any = load_model(spec.source, WeightStorage.as_stored(spec.source), self._device).eval()
        tokenizer = load_tokenizer(spec.source)
        self._own_ends = answer_ends(self._model, tokenizer)
        # In place of the model's own, whose penalties and limits would change the answers.
        self._model.generation_config = GenerationConfig(do_sample=False, use_cache=True)
        self._positions, self._embeddings = positions_of(spec.source), vocabulary_size(spec.source)
        self._voices: dict[str | None, _Voice] = {None: _Voice(tokenizer, self._own_ends, None)}
        """By the name of the adapter; least recently used first."""
        self._peft: PeftModel | None = None
        self._active: str | None = None
        self._loaded = 0
        self._turn = Turns()

    def answer(self, request: ServeRequest, send: Callable[[Answer], None], check: Callable[[], None]) -> None:
        """Answer a request. Raises JobFailure: the request, or its adapter, cannot be used. Others can.

        Args:
            send: gets the parts of the answer; may take its time, while others have the model.
            check: called before each token; raises where the answer is no longer wanted.
        """
        if request.json_schema is not None:
            check_schema(request.json_schema)
        with self._turn:
            check()
            send(AnswerReading())  # if the process ends now, this is the request that has ended it
            voice = self._voice(request.adapter)
            voice.users += 1
            try:
                self._answer(voice, request, send, check)
            finally:
                voice.users -= 1

    def _answer(
        self, voice: _Voice, request: ServeRequest, send: Callable[[Answer], None], check: Callable[[], None]
    ) -> None:
        ids = self._encoded(voice, request)
        most = self._room(ids, request.max_tokens)
        answer = _Answering(voice, request, ids)

        def next_turn(message: Answer) -> None:
            self._turn.give()
            try:
                send(message)
                check()
            finally:
                self._turn.take()
            self._activate(voice)

        has_call_tags = CALL_BEGIN in str(voice.tokenizer.chat_template)
        opened = opens_thought(voice.tokenizer, ids)
        next_turn(AnswerBegun(prompt_tokens=len(ids), has_call_tags=has_call_tags, opens_thought=opened))
        config = GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=voice.ends,
            pad_token_id=voice.tokenizer.pad_token_id,
            use_cache=True,
        )
        inputs = torch.tensor([ids], device=self._device)
        try:
            with torch.no_grad():
                self._model.generate(
                    generation_config=config,
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    logits_processor=LogitsProcessorList([_Choosing(answer, next_turn)]),
                )
        except _LeftEarly:
            pass
        if rest := answer.text.rest():
            next_turn(AnswerPart(text=rest))
        send(AnswerEnd(reason=answer.reason, tokens=answer.count))

    def _encoded(self, voice: _Voice, request: ServeRequest) -> list[int]:
        """The token ids of a prompt. The turn is held: limits of a template's memory are those of the process."""
        if request.messages is None:
            (ids,) = call_tokenizer(voice.tokenizer, [request.prompt or ""])["input_ids"]
        else:
            try:
                text = voice.chat.written(request.messages, 0, add_generation_prompt=True)
            except JobFailure as error:
                raise JobFailure(error.reason, error.message.removeprefix("row 0: ")) from error
            (ids,) = voice.chat.tokenize([text])
        ids = ids or [voice.tokenizer.eos_token_id]
        check_embedded(ids, self._embeddings, voice.tokenizer, "the prompt", Reason.invalid_request)
        return list(ids)

    def _room(self, ids: list[int], wanted: int | None) -> int:
        if self._positions is None:
            return wanted or _WITHOUT_POSITIONS
        if len(ids) + (wanted or 1) > self._positions:
            answer = f"{wanted} of its answer" if wanted else "an answer"
            raise JobFailure(
                Reason.invalid_request,
                f"the prompt has {len(ids)} tokens, which with {answer} are more than the {self._positions} positions "
                "of the model: send a shorter prompt, or fewer max_tokens",
            )
        return wanted or self._positions - len(ids)

    def _voice(self, name: str | None) -> _Voice:
        """The base, or an adapter, which is loaded here where it is new. It is active from then on."""
        voice = self._voices.pop(name, None) or self._load(name or "")
        self._voices[name] = voice
        self._activate(voice)
        return voice

    def _load(self, name: str) -> _Voice:
        directory = self._directory / name
        check_adapter(directory, self._source)
        self._remove_others(PeftConfig.from_pretrained(str(directory)).peft_type)
        self._make_room()
        self._loaded += 1
        adapter = f"adapter_{self._loaded}"
        try:
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self._model, str(directory), adapter_name=adapter)
            else:
                self._peft.load_adapter(str(directory), adapter_name=adapter)
        finally:
            self._apply(None)
        tokenizer = self._voices[None].tokenizer
        if has_tokenizer_files(directory):
            tokenizer = load_tokenizer(ModelSource(model=str(directory)), model=self._source)
        end = tokenizer.eos_token_id
        return _Voice(tokenizer, sorted({*self._own_ends, *([] if end is None else [end])}), adapter)

    def _remove_others(self, kind: Any) -> None:
        """Remove the adapters in memory if they are of another kind: PEFT keeps one kind in a model. Raises JobFailure:
        one of them is answering."""
        if self._peft is None or all(config.peft_type == kind for config in self._peft.peft_config.values()):
            return
        adapted = {name: voice for name, voice in self._voices.items() if name is not None}
        if any(voice.users for voice in adapted.values()):
            raise JobFailure(
                Reason.invalid_request,
                "an adapter of another kind is answering, and a model has those of one kind at a time: send it again "
                "when that answer has ended",
            )
        self._peft.unload()
        self._peft = None
        for name in adapted:
            del self._voices[name]

    def _make_room(self) -> None:
        unused = [name for name, voice in self._voices.items() if name is not None and not voice.users]
        while len(self._voices) > MOST_ADAPTERS and unused:
            voice = self._voices.pop(unused.pop(0))
            assert self._peft is not None
            assert voice.adapter is not None
            # PEFT would choose another one by itself, with a warning, where this was the last one that answered.
            self._apply(next((name for name in self._peft.peft_config if name != voice.adapter), None))
            self._peft.delete_adapter(voice.adapter)
            self._apply(None)

    def _activate(self, voice: _Voice) -> None:
        if voice.adapter != self._active:
            self._apply(voice.adapter)

    def _apply(self, adapter: str | None) -> None:
        """Have the model compute with an adapter, or without one."""
        if self._peft is not None:
            layers: Any = self._peft.base_model
            if adapter is None:
                layers.disable_adapter_layers()
            else:
                layers.enable_adapter_layers()
                layers.set_adapter(adapter)
        self._active = adapter


class _Answering:
    def __init__(self, voice: _Voice, request: ServeRequest, prompt: list[int]) -> None:
        self.voice, self.request = voice, request
        # The answer in a chat is a text of its own; a completion continues that of the prompt.
        self.text = AnswerText(voice.tokenizer, request.stop, prompt if request.messages is None else ())
        self.sampler = Sampler(request, [random.Random(request.seed)], lambda: None)
        self.matcher = None if request.json_schema is None else voice.matcher(request.json_schema)
        self.count = 0
        self.reason: Any = "length"

    def add(self, token: int, scores: torch.Tensor) -> AnswerPart:
        """Take the next token, and return the part that can be sent."""
        self.count += 1
        if token in self.voice.ends:
            self.reason = "stop"
            return AnswerPart(text="")
        tokens = () if self.request.logprobs is None else (self._with_logprobs(token, scores, self.request.logprobs),)
        text = self.text.add(token)
        if self.text.is_stopped:
            self.reason = "stop"
        return AnswerPart(text=text, tokens=tokens)

    def _with_logprobs(self, token: int, scores: torch.Tensor, top: int) -> ChosenToken:
        found = torch.log_softmax(scores[0].float(), dim=-1)
        best = torch.topk(found, min(top, found.shape[-1]))
        chosen = self._named(token, float(found[token]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return ChosenToken(**dict(chosen), top=tuple(self._named(each, value) for each, value in pairs))

    def _named(self, token: int, logprob: float) -> TokenLogprob:
        text, content = written_token(self.voice.tokenizer, token, self.text.last())
        known = None if content is None else tuple(content)
        return TokenLogprob(token=text, bytes=known, logprob=max(logprob, -9999.0))


class _Choosing(LogitsProcessor):
    """Chooses each token, sends what it adds to the text, and lets other answers have the model."""

    def __init__(self, answer: _Answering, next_turn: Callable[[Answer], None]) -> None:
        self._answer, self._next_turn = answer, next_turn

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        matcher = self._answer.matcher
        chosen = self._answer.sampler(input_ids, scores if matcher is None else matcher.masked(scores))
        token = int(chosen.argmax(dim=-1))
        if matcher is not None:
            matcher.add(token)
        part = self._answer.add(token, scores)
        self._next_turn(part)
        if self._answer.reason == "stop":
            raise _LeftEarly
        return chosen
