"""scripts/prepare-env.sh leaves alone what is not its own; scripts/uv_install.py: the configuration of pip as arguments
and variables of uv."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from tests.programs import module_of
from tests.tiny import REPOSITORY


@pytest.fixture(scope="module")
def uv_install() -> ModuleType:
    return module_of(REPOSITORY / "scripts" / "uv_install.py")


def test_indexes_certificate_and_constraints_of_pip_are_those_of_uv(uv_install: ModuleType) -> None:
    listing = """\
:env:.cert='/etc/ca.pem'
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
global.constraint='a.txt'
global.extra-index-url='file:///one\\nhttps://two/simple'
global.find-links='/wheels /more'
global.index-url='https://mirror/simple'
global.trusted-host='mirror'
"""
    arguments, variables = uv_install.translate(listing)
    assert {tuple(arguments[at : at + 2]) for at in range(0, len(arguments), 2)} == {
        ("--constraint", "a.txt"),
        ("--find-links", "/wheels"),
        ("--find-links", "/more"),
        ("--allow-insecure-host", "mirror"),
    }
    assert variables == {
        **{"UV_DEFAULT_INDEX": "https://mirror/simple", "UV_INDEX": "file:///one https://two/simple"},
        **{"SSL_CERT_FILE": "/etc/ca.pem", "UV_HTTP_TIMEOUT": "180"},
    }


def test_a_variable_replaces_the_setting_for_install_which_replaces_the_global_one(uv_install: ModuleType) -> None:
    listing = ":env:.index-url='c'\nglobal.index-url='a'\nglobal.find-links='f'\ninstall.find_links='g'\n"
    assert uv_install.settings(listing) == {"index-url": "c", "find-links": "g"}
    assert uv_install.settings(":env:.index-url=''\nglobal.index-url='a'\n") == {"index-url": "a"}
    assert uv_install.settings("download.index-url='a'\nlist.format='json'\n") == {}


@pytest.mark.parametrize(("value", "arguments"), [("true", ["--no-index"]), ("1", ["--no-index"]), ("false", [])])
def test_no_index_is_a_switch(uv_install: ModuleType, value: str, arguments: list[str]) -> None:
    assert uv_install.translate(f"global.no-index='{value}'\n") == (arguments, {})


@pytest.mark.parametrize("name", ["proxy", "client-cert", "only-binary", "target", "user", "require-hashes"])
def test_a_setting_that_uv_lacks_leaves_the_install_to_pip(uv_install: ModuleType, name: str) -> None:
    with pytest.raises(uv_install.NoCounterpart, match=name):
        uv_install.translate(f"global.{name}='x'\n")


def test_uv_is_started_with_the_settings_of_a_quiet_pip_and_no_password_among_its_arguments(
    uv_install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(uv_install, "cache", lambda environment, uv: [])
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(sys, "argv", ["uv_install.py", "-e", "."])
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\nquiet = 3\nindex-url = https://user:password@mirror/simple\nno-index = yes\n")
    others = {"UV_LINK_MODE": "symlink", "UV_DEFAULT_INDEX": "https://elsewhere/simple"}
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            del os.environ[name]
        os.environ.update(PIP_CONFIG_FILE=str(configuration), UV_CACHE_DIR=str(tmp_path), **others)
        uv_install.main()
        found = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
    (command,) = started
    assert command[1:3] == ["pip", "install"]
    assert command[-2:] == ["-e", "."]
    assert "--no-index" in command
    assert "password" not in " ".join(command)
    found.pop("UV_INDEX", None)  # of the configuration of the machine
    assert found == {"UV_CACHE_DIR": str(tmp_path), "UV_DEFAULT_INDEX": "https://user:password@mirror/simple"}


def test_an_environment_that_is_a_link_is_refused_and_left_alone(tmp_path: Path) -> None:
    """There are no constraints: were it not refused, nothing would be installed either."""
    checkout, shared = tmp_path / "checkout", tmp_path / "shared"
    shared.mkdir()
    (shared / "pyvenv.cfg").write_text("of another checkout")
    (checkout / "scripts").mkdir(parents=True)
    for name in ("prepare-env.sh", "pythons.sh"):
        shutil.copy(REPOSITORY / "scripts" / name, checkout / "scripts")
    (checkout / ".venv").symlink_to(shared)
    environ = os.environ | {"TRL_CONSTRAINTS": "missing"}
    done = subprocess.run([checkout / "scripts" / "prepare-env.sh"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"prepare-env: .venv is a link to '{shared}', and this would replace what is there: "
        "remove the link ('rm .venv') and run this again.\n"
    )
    assert [path.read_text() for path in shared.iterdir()] == ["of another checkout"]
    assert sorted(path.name for path in checkout.iterdir()) == [".venv", "scripts"]
