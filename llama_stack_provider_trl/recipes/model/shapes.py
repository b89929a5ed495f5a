"""Compares the weights in a model's files with those that its configuration describes: shapes, and which there are.

Only headers are read. transformers loads weights of these shapes without values into the model, and so decides itself
what it renames, merges, splits, ties or leaves out.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.model_source import ModelSource
from .agreement import refuse_padding
from .configs import DAMAGE, invalid_model
from .files import WeightFiles
from .merging import few_copies

_NUMBER = re.compile(r"\.(\d+)\.")
"""In the name of a weight the number of its layer."""
_WHOLE = {"F64", "F32", "BF16", "F16"}
"""Names of dtypes of weights that are not quantized."""
_SCALES = ("_scale", "_scale_inv")
"""Endings of the names of what a quantized weight is multiplied with, which lies beside it."""


_IGNORED = re.compile(
    r"(^|\.)(rotary|rope|inv_freq|position_ids|embed_positions|alibi)"
    r"|(attn|attention)\.(bias|masked_bias|causal_mask)$"
    r"|\.(q|k|v|kv|prob)(_output)?_scale$|_extra_state$"
)
"""Names of what old files have beside weights: constants, masks, and scales of a cache."""
_compared: dict[Hashable, tuple[str, ...]] = {}
"""What comparisons have returned, by what they depend on: a job checks its models several times. For 61 layers of 256
experts, one takes 9 s of a CPU."""
_MOST_COMPARED = 64


class _StoredWeight(NamedTuple):
    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As its file has it; empty: one of whole floating-point numbers."""


class _OtherShape(NamedTuple):
    """A weight whose shape in its file is not what the model has."""

    header: _StoredWeight
    target: str
    """Its name in the model."""
    expected: tuple[int, ...]


def refuse_unfitting(
    source: ModelSource,
    files: WeightFiles,
    config: Any,
    outline: Callable[[], PreTrainedModel],
    may_lack: Collection[str] = (),
    *,
    is_reward: bool = False,
) -> tuple[str, ...]:
    """Compare the weights in a model's files with those that its configuration describes, once in a process. Returns
    what the files have beyond that, as warnings; empty: nothing, or it could not be found out. Raises JobFailure:
    invalid_model, with the first weight of another shape, and both shapes, or those that are missing; a file cannot be
    read, or no model be built.

    Args:
        may_lack: weights that may be new.
    """
    key = _key(source, files, config, (*sorted(may_lack), is_reward))
    if key is None or key not in _compared:
        unused = _compare(source, files, config, outline, may_lack) if files.paths else ()
        if key is None:
            return unused
        while len(_compared) >= _MOST_COMPARED:
            del _compared[next(iter(_compared))]
        _compared[key] = unused
    return _compared[key]


def _key(source: ModelSource, files: WeightFiles, config: Any, use: Hashable) -> Hashable | None:
    """What a comparison depends on; None: a file is gone, which reading it reports."""
    try:
        status = [(str(path), path.stat()) for path in files.paths]
    except OSError:
        return None
    content = tuple((path, one.st_size, one.st_mtime_ns, one.st_ino) for path, one in status)
    return source.model, content, files.is_complete, repr(config.to_dict()), use


def _compare(
    source: ModelSource,
    files: WeightFiles,
    config: Any,
    outline: Callable[[], PreTrainedModel],
    may_lack: Collection[str],
) -> tuple[str, ...]:
    headers = _headers(source, files.paths)
    try:
        bare = outline()
    except (*DAMAGE, RuntimeError) as error:  # as loading, which builds it without weights first
        text = config.get_text_config()
        refuse_padding(text, getattr(text, "vocab_size", None), source.model)
        raise not_loadable(source, error) from error
    try:
        loaded = _load_shapes(bare, headers)
        others = _other_shapes(bare, headers) if loaded["mismatched_keys"] else []
    except (*DAMAGE, RuntimeError, SafetensorError):
        return ()  # loading reports it
    if others:
        raise JobFailure(Reason.invalid_model, f"model {source.model!r}: {_described(others, bare)}")
    if packed := _packed(bare, headers):
        raise JobFailure(
            Reason.invalid_model,
            f"model {source.model!r}: {packed.name} is in {packed.dtype} in {packed.file}, as quantized weights are, "
            "and config.json has no quantization_config: use the config.json that was saved with these weights.",
        )
    for name, found, expected in sorted(loaded["mismatched_keys"]):
        raise JobFailure(
            Reason.invalid_model,
            f"model {source.model!r}: what its files have for {name} is {[*found]}, and {[*expected]} by config.json. "
            "config.json describes another model: use the one that was saved with these weights.",
        )
    if files.is_complete and (missing := sorted(set(loaded["missing_keys"]) - set(may_lack))):
        raise missing_weights(source, bare, missing, [header.name for header in headers])
    unexpected = loaded["unexpected_keys"]
    return tuple(filter(None, [_unused_layers(source, bare, unexpected), _left_out(source, bare, unexpected)]))


def not_loadable(source: ModelSource, error: BaseException) -> JobFailure:
    return invalid_model(source.model, "it cannot be loaded as a causal language model", error)


def missing_weights(
    source: ModelSource, model: PreTrainedModel, missing: Sequence[str], found: Iterable[str] = ()
) -> JobFailure:
    kind = "reward model" if type(model).__name__.endswith("ForSequenceClassification") else "causal language model"
    advice = f"It is no {kind}, or a file is missing; name a complete one."
    there = _layers(found)
    if there and min(map(_layer, missing)) >= there:
        advice = (
            f"config.json describes {_layers(missing)} layers, and its files have {there}: use the config.json that "
            "was saved with these weights, or name a complete model."
        )
    return JobFailure(
        Reason.invalid_model,
        f"model {source.model!r} has no weights for {len(missing)} parameters of {type(model).__name__}, such as "
        f"{', '.join(missing[:3])}: they would start at random. {advice}",
    )


def _unused_layers(source: ModelSource, bare: PreTrainedModel, unexpected: Iterable[str]) -> str:
    described = _layers(name for name, _ in bare.named_parameters())
    unused = [name for name in unexpected if _layer(name) >= described]
    if not unused:
        return ""
    return (
        f"the files of {source.model!r} have weights of {_layers(unused)} layers, and its config.json describes "
        f"{described}: the others are neither trained nor exported"
    )


def _left_out(source: ModelSource, bare: PreTrainedModel, unexpected: Iterable[str]) -> str:
    """Of weights that a model of another kind has in the same places: it computes other numbers without them."""
    modules = {name for name, _ in bare.named_modules() if name}
    left_out = sorted(name for name in unexpected if _is_within(name, modules) and not _IGNORED.search(name))
    if not left_out:
        return ""
    return (
        f"the files of {source.model!r} have {len(left_out)} weights that its config.json leaves out, such as "
        f"{', '.join(left_out[:3])}: the model computes without them, and they are neither trained nor exported"
    )


def _is_within(name: str, modules: Collection[str]) -> bool:
    """Whether a weight would be one of the modules, or inside of one of its layers."""
    layer = _NUMBER.search(name)
    return name.rpartition(".")[0] in modules or (layer is not None and name[: layer.end() - 1] in modules)


def _layer(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[1]) if found else -1


def _layers(names: Iterable[str]) -> int:
    return max(map(_layer, names), default=-1) + 1


def _load_shapes(bare: PreTrainedModel, headers: Sequence[_StoredWeight]) -> dict[str, Any]:
    """What transformers reports of loading weights of these shapes, without values."""
    weights = {header.name: torch.empty(header.shape, device="meta") for header in headers}
    with torch.random.fork_rng(devices=[]), few_copies():
        _, loaded = type(bare).from_pretrained(
            None,
            config=bare.config,
            state_dict=weights,
            device_map={"": "meta"},
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return dict(loaded)


def _other_shapes(bare: PreTrainedModel, headers: Sequence[_StoredWeight]) -> list[_OtherShape]:
    """The weights of other shapes among those that transformers loads as they are."""
    return [
        _OtherShape(header, target, tuple(weight.shape))
        for header, target, weight, is_alone in _used(bare, headers)
        if is_alone and tuple(weight.shape) != header.shape
    ]


def _packed(bare: PreTrainedModel, headers: Sequence[_StoredWeight]) -> _StoredWeight | None:
    """The first weight that transformers would load as other numbers than it stands for: an integer, or a scaled one.

    It converts them one by one, which is right for weights that were merely cast to 8 bits.
    """
    names = {header.name for header in headers}
    packed = [header for header in headers if header.dtype and (not _is_float(header) or _is_scaled(header, names))]
    return next((header for header, _, weight, _ in _used(bare, packed) if weight.is_floating_point()), None)


def _is_float(header: _StoredWeight) -> bool:
    """Whether torch converts numbers of its dtype to others of the same value."""
    return header.dtype.lower().removeprefix("torch.").startswith(("f8_e4m3", "f8_e5m2", "float8_e4m3", "float8_e5m2"))


def _is_scaled(header: _StoredWeight, names: Collection[str]) -> bool:
    return any(f"{header.name}{ending}" in names for ending in _SCALES)


def _used(
    bare: PreTrainedModel, headers: Sequence[_StoredWeight]
) -> Iterator[tuple[_StoredWeight, str, torch.Tensor, bool]]:
    """The weights that transformers loads: their name in the model, what is there, and whether it is that one alone.

    Of those that it merges or splits it is the first name.
    """
    if not headers:
        return
    expected: dict[str, torch.Tensor] = bare.state_dict()
    transforms = get_model_conversion_mapping(bare)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix = bare.base_model_prefix
    for header in headers:
        target, converted = rename_source_key(header.name, renamings, converters, prefix, expected)
        if target not in expected and header.name in expected:
            target, converted = rename_source_key(header.name, [], [], prefix, expected)
        if target in expected:
            yield header, target, expected[target], converted is None


def _described(others: Sequence[_OtherShape], bare: PreTrainedModel) -> str:
    """Names what is wrong where the head or the embeddings show it: other sizes are products of several."""
    first = next((other for other in others if not _is_head(other, bare)), others[0])
    header, wanted = first.header, [*first.expected]
    found = f"{header.name} is {[*header.shape]} in {header.file}"
    if _is_head(first, bare):
        return (
            f"{found}, and {wanted} in a reward model: it gives {header.shape[0]} values for a text, and a reward is "
            "one. Name a causal language model, or a reward model with one label (num_labels 1)."
        )
    more = f" ({len(others) - 1} more differ)" if len(others) > 1 else ""
    size = bare.config.get_text_config().vocab_size
    theirs, *width = header.shape
    if _is_embedding(first, bare) and first.expected == (size, *width):
        advice = (
            f"config.json has vocab_size {size}, the file has {theirs} embeddings: write vocab_size {theirs} into "
            "config.json."
        )
    else:
        advice = "config.json describes another model: use the one that was saved with these weights."
    return f"{found}, and {wanted} by config.json{more}. {advice}"


def _is_head(other: _OtherShape, bare: PreTrainedModel) -> bool:
    """Whether it is what a reward model has beyond a language model."""
    has_head = type(bare).__name__.endswith("ForSequenceClassification")
    return has_head and not other.target.startswith(f"{bare.base_model_prefix}.")


def _is_embedding(other: _OtherShape, bare: PreTrainedModel) -> bool:
    ends = [bare.get_input_embeddings(), bare.get_output_embeddings()]
    own = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    return id(dict(bare.named_parameters(remove_duplicate=False)).get(other.target)) in own


def _headers(source: ModelSource, paths: Sequence[Path]) -> list[_StoredWeight]:
    found: list[_StoredWeight] = []
    for path in paths:
        try:
            found += _headers_in(path)
        except MemoryError:
            raise
        except Exception as error:  # of torch.load, for content of any kind
            raise invalid_model(source.model, f"its weights in {path.name} cannot be read", error) from error
    return found


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights in a file. Raises what safetensors and torch.load do for damaged ones."""
    return {header.name: header.shape for header in _headers_in(path)}


def first_not_finite(paths: Iterable[Path], heartbeat: Callable[[], None]) -> _StoredWeight | None:
    """The first weight in files of a model that holds NaN or an infinity. Reads all values, one weight at a time."""
    for path in paths:
        for name, read in _values_in(path):
            heartbeat()
            weight = read()
            if weight.is_floating_point() and not bool(_wide(weight).isfinite().all()):
                return _StoredWeight(path.name, name, tuple(weight.shape), str(weight.dtype))
    return None


def _values_in(path: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    if path.suffix != ".safetensors":
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        yield from ((name, partial(found.get, name)) for name, one in found.items() if isinstance(one, torch.Tensor))
        return
    with safe_open(path, framework="pt") as file:
        yield from ((name, partial(file.get_tensor, name)) for name in file.keys())  # noqa: SIM118 - no iterator


def _wide(weight: torch.Tensor) -> torch.Tensor:
    """Of 8 bits as of 16: torch looks for infinities in no narrower ones."""
    return weight if weight.element_size() > 1 else weight.bfloat16()


def _headers_in(path: Path) -> Iterator[_StoredWeight]:
    if path.suffix != ".safetensors":
        yield from _pickled(path)
        return
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no iterator
            weight = file.get_slice(name)
            dtype = weight.get_dtype()
            yield _StoredWeight(path.name, name, tuple(weight.get_shape()), "" if dtype in _WHOLE else dtype)


def _pickled(path: Path) -> Iterator[_StoredWeight]:
    """Of a file that torch.save wrote. Its values are not read."""
    weights = torch.load(path, map_location="meta", weights_only=True)
    if not isinstance(weights, dict):
        raise pickle.UnpicklingError(f"it holds a {type(weights).__name__}, expected names and weights")
    tensors = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    for name, weight in tensors.items():
        is_whole = weight.is_floating_point() and weight.element_size() > 1
        yield _StoredWeight(path.name, name, tuple(weight.shape), "" if is_whole else str(weight.dtype))
