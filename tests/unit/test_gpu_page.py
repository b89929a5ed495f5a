"""docs/how-to/gpu.md and nccl.md list what the code does: recipes and commands that exist, variables that reach the
ranks."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.torchrun import training_environment
from tests.tiny import REPOSITORY
from tests.tutorials import blocks

sys.path.append(str(REPOSITORY / "benchmarks"))

import gpu

PAGE = "docs/how-to/gpu.md"
TEXT = (REPOSITORY / PAGE).read_text()
OF_SEVERAL = (REPOSITORY / "docs/how-to/nccl.md").read_text()


def variables() -> list[str]:
    """Each variable of the table; of a family one member."""
    table = OF_SEVERAL.split("<!-- variables -->")[1].split("<!-- /variables -->")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name.replace("*", "ANY") for name in re.findall(r"`([^`]+)`", " ".join(first_cells))]


@pytest.mark.parametrize("name", variables())
def test_a_variable_of_the_table_reaches_the_ranks(name: str) -> None:
    task = TaskSpec("job-1", REPOSITORY, ("cpu",))
    assert training_environment(task, {name: "value", "SECRET": "value"})[name] == "value"
    assert "SECRET" not in training_environment(task, {name: "value", "SECRET": "value"})


def test_the_recipes_that_the_page_names_exist() -> None:
    named = re.findall(r"`(examples/recipes/[\w.-]+)`", TEXT)
    assert named
    assert all((REPOSITORY / name).is_file() for name in named)


def test_the_commands_of_the_page_are_ones_that_the_benchmark_takes() -> None:
    lines = [line.partition("#")[0] for line in "".join(blocks(PAGE, "bash")).splitlines() if "gpu.py" in line]
    assert len(lines) == 7
    for line in lines:
        _, _, *arguments = shlex.split(line)
        gpu.parse_options(arguments)
