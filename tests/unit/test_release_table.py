"""The table of releases in docs/reference/compatibility.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import release_table
from tests.release_table import BEGIN, END, NATIVE
from tests.releases import RELEASES

HEAD = f"| | {' | '.join(RELEASES)} |\n|---|{'---|' * len(RELEASES)}\n"
RESULTS = """<testsuites><testsuite>
<testcase classname="tests.contract.test_releases" name="test_sft[0.7.3-inline]"/>
<testcase classname="tests.contract.test_release_builds" name="test_build_ends_in_an_environment_that_starts[0.2.23]">
  <skipped message="TRL_RELEASES leaves 0.2.23 out"/>
</testcase>
</testsuite></testsuites>"""


def test_a_release_of_which_no_test_ran_keeps_its_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, results = tmp_path / "compatibility.md", tmp_path / "results.xml"
    results.write_text(RESULTS)
    rows = "".join(f"| {feature} | {' | '.join(['yes'] * len(RELEASES))} |\n" for feature in NATIVE)
    table.write_text(f"before\n{BEGIN}{HEAD}{rows}{END}\nafter")
    monkeypatch.setattr(release_table, "TABLE", table)
    release_table.main([results])
    columns = list(zip(*(line.strip("| ").split(" | ") for line in table.read_text().splitlines()[4:-3]), strict=False))
    by_release = dict(zip(["", *RELEASES], columns, strict=False))
    assert set(by_release["0.2.23"]) == {"yes"}
    assert set(by_release["0.7.3"]) == {"yes", "-"}
