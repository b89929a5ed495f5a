"""A minute of the fuzzer (`tests.security.fuzz`): each route several times, without a training beside it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.required import FULL
from tests.security.fuzz import KNOWN, MOST_MIB, fuzzed
from tests.security.generate import FuzzRequest, Generator
from tests.security.guarded import documented_roles, without_version
from tests.security.monitor import Monitor

pytestmark = pytest.mark.contract

SECONDS = 60.0
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


def test_every_route_is_fuzzed() -> None:
    settings = ServiceSettings.model_validate({"api_token": "a"})
    document = make_app(MagicMock(settings=settings, node_name="head", node_token="n")).openapi()
    fuzzed = {(method, without_version(path)) for method, path, _ in Generator(document, 7, KNOWN).operations}
    assert fuzzed == documented_roles().keys(), "give a page its row in generate.PAGES"


def test_the_same_seed_and_number_make_the_same_request() -> None:
    settings = ServiceSettings.model_validate({"api_token": "a"})
    document = make_app(MagicMock(settings=settings, node_name="head", node_token="n")).openapi()
    generator = Generator(document, 7, KNOWN)
    numbers = range(1000 if FULL else 100)
    first = [digest(generator.request(number)) for number in numbers]
    assert [digest(Generator(document, 7, KNOWN).request(number)) for number in numbers] == first


def digest(request: FuzzRequest) -> bytes:
    return hashlib.sha256(json.dumps(request.shown()).encode() + request.body).digest()
