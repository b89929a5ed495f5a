"""Keeps sequences within the positions of a model. Training on longer ones would fail, on CUDA without a message."""

from __future__ import annotations

from transformers import PreTrainedModel

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec
from ...specs.model_source import ModelSource
from .loading import load_config


def within_positions(spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """The job with a default `max_seq_length` lowered to the positions of its models and its reference, and a warning.

    A length that the request set stays as it is: `check_length` refuses one that is too large. Reads config.json alone.
    """
    if not spec.data.max_seq_length_is_default:
        return spec, []
    members = [member.source for member in spec.does.ensemble]
    sources = [spec.source, spec.reference_source, *members]
    found = [positions for source in sources if (positions := positions_of(source)) is not None]
    if not found or min(found) >= spec.data.max_seq_length:
        return spec, []
    warning = (
        f"max_seq_length is {min(found)}, the positions of the model, instead of the default {spec.data.max_seq_length}"
        ": set the provider option max_seq_length to choose it"
    )
    return spec.changed(max_seq_length=min(found)), [warning]


def positions_of(source: ModelSource) -> int | None:
    """Tokens that a model has positions for; None: it states no limit, or cannot be read, which loading it reports."""
    try:
        config = load_config(source)
    except JobFailure:
        return None
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_length(model: PreTrainedModel, max_seq_length: int, role: str = "") -> None:
    """Refuse sequences longer than the model has positions for. Training would fail, on CUDA without a message. Raises
    JobFailure: invalid_request, naming both lengths.

    Args:
        role: what the model is in the job, and its name, where it is not the one that is trained.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_seq_length > positions:
        role = role or f"this {type(model).__name__}"
        raise JobFailure(
            Reason.invalid_request,
            f"max_seq_length is {max_seq_length}, but {role} has {positions} positions. "
            f"Set the provider option max_seq_length to {positions} or less.",
        )
