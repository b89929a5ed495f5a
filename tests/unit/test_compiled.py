"""What is compiled before a run of all tests is what pytest looks for."""

from __future__ import annotations

from pathlib import Path

from _pytest.assertion import rewrite

from tests import compiled


def test_pytest_finds_a_file_that_was_compiled_with_its_assertions_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("def test_one():\n    assert 1 == 2\n")
    compiled._compile([path])
    found = rewrite._read_pyc(path, tmp_path / "__pycache__" / f"test_one{rewrite.PYC_TAIL}")
    assert found is not None
    assert "@pytest_ar" in found.co_names
