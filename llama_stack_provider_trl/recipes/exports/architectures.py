"""What llama.cpp reads of a model's configuration, by architecture, and which names its tensors have there.

A configuration that llama.cpp would compute otherwise than transformers is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ...specs.exports import MappedModelType
from .vocabulary import unmapped

_GEMMA2_27B = 46
"""Blocks of the model of which llama.cpp divides attention by the width of a head, whatever the file says."""
_LOCAL_THETA = 1e4
"""Of Gemma 3's local attention in llama.cpp."""
_ALPHA, _BETA = "low_freq_factor", "high_freq_factor"


class GgufArchitecture(NamedTuple):
    """How a model type of transformers is named and stored in GGUF."""

    name: str
    """Of gguf's MODEL_ARCH."""
    interleaves: bool = False
    """Rotary embeddings turn pairs of neighbours: the rows of q and k are in another order than in transformers."""
    adds_one: bool = False
    """Norms multiply by their weight plus 1 in transformers, and by their weight in llama.cpp."""
    describe: Callable[[Any, Any], None] = lambda writer, config: None
    """Writes what this architecture alone has. Raises JobFailure."""
    may_untie: bool = True
    """It can have an output head of its own."""


def architecture_of(config: Any) -> GgufArchitecture:
    """The architecture of a model's configuration. Raises JobFailure: it is not mapped."""
    found = ARCHITECTURES.get(config.model_type)
    if found is None:
        raise unmapped(f"its model_type is {config.model_type!r}; mapped are {', '.join(sorted(ARCHITECTURES))}")
    return found


def describe(writer: Any, config: Any) -> None:
    """Write the configuration of a model as metadata. Raises JobFailure: invalid_model, naming the setting that is not
    mapped."""
    architecture = architecture_of(config)
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    expected = ("gelu_pytorch_tanh",) if config.model_type.startswith("gemma") else ("silu", "swish")
    if activation not in expected:
        raise unmapped(f"its activation is {activation!r}, and llama.cpp computes {expected[0]!r}")
    heads, head_dim = config.num_attention_heads, head_width(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type") == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif rope.get("rope_type") not in ("default", "llama3"):
        raise unmapped(f"its rotary embeddings are of the type {rope.get('rope_type')!r}")
    architecture.describe(writer, config)


def head_width(config: Any) -> int:
    """Numbers of a query of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: Any) -> dict[str, Any]:
    """The rotary embeddings, of Gemma 3 those of its global attention."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return dict(rope.get("full_attention", rope))


def rope_factors(config: Any) -> torch.Tensor | None:
    """Llama 3's divisors of the frequencies [head_dim / 2], fp32; None: there are none."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    factor, low, high = (float(rope[name]) for name in ("factor", _ALPHA, _BETA))
    trained = float(rope["original_max_position_embeddings"])
    frequencies = float(rope["rope_theta"]) ** (
        -torch.arange(0, head_width(config), 2, dtype=torch.float64) / head_width(config)
    )
    found = []
    for wavelength in (2 * math.pi / frequencies).tolist():
        share = (trained / wavelength - low) / (high - low)
        share = min(max(share, 0.0), 1.0)
        found.append(1 / ((1 - share) / factor + share))
    return torch.tensor(found, dtype=torch.float32)


def names_in_gguf(config: Any, names: Iterable[str]) -> dict[str, str]:
    """The name of each tensor of a model's files in GGUF. Raises JobFailure: one is not mapped."""
    import gguf

    architecture = architecture_of(config)
    known = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.name), config.num_hidden_layers)
    found: dict[str, str] = {}
    for name in names:
        mapped = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise unmapped(f"its tensor {name!r} has no name in llama.cpp's {architecture.name}")
        found[name] = mapped
    if "output.weight" in found.values() and not architecture.may_untie:
        raise unmapped(f"it has an output head of its own, and llama.cpp's {architecture.name} has none")
    return found


def in_gguf(config: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A tensor as llama.cpp computes with it."""
    architecture = architecture_of(config)
    if architecture.interleaves and ".self_attn." in name:
        heads = config.num_attention_heads
        if ".q_proj." in name:
            return _interleaved(weight, heads)
        if ".k_proj." in name:
            return _interleaved(weight, config.num_key_value_heads or heads)
    if architecture.adds_one and name.endswith("norm.weight"):
        return weight.float() + 1
    return weight


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head as 0, n/2, 1, n/2 + 1, ... in place of 0, 1, ..."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _context(config: Any) -> int:
    """Tokens that a context may have. Where llama.cpp computes full attention in place of a window: those of a window,
    in which both are the same."""
    positions = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    if config.model_type.startswith("gemma") or window is None:
        return positions
    if not getattr(config, "use_sliding_window", True):
        return positions
    return min(positions, int(window))


def _gemma2(writer: Any, config: Any) -> None:
    kinds = ["sliding_attention" if number % 2 == 0 else "full_attention" for number in range(config.num_hidden_layers)]
    _check_layers(config, kinds)
    _check_scale(config, config.num_hidden_layers == _GEMMA2_27B)
    writer.add_sliding_window(config.sliding_window)
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if (value := getattr(config, name)) is None:
            raise unmapped(f"its {name} is not set, and llama.cpp always caps logits of Gemma 2")
        add(value)


def _gemma3(writer: Any, config: Any) -> None:
    kinds = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(config.num_hidden_layers)]
    _check_layers(config, kinds)
    _check_scale(config, config.num_hidden_layers == 62)
    local = dict((config.rope_parameters or {}).get("sliding_attention") or {})
    if local.get("rope_theta") != _LOCAL_THETA or local.get("rope_type") != "default":
        raise unmapped(f"its local rotary embeddings are {local}, and llama.cpp has the base {_LOCAL_THETA:g}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise unmapped(f"it sets {name}")
    writer.add_sliding_window(config.sliding_window)


def _check_layers(config: Any, expected: list[str]) -> None:
    if list(config.layer_types) != expected:
        raise unmapped("its layer_types are not those that llama.cpp has for this architecture")


def _check_scale(config: Any, is_27b: bool) -> None:
    """llama.cpp decides by the number of blocks what attention is divided by."""
    expected = config.hidden_size / config.num_attention_heads if is_27b else config.head_dim
    if config.query_pre_attn_scalar != expected:
        found = f"its query_pre_attn_scalar is {config.query_pre_attn_scalar}"
        raise unmapped(f"{found}, and llama.cpp computes with {expected:g} for it")


def _phi3(writer: Any, config: Any) -> None:
    if rope_of(config).get("partial_rotary_factor", 1.0) != 1.0:
        raise unmapped("its partial_rotary_factor is not 1")
    original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(int(original))
    writer.add_sliding_window(0)  # attention is full; the context is one window at most


def _plain(writer: Any, config: Any) -> None:
    if getattr(config, "use_sliding_window", False):
        kinds = set(getattr(config, "layer_types", None) or [])
        if len(kinds) > 1:
            raise unmapped("some of its layers have a window and others none")


ARCHITECTURES: dict[MappedModelType, GgufArchitecture] = {
    "llama": GgufArchitecture("LLAMA", interleaves=True),
    "mistral": GgufArchitecture("LLAMA", interleaves=True),
    "qwen2": GgufArchitecture("QWEN2", describe=_plain),
    "qwen3": GgufArchitecture("QWEN3", describe=_plain),
    "gemma2": GgufArchitecture("GEMMA2", adds_one=True, describe=_gemma2, may_untie=False),
    "gemma3_text": GgufArchitecture("GEMMA3", adds_one=True, describe=_gemma3),
    "phi3": GgufArchitecture("PHI3", describe=_phi3),
}
"""By `model_type` of transformers."""
