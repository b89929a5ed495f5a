"""Methods that installed packages add: how they are requested, and what a broken package does."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, MethodUnavailable
from llama_stack_provider_trl.requests import custom as custom_requests
from llama_stack_provider_trl.requests.bodies import algorithm_of
from llama_stack_provider_trl.specs import custom, custom_imports, custom_limits
from llama_stack_provider_trl.specs.custom import CustomMethod, check_custom_rows, find_method, problems
from llama_stack_provider_trl.specs.custom_limits import refuse_custom_rows
from llama_stack_provider_trl.specs.methods import CustomSpec
from llama_stack_provider_trl.system import limited
from llama_stack_provider_trl.system.limited import Limited
from tests.plugins import install, install_example
from tests.required import in_full
from tests.tiny import REPOSITORY
from tests.training import dataset
from tests.unit.installed_method import METHOD
from tests.unit.preference_requests import resolved, spec_of


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of sys.path with the example; what tests import from it is forgotten afterwards."""
    monkeypatch.setattr(custom, "_imports", custom_imports.Imports())
    monkeypatch.syspath_prepend(tmp_path / "site")
    before = set(sys.modules)
    install_example(tmp_path / "site")
    yield tmp_path / "site"
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_request_names_a_method_of_a_package_and_the_job_records_its_version_and_fields() -> None:
    spec = spec_of({"type": "robust", "flip_rate": 0.2, "beta": None})
    expected = CustomSpec(
        algorithm="custom_pairs",
        type="robust",
        package="custom-trainer-example",
        version="1.0.0",
        parameters={"beta": 2.0, "flip_rate": 0.2},
    )
    assert (spec.algorithm, spec.method, spec.has_pairs) == ("custom_pairs", expected, True)
    assert spec_of(None, method={"type": "robust", "flip_rate": 0.2}).method == expected
    assert spec.train.optimizer.learning_rate == 1e-6
    focal = spec_of({"type": "focal"}, lora={"rank": 4})
    assert (focal.algorithm, focal.has_pairs, focal.train.optimizer.learning_rate) == ("custom_rows", False, 2e-4)
    for body in ({"algorithm_config": {"type": "robust"}}, {"provider_options": {"method": {"type": "robust"}}}):
        assert algorithm_of(body) == "dpo"


@pytest.mark.parametrize(
    ("config", "options", "field", "words"),
    [
        ({"type": "robust", "gamma": 1}, {}, "algorithm_config.gamma", "no such field; its fields are: type, beta, fl"),
        ({"type": "robust", "beta": 0}, {}, "algorithm_config.beta", "greater than 0"),
        ({"type": "robust", "beta": float("inf")}, {}, "algorithm_config.beta", "finite"),
        ({"type": "robust", "beta": "much"}, {}, "algorithm_config.beta", "valid number"),
        ({"type": "robust"}, {"label_smoothing": 0.1}, "provider_options.label_smoothing", "Robust preferences has no"),
        ({"type": "robust"}, {"reference_model": "org/b"}, "provider_options.reference_model", "no reference model"),
        ({"type": "robst"}, {}, "algorithm_config.type", "the nearest is 'robust'; installed packages add focal, rob"),
        (None, {"method": {"type": "gone"}}, "provider_options.method.type", "installed packages add focal, robust"),
        (None, {"method": {"type": "focal", "g": 1}}, "provider_options.method.g", "Focal loss has no such field"),
    ],
)
def test_what_a_package_does_not_have_is_refused_by_name(config: Any, options: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolved(config, **options)
    assert refused.value.field == field
    assert words in str(refused.value)


BROKEN = {
    "missing": ("", "method 'missing' of broken 1.0 cannot be imported: ModuleNotFoundError"),
    "raises": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "leaves": ("raise SystemExit('bye')", "cannot be imported: SystemExit: bye"),
    "heavy": ("import ijson_of_torch", "ImportError: it imports torch, which only its trainer's module may"),
    "other": ("method = 3", "found an object of type int, expected a CustomMethod"),
    "rows": (METHOD + "method = make(rows='images')", "its rows are 'images', expected one of pairs, conversations"),
    "trainer": (METHOD + "method = make(trainer='no name')", "its trainer is 'no name', expected 'package.module"),
    "typed": (
        METHOD + "class T(Fields):\n    type: str = ''\nmethod = make(fields=T)",
        "it has a field 'type', which names the method itself",
    ),
    "orpo": (METHOD + "method = make()", "broken 1.0: the name 'orpo' of its method is taken by this project"),
    "robust": (METHOD + "method = make()", "several packages add a method 'robust': "),
    "Upper": (METHOD + "method = make()", "the name 'Upper' of its method does not match"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_one_sentence_and_disturbs_nothing_else(
    site: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, words = BROKEN[name]
    for library in ("torch", *(each for each in sys.modules if each.startswith("torch."))):
        if name == "heavy":
            monkeypatch.delitem(sys.modules, library, raising=False)
    (site / "ijson_of_torch.py").write_text("import torch")
    install(site, "broken", {name: f"broken_{name}:method"}, {f"broken_{name}": source} if source else {})
    (sentence,) = problems()
    assert words in sentence
    assert "\n" not in sentence
    assert find_method("focal").package == "custom-trainer-example"
    if name == "orpo":
        assert spec_of({"type": "orpo"}).algorithm == "orpo"
        return
    with pytest.raises(InvalidRequest) as refused:
        spec_of({"type": name})
    assert refused.value.field == "algorithm_config.type"
    assert words in str(refused.value)


def test_a_package_is_found_when_it_is_installed_and_gone_when_it_is_removed(site: Path) -> None:
    with pytest.raises(InvalidRequest, match="expected one of dpo, orpo"):
        spec_of({"type": "later"})
    install(site, "later", {"later": "later_module:method"}, {"later_module": METHOD + "method = make()"})
    assert spec_of({"type": "later"}).method == CustomSpec(
        algorithm="custom_pairs",
        type="later",
        package="later",
        version="1.0",
        parameters={"weight": 1.0, "inner": {"x": 1.0}},
    )
    with pytest.raises(InvalidRequest, match=r"inner\.x='far' is not supported"):
        spec_of({"type": "later", "inner": {"x": "far"}})
    (site / "later-1.0.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(MethodUnavailable, match="no installed package adds the method 'later'; installed packages add"):
        find_method("later")


def test_a_method_checks_each_pair_of_a_row(site: Path, tmp_path: Path) -> None:
    method = spec_of({"type": "robust"}).method
    rows = [{"prompt": "a", "chosen": "b", "rejected": ["c", other]} for other in "db"]
    check_custom_rows(method, dataset(tmp_path, rows[:1]), "custom_pairs", None)
    with pytest.raises(InvalidRows, match="dataset 'rows', row 1: chosen and rejected are the same answer"):
        check_custom_rows(method, dataset(tmp_path, rows), "custom_pairs", None)


def test_a_method_checks_rows_and_a_refused_one_is_named(site: Path, tmp_path: Path) -> None:
    method = spec_of({"type": "robust"}).method
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    check_custom_rows(method, dataset(tmp_path, pairs[:1]), "custom_pairs", None)
    with pytest.raises(InvalidRows, match="dataset 'rows', row 1: chosen and rejected are the same answer"):
        check_custom_rows(method, dataset(tmp_path, pairs), "custom_pairs", None)
    install(site, "bad", {"bad": "bad_check:method"}, {"bad_check": METHOD + "method = make(check_row=check)"})
    with pytest.raises(MethodUnavailable, match=r"method 'bad' of bad 1\.0 failed on row 0: AttributeError"):
        check_custom_rows(spec_of({"type": "bad"}).method, dataset(tmp_path, pairs), "custom_pairs", None)


MODELLED = (
    METHOD
    + """
from pydantic import model_validator
class Row(BaseModel):
    chosen: str = Field(min_length=3)
    rejected: str = Field(max_length=3)
class Whole(Row):
    @model_validator(mode="after")
    def differ(self):
        raise ValueError("both are\\n the same")
def row_of(model):
    def check(example, fields):
        model(**{name: getattr(example, name)[-1]["content"] for name in ("chosen", "rejected")})
    return check
fields, whole = make(check_row=row_of(Row)), make(check_row=row_of(Whole))
"""
)


def test_a_row_that_a_packages_model_does_not_accept_is_named_with_its_field(site: Path, tmp_path: Path) -> None:
    points = {f"of_{name}": f"modelled_rows:{name}" for name in ("fields", "whole")}
    install(site, "modelled", points, {"modelled_rows": MODELLED})
    for name, sentence in (
        ("of_fields", "dataset 'rows', row 1: chosen: String should have at least 3 characters"),
        ("of_whole", "dataset 'rows', row 0: Value error, both are the same"),
    ):
        pairs = [{"prompt": "a", "chosen": chosen, "rejected": "cd"} for chosen in ("bcd", "b")]
        with pytest.raises(InvalidRows) as refused:
            check_custom_rows(spec_of({"type": name}).method, dataset(tmp_path, pairs), "custom_pairs", None)
        assert str(refused.value) == sentence


def test_a_package_whose_import_raises_a_validation_error_is_named_in_one_line(site: Path) -> None:
    source = METHOD + "class Row(BaseModel):\n    x: int\nRow(x='far')\nmethod = make()"
    install(site, "invalid", {"invalid": "invalid_module:method"}, {"invalid_module": source})
    with pytest.raises(MethodUnavailable) as refused:
        find_method("invalid")
    assert str(refused.value).endswith(
        "cannot be imported: ValidationError: x: Input should be a valid integer, unable to parse string as an integer"
    )


LATE = (
    METHOD
    + """
from pydantic import field_validator
class Late(Fields):
    @field_validator("weight")
    def look(cls, value):
        import ijson_of_torch
        return value
def check_late(example, fields):
    import ijson_of_torch
validates, checks = make(fields=Late), make(check_row=check_late)
"""
)


def test_validators_and_checks_of_rows_may_not_import_training_libraries_either(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("torch", *(each for each in sys.modules if each.startswith("torch."))):
        monkeypatch.delitem(sys.modules, library, raising=False)
    (site / "ijson_of_torch.py").write_text("import torch")
    points = {name: f"late_imports:{name}" for name in ("validates", "checks")}
    install(site, "late", points, {"late_imports": LATE})
    words = "ImportError: it imports torch, which only its trainer's module may"
    with pytest.raises(InvalidRequest, match=rf"method 'validates' of late 1\.0 failed on its fields: {words}"):
        spec_of({"type": "validates", "weight": 2.0})
    method = spec_of({"type": "checks"}).method
    rows = dataset(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(MethodUnavailable, match=rf"method 'checks' of late 1\.0 failed on row 0: {words}"):
        check_custom_rows(method, rows, "custom_pairs", None)
    assert "torch" not in sys.modules


ENDLESS = (
    METHOD
    + """
import signal
from pydantic import field_validator
def consume():
    while True:
        pass
def wait():
    while True:
        signal.pause()
def allocate():
    kept = []
    while True:
        kept.append(bytearray(1 << 24))
def crash():
    import os
    os.abort()
def make_one(call):
    class Endless(Fields):
        @field_validator("weight")
        def look(cls, value):
            call()
    return make(fields=Endless, check_row=lambda example, fields: call())
consumes, waits, allocates, crashes = map(make_one, (consume, wait, allocate, crash))
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
@pytest.mark.parametrize("name", ["consumes", "crashes", *in_full("waits", "allocates")])
def test_validators_and_checks_of_rows_that_never_end_are_refused_within_limits(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    points = {one: f"endless_methods:{one}" for one in ("consumes", "waits", "allocates", "crashes")}
    install(site, "endless", points, {"endless_methods": ENDLESS})
    method = spec_of({"type": name}).method  # the default is not validated
    limits = Limited(seconds=1, memory=128 << 20)
    monkeypatch.setattr(custom_requests, "FIELDS", limits)
    monkeypatch.setattr(custom_limits, "ROWS", limits)
    if name == "waits":
        monkeypatch.setattr(limited, "_LEAST_WALL_S", 1.0)
    what = "(checked the rows of dataset 'rows'|read its fields)"
    exceeds = rf"method '{name}' of endless 1\.0 crashed, or has not {what}"
    why = rf"failed on (its fields|row 0): MemoryError|{exceeds} within 1 s of CPU time, \d+ s in all and 128 MiB"
    with pytest.raises(InvalidRequest, match=why) as refused:
        spec_of({"type": name, "weight": 2.0})
    assert refused.value.field == "algorithm_config.type"
    rows = dataset(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(MethodUnavailable, match=why):
        refuse_custom_rows(method, rows, "custom_pairs", None)


def test_rows_are_refused_within_limits_as_without(site: Path, tmp_path: Path) -> None:
    method = spec_of({"type": "robust"}).method
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    refuse_custom_rows(method, dataset(tmp_path, pairs[:1]), "custom_pairs", None)
    with pytest.raises(InvalidRows, match=r"^dataset 'rows', row 1: chosen and rejected are the same answer"):
        refuse_custom_rows(method, dataset(tmp_path, pairs), "custom_pairs", None)
    install(site, "bad", {"bad": "bad_check:method"}, {"bad_check": METHOD + "method = make(check_row=check)"})
    with pytest.raises(MethodUnavailable, match=r"^method 'bad' of bad 1\.0 failed on row 0: AttributeError"):
        refuse_custom_rows(spec_of({"type": "bad"}).method, dataset(tmp_path, pairs), "custom_pairs", None)


def test_a_failed_import_is_repeated_when_its_files_or_the_installed_packages_change(site: Path) -> None:
    (site / "count_imports.py").write_text("counted = []")
    source = "import count_imports\ncount_imports.counted.append(1)\nimport absent_library\n" + METHOD
    install(site, "failing", {"failing": "failing_module:method"}, {"failing_module": source})
    counts = importlib.import_module("count_imports")

    def failed(imports: int) -> None:
        for _ in range(2):
            with pytest.raises(MethodUnavailable, match="ModuleNotFoundError: No module named 'absent_library'"):
                find_method("failing")
        assert len(counts.counted) == imports

    failed(1)
    (site / "failing_module.py").write_text(source + "# another one\n")
    failed(2)
    install(site, "other", {})
    failed(3)
    (site / "failing_module.py").write_text(source.replace("import absent_library", "") + "method = make()")
    assert find_method("failing").version == "1.0"
    assert find_method("failing").method.title == "Mine"
    assert len(counts.counted) == 4


def test_a_repeated_import_reads_all_modules_of_its_package_again(site: Path) -> None:
    install(site, "parted", {"parted": "parted_package.method:method"}, {})
    package = site / "parted_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "values.py").write_text("TITLE = None")
    source = f"from parted_package.values import TITLE\n{METHOD}\nmethod = make(title=TITLE.title())"
    (package / "method.py").write_text(source)
    with pytest.raises(MethodUnavailable, match="AttributeError: 'NoneType' object has no attribute 'title'"):
        find_method("parted")
    (package / "values.py").write_text("TITLE = 'corrected'")
    assert find_method("parted").method.title == "Corrected"


def test_an_import_that_does_not_end_is_refused_after_its_deadline(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_imports, "DEADLINE_S", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(custom, "the_gate", gate, raising=False)
    source = "from llama_stack_provider_trl.specs import custom\ncustom.the_gate.wait(60)\n" + METHOD
    install(site, "hanging", {"hanging": "hanging_module:method"}, {"hanging_module": source + "method = make()"})
    with pytest.raises(InvalidRequest, match=r"hanging 1\.0 cannot be imported: its import has not ended in 0\.05 s"):
        spec_of({"type": "hanging"})
    gate.set()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "import hanging_module")
    thread.join(30)
    assert find_method("hanging").method.title == "Mine"


def test_the_page_lists_every_attribute_of_a_method() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "custom-trainers.md").read_text(encoding="utf-8")
    table = text.split("<!-- method -->")[1].split("<!-- /method -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        field.name for field in dataclasses.fields(CustomMethod)
    ]
    assert f'"{custom.GROUP}"' in text


def test_a_package_that_was_upgraded_under_a_server_is_named(tmp_path: Path) -> None:
    found = find_method("robust")
    assert custom.same_method("robust", found.package, found.version) is found
    message = "is of custom-trainer-example 1.0.0 now, and was of custom-trainer-example 0.9 when .* restart the server"
    (outcome,) = custom_requests._outcome("robust", found.package, "0.9", {}, "algorithm_config")
    assert re.search(message, outcome["unavailable"])
    rows = dataset(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    method = CustomSpec(algorithm="custom_pairs", type="robust", package=found.package, version="0.9", parameters={})
    ((kind, sentence),) = custom_limits._problem(found.package, "0.9", method, rows, "custom_pairs", None)
    assert kind == "method"
    assert re.search(message, sentence)
