"""What `llama stack list-deps` prints for the shipped build files ends in an environment that starts, from a directory
of wheels, on each release that has the command. Runs where `TRL_RELEASES` asks for it (scripts/test-matrix.sh)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.release_stack import SURFACES, ReleaseStack, sentence
from tests.releases import constraints_of, python_of
from tests.tiny import REPOSITORY

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

RELEASES = [
    name for name in os.environ.get("TRL_RELEASES", "").split() if name in SURFACES and not name.startswith("0.2")
]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our distribution, built from the checkout."""
    directory = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, REPOSITORY]
    subprocess.run(command, check=True, timeout=300)
    return directory


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("build", "run"), [("build.yaml", "run.yaml"), ("build_fsdp.yaml", "run_fsdp.yaml")])
def test_list_deps_ends_in_an_environment_that_starts(
    release: str, build: str, run: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "environment"
    python = home / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    # The release itself, without our checkout: a .pth in a directory that a .pth names is not read.
    (site,) = home.glob("lib/python*/site-packages")
    where = "import llama_stack, pathlib; print(pathlib.Path(llama_stack.__file__).parents[1])"
    shown = subprocess.run([python_of(release), "-c", where], capture_output=True, text=True, check=True, cwd=tmp_path)
    (site / "release.pth").write_text(shown.stdout)

    listed = subprocess.run(
        [python, "-m", "llama_stack.cli.llama", "stack", "list-deps", REPOSITORY / build],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--find-links", str(wheels)]
    for line in listed.stdout.splitlines():
        # Where the release is that of the checkout's own environment, pip would take the checkout for installed.
        ours = ["--ignore-installed", "--no-deps"] if line == "llama_stack_provider_trl" else []
        command = [*pip, *ours, "--constraint", str(constraints_of(release)), *line.split()]
        subprocess.run(command, check=True, cwd=tmp_path)
    where = "import llama_stack_provider_trl as ours; print(ours.__file__)"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.startswith(str(home)), "our packages come from the wheel"

    assert_it_starts(release, python, run, tmp_path)


@pytest.mark.skipif("0.2.23" not in os.environ.get("TRL_RELEASES", ""), reason="TRL_RELEASES leaves 0.2.23 out")
@pytest.mark.skipif(shutil.which("uv") is None, reason="`llama stack build` installs with uv, which is not on the PATH")
@pytest.mark.parametrize("release", ["0.2.23"])
def test_build_ends_in_an_environment_that_starts(release: str, wheels: Path, tmp_path: Path) -> None:
    """`llama stack build`, which 0.3 has no longer."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    command = [
        "stack",
        "build",
        "--config",
        REPOSITORY / "build_fsdp.yaml",
        "--image-type",
        "venv",
        "--image-name",
        home,
    ]
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "VIRTUAL_ENV": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "UV_CONSTRAINT": str(constraints_of(release)),
        "UV_FIND_LINKS": str(wheels),
    }
    program = [python_of(release), "-m", "llama_stack.cli.llama"]
    subprocess.run([*program, *command], check=True, cwd=tmp_path, env=environ, timeout=500)
    assert_it_starts(release, home / "bin" / "python", "run_fsdp.yaml", tmp_path)


def assert_it_starts(release: str, python: Path, run: str, root: Path) -> None:
    stack = ReleaseStack(root, release)
    stack.python = python
    stack.environ |= {"TRL_SERVICE_URL": NOWHERE, "TRL_SERVICE_DATA_DIR": str(root / "data")}
    stack._config.write_text((REPOSITORY / run).read_text())
    stack.start()
    try:
        answer = stack.get("/post-training/jobs")
        if run == "run_fsdp.yaml":
            assert NOWHERE in sentence(answer, 502)
        else:
            assert answer.json() == {"data": []}
    finally:
        stack.stop()
