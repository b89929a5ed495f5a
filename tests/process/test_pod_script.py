"""Process 1 of a pod: what it does where Kubernetes, or the agent, ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.nodes.pools.pods import SCRIPT
from tests.contract.stack import poll
from tests.required import in_full

pytestmark = pytest.mark.process

AGENT = """
import os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(0.3), place.write_text("left"), os._exit(0)))
place.write_text("ready")
time.sleep(600)
"""
Start = Callable[..., subprocess.Popen[bytes]]


SHELLS = [name for name in ("dash", "bash") if shutil.which(name)]


@pytest.fixture(params=[*SHELLS[:1], *in_full(*SHELLS[1:])])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts the script with the words of an agent."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*words: str, script: str = SCRIPT) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([request.param, "-c", script, "trl-node", *words], start_new_session=True)
        started.append(process)
        return process

    yield run
    for process in started:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], stderr=subprocess.DEVNULL, check=False)
        process.wait(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_agent_leaves_when_its_pod_is_evicted(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    place = tmp_path / "agent"
    pod = start(sys.executable, "-c", AGENT, str(place))
    poll(lambda: place.exists() and place.read_text() == "ready", "the agent runs", timeout=20)
    pod.send_signal(number)
    pod.send_signal(number)  # kubelet's, after that of an operator
    assert pod.wait(60) == 0
    assert place.read_text() == "left"


LINES = ["trap leave TERM USR1", '"$@" &', "agent=$!", '[ -z "$caught" ] || leave']


@pytest.mark.parametrize("line", LINES)
def test_an_agent_that_has_not_begun_has_left(start: Start, tmp_path: Path, line: str) -> None:
    """The signal arrives while process 1 is after that line: before it starts the agent, or before it waits for it."""
    place = tmp_path / "reached"
    before, line, after = SCRIPT.partition(f"{line}\n")
    assert line, "the script has another line"
    pod = start("sleep", "600", script=f"{before}{line}: > {place}; sleep 0.2\n{after}")
    poll(place.exists, "process 1 is there", timeout=20)
    pod.terminate()
    assert pod.wait(60) == 0


@pytest.mark.parametrize("seconds", [0.05, 0.4])
def test_a_pod_ends_however_often_it_is_evicted(start: Start, tmp_path: Path, seconds: float) -> None:
    place = tmp_path / "agent"
    pod = start(sys.executable, "-c", AGENT, str(place))
    poll(lambda: place.exists() and place.read_text() == "ready", "the agent runs", timeout=20)

    def ended() -> bool:
        pod.send_signal(signal.SIGTERM)
        return pod.poll() is not None

    poll(ended, "the pod has ended", timeout=20, pause=seconds)
    assert pod.returncode == 0
    assert place.read_text() == "left"


@pytest.mark.parametrize(("words", "status"), [(("sh", "-c", "exit 3"), 3), (("sh", "-c", "kill -KILL $$"), 137)])
def test_the_status_of_an_agent_that_fails_is_that_of_the_pod(
    start: Start, words: tuple[str, ...], status: int
) -> None:
    assert start(*words).wait(60) == status
