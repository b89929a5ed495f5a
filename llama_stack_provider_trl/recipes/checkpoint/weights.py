"""Writes a model's weights one by one into safetensors files that transformers loads, and reads them back.

In memory at a time are: on rank 0 the file at hand (`FILE_BYTES` at most, or one group) and one group of weights,
on the others one weight, twice while it is gathered. Measured on two CPU ranks, a model of 420 MiB whose largest weight
takes 48 MiB, files of 64 MiB: 102 MiB more on rank 0, 97 MiB on the other.

A group is what must be converted together for the file: one weight in all architectures known to us, see `_groups`.
Without sharding and without a change of dtype, the weights are not even copied.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel, VeraModel
from peft.tuners.ia3 import IA3Layer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..distributed import ranks
from ..model.fsdp import gather

_HASHING_THREADS = 8
"""One thread hashes 1 GB/s: the 140 GB of a 70B model would take two minutes while every GPU waits, and as long again
to read back. hashlib releases the interpreter's lock."""
FILE_BYTES = 2 << 30
"""Size of a weights file beyond which the next one is begun."""


class Weight(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str
    """Of its bytes."""


class _Source(NamedTuple):
    """Where a weight of the plain model is in the one that was trained."""

    weight: torch.Tensor
    dtype: torch.dtype
    """What it is exported in."""
    adapted: BaseTunerLayer | None = None
    """The layer whose adapter is to be merged into it."""
    part: str = "weight"
    """Of that layer: weight or bias."""

    def whole(self) -> torch.Tensor | None:
        """The weight in CPU memory on rank 0, None on the others; every rank must call it."""
        if self.adapted is None:
            return gather(self.weight, self.dtype)
        # In fp32, so that what is rounded to the export's dtype is rounded once.
        parts = {id(part): gather(part, torch.float32) for part in self.adapted.parameters()}
        if ranks.rank() != 0:
            return None
        # A twin of the layer around whole weights; PEFT itself merges it (LoRA, DoRA, Conv1D).
        memo = {address: torch.nn.Parameter(part.clone()) for address, part in parts.items() if part is not None}
        twin = copy.deepcopy(self.adapted, memo)
        twin.merge()
        merged: torch.Tensor = getattr(twin.get_base_layer(), self.part).detach()
        return merged.to(self.dtype)


def write_weights(
    model: PreTrainedModel | PeftModel,
    directory: Path,
    dtype: torch.dtype,
    heartbeat: Callable[[], None] = lambda: None,
) -> dict[str, Weight]:
    """Write a model's weights as `model.safetensors`, or as several files with their index. Every rank must call it.

    Names, tied weights (once) and conversions (experts of their own in the file, one tensor in the model) are those of
    `save_pretrained` in transformers 5. Adapters are merged into their layers. Returns what the files must hold, by
    name; on rank 0, empty on the others.

    Args:
        dtype: of the floating point weights in the files; what the architecture keeps in fp32 stays so.
    """
    groups = WeightGroups(model, dtype)
    files = _Files(directory, groups.planned)
    for weights in groups.values(heartbeat):
        for name, weight in weights.items():
            files.add(name, weight)
    if ranks.rank() == 0:
        files.finish()
    return files.written


class WeightGroups:
    """A model's weights as its files have them, in groups that are converted together."""

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> None:
        self._plain = model.get_base_model() if isinstance(model, PeftModel) else model
        self._sources = _sources(self._plain, dtype)
        self._names = _groups(self._plain, self._sources)
        self.planned = [
            _converted(self._plain, {name: _meta(self._sources[name]) for name in names}) for names in self._names
        ]
        """Tensors without data, by name."""

    def values(self, heartbeat: Callable[[], None] = lambda: None) -> Iterator[dict[str, torch.Tensor]]:
        """The groups in CPU memory on rank 0, empty ones on the others. Every rank must iterate. `heartbeat` is called
        after every weight."""
        for names, planned in zip(self._names, self.planned, strict=True):
            weights = {name: self._sources[name].whole() for name in names}
            heartbeat()
            if ranks.rank() != 0:
                yield {}
                continue
            found = _converted(self._plain, {name: weight for name, weight in weights.items() if weight is not None})
            if found.keys() != planned.keys():
                raise AssertionError(f"converted to {sorted(found)}, planned were {sorted(planned)}")
            yield found
            heartbeat()


def adapter_tensors(model: PeftModel) -> dict[str, torch.Tensor]:
    """The tensors of an adapter by the model's names: those that are trained, and the fixed matrices of VeRA."""
    found: dict[str, torch.Tensor] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if isinstance(model.base_model, VeraModel):
        for name in ("vera_A", "vera_B"):
            found[f"base_model.{name}.default"] = getattr(model.base_model, name)["default"]
    return found


def digest(weight: torch.Tensor) -> Weight:
    """Shape, dtype and a digest of the bytes of a tensor in CPU memory."""
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return Weight(tuple(weight.shape), weight.dtype, hashlib.blake2b(data, digest_size=16).hexdigest())


def differences(
    expected: Mapping[str, Weight], directory: Path, file: str, heartbeat: Callable[[], None] = lambda: None
) -> list[str]:
    """Read weights back from their files and describe each difference from `expected`.

    Args:
        file: the file of all weights, where there is no index.
    """
    wrong: list[str] = []
    try:
        files = _file_by_weight(directory, file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return [f"{directory.name} cannot be read ({error})"]
    wrong += [f"{name} is not there" for name in expected.keys() - files.keys()]
    wrong += [f"{name} is there and should not be" for name in files.keys() - expected.keys()]
    for path in sorted(set(files.values())):
        try:
            with safe_open(directory / path, framework="pt") as weights, ThreadPoolExecutor(_HASHING_THREADS) as pool:
                names = sorted(name for name in expected if files.get(name) == path)
                tensors = (weights.get_tensor(name) for name in names)  # mapped, not copied
                for name, found in zip(names, pool.map(digest, tensors), strict=True):
                    wanted = expected[name]
                    if found[:2] != wanted[:2]:
                        is_now, was = (f"{weight.dtype} {[*weight.shape]}" for weight in (found, wanted))
                        wrong.append(f"{name} is {is_now} and not {was}")
                    elif found != wanted:
                        wrong.append(f"{name} has other values")
                    heartbeat()
        except (OSError, SafetensorError) as error:
            wrong.append(f"{path} cannot be read ({error})")
    return sorted(wrong)


def export_bytes(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> int:
    """The approximate number of bytes that `write_weights` writes."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    sources = _sources(plain, dtype)
    return sum(source.weight.numel() * source.dtype.itemsize for source in sources.values())


class _Files:
    """Fills one file after the other. The planned weights determine their number, and so their names."""

    def __init__(self, directory: Path, planned: Iterable[Mapping[str, torch.Tensor]]) -> None:
        self.directory = directory
        self.written: dict[str, Weight] = {}
        self._digests: dict[str, Future[Weight]] = {}
        self._pool = ThreadPoolExecutor(_HASHING_THREADS)
        self._pending: dict[str, torch.Tensor] = {}
        self._counts: list[int] = []
        self._index: dict[str, str] = {}
        self._total = size = 0
        for weight in (weight for group in planned for weight in group.values()):
            if not self._counts or size + weight.nbytes > FILE_BYTES:
                self._counts.append(0)
                size = 0
            size += weight.nbytes
            self._counts[-1] += 1
            self._total += weight.nbytes
        self._number = 0

    def add(self, name: str, weight: torch.Tensor) -> None:
        self._pending[name] = weight.contiguous()
        self._digests[name] = self._pool.submit(digest, weight)
        if len(self._pending) == self._counts[self._number]:
            self._write()

    def _write(self) -> None:
        many = len(self._counts)
        stem = SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
        name = SAFE_WEIGHTS_NAME if many == 1 else f"{stem}-{self._number + 1:05d}-of-{many:05d}.safetensors"
        save_file(self._pending, self.directory / name, metadata={"format": "pt"})
        self._index |= dict.fromkeys(self._pending, name)
        self.written |= {name: found.result() for name, found in self._digests.items()}
        self._pending, self._digests = {}, {}
        self._number += 1

    def finish(self) -> None:
        self._pool.shutdown()
        if self._number != len(self._counts):
            raise AssertionError(f"{self._number} of {len(self._counts)} weight files were written")
        if len(self._counts) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._index}
            path = self.directory / SAFE_WEIGHTS_INDEX_NAME
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _sources(plain: PreTrainedModel, dtype: torch.dtype) -> dict[str, _Source]:
    """The weights of the plain model by name, each once; adapters are no weights of it."""
    layers = {path: layer for path, layer in plain.named_modules() if isinstance(layer, BaseTunerLayer)}
    fp32 = [re.compile(rf"(^|\.){name}(\.|$)") for name in plain._keep_in_fp32_modules_strict or ()]
    sources: dict[str, _Source] = {}
    for key, weight in plain.state_dict(keep_vars=True).items():
        path = next((path for path in layers if key.startswith(f"{path}.")), None)
        name, adapted, part = key, None, "weight"
        if path is not None:
            _, base, part = key.removeprefix(f"{path}.").rpartition("base_layer.")
            if not base:
                continue  # the adapter itself
            name = f"{path}.{part}"
            adapted = layers[path] if part == "weight" or isinstance(layers[path], IA3Layer) else None
        if name in (plain._keys_to_ignore_on_save or ()):
            continue
        kept = weight.dtype if not weight.is_floating_point() else dtype
        if any(pattern.search(name) for pattern in fp32):
            kept = torch.float32
        sources[name] = _Source(weight, kept, adapted, part)
    return {name: sources[name] for name in _without_tied(sources, plain)}


def _without_tied(sources: Mapping[str, _Source], plain: PreTrainedModel) -> Iterator[str]:
    """Of the names of one tensor, the one under which transformers loads it."""
    names: dict[tuple[int, str], list[str]] = {}
    for name, source in sources.items():
        key = (id(source.weight), "") if source.adapted is None else (id(source.adapted), source.part)
        names.setdefault(key, []).append(name)
    for shared in names.values():
        yield next((name for name in shared if name not in plain.all_tied_weights_keys), shared[0])


def _groups(plain: PreTrainedModel, sources: Mapping[str, _Source]) -> list[list[str]]:
    """Weights that must be converted together, the smallest groups that give what the whole model gives.

    transformers 5 can only revert the conversions of a whole state dict. So tensors without data are converted in
    three ways: weight by weight, block by block, and as a whole, which takes the memory of rank 0.
    """
    every = {name: _meta(source) for name, source in sources.items()}
    expected = _outline(_converted(plain, every))
    for key in (lambda name: name, _block):
        groups: dict[str, list[str]] = {}
        for name in sources:
            groups.setdefault(key(name), []).append(name)
        try:
            parts = [_outline(_converted(plain, {name: every[name] for name in names})) for names in groups.values()]
        except (RuntimeError, ValueError, KeyError, IndexError):
            continue
        found = {name: outline for part in parts for name, outline in part.items()}
        if found == expected and sum(len(part) for part in parts) == len(expected):
            return list(groups.values())
    return [list(sources)]


def _block(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else name


def _converted(plain: PreTrainedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return revert_weight_conversion(plain, weights)


def _outline(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (weight.shape, weight.dtype) for name, weight in weights.items()}


def _meta(source: _Source) -> torch.Tensor:
    return torch.empty(source.weight.shape, dtype=source.dtype, device="meta")


def _file_by_weight(directory: Path, file: str) -> dict[str, str]:
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        return dict(json.loads(index.read_text())["weight_map"])
    with safe_open(directory / file, framework="pt") as weights:
        return dict.fromkeys(weights.keys(), file)
