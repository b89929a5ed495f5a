"""What a file of a job's result holds, as a digest that another run of the same job has too."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LEFT_OUT = ("manifest.json",)
"""Files with digests of the others."""
_VARYING = re.compile(
    r"(.*_)?(time|seconds|runtime|pid|versions?|per_second|created_at|memory_bytes(_rank_\d+)?)"
    r"|(overhead|estimate|machine|limit|machine_limit)_bytes"  # of a memory estimate: what processes have by themselves
    r"|token_cache"  # whether an earlier job has made the same tokens
)
"""Keys of values that differ from run to run, or from release to release of a library."""
_SETS = ("target_modules", "feedforward_modules", "modules_to_save", "exclude_modules")
"""Keys of lists that PEFT writes from sets, in an order that each process has for itself."""
_RANDOM = re.compile(r"(?<=/resume/)[0-9a-f]{32}")
"""Parts of paths that are random."""
_MOST_TEXT = 1 << 16
"""Characters of a JSON file up to which a record has its content, too, so that differences are shown by field."""


class Reader:
    """Reads files without what belongs to one run.

    Args:
        places: directory -> name that takes its place in texts.
    """

    def __init__(self, places: Mapping[Path, str]) -> None:
        self._places = {str(path): name for path, name in places.items()}
        self.contents: dict[str, Any] = {}
        """Digest of a JSON file -> its content."""

    def digest(self, file: Path) -> str:
        """sha256 of a file: of the tensors of safetensors, of the content of JSON, of text without paths."""
        if file.suffix == ".safetensors":
            return tensors_digest(file)
        if file.suffix == ".json":
            return self.of_json(json.loads(file.read_text()))
        data = file.read_bytes()
        for path, name in self._places.items():
            data = data.replace(path.encode(), name.encode())
        return hashlib.sha256(data).hexdigest()

    def of_json(self, value: Any) -> str:
        """sha256 of a JSON value, which is kept."""
        cleaned = self.cleaned(value)
        text = json.dumps(cleaned, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) <= _MOST_TEXT:
            self.contents[digest] = cleaned
        return digest

    def cleaned(self, value: Any) -> Any:
        """A JSON value without what differs from run to run."""
        if isinstance(value, dict):
            kept = {key: one for key, one in value.items() if not _VARYING.fullmatch(key)}
            ordered = {key: sorted(one) if key in _SETS and isinstance(one, list) else one for key, one in kept.items()}
            return {self.cleaned(key): self.cleaned(one) for key, one in ordered.items()}
        if isinstance(value, list):
            return [self.cleaned(one) for one in value]
        if isinstance(value, str):
            for path, name in self._places.items():
                value = value.replace(path, name)
            value = _RANDOM.sub("RANDOM", value)
        return value


def tensors_digest(file: Path) -> str:
    """sha256 of the names, types, shapes and bytes of a file's tensors, whatever their order and metadata are."""
    digest = hashlib.sha256()
    with open(file, "rb") as source:
        (size,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(size))
        for name, tensor in sorted(header.items()):
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                source.seek(8 + size + begin)
                digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
                digest.update(source.read(end - begin))
    return digest.hexdigest()


def is_varying(name: str) -> bool:
    """Whether a metric of this name is measured, and not computed from the job."""
    return bool(_VARYING.fullmatch(name))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and text of every value in a JSON value."""
    if not value or not isinstance(value, dict | list):
        yield path, exact(value)
        return
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(one, f"{path}.{key}" if path else str(key))


def exact(value: Any) -> str:
    """A value as text that no other one has."""
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
