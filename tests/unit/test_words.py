"""The word list of scripts/words.txt finds what it lists, and exempts what it names."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.programs import module_of
from tests.unit.test_architecture import REPOSITORY

LIST = """
nobody -> no process
(go|goes) on -> continue
(?-i:_?LOOK) -> poll interval
# exempt: path |> expression |> reason
tests/* |> "nobody" |> the name of an unknown job
"""


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return module_of(REPOSITORY / "scripts" / "check-words.py")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\n# It goes on.\n", [(2, "goes on")]),
        ("def test_it_goes_on() -> None: ...", [(1, "goes_on")]),
        ("# it goes\n    # on\n", [(1, "goes # on")]),
        ("-- it goes\n-- on\n", [(1, "goes -- on")]),
        ("_LOOK = 1\nlook = 2\n", [(1, "_LOOK")]),
        ("Nobody does.", [(1, "Nobody")]),
        ("goes once; ongoing; egos on", []),
    ],
)
def test_a_listed_phrase_is_found_in_names_and_over_line_breaks(
    checker: ModuleType, text: str, found: list[tuple[int, str]]
) -> None:
    assert [(hit.line, hit.phrase) for hit in checker.Words(LIST).hits("a.py", text)] == found


def test_an_exemption_covers_its_phrase_in_its_files_only(checker: ModuleType) -> None:
    words = checker.Words(LIST)
    assert not list(words.hits("tests/a.py", 'get("nobody")'))
    assert len(list(words.hits("tests/a.py", "nobody"))) == 1
    assert len(list(words.hits("package/a.py", 'get("nobody")'))) == 1


def test_a_rule_without_a_replacement_is_refused(checker: ModuleType) -> None:
    with pytest.raises(SystemExit, match="has 1 fields, expected 2"):
        checker.Words("nobody\n")


def test_released_entries_of_the_changelog_are_not_checked(checker: ModuleType) -> None:
    text = "# Changelog\n## [Unreleased]\n- new\n## [0.1.0]\n- it goes on\n"
    assert checker.unreleased(text) == "# Changelog\n## [Unreleased]\n- new\n"
    assert checker.unreleased("## [Unreleased]\n- new\n") == "## [Unreleased]\n- new\n"


def test_the_shipped_list_parses_and_the_packages_are_among_the_files(checker: ModuleType) -> None:
    words = checker.Words((REPOSITORY / "scripts" / "words.txt").read_text())
    name = "llama_stack_provider_trl/jobs/verdict.py"
    assert name in checker.files(["llama_stack_provider_trl/jobs"])
    assert not list(words.hits(name, (REPOSITORY / name).read_text()))
