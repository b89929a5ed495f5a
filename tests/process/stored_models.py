"""Models as they are stored, of each architecture."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from tests.process.architectures import ARCHITECTURES as EXPORTED
from tests.process.architectures import SIZES
from tests.tiny import tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())


OTHERS = {**SIZES, "num_hidden_layers": 1}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    **EXPORTED,
    **dict.fromkeys(("llama", "mistral", "gemma", "olmo2", "starcoder2", "granite"), OTHERS),
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    "gemma3": {
        "text_config": {**OTHERS, "vocab_size": VOCABULARY},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        "mm_tokens_per_image": 4,
    },
}


@cache
def whole(root: Path, architecture: str) -> Path:
    """A model of one block whose files agree, but for token ids that a trainer aligns."""
    path = root / architecture
    sizes = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(
        architecture, **sizes if "text_config" in sizes else {**sizes, "vocab_size": VOCABULARY}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
