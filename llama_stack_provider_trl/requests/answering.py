"""What jobs cannot do whose model answers prompts while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from ..specs.methods import METHODS
from .bodies import DataConfig
from .options import ProviderOptions


def check_answers(fields: Mapping[str, Any], data: DataConfig) -> None:
    """Refuse what such a job cannot do, by its resolved fields and its data. Raises InvalidRequest: names the field."""
    most = fields["method"].answer_tokens
    if most is None:
        return
    title, resources = METHODS[fields["method"].algorithm].title, fields["resources"]
    if resources is not None and resources.nodes > 1:
        hint = f"{title} trains on the ranks of one node: send 1, and the ranks as nproc_per_node"
        raise InvalidRequest("provider_options.resources.nodes", resources.nodes, hint)
    held_out = f"{title} evaluates on no held-out rows: its metrics are those of each step's answers; leave it out"
    for name in ("validation_dataset_id", "train_split_percentage"):
        value = getattr(data, name)
        if value is not None and value != 1.0:
            raise InvalidRequest(f"training_config.data_config.{name}", value, held_out)
    if most >= fields["max_seq_length"]:
        hint = (
            f"it leaves no token for a prompt within max_seq_length {fields['max_seq_length']}: lower it, or raise that"
        )
        raise InvalidRequest("algorithm_config.max_completion_length", most, hint)


def refuse_options(options: ProviderOptions, title: str, reference: str) -> None:
    """Refuse options that such a method has no use for. Raises InvalidRequest: names the option.

    Args:
        reference: why it has no reference as DPO has one, as a sentence's end.
    """
    if options.label_smoothing:
        hint = f"{title} has no form with smoothed labels; leave it out"
        raise InvalidRequest("provider_options.label_smoothing", options.label_smoothing, hint)
    if options.truncation_side != "right":
        hint = f"{title} cuts no prompt: one that leaves no room for an answer is left out; leave this out, too"
        raise InvalidRequest("provider_options.truncation_side", options.truncation_side, hint)
    for name in ("reference_model", "precompute_reference"):
        if value := getattr(options, name):
            raise InvalidRequest(f"provider_options.{name}", value, f"{reference}; leave it out")
    if options.lora and options.lora.quantize_base:
        hint = f"{title} has not been tried with a base in 4 bits; leave it out"
        raise InvalidRequest("provider_options.lora.quantize_base", True, hint)
