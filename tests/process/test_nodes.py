"""Jobs over several nodes: ranks that share neither a machine nor a disk, as far as they can tell."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from llama_stack_provider_trl.files import RunDir
from llama_stack_provider_trl.recipes.events import Failed, Reason, iter_events
from tests.ranks import REPOSITORY
from tests.training import of_kind

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

MEETS = """
import sys
from pathlib import Path
import torch
from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes import contact
contact.ARRIVAL, contact.BEAT, contact.SILENCE, contact.FAREWELL = 5.0, 0.1, 1.0, 1.0
try:
    with contact.in_contact(torch.device("cpu"), Path(sys.argv[1])):
        print("met", flush=True)
        sys.stdin.readline()
except JobFailure as failure:
    print(failure.reason, failure.message, flush=True)
"""


@contextmanager
def meeting(root: Path, port: int, rank: int, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """One of two ranks on two nodes that meets the other and then waits for a line."""
    run_dir = root / f"node-{rank}"
    run_dir.mkdir()
    ours = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", MEETS, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **ours, **place, **environ},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def failures(root: Path, rank: int) -> list[Failed]:
    return of_kind(iter_events(RunDir(root / f"node-{rank}").events), Failed)


def test_a_rank_that_answers_no_longer_ends_the_others_by_name(tmp_path: Path, port: int) -> None:
    with meeting(tmp_path, port, 0) as first, meeting(tmp_path, port, 1) as second:
        assert (said(first), said(second)) == ("met", "met")
        second.send_signal(signal.SIGSTOP)
        assert first.wait(20) == 1
    (failed,) = failures(tmp_path, 0)
    assert failed.reason is Reason.node_lost
    assert f"rank 1 on {socket.gethostname()} has not answered rank 0" in failed.message


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=["killed", "at-its-end"])
def test_a_rank_whose_other_is_gone_ends_and_leaves_the_reason_to_it(
    tmp_path: Path, port: int, number: int | None
) -> None:
    with meeting(tmp_path, port, 0) as first, meeting(tmp_path, port, 1) as second:
        assert (said(first), said(second)) == ("met", "met")
        if number:
            second.send_signal(number)
        else:
            second.communicate("\n")
        assert first.wait(20) == 1
    assert failures(tmp_path, 0) == []


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, port: int) -> None:
    with meeting(tmp_path, port, 0) as first:
        found = said(first)
    assert found.startswith("launch_failed rank 0 on ")
    assert "of 2 ranks these did not come: 1" in found


def test_a_place_to_meet_that_nobody_holds_is_named(tmp_path: Path, port: int) -> None:
    with meeting(tmp_path, port, 1) as second:
        found = said(second)
    assert found.startswith("launch_failed rank 1 on ")
    assert f"cannot reach rank 0 at 127.0.0.1 port {port}" in found
    assert f"open TCP port {port} and" in found


def test_ranks_that_meet_at_the_store_and_not_by_gloo_say_so(tmp_path: Path, port: int) -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(meeting(tmp_path, port, rank, GLOO_SOCKET_IFNAME=interface))
            for rank, interface in enumerate(("lo", "none0"))
        ]
        found = [said(process) for process in both]
    assert f"rank 1 on {socket.gethostname()} does not reach all of rank 0 on" in found[1]
    assert "over none0" in found[1]
    assert "rank 0" in found[0]
