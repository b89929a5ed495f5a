"""Other clients of OpenAI's API: earlier majors of its Python SDK, and its npm package. No part of scripts/test.sh.

    python -m tests.openai_clients                            # openai 1 and 2, and npm
    python -m tests.openai_clients --python 1.109.1 --npm 7.59.0
    python -m tests.openai_clients --smollm2                  # the environment's own SDK, with SmolLM2-135M

An earlier major runs `contract/test_openai_sdk.py`, from a directory in front of the environment's own SDK, and
`openai_client.py` against a service with a tiny model. The npm package runs `openai_client.mjs` in the same way; it
needs `node` and `npm`. Exit status 1: one of them fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path

from tests.contract.service import running_service
from tests.programs import smollm2
from tests.tiny import REPOSITORY, tiny_model

PYTHON, NPM = ("1.109.1", "2.54.0"), "7.59.0"
MODEL = "gpt-4o-mini-2024-07-18"


def python_sdk(root: Path, version: str) -> str:
    """Run the tests with a version. Returns the last line of pytest; raises CalledProcessError."""
    target = root / version
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), f"openai=={version}"]
    subprocess.run(command, check=True)
    environ = {**os.environ, "PYTHONPATH": str(target)}
    check = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    found = subprocess.run(check, check=True, env=environ, capture_output=True, text=True).stdout.strip()
    if found != version:
        raise ValueError(f"openai {found} is imported, expected {version}")
    tests = [sys.executable, "-m", "pytest", "-q", "tests/contract/test_openai_sdk.py"]
    done = subprocess.run(tests, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout, flush=True)
    done.check_returncode()
    return f"{done.stdout.strip().splitlines()[-1]}; {script(root, tiny_model(), 5e-3, environ)}"


def script(root: Path, model: Path, learning_rate: float, environ: Mapping[str, str]) -> str:
    """Run openai_client.py with a model. Returns the last line that it prints; raises CalledProcessError."""
    client = REPOSITORY / "tests" / "openai_client.py"
    rates = dict.fromkeys(("learning_rate", "dpo_learning_rate", "reinforcement_learning_rate"), learning_rate)
    block = {"model": str(model), "lora_rank": 8, "num_generations": 2, "max_completion_length": 16, **rates}
    directory = root / "service"
    directory.mkdir()
    with running_service(directory, openai={"models": {MODEL: block}}) as service:
        given = {**environ, "OPENAI_BASE_URL": f"{service.url}/openai/v1", "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-P", str(client), MODEL]
        done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, timeout=1800, check=False)
    lines = done.stdout.rstrip("\n").splitlines()
    print("\n".join(lines if done.returncode else lines[:-1]), flush=True)
    done.check_returncode()
    return lines[-1]


def npm_package(root: Path, version: str) -> str:
    """Run the script with a version. Returns what it prints; raises CalledProcessError."""
    package = root / "npm"
    package.mkdir()
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(package), f"openai@{version}"]
    subprocess.run(install, check=True, cwd=package)
    script = shutil.copy(REPOSITORY / "tests" / "openai_client.mjs", package)  # it finds the package beside it
    models = {MODEL: {"model": str(tiny_model()), "learning_rate": 5e-3, "batch_size": 5, "lora_rank": 4}}
    directory = root / "service"
    directory.mkdir()
    with running_service(directory, openai={"models": models}) as service:
        command = ["node", script, f"{service.url}/openai/v1", MODEL]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.openai_clients", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--python", nargs="*", default=PYTHON, help="versions of the Python SDK")
    parser.add_argument("--npm", nargs="*", default=[NPM], help="versions of the npm package")
    parser.add_argument(
        "--smollm2", action="store_true", help="openai_client.py alone, with the SDK that is here and SmolLM2-135M"
    )
    options = parser.parse_args()
    if options.smollm2:
        model = smollm2()
        passes = _reported(version_of("openai"), "SmolLM2-135M", lambda root: script(root, model, 5e-4, os.environ))
        return int(not passes)
    has_failed = False
    for what, run, versions in (("PyPI", python_sdk, options.python), ("npm", npm_package, options.npm)):
        for version in versions:
            has_failed |= not _reported(version, what, partial(run, version=version))
    return int(has_failed)


def _reported(version: str, what: str, run: Callable[[Path], str]) -> bool:
    """Whether a run in a directory of its own passes; its result is printed."""
    began, passes = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="trl-openai-") as root:
        try:
            result = run(Path(root))
        except (subprocess.SubprocessError, ValueError) as error:
            result, passes = f"FAILED: {error}", False
    print(f"openai {version} ({what}): {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return passes


if __name__ == "__main__":
    sys.exit(main())
