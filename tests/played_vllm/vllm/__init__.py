"""Takes the place of vLLM: its calls, as `recipes.vllm_child` makes them, without a model.

An answer has the numbers that follow from its prompt and its seed. `plays.json`, which `TRL_FAULTS` names the directory
of, has what goes wrong: {"load": TEXT}, {"answer": TEXT}, {"kill": "load"} or {"kill": "answer"}.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_LARGEST = 256
_TOKENS_OF_A_STEP = 2048


def _reach(name: str) -> None:
    print("vLLM is at", name)  # which is no message to the parent
    file = Path(os.environ.get("TRL_FAULTS", "/"), "plays.json")
    plays = json.loads(file.read_text()) if file.exists() else {}
    if plays.get("kill") == name:
        os.kill(os.getpid(), signal.SIGKILL)
    if text := plays.get(name):
        raise ValueError(text)


class SamplingParams(SimpleNamespace):
    """How the tokens of a prompt are chosen."""


class LLM:
    """A model that is loaded."""

    def __init__(self, **settings: Any) -> None:
        assert "RANK" not in os.environ
        assert not Path(settings["model"], "adapter_config.json").exists()
        if settings["max_num_seqs"] > _TOKENS_OF_A_STEP:
            raise ValueError("max_num_batched_tokens has to be greater than or equal to max_num_seqs")
        self.longest = settings["max_model_len"]
        self.llm_engine = SimpleNamespace(step=lambda: None)
        _reach("load")

    def generate(self, prompts: list[Any], chosen: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        """The answers, in the order of the prompts."""
        _reach("answer")
        found = []
        for prompt, params in zip(prompts, chosen, strict=True):
            ids = prompt["prompt_token_ids"]
            assert len(ids) + params.max_tokens <= self.longest
            self.llm_engine.step()
            first = sum(ids) + (params.seed if params.temperature else 0)
            tokens = [3 + (first + number) % _LARGEST for number in range(params.max_tokens - 1)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[*tokens, params.stop_token_ids[0]])]))
        return found
