"""`train_python` is checked before anything is queued, and what it lacks is one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.launch import interpreter
from llama_stack_provider_trl.launch.interpreter import NEEDED, check_interpreter
from llama_stack_provider_trl.specs.schema import schema_digest

REPOSITORY = Path(__file__).resolve().parents[2]
GOOD = {
    "torch": "2.13.0",
    "trl": "1.16.0",
    "transformers": "5.23.0",
    "peft": "0.21",
    "accelerate": "1",
    "datasets": "5",
    "jsonschema": "4.26.0",
    "regex": "2026.11.15",
    "specs": schema_digest(),
}


@pytest.fixture
def python(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Write an interpreter that answers as if it were this version with these distributions."""

    def write(version: tuple[int, int], **found: str) -> Path:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\necho '{json.dumps([version, found])}'\n")
        program.chmod(0o755)
        return program

    return write


def refusal(python: Path) -> str:
    with pytest.raises(
        InvalidRequest, match=re.escape(f"train_python='{python}' is not supported: {python}")
    ) as caught:
        check_interpreter(python)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_interpreter_with_all_that_training_needs_is_taken(python) -> None:  # type: ignore[no-untyped-def]
    check_interpreter(python((3, 12), ours=__version__, **GOOD))
    check_interpreter(python((3, 13), ours=__version__, **GOOD))


@pytest.mark.parametrize(
    ("version", "found", "message"),
    [
        ((3, 9), {}, "is Python 3.9; training needs 3.12 or later"),
        ((3, 12), {}, f"has no llama_stack_provider_trl, and this is {__version__}"),
        ((3, 12), {"ours": "0.0.1"}, f"has llama_stack_provider_trl 0.0.1, and this is {__version__}"),
        (
            (3, 12),
            {"ours": __version__, "torch": "2.13.0"},
            "has no trl, transformers, peft, accelerate, datasets, jsonschema, regex; run",
        ),
        (
            (3, 12),
            {"ours": __version__, **GOOD, "transformers": "4.57.6"},
            "has transformers 4.57.6, and training needs",
        ),
        (
            (3, 12),
            {"ours": __version__, **GOOD, "transformers": "5.17.1"},
            "has transformers 5.17.1, and training needs",
        ),
        (
            (3, 12),
            {"ours": __version__, **GOOD, "specs": "0123"},
            f"have the digest 0123, those of this process {schema_digest()}. Install the same build in both",
        ),
        ((3, 12), {"ours": __version__, **GOOD, "specs": ""}, "have the digest none, those of this process"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(python, version, found, message) -> None:  # type: ignore[no-untyped-def]
    text = refusal(python(version, **found))
    assert message in text
    assert f"pip install 'llama_stack_provider_trl[train]=={__version__}'" in text


def test_what_is_no_interpreter_is_named(tmp_path: Path) -> None:
    assert "cannot be started (No such file or directory)" in refusal(tmp_path / "nowhere")
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    assert "is not a working Python" in refusal(silent)


def test_it_is_probed_as_a_training_would_start_it(python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Without the server's secrets, and without what lies in the directory where the server was started."""
    monkeypatch.setenv("TRL_SERVICE_TOKEN", "s3cret")
    monkeypatch.chdir(tmp_path)
    program = python((3, 12), ours=__version__, **GOOD)
    seen = tmp_path / "seen"
    program.write_text(program.read_text().replace("\n", f"\n(pwd; env) > '{seen}'\n", 1))
    check_interpreter(program)
    assert seen.read_text().startswith("/\n")
    assert "s3cret" not in seen.read_text()


def test_the_interpreter_of_this_process_is_checked_as_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process less, with the same result; where the unit tests run, training's libraries may be missing."""
    found = [interpreter._problem(sys.executable)]
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", None)
        for python in (None, Path(sys.executable)):
            try:
                check_interpreter(python)
                found.append(None)
            except InvalidRequest as error:
                found.append(str(error).split(" is not supported: ")[1])
    assert found == [found[0]] * 3
    monkeypatch.setitem(NEEDED, "not-a-distribution", "1.")
    with pytest.raises(InvalidRequest, match=r"has no .*not-a-distribution; run there"):
        check_interpreter(None)


def test_its_own_interpreter_is_what_an_unset_one_means() -> None:
    assert TrlConfig.model_validate({"train_python": None}).train_python is None
    assert TrlConfig.model_validate({"train_python": ""}).train_python is None
    assert TrlConfig.model_validate({"train_python": sys.executable}).train_python == Path(sys.executable)


def test_the_probe_checks_for_what_the_extra_installs() -> None:
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    # datasets brings huggingface-hub: the extra states its release alone, which only readers of hub datasets need.
    assert {re.split(r"[<>=]", line)[0] for line in extra} - {"huggingface-hub"} == {*NEEDED}
    assert "trl>=1.16,<1.17" in extra
    assert "transformers>=5.23,<6" in extra
