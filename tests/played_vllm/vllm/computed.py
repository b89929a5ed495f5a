"""A model of transformers in vLLM's place, with an adapter that PEFT reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from .lora.request import LoRARequest

_SUFFIXES = (".lora_A.weight", ".lora_B.weight")


class Computed:
    """A model that answers.

    Args:
        settings: of LLM.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # several would wait for each other beside other tests
        dtype = getattr(torch, settings["dtype"])
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
        self._layers = {name for name, module in self._model.named_modules() if isinstance(module, torch.nn.Linear)}
        self._most_rank = settings.get("max_lora_rank", 0)
        self._loaded: LoRARequest | None = None
        self._names: set[str] = set()

    def manager(self, lacks: str | None) -> Any:
        """What has the layers of the model and of its adapter, as vLLM's LoRAModelManager has them."""
        adapter = SimpleNamespace(loras=self._names)
        return SimpleNamespace(modules=self._layers - {lacks}, get_adapter=lambda number: adapter)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Take weights by the names in the model's files."""
        missing, unknown = self._model.load_state_dict(weights, strict=False)
        assert not unknown
        assert set(missing) <= set(self._model.all_tied_weights_keys)

    def add(self, request: LoRARequest) -> None:
        """Read an adapter; as vLLM does, keep the one that is loaded where that has the same number."""
        if self._loaded is not None and self._loaded.lora_int_id == request.lora_int_id:
            return
        directory = Path(request.lora_path)
        assert 0 < json.loads((directory / "adapter_config.json").read_text())["r"] <= self._most_rank
        names = load_file(directory / "adapter_model.safetensors")
        assert all(name.endswith(_SUFFIXES) for name in names)
        self._names.clear()
        self._names.update(name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in names)
        if self._loaded is None:
            self._model = PeftModel.from_pretrained(self._model, directory, adapter_name=request.lora_name)
        else:
            self._model.load_adapter(str(directory), adapter_name=request.lora_name)
            self._model.set_adapter(request.lora_name)
            self._model.delete_adapter(self._loaded.lora_name)
        self._model.eval()
        self._loaded = request

    @torch.no_grad()
    def answer(self, prompt: list[int], params: Any, request: LoRARequest | None) -> tuple[list[int], list[float]]:
        """The tokens that answer a prompt, and the log-probability of each."""
        assert request == self._loaded
        assert params.top_p == 1.0
        random, tokens, scores = torch.Generator().manual_seed(params.seed), [], []
        while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stop_token_ids):
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, -1].float()
            log_probs = (logits / params.temperature).log_softmax(dim=-1)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=random))
            tokens.append(token)
            scores.append(float(log_probs[token]))
        return tokens, scores
