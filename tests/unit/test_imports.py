"""What transformers reads of its models is kept for the next import."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.recipes import imports

STRUCTURE = {
    "llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}, frozenset(): {"configuration": {"B", "A"}}},
    frozenset({"torch", "vision"}): {"auto": {"AutoModel"}},
}


class Library:
    """A package like transformers, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.models = directory / "transformers" / "models"
        self.models.mkdir(parents=True)
        self.scanned: list[str] = []
        self.record = directory / "transformers-5.0.dist-info" / "RECORD"
        self.record.parent.mkdir()
        self.record.write_text("")
        self.direct_url: str | None = None
        self.version = "5.0"

    def distribution(self, name: str) -> Any:
        return SimpleNamespace(
            version=self.version,
            read_text=lambda name: self.direct_url,
            locate_file=lambda path: self.models.parent.parent / "transformers-5.0.dist-info" / "RECORD",
        )

    def scan(self, path: Any) -> Any:
        self.scanned.append(str(path))
        return STRUCTURE

    def module(self) -> Any:
        module = ModuleType("transformers.utils.import_utils")
        module.__file__ = str(self.models.parent / "utils" / "import_utils.py")
        module.create_import_structure_from_path = self.scan  # type: ignore[attr-defined]
        return module


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", library.distribution)
    return library


@pytest.fixture
def scan(library: Library, tmp_path: Path) -> Callable[..., Any]:
    """What a new process gets from transformers' function."""

    def call(path: Path | None = None) -> Any:
        module = library.module()
        imports.keep_structure(module, tmp_path / "cache")
        return module.create_import_structure_from_path(path or library.models)

    return call


def forget_transformers() -> dict[str, ModuleType]:
    """Have the next import read the package again; returns what was imported."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "transformers"}


@pytest.fixture
def own_transformers() -> Iterator[None]:
    """The package that a test imports is gone after it, and the real one is back where it was imported before."""
    before = forget_transformers()
    yield
    forget_transformers()
    sys.modules.update(before)


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_the_models_are_read_once_per_installation(scan: Callable[..., Any], library: Library, tmp_path: Path) -> None:
    assert [scan(), scan(), scan(library.models / "__init__.py")] == [STRUCTURE] * 3
    assert library.scanned == [str(library.models)]
    (file,) = kept(tmp_path)
    assert file.stat().st_mode & 0o077 == 0
    library.version = "5.1"
    assert scan() == STRUCTURE
    assert len(library.scanned) == 2
    assert kept(tmp_path) != [file]
    assert len(kept(tmp_path)) == 1


def test_other_directories_and_checkouts_are_read_every_time(
    scan: Callable[..., Any], library: Library, tmp_path: Path
) -> None:
    other = library.models / "llama"
    assert [scan(other), scan(other)] == [STRUCTURE] * 2
    library.direct_url = '{"dir_info": {"editable": true}}'
    assert [scan(), scan()] == [STRUCTURE] * 2
    assert len(library.scanned) == 4
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"directories": 1}', '{"directories": {}, "modules": [[1]]}', "\udcff"])
def test_a_damaged_file_is_written_again(scan: Callable[..., Any], library: Library, tmp_path: Path, text: str) -> None:
    scan()
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert scan() == STRUCTURE
    assert file.read_bytes() == whole


def test_without_a_place_to_write_the_models_are_read_every_time(
    scan: Callable[..., Any], library: Library, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no directory")
    assert [scan(), scan()] == [STRUCTURE] * 2
    assert len(library.scanned) == 2


def test_a_transformers_without_the_function_is_left_alone(library: Library, tmp_path: Path) -> None:
    module = library.module()
    del module.create_import_structure_from_path
    imports.keep_structure(module, tmp_path / "cache")
    assert not hasattr(module, "create_import_structure_from_path")


@pytest.mark.usefixtures("own_transformers")
def test_quick_imports_have_the_module_keep_what_it_reads(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = library.models.parent
    (package / "utils").mkdir()
    (package / "__init__.py").write_text("from .utils import import_utils\nfound = import_utils.define(__file__)\n")
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "import_utils.py").write_text(
        "import os\n"
        "def create_import_structure_from_path(path):\n"
        "    with open(os.environ['SCANNED'], 'a') as file:\n        file.write('scanned\\n')\n"
        "    return {frozenset(): {'auto': {'AutoModel'}}}\n"
        "def define(file):\n"
        "    return create_import_structure_from_path(os.path.join(os.path.dirname(file), 'models'))\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("SCANNED", str(tmp_path / "scanned"))
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.meta_path[:]
    for _ in range(2):
        forget_transformers()
        with imports.quick_imports():
            import transformers  # the one of this test
        assert transformers.found == {frozenset(): {"auto": {"AutoModel"}}}
        assert sys.meta_path == before
    assert (tmp_path / "scanned").read_text() == "scanned\n"
    (file,) = (tmp_path / "caches" / "llama-stack-provider-trl").iterdir()
    assert json.loads(file.read_text()) == {"directories": {}, "modules": [[[], {"auto": ["AutoModel"]}]]}
