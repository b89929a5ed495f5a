"""Takes the place of vLLM: its calls, as `recipes.model.vllm_child` makes them, without a model.

An answer has the numbers that follow from its prompt, its seed, and the weights that were loaded last. An interpreter
with torch has a model of transformers instead (`vllm.computed`), which answers by its weights, or with an adapter that
PEFT reads: what was sent wrong shows in the log-probabilities. `plays.json`, which `TRL_FAULTS` names the directory of,
has what goes wrong at a point, load, reload or answer: {POINT: TEXT}, {"kill": POINT}, {"kill worker": POINT} or
{"wait": POINT}. With {"keep": NAME} the weights that were loaded last are in that file beside it; with {"loads": NAME}
a line of that file has of each model that was loaded what devices it was for.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .lora.request import LoRARequest

_LARGEST = 256
_TOKENS_OF_A_STEP = 2048


def _plays() -> dict[str, str]:
    file = Path(os.environ.get("TRL_FAULTS", "/"), "plays.json")
    return json.loads(file.read_text()) if file.exists() else {}


def _reach(name: str) -> None:
    print("vLLM is at", name)  # which is no message to the parent
    plays = _plays()
    if plays.get("kill") == name:
        os.kill(os.getpid(), signal.SIGKILL)
    if plays.get("kill worker") == name:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
        worker.kill()
        worker.join()
        raise RuntimeError("cancelled")  # as vLLM itself
    while plays.get("wait") == name:
        time.sleep(0.1)
    if text := plays.get(name):
        raise ValueError(text)


class SamplingParams(SimpleNamespace):
    """How the tokens of a prompt are chosen."""


class Worker:
    """What has the weights of a model that is loaded."""

    def __init__(self, model: Path) -> None:
        self.digest = self.packed = 0
        self.lora_manager: Any = SimpleNamespace(modules=(), get_adapter=lambda number: SimpleNamespace(loras=()))
        self.quant_method = SimpleNamespace(process_weights_after_loading=Worker.pack)
        self._path = model
        self.computed: Any = None
        self.model_runner = SimpleNamespace(get_model=lambda: self)

    def pack(self) -> None:
        """Copy the weight that a layer shares, as vLLM does on a CPU."""
        self.packed = self.digest

    def get_submodule(self, name: str) -> Worker:
        """The layer that shares a weight with another one."""
        assert name == "tied"
        return self

    def named_parameters(self, remove_duplicate: bool = True) -> list[tuple[str, None]]:
        """The weights of the model's file, by name, and one that a second layer has."""
        with open(self._path / "model.safetensors", "rb") as weights:
            size = int.from_bytes(weights.read(8), "little")  # of what precedes the weights
            names = sorted(json.loads(weights.read(size)).keys() - {"__metadata__"})
        more = [_plays().get("lack"), None if remove_duplicate else "tied.weight"]
        return [(name, None) for name in [*names, *filter(None, more)]]

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Any]]) -> None:
        """Load weights by the model's own method, which may be replaced."""
        self.load_weights(weights_iterator)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> set[str]:
        """Load weights; returns their names."""
        _reach("reload")
        loaded = {name: weight.clone() for name, weight in weights}
        if self.computed is not None:
            self.computed.load(loaded)
        self.digest = 0
        for _, weight in sorted(loaded.items()):
            self.digest = zlib.crc32(weight.contiguous().numpy().tobytes(), self.digest)
        if name := _plays().get("keep"):
            from safetensors.torch import save_file

            save_file(loaded, Path(os.environ["TRL_FAULTS"], name))
        return set(loaded)


class LLM:
    """A model that is loaded."""

    def __init__(self, **settings: Any) -> None:
        assert "RANK" not in os.environ
        assert not Path(settings["model"], "adapter_config.json").exists()
        if settings["max_num_seqs"] > _TOKENS_OF_A_STEP:
            raise ValueError("max_num_batched_tokens has to be greater than or equal to max_num_seqs")
        assert not settings["enable_prefix_caching"]  # new weights would not be used for prompts that it has
        self.longest = settings["max_model_len"]
        self.scores = settings.get("logprobs_mode") == "processed_logprobs"
        self.is_current = False
        self.can_sleep = settings.get("enable_sleep_mode", False)
        assert not self.can_sleep or settings["gpu_memory_utilization"] < 0.9
        self.asleep: set[str] = set()
        devices = settings["tensor_parallel_size"]
        assert settings["distributed_executor_backend"] == ("uni" if devices == 1 else "mp")
        self.workers = [Worker(Path(settings["model"])) for _ in range(devices)]
        self.worker = self.workers[0]
        """Whose weights answer."""
        if name := _plays().get("loads"):
            share = settings.get("gpu_memory_utilization")
            found = [devices, os.environ.get("CUDA_VISIBLE_DEVICES"), share, self.can_sleep]
            with open(Path(os.environ["TRL_FAULTS"], name), "a") as file:
                file.write(json.dumps(found) + "\n")
        self.llm_engine = SimpleNamespace(step=lambda: None, add_lora=self._add_lora)
        self.adapts = settings.get("enable_lora", False)
        if (torch := importlib.util.find_spec("torch")) is not None and torch.submodule_search_locations:
            from .computed import Computed

            self.worker.computed = Computed(settings)
            self.worker.lora_manager = self.worker.computed.manager(_plays().get("lack"))
        _reach("load")

    def _add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter, unless one of its number is loaded."""
        assert "weights" not in self.asleep
        _reach("reload")
        if self.worker.computed is not None:
            self.worker.computed.add(request)
        else:
            file = Path(request.lora_path, "adapter_model.safetensors")
            self.worker.digest = zlib.crc32(file.read_bytes())
        self.is_current = True
        return True

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call a function with each worker."""
        assert "weights" not in self.asleep
        found = [method(worker, *args) for worker in self.workers]
        self.is_current = True
        return found

    def sleep(self, level: int) -> None:
        """Release all memory of the device; with level 1 vLLM has the weights again when it wakes up."""
        assert self.can_sleep
        assert level == (1 if self.adapts else 2)
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        """Take memory of the device again."""
        assert self.asleep.issuperset(tags)
        self.asleep -= set(tags)

    def generate(
        self,
        prompts: list[Any],
        chosen: list[SamplingParams],
        use_tqdm: bool,
        lora_request: LoRARequest | None = None,
    ) -> list[Any]:
        """The answers, in the order of the prompts."""
        assert (lora_request is not None) is self.adapts
        assert not self.asleep
        assert self.adapts or self.worker.packed == self.worker.digest
        _reach("answer")
        if self.scores:
            assert self.is_current, "these weights have answered before"
            self.is_current = False
        assert all((params.logprobs == 0) is self.scores for params in chosen)
        found = []
        for prompt, params in zip(prompts, chosen, strict=True):
            ids = prompt["prompt_token_ids"]
            assert len(ids) + params.max_tokens <= self.longest
            self.llm_engine.step()
            if self.worker.computed is not None and self.scores:
                tokens, log_probs = self.worker.computed.answer(ids, params, lora_request)
                scores = [{t: SimpleNamespace(logprob=value)} for t, value in zip(tokens, log_probs, strict=True)]
                found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=scores)]))
                continue
            first = sum(ids) + (params.seed if params.temperature else 0) + self.worker.digest
            tokens = [3 + (first + number) % _LARGEST for number in range(params.max_tokens - 1)]
            tokens.append(params.stop_token_ids[0])
            scores = [{token: SimpleNamespace(logprob=-6.5 - token % 8 / 8)} for token in tokens]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=scores)]))
        return found
