"""Reads step checkpoints of earlier releases without executing their pickles.

They hold the optimizer's state in `optimizer/`, as torch.distributed.checkpoint (DCP) writes it: `.metadata` is a
pickle, `__R_N.distcp` files are tensors as torch.save writes them one after the other, and the parameter groups are a
pickle among them. `scheduler.pt`, `scaler.pt` and `rng_state*.pth` are torch.save's too. DCP's own reader unpickles
anything, so it executes any code that the writer of the file wants.

Here `.metadata` becomes records without behavior: an unpickler that knows the names DCP's metadata needs and gives
each a stand-in, none of them the class of that name. Everything else goes through `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import numpy._core.multiarray
import torch
from transformers.utils.import_utils import check_torch_load_is_safe

from ...errors import JobFailure
from ...specs.events import Reason
from ..distributed import ranks
from . import shards
from .optimizer_state import StoredOptimizer, reading
from .random_state import encoded

_DIRECTORY = "optimizer"
_METADATA = ".metadata"
_FILE = re.compile(r"__\d+_\d+\.distcp")
_GROUPS = "param_groups"
_PREFIX = "state."
_STATES = {"scheduler.json": "scheduler.pt", "scaler.json": "scaler.pt"}
"""Name of the present format -> of the earlier one."""
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    *((f"{_DCP}.metadata", "MetadataIndex"), (f"{_DCP}.filesystem", "_StorageInfo")),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in shards.DTYPES},
}


_NUMPY: list[Any] = [numpy._core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]
"""What an array of numpy's random numbers is made of."""


class _Part(NamedTuple):
    """Some rows of a tensor, or a value, and where its bytes are."""

    first: int
    shape: torch.Size
    file: str
    offset: int
    length: int


class _Refused(pickle.UnpicklingError):
    """Raised when a pickle names an object that no checkpoint needs; its text is that name."""


def is_legacy(checkpoint: Path) -> bool:
    """Whether an earlier release wrote this checkpoint."""
    return (checkpoint / _DIRECTORY / _METADATA).exists()


def read_optimizer(checkpoint: Path) -> StoredOptimizer:
    """The optimizer's state in a checkpoint.

    Raises:
        JobFailure: invalid_request, where it is malformed, or holds what could run code.
    """
    path = checkpoint / _DIRECTORY / _METADATA
    with _refusing(path), reading(path):
        tensors, parts = _index(_Unpickler(io.BytesIO(path.read_bytes())).load())
        values = {name: _load(_slice(path.parent, found[0])) for name, found in parts.items() if name not in tensors}
        groups = [dict(group) for group in values.pop(_GROUPS)]
        return StoredOptimizer(
            {name.removeprefix(_PREFIX): outline for name, outline in tensors.items()},
            {name.removeprefix(_PREFIX): value for name, value in values.items()},
            groups,
            partial(_read_into, path.parent, parts),
        )


def state(checkpoint: Path, name: str) -> dict[str, Any] | None:
    """A small state, by the name that its file has now; None: the checkpoint has none. Raises as `read_optimizer`."""
    path = checkpoint / _STATES[name]
    with _refusing(path), reading(path):
        return dict(_load(path)) if path.exists() else None


def random_state(checkpoint: Path, device: torch.device) -> dict[str, Any] | None:
    """This rank's random numbers in the format of `random_state`; None: there are none. Raises as `read_optimizer`."""
    path = checkpoint / ("rng_state.pth" if ranks.world_size() == 1 else f"rng_state_{ranks.rank()}.pth")
    with _refusing(path), reading(path):
        if not path.exists():
            return None
        found = _load(path)
        version, values, gauss = found["python"]
        name, keys, *others = found["numpy"]
        states = {"cpu": encoded(found["cpu"])}
        if device.type == "cuda" and "cuda" in found:
            # Of several ranks, the generators of all GPUs that each one saw.
            of_gpu = found["cuda"] if isinstance(found["cuda"], torch.Tensor) else found["cuda"][device.index]
            states["cuda"] = encoded(of_gpu)
        return {"python": [version, list(values), gauss], "numpy": [name, keys.tolist(), *others], "torch": states}


class _Record:
    """An object of the pickle: what it was made of, and no behavior."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata. A name outside the lists above ends it, before anything is made or called."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # New ones for every file: a pickle may set attributes of the classes that it names.
        self._known = {**_PLAIN, **{(module, name): type(name, (_Record,), {}) for module, name in _RECORDS}}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """While this is open, a pickle that is damaged or names an object that no checkpoint needs is a JobFailure."""
    try:
        yield
    except JobFailure:
        raise
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        unsafe = str(error) if isinstance(error, _Refused) else named and named[1]
        problem = (
            f"names {unsafe}, which no checkpoint needs and which could run code: it was not read further, and nothing "
            "of it was run"
            if unsafe
            else f"cannot be read ({' '.join(str(error).split())[:200]})"
        )
        raise JobFailure(Reason.invalid_request, f"{path} {problem}. Resume from another checkpoint.") from error


def _index(metadata: _Record) -> tuple[dict[str, shards.Outline], dict[str, list[_Part]]]:
    """The tensors, and where each value's parts are."""
    shapes: dict[tuple[str, tuple[int, ...]], torch.Size] = {}
    tensors = {}
    for name, described in metadata.state["state_dict_metadata"].items():
        if type(described).__name__ != "TensorStorageMetadata":
            continue
        dtype = described.state["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} has the dtype {dtype!r}")
        tensors[name] = shards.Outline(torch.Size(described.state["size"]), dtype)
        for chunk in described.state["chunks"]:
            shapes[name, tuple(chunk.state["offsets"])] = torch.Size(chunk.state["sizes"])
    parts: dict[str, list[_Part]] = {}
    for index, place in metadata.state["storage_data"].items():
        name, offsets = index.state["fqn"], tuple(index.state.get("offset") or ())
        if any(offsets[1:]) or not _FILE.fullmatch(place.state["relative_path"]) or len(place.state) != 3:
            raise ValueError(f"{name} lies in {place.state}, rows of it in a .distcp file are expected")
        shape = shapes[name, offsets] if name in tensors else torch.Size()
        where = (place.state[key] for key in ("relative_path", "offset", "length"))
        part = _Part(next(iter(offsets), 0), shape, *where)
        parts.setdefault(name, []).append(part)
    return tensors, parts


@torch.no_grad()
def _read_into(directory: Path, parts: Mapping[str, list[_Part]], tensors: Mapping[str, torch.Tensor]) -> None:
    with _refusing(directory):
        for name, tensor in tensors.items():
            rows = shards.rows_of(tensor)
            if not tensor.ndim:
                tensor.copy_(_tensor(directory, parts[_PREFIX + name][0]))
                continue
            first, last = rows.first, rows.first + rows.values.shape[0]
            missing = last - first
            for part in parts[_PREFIX + name]:
                begin, end = max(first, part.first), min(last, part.first + part.shape[0])
                if begin < end:
                    found = _tensor(directory, part)[begin - part.first : end - part.first]
                    rows.values[begin - first : end - first].copy_(found)
                    missing -= end - begin
            if missing:
                raise ValueError(f"{missing} rows of {name} are not there")


def _tensor(directory: Path, part: _Part) -> torch.Tensor:
    found = _load(_slice(directory, part))
    if not isinstance(found, torch.Tensor) or found.shape != part.shape:
        raise ValueError(f"{part.file} has no tensor of shape {list(part.shape)} at {part.offset}")
    return found


def _slice(directory: Path, part: _Part) -> io.BytesIO:
    with open(directory / part.file, "rb") as file:
        file.seek(part.offset)
        return io.BytesIO(file.read(part.length))


def _load(source: Path | io.BytesIO) -> Any:
    check_torch_load_is_safe()  # before torch 2.6 the restriction had a hole
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(source, map_location="cpu", weights_only=True)
