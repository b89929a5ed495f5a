"""README.md, the tutorials and the how-tos have a reader type what exists. tests/contract and tests/cluster run it."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.cli.main import parser
from tests.tiny import REPOSITORY
from tests.tutorials import LLAMA_STACK, blocks

PAGES = ["README.md", *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "docs").rglob("*.md")))]


def shell_lines(page: str) -> list[str]:
    """What a page has a reader type into a shell, without comments; lines that a backslash continues are one."""
    fenced = "".join([*blocks(page, "bash"), *re.findall(r"^\$ (.*\n)", "".join(blocks(page, "")), re.MULTILINE)])
    lines = fenced.replace("\\\n", " ").splitlines()
    return [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]


def every_line() -> list[tuple[str, str]]:
    return [(page, line) for page in PAGES for line in shell_lines(page)]


@cache
def sources() -> str:
    kinds = ("scripts/*.sh", "run*.yaml", "llama_stack_provider_trl*/**/*.py", "tests/**/*.py")
    return "\n".join(path.read_text() for kind in kinds for path in REPOSITORY.glob(kind) if path != Path(__file__))


def test_the_first_tutorial_is_the_program_of_the_readme_in_steps() -> None:
    (program,) = blocks("README.md", "python")
    *steps, load_the_result = blocks(LLAMA_STACK, "python")
    assert [line for line in "".join(steps).splitlines() if line] == [line for line in program.splitlines() if line]
    assert "from_pretrained" in load_the_result


def test_each_command_of_trl_remote_in_a_shell_block_is_one_that_it_takes() -> None:
    for page, line in every_line():
        if (found := re.search(r"(?:^|[\s/])trl-remote (.+)", line)) is None:
            continue
        given = [word for word in shlex.split(found[1]) if word != "..."]
        given = given[: given.index(">")] if ">" in given else given
        if given[0] == "serve":  # its options are another parser's
            continue
        try:
            parser().parse_args(given)
        except SystemExit:
            pytest.fail(f"{page}: trl-remote refuses {line!r}")


def test_each_script_and_variable_in_a_shell_block_exists() -> None:
    for page, line in every_line():
        for script in re.findall(r"(?:^|\s)(?:\./)?((?:scripts|examples|benchmarks)/[\w./-]+)", line):
            assert (REPOSITORY / script).is_file(), f"{page}: {line!r} names {script}, which is not there"
        for variable in re.findall(r"\b(TRL_[A-Z_]+)\b", line):
            assert variable in sources(), f"{page}: {line!r} sets {variable}, which no program reads"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "benchmarks/README.md"]
)
def test_each_link_of_a_page_outside_of_the_site_leads_somewhere(page: str) -> None:
    """scripts/docs.sh checks the pages of the site."""
    here = (REPOSITORY / page).parent
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([\w-]+))?\)", (REPOSITORY / page).read_text())
    for file, anchor in links:
        target = here / file if file else REPOSITORY / page
        assert target.exists(), f"{page} links to {file}, which is not there"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page} links to #{anchor} of {file}, which has no such title"


def test_the_index_links_each_page() -> None:
    docs = REPOSITORY / "docs"
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (docs / "index.md").read_text()))
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md") if path.parent.name != "decisions"}
    assert pages - {"index.md"} <= linked
