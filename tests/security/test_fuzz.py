"""A minute of the fuzzer (`tests.security.fuzz`), without a training beside it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.security.fuzz import MOST_MIB, fuzzed
from tests.security.monitor import Monitor

pytestmark = pytest.mark.contract

SECONDS = 45.0
SEED = int(os.environ.get("TRL_FUZZ_SEED", "1"))


@pytest.mark.timeout(180)
def test_damaged_requests_to_every_route_break_nothing(tmp_path: Path) -> None:
    with fuzzed(tmp_path, SEED, training=False) as (service, _, fuzzer):
        with Monitor(service) as monitor:
            asyncio.run(fuzzer.send_all(0, SECONDS))
        assert not fuzzer.failures, "\n".join(fuzzer.failures)
        assert len({route for route, _ in fuzzer.reached}) == fuzzer.routes
        assert monitor.unanswered == 0
        assert monitor.p99 < 1.0
        assert monitor.largest_rss >> 20 <= MOST_MIB
        assert service.get("/health").json()["supervising"]
