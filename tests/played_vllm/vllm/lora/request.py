"""Takes the place of vLLM's module (0.32.0, vllm/lora/request.py)."""

from __future__ import annotations

from typing import NamedTuple


class LoRARequest(NamedTuple):
    """An adapter in a directory."""

    lora_name: str
    lora_int_id: int
    lora_path: str
