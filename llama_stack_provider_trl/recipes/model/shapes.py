"""Compares the shapes of the weights in a model's files with those that its configuration describes.

Only headers are read. The names are those that transformers gives the weights while it loads them; weights that it
merges, splits or transposes then are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.model_source import ModelSource
from .configs import DAMAGE


class _OtherShape(NamedTuple):
    """A weight whose shape in its file is not what the model has."""

    name: str
    """In its file."""
    target: str
    """In the model."""
    file: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


def refuse_other_shapes(source: ModelSource, files: Sequence[Path], outline: Callable[[], PreTrainedModel]) -> None:
    """Return if the weights in a model's safetensors files have the shapes that its configuration describes.

    Args:
        outline: makes the model without weights.

    Raises:
        JobFailure: invalid_model, with the first weight that does not, and both shapes.
    """
    if not files:
        return
    try:
        bare = outline()
        others = _other_shapes(bare, files)
    except (*DAMAGE, RuntimeError, SafetensorError):
        return  # loading reports it
    if others:
        raise JobFailure(Reason.invalid_model, f"model {source.model!r}: {_described(others, bare)}")


def _other_shapes(bare: PreTrainedModel, files: Sequence[Path]) -> list[_OtherShape]:
    expected: dict[str, Any] = bare.state_dict()
    transforms = get_model_conversion_mapping(bare)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix, found = bare.base_model_prefix, []
    for file, name, shape in _headers(files):
        target, converted = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, converted = rename_source_key(name, [], [], prefix, expected)
        wanted = getattr(expected.get(target), "shape", None)
        if converted is None and wanted is not None and tuple(wanted) != shape:
            found.append(_OtherShape(name, target, file, shape, tuple(wanted)))
    return found


def _described(others: Sequence[_OtherShape], bare: PreTrainedModel) -> str:
    first = others[0]
    more = f" ({len(others) - 1} more differ)" if len(others) > 1 else ""
    found = f"{first.name} is {[*first.found]} in {first.file}, and {[*first.expected]} by config.json{more}."
    return f"{found} {_advice(first, bare)}"


def _advice(other: _OtherShape, bare: PreTrainedModel) -> str:
    """Names what is wrong in the configuration where the embeddings show it: other sizes are products of several."""
    size = bare.config.get_text_config().vocab_size
    theirs, *width = other.found
    if _is_embedding(other, bare) and other.expected == (size, *width):
        return (
            f"config.json has vocab_size {size}, the file has {theirs} embeddings: write vocab_size {theirs} into "
            "config.json."
        )
    return "config.json describes another model: use the one that was saved with these weights."


def _is_embedding(other: _OtherShape, bare: PreTrainedModel) -> bool:
    ends = [bare.get_input_embeddings(), bare.get_output_embeddings()]
    own = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    return id(dict(bare.named_parameters(remove_duplicate=False)).get(other.target)) in own


def _headers(files: Sequence[Path]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no iterator
                yield path.name, name, tuple(file.get_slice(name).get_shape())
