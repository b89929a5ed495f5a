"""Checks whether an interpreter can train, before anything is queued and without importing the libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InvalidRequest
from ..specs.schema import schema_digest
from ..system.process import child_environment, without_modules

NEEDED = {
    "torch": "2.",
    "trl": "1.16.",
    "transformers": "5.",
    "peft": "",
    "accelerate": "",
    "datasets": "",
    "jsonschema": "",
    "regex": "",
}
"""Distribution -> prefix of its version, for the releases that `recipes` is written for."""
_MINORS = {"transformers": 23}
"""Distribution -> its first minor release within that."""
INSTALL = f"pip install 'llama_stack_provider_trl[train]=={__version__}'"
_OLDEST = (3, 12)
_TIMEOUT = 60.0
"""Timeout of the probe in seconds. It takes 0.4; a cold network disk takes longer."""
_PROBE = """
import sys
found = {}
if sys.version_info >= (3, 12):
    import importlib.metadata, importlib.util
    for name in sys.argv[1:]:
        if importlib.util.find_spec(name) is not None:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
    try:
        import llama_stack_provider_trl
        found["ours"] = llama_stack_provider_trl.__version__
        from llama_stack_provider_trl.specs.schema import schema_digest
        found["specs"] = schema_digest()
    except ImportError:
        pass
import json
print(json.dumps([list(sys.version_info[:2]), found]))
"""

_VLLM_PROBE = """
import importlib.metadata, importlib.util, json
found = ""
if importlib.util.find_spec("vllm") is not None:
    try:
        versions = [importlib.metadata.version("vllm")]
    except importlib.metadata.PackageNotFoundError:  # of another name, which takes 0.6 s of CPU time to find
        names = importlib.metadata.packages_distributions().get("vllm", [])
        versions = [importlib.metadata.version(name) for name in names[:1]]
    found = " ".join(["vllm", *versions])
print(json.dumps(found))
"""
_NO_ANSWER = (subprocess.TimeoutExpired, ValueError, IndexError, TypeError)
"""What a probe that is no working Python leads to."""


def check_interpreter(python: Path | None) -> None:
    """Check that an interpreter can train; None: the interpreter of this process. Raises InvalidRequest: it does not
    exist, is too old, or lacks what training needs; names the remedy."""
    if python is None or str(python) == sys.executable:
        # Without a process of its own, whose start takes 0.25 s of CPU.
        problem = _lacking(sys.executable, sys.version_info[:2], _installed(), __version__, schema_digest())
    else:
        problem = _problem(str(python))
    if problem is not None:
        raise InvalidRequest("train_python", None if python is None else str(python), problem)


def check_vllm(python: Path | None) -> str:
    """Check that an interpreter has vLLM, which is not imported. Returns what it has; None: empty. Raises
    InvalidRequest: it does not exist, or lacks vLLM; names the remedy."""
    if python is None:
        return ""
    todo = "name the Python of an environment made with pip install vllm, or leave it out"
    try:
        found = _answer_of(str(python), _VLLM_PROBE, environ=without_modules(os.environ))
    except OSError as error:
        problem = f"{python} cannot be started ({error.strerror}); {todo}"
        raise InvalidRequest("vllm_python", str(python), problem) from error
    except _NO_ANSWER as error:
        raise InvalidRequest("vllm_python", str(python), f"{python} is not a working Python; {todo}") from error
    if not found:
        raise InvalidRequest("vllm_python", str(python), f"{python} has no vllm; {todo}")
    return str(found)


def _installed() -> dict[str, str]:
    """The versions of what is needed and installed for this process, as the probe finds them."""
    found = {}
    for name in NEEDED:
        with suppress(importlib.metadata.PackageNotFoundError):
            if importlib.util.find_spec(name) is not None:
                found[name] = importlib.metadata.version(name)
    return found


def _problem(python: str) -> str | None:
    try:
        version, found = _answer_of(python, _PROBE, *NEEDED)
    except OSError as error:
        return f"{python} cannot be started ({error.strerror}); name the Python of an environment made with {INSTALL}"
    except _NO_ANSWER:
        return f"{python} is not a working Python; name that of an environment made with {INSTALL}"
    ours, specs = found.pop("ours", None), found.pop("specs", "")
    return _lacking(python, tuple(version), found, ours, specs)


def _answer_of(python: str, probe: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> Any:
    """What a probe prints. Raises OSError, and `_NO_ANSWER`."""
    done = subprocess.run(
        [python, "-c", probe, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        cwd="/",  # not the server's working directory, so that nothing is imported from there
        env=child_environment(environ, {}),
    )
    return json.loads(done.stdout.splitlines()[-1])


def _lacking(python: str, version: tuple[int, ...], found: dict[str, str], ours: str | None, specs: str) -> str | None:
    if version < _OLDEST:
        return f"{python} is Python {version[0]}.{version[1]}; training needs 3.12 or later, and there {INSTALL}"
    if ours != __version__:
        has = f"llama_stack_provider_trl {ours}" if ours else "no llama_stack_provider_trl"
        return f"{python} has {has}, and this is {__version__}; run there: {INSTALL}"
    if missing := [name for name in NEEDED if name not in found]:
        return (
            f"{python} has no {', '.join(missing)}; run there: {INSTALL}, or set train_python to an interpreter "
            "that has them (in the shipped run files, TRL_TRAIN_PYTHON)"
        )
    others = [f"{name} {found[name]}" for name in NEEDED if not _is_fitting(name, found[name])]
    if others:
        since = {name: f" (5.{minor} and later)" for name, minor in _MINORS.items()}
        fitting = ", ".join(f"{name} {prefix}*{since.get(name, '')}" for name, prefix in NEEDED.items() if prefix)
        return (
            f"{python} has {', '.join(others)}, and training needs {fitting}; set train_python to the Python of an "
            f"environment of its own, made with {INSTALL}"
        )
    if specs != schema_digest():
        return (
            f"{python} has another build of llama_stack_provider_trl {__version__}: its job specifications have the "
            f"digest {specs or 'none'}, those of this process {schema_digest()}. Install the same build in both "
            f"environments, which is the wheel or the checkout of the newer one; a release: {INSTALL} --force-reinstall"
        )
    return None


def _is_fitting(name: str, version: str) -> bool:
    minor = re.match(r"\d+\.(\d+)", version)
    return version.startswith(NEEDED[name]) and (name not in _MINORS or int(minor[1] if minor else 0) >= _MINORS[name])
