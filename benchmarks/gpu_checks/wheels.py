"""The libraries that a machine with torch may lack, or have in other releases, as wheels. Standard library only.

`download` is for a machine with a network and this project's environment, `install` for the one with the GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

MISSING = (
    "trl",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "dill",
    "multiprocess",
    "xxhash",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "psutil",
    "pytest-timeout",
)
"""19 MB, of which transformers is 12: the recipes need 5.23, and an image may have an earlier one. pyarrow (53 MB) and
pandas (12 MB), which `datasets` imports, are not among them: `--with` adds them."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download_command(
    folder: Path, python: str, more: Sequence[str], installed: Callable[[str], str] = version
) -> list[str]:
    """pip's command for wheels in the versions of this environment: pydantic accepts one version of its core only."""
    names = [f"{name}=={installed(name)}" for name in (*MISSING, *more)]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation=cp"),
        *(f"--python-version={python}", *platforms, f"--dest={folder}", *names),
    ]


def install_command(folder: Path, target: Path) -> list[str]:
    """pip's command that installs every wheel of a directory into `target`, without a network.

    Raises:
        SystemExit: the directory has no wheel.
    """
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise SystemExit(f"--wheels {folder}: expected wheels there; --download DIR fetches them on another machine")
    options = (
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--upgrade",
        "--quiet",
        "--target",
        str(target),
    )
    return [sys.executable, "-m", "pip", "install", *options, *map(str, found)]


def download(folder: Path, python: str, more: Sequence[str]) -> None:
    """Fetch the wheels into `folder`, and print their size."""
    subprocess.run(download_command(folder, python, more), check=True)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels in {folder}, {size / (1 << 20):.1f} MiB")


def install(folder: Path, target: Path) -> None:
    subprocess.run(install_command(folder, target), check=True)
