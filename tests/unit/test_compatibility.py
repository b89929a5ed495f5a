"""docs/reference/compatibility.md shows the matrix that tests/matrix runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.matrix.cells import EMBEDDINGS, LAYOUTS, Cell, all_cells, covering, families

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "compatibility.md").read_text()


def test_the_matrix_of_the_documentation_is_the_one_that_is_tested() -> None:
    table = TEXT.split("<!-- matrix -->")[1].split("<!-- /matrix -->")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line)
    assert head == ["algorithm", "method", *LAYOUTS]
    shown = {
        Cell(algorithm, method, layout, embeddings)
        for algorithm, method, *words in rows
        for layout, word in zip(LAYOUTS, words, strict=True)
        for embeddings in EMBEDDINGS
        if word == "yes"
    }
    assert shown == {*all_cells()}
    assert re.search(rf"all {len(all_cells())}\.", TEXT)


def test_every_family_is_in_a_cell_that_ci_runs() -> None:
    wanted = set().union(*map(families, all_cells()))
    assert set().union(*map(families, covering(all_cells()))) == wanted
    assert len(wanted) == 2 + 2 + 3 + 2  # full and adapters; one process, DDP and shards
