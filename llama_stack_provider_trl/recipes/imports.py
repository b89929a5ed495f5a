"""Imports of large libraries without the parts of them that only cost time."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ..system.files import atomic_write

_SCANNER = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"
_LARGEST = 16 << 20
"""Bytes of a kept structure; that of transformers 5.23 has 0.4 MB."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large libraries in 3.5 s of CPU time where it took 7.

    They leave a million objects that are never garbage: the collector looks for garbage among them again and again.
    trl reads the files of every installed distribution, 0.8 s, for packages that are rarely installed. transformers
    reads the source of all its models, 0.8 s, for the names in them, which are the same every time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    finder = _ScannerFinder(cache_directory(os.environ))
    sys.meta_path.insert(0, finder)
    try:
        read = importlib.metadata.packages_distributions
        with patch.object(importlib.metadata, "packages_distributions", lambda: _Distributions(read)):
            yield
    finally:
        sys.meta_path.remove(finder)
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def packages_found_once() -> Iterator[None]:
    """While this is open, accelerate searches for each package once, not at every step and unwrapped model.

    Each time it searches the path, and parses the metadata of what it finds. An accelerate that does so in a function
    of another name is left alone.
    """
    accelerate = sys.modules.get("accelerate.utils.imports")
    search = getattr(accelerate, "_is_package_available", None)
    with patch.object(accelerate, "_is_package_available", functools.cache(search)) if search else nullcontext():
        yield


class _Distributions(dict[str, list[str]]):
    """Top-level package -> the distributions that have it: the one of its own name, else all are read."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        super().__init__()
        self._read = functools.cache(read)

    def __missing__(self, name: str) -> list[str]:
        try:
            return [importlib.metadata.distribution(name).metadata["Name"]]
        except importlib.metadata.PackageNotFoundError:
            return self._read()[name]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


# --- what transformers reads of its models ----------------------------------------------------------------------------


def cache_directory(environ: Mapping[str, str]) -> Path | None:
    """Where the names in transformers' models are kept: a directory of this user, which isolated trainings may write as
    they do those of compiled kernels. None: there is no home directory."""
    with suppress(RuntimeError):
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-stack-provider-trl"
    return None


class _ScannerFinder:
    """Finds the module of transformers that reads its models, and has it use what was kept."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._is_searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _SCANNER or self._is_searching or self._cache is None:
            return None
        self._is_searching = True  # the other finders, which may be wrapped, search in their order
        try:
            found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec: Any = next((one for one in found if one is not None), None)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            execute, cache = spec.loader.exec_module, self._cache

            def exec_module(module: ModuleType) -> None:
                execute(module)
                keep_structure(module, cache)

            spec.loader.exec_module = exec_module
        return spec


def keep_structure(module: ModuleType, cache: Path) -> None:
    """Have `create_import_structure_from_path` read transformers' models once per installation.

    Args:
        module: `transformers.utils.import_utils`, or one like it; without that function it stays as it is.
    """
    scan = getattr(module, _SCAN, None)
    models = Path(module.__file__ or "").parent.parent / "models"
    key = _installation(models)
    if scan is None or key is None:
        return
    place = cache / f"transformers-{key}.json"

    @functools.wraps(scan)
    def scan_once(module_path: Any) -> Any:
        if Path(os.fspath(module_path)) not in (models, models / "__init__.py"):
            return scan(module_path)
        found = _read(place)
        if found is None:
            found = scan(module_path)
            _write(place, found)
        return found

    setattr(module, _SCAN, scan_once)


def _installation(models: Path) -> str | None:
    """A digest that changes with every installation of transformers; None: its files may change without one."""
    try:
        distribution = importlib.metadata.distribution("transformers")
        if distribution.read_text("direct_url.json") is not None:  # a checkout that is being edited, perhaps
            return None
        record = Path(str(distribution.locate_file(f"transformers-{distribution.version}.dist-info/RECORD")))
        stamps = [(str(path), path.stat().st_mtime_ns) for path in (record, models)]
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    return hashlib.sha256(repr((distribution.version, stamps)).encode()).hexdigest()[:32]


def _read(place: Path) -> Any:
    """The kept structure; None: there is none that can be used."""
    try:
        with open(place, "rb") as file:
            data = file.read(_LARGEST + 1)
        return _decoded(json.loads(data)) if len(data) <= _LARGEST else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _write(place: Path, structure: Any) -> None:
    with suppress(OSError, TypeError, AttributeError):  # a disk that cannot be written costs time only
        data = json.dumps(_encoded(structure)).encode()
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(place, data)
        for other in place.parent.glob("transformers-*.json"):
            if other != place:  # of installations that were replaced
                other.unlink(missing_ok=True)


def _encoded(structure: Mapping[Any, Any]) -> Any:
    """As JSON: `directories` by name, and `modules`: the libraries that they need, with their modules' names."""
    return {
        "directories": {name: _encoded(inner) for name, inner in structure.items() if isinstance(name, str)},
        "modules": [
            [sorted(needs), {module: sorted(names) for module, names in modules.items()}]
            for needs, modules in structure.items()
            if not isinstance(needs, str)
        ],
    }


def _decoded(kept: Mapping[str, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {name: _decoded(inner) for name, inner in kept["directories"].items()}
    for needs, modules in kept["modules"]:
        found[frozenset(needs)] = {module: set(names) for module, names in modules.items()}
    return found
