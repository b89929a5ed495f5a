"""docs/reference/nodes.md has every state of a node and every stage of an attempt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from llama_stack_provider_trl.jobs.records import NodeMode
from llama_stack_provider_trl_remote.service.cluster import membership, presence
from llama_stack_provider_trl_remote.wire import Stage

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "reference" / "nodes.md").read_text()


def first_cells(name: str) -> list[str]:
    table = PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_the_table_of_stages_has_each_stage_in_its_order() -> None:
    assert first_cells("stages") == [*Stage]


def test_the_table_of_states_has_each_mode_and_what_the_service_finds_out_itself() -> None:
    modes, found = first_cells("states")[:3], first_cells("states")[3:]
    assert modes == [*get_args(NodeMode)]
    silent, unheard, other_build = found
    assert re.fullmatch(silent.replace("HH:MM:SS", r"\d\d:\d\d:\d\d"), presence.silent_since(1.0))
    assert f'"{unheard}"' in Path(membership.__file__).read_text()
    assert f'"{other_build}"' in Path(membership.__file__).read_text()
