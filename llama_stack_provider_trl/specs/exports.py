"""What an export of a model is to be, and the names of its files."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from .bases import Frozen

ExportTarget = Literal["safetensors", "gguf", "ollama", "lora-gguf", "vllm"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]
MappedModelType = Literal["gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"]
"""`model_type` of the models that GGUF files are made of, and that vLLM is known to serve. SmolLM2 is a llama."""
MAPPED_MODEL_TYPES: tuple[str, ...] = get_args(MappedModelType)
GGUF_FILE = "model.gguf"
ADAPTER_GGUF = "adapter.gguf"
EXPORT_RECORD = "export.json"
"""In each export: what it was made of, and how it was proven."""
EXPORTING = "exporting"
"""Directory in the checkpoint directory of an `export` job: the result while it is not whole."""


HUB, BUCKET = "hf", "s3"
HUB_TOKEN = "TRL_EXPORT_HUB_TOKEN"
"""Variable of the service's environment: the token by which exports are uploaded. No training gets it."""
HUB_TOKEN_FILE = "TRL_EXPORT_HUB_TOKEN_FILE"
"""Variable of the service's environment: a file with that token, in place of the variable."""
_HUB_NAME = r"\w(?:[\w.-]{0,94}\w)?"
"""A hub refuses a dot or a dash at either end of a name, and more than 96 characters."""
_PLACES = {
    HUB: re.compile(rf"{_HUB_NAME}/{_HUB_NAME}(?<!\.git)", re.ASCII),
    BUCKET: re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w+=@-][\w.+=@-]*){1,30}", re.ASCII),
}
_EXPECTED = "expected hf://OWNER/NAME or s3://BUCKET/PATH, without a slash at its end"
_EXPECTED_HUB = (
    "expected hf://OWNER/NAME, each of at most 96 letters, digits, '_', '.' and '-'; a hub refuses '--', '..', '-' or "
    "'.' at either end, and '.git' at the end of a name"
)
_ACCOUNTS = {HUB: (HUB_TOKEN,), BUCKET: ("AWS_",)}


class Destination(NamedTuple):
    """Where an export is uploaded."""

    scheme: str
    path: str
    """Owner and name of a repository; or a bucket, and the directory in it."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"


def destination_of(text: str) -> Destination:
    """What `hf://OWNER/NAME` or `s3://BUCKET/PATH` names. Raises ValueError: it has another form."""
    scheme, _, rest = text.partition("://")
    place = _PLACES.get(scheme)
    found = place.fullmatch(rest) if place is not None else None
    if found is None or ".." in rest or (scheme == HUB and "--" in rest):
        raise ValueError(_EXPECTED_HUB if scheme == HUB else _EXPECTED)
    return Destination(scheme, rest)


def allows(allowed: str, destination: Destination) -> bool:
    """Whether a destination is, or lies below, one that the operator allows, such as `hf://OWNER`."""
    return f"{destination}/".startswith(f"{allowed.rstrip('/')}/")


class ExportSpec(Frozen):
    """The files that an export consists of."""

    target: ExportTarget
    gguf_type: GgufType | None = None
    """Of the weights in a GGUF file; None: that of the model's own files, of an adapter f32. Of other files: None."""
    upload_to: str | None = None
    """Where it is sent once it is proven, as `destination_of` reads it; None: it stays here."""


def accounts_of(spec: ExportSpec) -> tuple[str, ...]:
    """Variables of the service's environment by which an export is uploaded (`TaskSpec.accounts`)."""
    return () if spec.upload_to is None else _ACCOUNTS[destination_of(spec.upload_to).scheme]
