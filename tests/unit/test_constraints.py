"""constraints/*.txt name everything that an install of their release needs, and nothing but names and versions."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.releases import CONSTRAINTS, OGX, RELEASES, REPOSITORY, constraints_of, pins

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", line)[0].lower().replace("_", "-") for line in requirements}


def test_there_is_a_file_for_every_release_and_no_other() -> None:
    assert {*CONSTRAINTS.glob("*")} == {constraints_of(release) for release in RELEASES}


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_pins_its_release_and_all_that_our_extra_asks_for(release: str) -> None:
    lines = [line for line in constraints_of(release).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in lines), "names and exact versions only"
    found = pins(release)
    extra = PROJECT["optional-dependencies"]["ogx" if release == OGX else "stack"]
    assert names([*PROJECT["dependencies"], *extra]) <= found.keys()
    if release == OGX:
        assert found["ogx"] == release.removeprefix("ogx-")
    else:
        # A client of another minor is refused (426).
        assert found["llama-stack"] == found["llama-stack-client"] == release
