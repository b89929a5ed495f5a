"""`trl-remote nodes discover` on a network of namespaces: announcements by mDNS, and a probe of its addresses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llama_stack_provider_trl.system.files import tail
from llama_stack_provider_trl_remote.cli.main import main
from tests.cluster.bed import NODE_TOKEN, Bed, Machine
from tests.required import IN_FULL

pytest.importorskip("zeroconf")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
AGENT = ("--announce", "--device", "cpu", "--data-dir")
OLLAMA = """
import http.server, json, sys

class Ollama(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answers = {"/api/tags": {"models": [{"name": "tiny:1b"}]}, "/api/version": {"version": "0.9.1"}}
        body = json.dumps(answers[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

server = http.server.HTTPServer((sys.argv[1], 11434), Ollama)
print(flush=True)
server.serve_forever()
"""


@IN_FULL  # CI: tests/contract/test_discovery_probe.py, tests/unit/test_discovery.py
def test_discovery_finds_agents_a_service_and_ollama_and_counts_machines(
    bed: Bed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's machine and that of an agent have two addresses each: they are one machine each."""
    monkeypatch.delenv("TRL_SERVICE_URL", raising=False)
    head, a, b = (bed.machine(name) for name in ("head", "a", "b"))
    of_head, of_a = head.add_address(101), a.add_address(102)
    head.serve({"announce": True}, TRL_SERVICE_HOST="0.0.0.0", TRL_NODE_ADDRESS=head.address)
    a.join(head, "--announce")
    b.join(head, TRL_NODE_ANNOUNCE="on")

    def search() -> Any:
        started = time.monotonic()
        assert main(["nodes", "discover", "--json", "--seconds", "4", "--subnet", f"{bed.network}.0/24"]) == 0
        took = time.monotonic() - started
        found = json.loads(capsys.readouterr().out)
        count = sum(len(machine["addresses"]) for machine in found["machines"])
        return found if took < 5 and count == 5 and len(found["machines"]) == 3 else None

    def printed(*words: str, of: str, times: int) -> str:
        code = main(["nodes", *words, "--seconds", "2"])
        text = capsys.readouterr().out
        return text if code == 0 and text.count(of) == times else ""

    with subprocess.Popen(
        ["ip", "netns", "exec", a.namespace, sys.executable, "-c", OLLAMA, of_a], stdout=subprocess.PIPE
    ) as ollama:
        try:
            assert ollama.stdout is not None
            assert ollama.stdout.readline(), "it listens"
            bed.wait(lambda: all(map(is_announced, bed.machines)), "all are announced", 120)

            # Where others load the machine an answer may be late; once it is all there within the time.
            found = bed.wait(search, "5 addresses of 3 machines are found within 5 s", 90)
            lines = bed.wait(lambda: printed("commands", "--discover", of="has an agent", times=2), "commands", 60)
            by_mdns = bed.wait(lambda: printed("discover", of="3 machines", times=1), "3 machines by mDNS", 60)

            with second_agent(a, head):
                shared = bed.wait(lambda: printed("discover", of="share the same cores", times=1), "the advice", 60)
        finally:
            ollama.kill()

    machines = {frozenset(machine["addresses"]): machine["found"] for machine in found["machines"]}
    assert set(machines) == {
        frozenset({head.address, of_head}),
        frozenset({a.address, of_a}),
        frozenset({b.address}),
    }, found
    (service,) = machines[frozenset({head.address, of_head})]
    assert (service["kind"], service["name"], service["url"]) == ("service", "head", f"http://{head.address}:8322")
    agent, models = machines[frozenset({a.address, of_a})]
    assert (agent["kind"], agent["name"], agent["service"]) == ("agent", "a", f"http://{head.address}:8322")
    assert (models["kind"], models["version"], models["models"]) == ("ollama", "0.9.1", ["tiny:1b"])
    assert [entry["name"] for entry in machines[frozenset({b.address})]] == ["b"]
    for machine in bed.machines:
        assert (machine.root / "machine-id").read_text().strip() not in json.dumps(found), "only its hash leaves"

    assert f"machine 0 ({head.address}) runs the service" in lines
    assert f"machine 1 ({a.address}) has an agent: a" in lines
    assert "NODE_RANK" not in lines, "an agent runs on each of them"
    assert "3 machines" in by_mdns
    advice = rf"parallel will not help on a2?, a2?: these agents are on one machine \({a.address}\), and share"
    assert re.search(advice, shared), shared
    assert "3 machines" in shared, "a2 is none of its own"


@contextmanager
def second_agent(machine: Machine, head: Machine) -> Iterator[None]:
    """Another agent on a machine that has one."""
    first = machine.process
    joining = {"NODE_RANK": "1", "MASTER_ADDR": head.address, "TRL_SERVICE_NODE_TOKEN": NODE_TOKEN}
    machine.start(*AGENT, str(machine.root / "second"), "--name", f"{machine.name}2", **joining)
    second, machine.process = machine.process, first
    assert second is not None
    try:
        yield
    finally:
        second.kill()
        second.wait()


def is_announced(machine: Machine) -> bool:
    return "announced by mDNS" in tail(machine.log, 200, 1 << 16)
