"""Answers computed by vLLM (https://docs.vllm.ai), in a process of its own and under an interpreter of its own: it pins
releases of torch and transformers that are not those of training. `vllm_child` is that process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import JobFailure
from ..specs.events import EventWriter, Reason
from ..specs.job import JobSpec
from ..specs.kinds import Answering
from ..system.process import without_modules
from .answerer import Answerer
from .distributed.heartbeat import heartbeat
from .model.generation import answer_ends
from .model.loading import DTYPES, load_config, outline, source_arguments

_PROGRAM = Path(__file__).with_name("vllm_child.py")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what is computed together follows from the batch alone
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONSAFEPATH": "1",  # our modules beside the program are none of its own
}
_CPU_CACHE_GIB = "2"
"""Of keys and values. vLLM's own default is nearly all memory of the machine."""
_MOST_AT_ONCE = 1024
"""Answers of a batch that vLLM has in progress; the others of it wait. vLLM refuses more than the tokens that one of
its steps takes, 4096 on a CPU and 2048 or more elsewhere."""
_END_SECONDS = 20.0
_NO_MEMORY = ("out of memory", "OutOfMemory", "No available memory", "less than desired")
"""In the texts of vLLM's errors: of torch, and of its own before it reserves the cache."""
_TODO = "Leave engine out, and transformers answers"


class VllmAnswerer(Answerer):
    """See `Answerer`. The model is loaded by `prepare`.

    The answers to a batch follow from its prompts, their order and their random numbers: no other batch has a part in
    them.

    Args:
        spec: whose model is a whole one: an adapter is merged into it before.
        writer: gets heartbeats while the model is loaded.
    """

    def __init__(self, spec: JobSpec, work: Answering, device: torch.device, batch: int, writer: EventWriter) -> None:
        super().__init__(spec, work)
        assert work.vllm_python is not None
        self._python, self._device, self._batch, self._writer = work.vllm_python, device, batch, writer
        self._outline: PreTrainedModel = outline(spec.source, load_config(spec.source), torch.float32)
        # Without a file of its own, a model's generation configuration follows from its config.json.
        generation = _generation_config(spec) or self._outline.generation_config
        self.ends = answer_ends(SimpleNamespace(generation_config=generation), self.tokenizer)
        self._child: subprocess.Popen[str] | None = None

    @property
    def model(self) -> PreTrainedModel:
        return self._outline

    def prepare(self, prompts: Sequence[list[int]]) -> None:
        """Start vLLM with the model. Raises JobFailure: it cannot be started, or cannot load the model."""
        source = self.spec.source
        settings = {
            "model": source.location,
            "revision": source.revision,
            "trust_remote_code": source.trust_remote_code,
            "dtype": str(DTYPES[self.spec.dtype]).removeprefix("torch."),
            "max_model_len": max(map(len, prompts)) + self.work.max_new_tokens,
            "max_num_seqs": min(self._batch, _MOST_AT_ONCE),
            "is_cpu": self._device.type == "cpu",
        }
        try:
            self._child = subprocess.Popen(
                [str(self._python), str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment(),
            )
        except OSError as error:
            problem = f"the interpreter with vLLM, {self._python}, cannot be started ({error.strerror})"
            raise JobFailure(Reason.launch_failed, f"{problem}: correct vllm_python") from error
        with heartbeat(self._writer, self._child.pid):
            for message in self._exchanged(settings):
                if "ready" in message:
                    return
                todo = f"The log of the job has the rest. {_TODO}"
                problem = f"vLLM cannot load {self.spec.model}: {message['error']}. {todo}"
                raise _out_of_memory(message["error"]) or JobFailure(Reason.invalid_model, problem)
        raise self._ended("while it loaded the model")

    def close(self) -> None:
        if (child := self._child) is None:
            return
        self._child = None
        with contextlib.suppress(OSError):
            child.stdin.close()  # type: ignore[union-attr]
        if _status_of(child) is None:
            child.kill()
            _status_of(child)
        child.stdout.close()  # type: ignore[union-attr]

    def _answer(
        self, prompts: list[list[int]], sources: list[random.Random], on_token: Callable[[], None]
    ) -> list[list[int]]:
        batch = {
            "prompts": prompts,
            "seeds": [source.getrandbits(31) for source in sources],
            "temperature": self.work.temperature,
            "top_p": self.work.top_p,
            "max_tokens": self.work.max_new_tokens,
            "ends": list(self.ends),
        }
        for message in self._exchanged(batch):
            on_token()
            if "error" in message:
                raise _out_of_memory(message["error"]) or RuntimeError(f"vLLM: {message['error']}")
            if "answers" in message:
                answers: list[list[int]] = message["answers"]
                return answers
        raise self._ended("while it answered")

    def _environment(self) -> dict[str, str]:
        given = {"VLLM_CPU_KVCACHE_SPACE": _CPU_CACHE_GIB} if self._device.type == "cpu" else {}
        if self._device.type == "cuda" and self._device.index is not None:
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            given["CUDA_VISIBLE_DEVICES"] = visible[self._device.index] if visible else str(self._device.index)
        return {**without_modules(os.environ), **_ENVIRONMENT, **given}

    def _exchanged(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a message; yields the program's own until it ends."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit status is reported
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        yield from map(json.loads, self._child.stdout)

    def _ended(self, when: str) -> Exception:
        """Why the program has ended without a message."""
        assert self._child is not None
        status = _status_of(self._child)
        if status is None:
            # `close` kills it.
            return RuntimeError(
                f"vLLM has closed its output {when}, and has not ended: what it has written is in the log"
            )
        if status == -signal.SIGKILL:
            found = f"vLLM was killed {when}, as the kernel does when memory runs out"
            return JobFailure(Reason.out_of_memory, f"{found}. Use a smaller batch_size or more memory")
        return RuntimeError(f"vLLM ended with exit status {status} {when}: its output is in the log")


def _status_of(child: subprocess.Popen[str]) -> int | None:
    """The exit status of a program that is to end; None: it has not, also in `_END_SECONDS`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(_END_SECONDS)
    return None


def _out_of_memory(error: str) -> JobFailure | None:
    """The failure that an error of vLLM is by its text; None: it is another one."""
    if not any(text in error for text in _NO_MEMORY):
        return None
    todo = "Use fewer prompts per batch_size, fewer max_new_tokens, or a device with more memory"
    return JobFailure(Reason.out_of_memory, f"vLLM: {error}. {todo}")


def _generation_config(spec: JobSpec) -> GenerationConfig | None:
    """The model's own; None: it has none."""
    source = spec.source
    with contextlib.suppress(OSError):
        found: GenerationConfig = GenerationConfig.from_pretrained(source.location, **source_arguments(source))
        return found
    return None
