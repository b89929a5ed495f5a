"""Other clients of OpenAI's API: earlier majors of its Python SDK, and its npm package. No part of scripts/test.sh.

    python -m tests.openai_clients                            # openai 1 and 2, and npm
    python -m tests.openai_clients --python 1.109.1 --npm 7.59.0

An earlier major runs `contract/test_openai_sdk.py`, from a directory in front of the environment's own SDK. The npm
package runs `openai_client.mjs` against a service with a tiny model; it needs `node` and `npm`. Exit status 1: one of
them fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.contract.service import running_service
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
    return done.stdout.strip().splitlines()[-1]


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
    options = parser.parse_args()
    has_failed = False
    for what, run, versions in (("PyPI", python_sdk, options.python), ("npm", npm_package, options.npm)):
        for version in versions:
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="trl-openai-") as root:
                try:
                    result = run(Path(root), version)
                except (subprocess.SubprocessError, ValueError) as error:
                    result, has_failed = f"FAILED: {error}", True
            print(f"openai {version} ({what}): {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
