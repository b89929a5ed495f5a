"""Packages that add methods and rewards, and are broken in every way: the service starts, and names them."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import MethodUnavailable
from llama_stack_provider_trl.specs import custom, custom_imports, rewards
from llama_stack_provider_trl.specs.custom import custom_names, find_method, log_unusable_methods, problems
from llama_stack_provider_trl_remote.cli import doctor
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.service import TrainingService, running
from tests.contract.stack import poll
from tests.plugins import install, install_example
from tests.required import FULL, in_full
from tests.security.harmful_text import FALSE_LINE, HARMFUL
from tests.unit.installed_method import METHOD

pytestmark = pytest.mark.contract

ESCAPES = f"\x1b[2J\u202e{FALSE_LINE}"
GOOD = METHOD + "method = make()"
BROKEN = {
    "raises": (f"raise ValueError({ESCAPES!r})", "ValueError"),
    "exits": (f"import sys\nsys.exit({ESCAPES!r})", "SystemExit"),
    "ends": ("import os\nos._exit(0)", "its import ends the process"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "its import ends the process"),
    "hangs": ("import time\nwhile True: time.sleep(1)", "its import has not ended in 2 s"),
    "spins": ("while True: pass", "its import has not ended in 2 s"),
}
"""Module -> its source, and what is reported of it."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(custom, "_imports", custom_imports.Imports())
    monkeypatch.setattr(custom_imports, "_TRY_SECONDS", 8)
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    before = set(sys.modules)
    install_example(site)
    yield site
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def break_with(site: Path, *names: str) -> None:
    for name in names:
        install(site, f"broken-{name}", {name: f"broken_{name}:method"}, {f"broken_{name}": BROKEN[name][0]})


@pytest.mark.parametrize("name", [name for name in BROKEN if FULL or name != "hangs"])
def test_a_package_that_cannot_be_imported_is_named_and_others_are_used(
    site: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_with(site, name)
    with monkeypatch.context() as hurried:
        if name in ("hangs", "spins"):
            hurried.setattr(custom_imports, "_TRY_SECONDS", 2)
        with pytest.raises(MethodUnavailable, match=BROKEN[name][1]) as caught:
            find_method(name)
    assert f"broken-{name} 1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert find_method("robust").package == "custom-trainer-example"


def test_a_server_does_not_wait_for_imports_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, logged = threading.Event(), threading.Event()

    def slow() -> list[str]:
        go_on.wait(60)
        logged.set()
        return []

    monkeypatch.setattr(custom, "problems", slow)
    log_unusable_methods()
    assert not logged.is_set()
    go_on.set()
    assert logged.wait(60)


def damage(site: Path, name: str) -> None:
    """A distribution whose own files are damaged."""
    install(site, "damaged", {"mine": "damaged_module:method"}, {"damaged_module": GOOD})
    points = site / "damaged-1.0.dist-info" / "entry_points.txt"
    match name:
        case "no UTF-8":
            points.write_bytes(b"[llama_stack_provider_trl.trainers]\nm\xff\xfe = a:b\n")
        case "no section":
            points.write_text("mine = damaged_module:method\n")
        case "no value":
            points.write_text("[llama_stack_provider_trl.trainers]\nmine =\n")
        case "no object reference":
            points.write_text("[llama_stack_provider_trl.trainers]\nmine = not a module!\n")
        case "no metadata":
            (site / "damaged-1.0.dist-info" / "METADATA").unlink()
        case "control characters":
            points.write_text(f"[llama_stack_provider_trl.trainers]\n{ESCAPES} = damaged_module:method\n")
        case "a name of control characters":
            metadata = f"Metadata-Version: 2.1\nName: a{ESCAPES}\nVersion: 1{ESCAPES}\n"
            (site / "damaged-1.0.dist-info" / "METADATA").write_text(metadata)
            points.write_text("[llama_stack_provider_trl.trainers]\nmine = damaged_module:missing\n")


DAMAGES = (
    *("no UTF-8", "no section", "no value", "no object reference", "no metadata"),
    *("control characters", "a name of control characters"),
)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_package_disturbs_no_other_one(site: Path, name: str) -> None:
    damage(site, name)
    assert find_method("robust").package == "custom-trainer-example"
    assert "robust" in custom_names()
    assert isinstance(rewards.installed_rewards(), dict)
    texts = [*problems(), *custom_names()]
    if name not in ("no section", "no metadata"):
        assert problems()
    for method in ("mine", ESCAPES, "absent"):
        try:
            find_method(method)
        except MethodUnavailable as error:
            texts.append(str(error))
    assert not HARMFUL.search("\n".join(texts))


def test_the_doctor_reports_each_and_nothing_that_they_print(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install(site, "printing", {"prints": "prints_module:method"}, {"prints_module": f"print({ESCAPES!r})\n" + GOOD})
    break_with(site, "raises", "ends")
    damage(site, "control characters")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._plugins,))
    monkeypatch.setenv("TRL_SERVICE_DATA_DIR", str(tmp_path / "data"))
    assert doctor.report(Namespace(config=None, json=False)) == 0
    output = capfd.readouterr()
    for words in ("method 'raises' of broken-raises 1.0", "method 'ends' of broken-ends 1.0", "the name '\\x1b[2J"):
        assert words in output.out
    assert not HARMFUL.search(output.out + output.err)
    assert "prints" not in output.out
    monkeypatch.setattr(doctor, "_PLUGINS_SECONDS", 0.01)
    (finding, *_) = doctor._plugins(ServiceSettings(data_dir=tmp_path))
    assert "cannot be examined: TimeoutExpired" in finding.found


def test_a_service_beside_broken_packages_starts_and_names_them_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    kinds = ("raises", "crashes", *in_full("exits", "ends", "hangs"))  # CI: each of them is tried above
    break_with(site, *kinds)
    install(site, "printing", {"prints": "prints_module:method"}, {"prints_module": f"print({ESCAPES!r})\n" + GOOD})
    damage(site, "control characters")
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "service").mkdir()
    service = TrainingService(tmp_path / "service")
    service.is_forked = False  # a fork would not have the packages
    with running(service):
        assert service.get("/health").status_code == 200
        log = service.data_dir / "logs" / "service.log"
        named = (*(f"'{kind}' of broken-{kind}" for kind in kinds if kind != "hangs"), "the name '\\x1b[2J")
        poll(lambda: all(word in log.read_text() for word in named) or None, "each is in the log", timeout=60)
        assert service.get("/health").status_code == 200
        assert not HARMFUL.search(log.read_text())
