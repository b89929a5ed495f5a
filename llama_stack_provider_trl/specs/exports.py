"""What an export of a model is to be, and the names of its files."""

from __future__ import annotations

from typing import Literal

from .bases import Frozen

ExportTarget = Literal["safetensors", "gguf", "ollama", "lora-gguf", "vllm"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]
GGUF_FILE = "model.gguf"
ADAPTER_GGUF = "adapter.gguf"
EXPORT_RECORD = "export.json"
"""In each export: what it was made of, and how it was proven."""
EXPORTING = "exporting"
"""Directory in the checkpoint directory of an `export` job: the result while it is not whole."""


class ExportSpec(Frozen):
    """The files that an export consists of."""

    target: ExportTarget
    gguf_type: GgufType | None = None
    """Of the weights in a GGUF file; None: that of the model's own files, of an adapter f32. Of other files: None."""
