"""scripts/uv_install.py: the configuration of pip as arguments and variables of uv."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.tiny import REPOSITORY


@pytest.fixture(scope="module")
def uv_install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("uv_install", REPOSITORY / "scripts" / "uv_install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        ("--index", "file:///one"),
        ("--index", "https://two/simple"),
        ("--find-links", "/wheels"),
        ("--find-links", "/more"),
        ("--default-index", "https://mirror/simple"),
        ("--allow-insecure-host", "mirror"),
    }
    assert variables == {"SSL_CERT_FILE": "/etc/ca.pem", "UV_HTTP_TIMEOUT": "180"}


def test_a_variable_replaces_the_setting_for_install_which_replaces_the_global_one(uv_install: ModuleType) -> None:
    listing = ":env:.index-url='c'\nglobal.index-url='a'\nglobal.find-links='f'\ninstall.find_links='g'\n"
    assert uv_install.settings(listing) == {"index-url": "c", "find-links": "g"}
    assert uv_install.settings("download.index-url='a'\nlist.format='json'\n") == {}


@pytest.mark.parametrize(("value", "arguments"), [("true", ["--no-index"]), ("1", ["--no-index"]), ("false", [])])
def test_no_index_is_a_switch(uv_install: ModuleType, value: str, arguments: list[str]) -> None:
    assert uv_install.translate(f"global.no-index='{value}'\n") == (arguments, {})


@pytest.mark.parametrize("name", ["proxy", "client-cert", "only-binary", "target", "user", "require-hashes"])
def test_a_setting_that_uv_lacks_leaves_the_install_to_pip(uv_install: ModuleType, name: str) -> None:
    with pytest.raises(uv_install.NoCounterpart, match=name):
        uv_install.translate(f"global.{name}='x'\n")
