"""docs/reference/nodes.md has every state of a node and every stage of an attempt; the dashboard's page has pools."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest

from llama_stack_provider_trl.jobs.store.records import NodeMode
from llama_stack_provider_trl_remote.service.cluster import membership, presence
from llama_stack_provider_trl_remote.service.http.node_bodies import AllocationRow, PoolRow
from llama_stack_provider_trl_remote.service.pages import rendering
from llama_stack_provider_trl_remote.wire import OwnerUse, Stage

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
    silent, unheard, other_build, *loaned = found
    assert loaned == [membership._OWNER[OwnerUse.high], membership._OWNER[OwnerUse.unknown]]
    assert re.fullmatch(silent.replace("HH:MM:SS", r"\d\d:\d\d:\d\d"), presence.silent_since(1.0))
    assert f'"{unheard}"' in Path(membership.__file__).read_text()
    assert f'"{other_build}"' in Path(membership.__file__).read_text()


def test_the_page_shows_pools_and_what_was_requested_of_them() -> None:
    pytest.importorskip("jinja2", reason="the extra `dashboard` is not installed")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    requests = [
        AllocationRow(
            request_id=name,
            nodes=[f"slurm-{name}-0", f"slurm-{name}-1"],
            state="requested",
            requested_for="my job/1",
            recorded_at=now,
            granted_at=None,
            ended_at=None,
            message="<PENDING>",
        )
        for name in ("first", "last")
    ]
    limits = {"what": "8 GPUs", "max_nodes": 4, "nodes": 2, "allocations": requests}
    pools = [
        PoolRow(pool="slurm", node_hours=500.0, node_hours_used=1.25, state="sbatch: no partition", **limits),
        PoolRow(pool="other", node_hours=None, node_hours_used=0.0, state="open", **{**limits, "allocations": []}),
    ]
    text = " ".join(rendering._environment().get_template("pools.html").render(pools=pools).split())
    assert text.index("last") < text.index("first")
    assert "slurm-first-0, slurm-first-1" in text
    assert 'href="/jobs/my%20job/1"' in text or 'href="/jobs/my%20job%2F1"' in text
    assert "&lt;PENDING&gt;" in text
    assert "no</span>: sbatch: no partition" in text
    assert "1.2 of 500" in text
    assert "2 of 4" in text
