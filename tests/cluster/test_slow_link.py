"""A job over two nodes whose link is slow: it measures the link, and reports that the second node does not help."""

from __future__ import annotations

import pytest

from tests.cluster.bed import Bed
from tests.cluster.jobs import dpo, prepared, resources_of, submit
from tests.required import IN_FULL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@IN_FULL
def test_parallel_does_not_help_over_10_mbit_per_s(bed: Bed) -> None:
    prepared(bed, "a")
    bed.machines[1].limit(kbit_per_s=10_000)
    job = submit(bed, dpo("slow", 24, resources={"nodes": 2}, save_steps=1000))
    assert bed.wait_for_end(job)["status"] == "completed"
    resources = resources_of(bed, job)
    progress = resources["progress"]
    assert 2 < progress["link_mbit_per_s"] < 12
    assert 0 <= progress["parallel_speedup"] < 1.1
    (warning,) = [text for text in resources["warnings"] if "parallel does not help" in text]
    assert "2 nodes train about" in warning
    assert "train on one node, on a faster link, or with more rows per step" in warning
