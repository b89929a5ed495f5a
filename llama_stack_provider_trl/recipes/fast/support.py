"""Whether a model can be trained on batches in one sequence. It is tried out on a small copy of the architecture."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...errors import JobFailure
from ...specs.job import JobSpec
from ...specs.methods import METHODS
from ...specs.model_source import ModelSource
from ..model.attention import balances_experts, is_causal_throughout
from ..model.loading import load_config, with_depth
from .attention import NAME
from .batches import FlatPairs
from .context_parallel import refuse_unshareable
from .cpu_attention import NAME_ON_CPU
from .model import use_rows

_TOLERANCE = 1e-5
"""Largest difference of a logit from that of a row alone, relative to the largest one. Rounding in fp32 is 1e-6."""
_WINDOW = 5
"""Tokens of a sliding window in the small copy, so that its rows are longer."""
_VOCABULARY = 64
_LARGEST = 50_000_000
"""Parameters of the small copy. Every rank makes one, 200 MB in fp32."""
_HEAD_SIZE = 16
_EXPERTS = 8
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Attributes of configurations."""
_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of blocks that a short row can try out. Of others, such as chunked attention, it would show nothing."""
_ROPE_OF_BATCHES = ("dynamic", "longrope")
"""Kinds of rotary embeddings that depend on the longest row of a batch."""


def with_batches(spec: JobSpec) -> tuple[JobSpec, str]:
    """The job with the kind of batches that its model can be trained on, and a sentence for its record.

    Raises:
        JobFailure: invalid_request, where its ranks are to share rows and cannot.
    """
    if not spec.compute.padding_free:
        refuse_unshareable(spec, "padding_free is false")
        return spec, ""
    reason = METHODS[spec.algorithm].padded_because or why_padded(spec)
    refuse_unshareable(spec, reason)
    if not reason:
        return spec, "used"
    return spec.changed(padding_free=False), f"not used: {reason}"


def why_padded(spec: JobSpec) -> str:
    """Why a job's batches are padded although its `padding_free` is true; empty: they are not.

    The same on every rank and machine: nothing is computed with the job's own weights or on its device.
    """
    if spec.data.has_images:
        return "the rows have images"
    if spec.compute.attention_mask == "always":
        return "attention_mask is 'always'"
    if spec.compute.attn_implementation not in (None, "sdpa"):
        return f"attn_implementation is {spec.compute.attn_implementation!r}"
    members = (member.source for member in spec.does.ensemble)
    sources = dict.fromkeys([spec.source, spec.reference_source, *members])
    return next((reason for source in sources if (reason := _unsupported(source, spec.data.max_seq_length))), "")


@cache
def _unsupported(source: ModelSource, max_seq_length: int) -> str:
    if source.trust_remote_code:
        return "the model has code of its own"
    try:
        config = load_config(source)
    except JobFailure:
        return ""  # loading the model reports it
    try:
        return _why_unsuitable(config, max_seq_length) or _why_different(config)
    except Exception as error:  # whatever an architecture does with what it does not know
        return f"its attention cannot be tried out ({' '.join(str(error).split())[:200]})"


def _why_unsuitable(config: Any, max_seq_length: int) -> str:
    """What a few short rows would not show."""
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        return "it has no attention"
    kinds = set(getattr(text, "layer_types", None) or ()) - _KINDS
    if kinds:
        return f"it has blocks of kind {', '.join(sorted(kinds))}"
    given = getattr(text, "rope_parameters", None) or {}
    for rope in (given, *(one for one in given.values() if isinstance(one, dict))):  # some have one per kind of block
        if rope.get("rope_type") in _ROPE_OF_BATCHES:
            unscaled = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            if max_seq_length > unscaled:
                return f"its {rope['rope_type']} rotary embeddings depend on the longest row of a batch"
    return ""


def _why_different(config: Any) -> str:
    try:
        return _why_copy_differs(_small(config, _HEAD_SIZE))
    except Exception:  # some architectures have sizes that follow from their own head size
        return _why_copy_differs(_small(config, None))


def _why_copy_differs(small: Any) -> str:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(small).parameters())
    if size > _LARGEST:
        return f"a small copy of it has {size / 1e6:.0f} million parameters, too many to try it out"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return _difference(AutoModelForCausalLM.from_config(small, dtype=torch.float32))


def _small(config: Any, largest_head: int | None) -> Any:
    """A configuration with the same kinds of blocks, few of them and small ones.

    Args:
        largest_head: largest size of a head; None: its own.
    """
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    small = with_depth(config, max(2, *(list(kinds).index(kind) + 1 for kind in set(kinds)), 0) if kinds else 2)
    text = small.get_text_config()
    heads, key_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if largest_head is not None:
        head_size = min(head_size, largest_head)
    sizes = {"num_attention_heads": 2 * heads // key_heads, "vocab_size": _VOCABULARY}
    sizes["hidden_size"] = sizes["num_attention_heads"] * head_size
    if getattr(text, "num_key_value_heads", None):
        sizes["num_key_value_heads"] = 2
    if getattr(text, "head_dim", None) and not isinstance(getattr(type(text), "head_dim", None), property):
        sizes["head_dim"] = head_size
    for name in text.to_dict():
        if name.endswith("intermediate_size") and isinstance(getattr(text, name), int):
            sizes[name] = 2 * sizes["hidden_size"]
    for name, value in {**sizes, **_fewer_experts(text)}.items():
        setattr(text, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    if getattr(text, "sliding_window", None):
        text.sliding_window = _WINDOW
    return small


def _fewer_experts(text: Any) -> dict[str, int]:
    """Experts are all alike: twice as many as a token uses, in as many groups as the router has."""
    used = getattr(text, "num_experts_per_tok", None) or 0
    most = (getattr(text, "n_group", None) or 1) * max(_EXPERTS, 2 * used)
    given = {name: getattr(text, name, None) for name in _NUMBERS_OF_EXPERTS}
    return {name: min(number, most) for name, number in given.items() if isinstance(number, int)}


def _difference(model: PreTrainedModel) -> str:
    """How the model computes pairs in one sequence otherwise than one row at a time; empty: it does not."""
    if not is_causal_throughout(model):
        return "not every block is known to have causal attention"
    if balances_experts(model):
        return "the loss that balances its experts is a mean over padded batches"
    for parameter in model.parameters():
        if parameter.dim() > 1:  # as initialized, attention would be nearly uniform
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.eval()
    ids = torch.randint(_VOCABULARY, (40,)).tolist()
    pairs = [
        {"prompt_ids": ids[:9], "chosen_ids": ids[9:17], "rejected_ids": ids[17:22]},
        {"prompt_ids": ids[22:25], "chosen_ids": ids[25:26], "rejected_ids": ids[26:40]},
    ]
    with torch.no_grad():
        rows = [(pair["prompt_ids"], pair[side]) for pair in pairs for side in ("chosen_ids", "rejected_ids")]
        alone = torch.cat([_logits_alone(model, prompt, answer) for prompt, answer in rows])
        use_rows(model, "cuda")
        inputs = FlatPairs().collate(pairs)
        arguments = {name: inputs[name] for name in ("input_ids", "position_ids", "scored", "layout")}
        together = []
        for name in (NAME, NAME_ON_CPU):
            model.set_attn_implementation(name)
            together.append(model(**arguments, use_cache=False).logits[0])
    # Whatever device the job has, so that all machines find the same.
    error = max(float((one - alone).abs().max() / alone.abs().max()) for one in together)
    return "" if error <= _TOLERANCE else f"its logits differ by {error:.1e} of the largest"


def _logits_alone(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits of the answer's tokens in a sequence of their own, shape (tokens, vocabulary)."""
    logits: torch.Tensor = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1]
