"""Environments of the Llama Stack releases that we serve: one light venv each, without torch, made once and kept.

They live under `.pytest_cache/releases/NAME-DIGEST`, the digest being that of the release's constraints, and see our
packages in the checkout itself. The release that this very environment holds needs no other.

    python -m tests.releases NAME...      makes them and prints their interpreters
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".pytest_cache" / "releases"
CONSTRAINTS = REPOSITORY / "constraints"
OGX = "ogx-1.5.0"
RELEASES = ("0.2.14", "0.2.23", "0.3.5", "0.4.7", "0.5.4", "0.6.1", "0.7.3", OGX)
NATIVE = ("0.2.14", "0.2.23", "0.3.5", "0.4.7", "0.6.1")
"""Those whose own post-training API our providers serve."""
_LEFT_OUT = frozenset({"oci"})
"""What is not installed: 18,000 files and 244 MB, which only Oracle's inference and vector stores import."""


def constraints_of(release: str) -> Path:
    return CONSTRAINTS / (f"{release}.txt" if release == OGX else f"llama-stack-{release}.txt")


def python_of(release: str) -> Path:
    """The interpreter of an environment that holds this release and sees our packages. Skips the test where packages
    would have to be installed and no package index answers."""
    if _installed_here(release):
        return Path(sys.executable)
    digest = hashlib.sha256(constraints_of(release).read_bytes()).hexdigest()
    home = CACHE / f"{release}-{digest[:12]}"
    python, whole = home / "bin" / "python", home / "whole"
    with _locked(CACHE / f"{release}.lock"):
        if not whole.exists():
            for old in CACHE.glob(f"{release}-*"):
                shutil.rmtree(old)
            _make(release, home, python)
            whole.touch()
    return python


def _installed_here(release: str) -> bool:
    name, version = ("ogx", release.removeprefix("ogx-")) if release == OGX else ("llama_stack", release)
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def _make(release: str, home: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # Three in four packages are those of this environment: linked with their bytecode, they cost a tenth.
    wanted = {name: version for name, version in pins(release).items() if name not in _LEFT_OUT}
    missing = [f"{name}=={version}" for name, version in wanted.items() if not _linked(name, version, packages)]
    # The files name all that pip would find, so that there is nothing to resolve; and half of what is installed is
    # never imported, so that nothing is compiled before.
    done = _pip(python, "install", "--no-deps", "--no-compile", *missing)
    if done.returncode != 0:
        if not _index_answers(python):
            pytest.skip(f"Llama Stack {release} is not installed, and no package index answers: run this once with one")
        raise RuntimeError(f"installing {release} failed:\n{done.stderr[-3000:]}")
    (packages / "llama_stack_provider_trl.pth").write_text(f"{REPOSITORY}\n")


def _linked(name: str, version: str, packages: Path) -> bool:
    """Put a package of this environment into another one of the same Python, without its programs; False: this
    environment does not have it in this version."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if found.version != version or not found.files:
        return False
    for file in found.files:
        source, target = Path(str(found.locate_file(file))), packages / file
        if ".." in file.parts or not source.is_file():
            continue
        _link(source, target)
        if source.suffix == ".py":
            _link(Path(cache_from_source(str(source))), Path(cache_from_source(str(target))))
    return True


def _link(source: Path, target: Path) -> None:
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--no-input", "--disable-pip-version-check"]
    return subprocess.run(
        [*command, *arguments, "--quiet", "--progress-bar", "off"], capture_output=True, text=True, timeout=900
    )


def _index_answers(python: Path) -> bool:
    return _pip(python, "install", "--dry-run", "--no-deps", "--ignore-installed", "psutil").returncode == 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pins(release: str) -> dict[str, str]:
    """Distribution -> version, as in its constraints."""
    lines = re.findall(r"^([\w.-]+)==(\S+)$", constraints_of(release).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(name, python_of(name), flush=True)
