"""A small flood (`tests.security.flood`): what is measured by command is only that nothing breaks here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.security.flood import MOST_MIB, OTHER, SMALL, TRAINING, failed_jobs, flooded
from tests.security.monitor import Monitor

pytestmark = pytest.mark.contract


@pytest.mark.timeout(300)
def test_a_training_continues_to_its_end_under_a_flood_of_connections_bodies_checks_and_jobs(tmp_path: Path) -> None:
    with flooded(tmp_path, SMALL) as flood:
        with Monitor(flood.service, OTHER) as monitor:
            asyncio.run(flood.run())
        assert flood.node
        assert flood.node.complaint == ""
        flood.service.wait(TRAINING, "completed", timeout=120)
        assert flood.answers["job 200"] == SMALL.posts
        assert flood.answers["body 200"] == SMALL.bodies
        assert not [answer for answer in flood.answers if answer.endswith(" 500")]
        assert failed_jobs(flood.service) == []
        assert (monitor.unanswered, monitor.largest_rss >> 20 <= MOST_MIB) == (0, True)
        flood.service.end_jobs()
