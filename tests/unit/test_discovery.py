"""What is found on the local network: hostile text, physical machines, and the commands that are proposed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.nodes.discovery import search as searching
from llama_stack_provider_trl_remote.nodes.discovery.machines import Here, machines_of
from llama_stack_provider_trl_remote.nodes.discovery.mdns import DiscoveryError, require_zeroconf
from llama_stack_provider_trl_remote.nodes.discovery.probe import addresses_of, neighbours
from llama_stack_provider_trl_remote.nodes.discovery.search import Search
from llama_stack_provider_trl_remote.nodes.discovery.sightings import (
    MOST_ADDRESSES,
    Sighting,
    announced,
    cleaned,
    machine_hash,
    properties_of,
)
from llama_stack_provider_trl_remote.nodes.start import worker_settings
from llama_stack_provider_trl_remote.service.settings import ServiceSettings, SettingsError
from tests.tiny import REPOSITORY

ONE, OTHER, THIS = (machine_hash(name) for name in ("one", "other", "this"))
HERE = Here(THIS, ("10.0.0.9/24", "172.17.0.1/16"))
HEAD = Sighting("service", ("10.0.0.1",), 8322, name="head", machine=ONE)
AGENT = Sighting("agent", ("10.0.0.2",), 0, name="a", machine=OTHER, service="http://10.0.0.1:8322")
OLLAMA = Sighting("ollama", ("10.0.0.3",), 11434, models=("tiny:1b",))


def test_the_id_of_a_machine_is_announced_as_a_hash_only() -> None:
    assert machine_hash("3d12") == machine_hash("3d12") != machine_hash("3d13")
    assert "3d1219c7c4c5404a" not in machine_hash("3d1219c7c4c5404a")


def test_an_announcement_is_read_as_it_was_made() -> None:
    made = replace(AGENT, version="0.1.0", cpus=8, gpus=2)
    sent = {name.encode(): value.encode() for name, value in properties_of(made).items()}
    assert announced("agent", made.addresses, 0, sent) == made


def test_text_from_the_network_has_no_control_characters_and_an_end() -> None:
    assert cleaned(b"\x1b[2Jmodel\r\nrm -rf /\xff") == "[2Jmodel rm -rf /\ufffd"
    assert cleaned("a\u202eb\u200bc\x85d") == "abc d"
    assert len(cleaned("x" * 10**6)) == 100
    assert [cleaned(other) for other in (None, 7, ["a"])] == ["", "", ""]


def test_a_hostile_announcement_is_bounded_and_reduced_to_what_is_valid() -> None:
    hostile: dict[bytes, bytes | None] = {
        b"name": b"a\nb" * 1000,
        b"machine": b"../../etc",
        b"cpus": b"-1",
        b"gpus": b"9" * 400,
        b"service": b"http://h/;\x07`reboot`",
        b"version": None,
    }
    addresses = ["127.0.0.1", "0.0.0.0", "224.0.0.1", "fe80::1%eth0", "no", *(f"10.0.1.{n}" for n in range(200))]
    found = announced("agent", addresses, None, hostile)
    assert found is not None
    assert found.addresses == tuple(f"10.0.1.{n}" for n in range(MOST_ADDRESSES))
    assert (found.machine, found.cpus, found.gpus, found.port) == (None, None, None, 0)
    assert len(found.name) <= 100
    assert found.name.isprintable()
    assert found.service.isprintable()


@pytest.mark.parametrize(("kind", "addresses", "port"), [("agent", ["127.0.0.1"], 0), ("service", ["10.0.0.1"], 0)])
def test_an_announcement_without_an_address_that_others_reach_is_left_out(
    kind: Any, addresses: list[str], port: int
) -> None:
    assert announced(kind, addresses, port, {}) is None


def test_two_addresses_of_one_machine_are_one_machine() -> None:
    second = replace(AGENT, addresses=("10.0.0.102",), name="a2")
    found = machines_of([HEAD, AGENT, second], {}, HERE)
    assert [machine.addresses for machine in found] == [("10.0.0.1",), ("10.0.0.2", "10.0.0.102")]
    assert [one.name for one in found[1].of_kind("agent")] == ["a", "a2"]


def test_what_lacks_a_hash_belongs_to_the_machine_with_its_address_or_hardware_address() -> None:
    by_address, by_mac = replace(OLLAMA, addresses=("10.0.0.2",)), replace(OLLAMA, addresses=("10.0.0.77",))
    macs = {"10.0.0.1": "aa", "10.0.0.77": "aa", "10.0.0.2": "bb"}
    found = machines_of([HEAD, AGENT, by_address, by_mac], macs, HERE)
    assert [[one.kind for one in machine.sightings] for machine in found] == [
        ["ollama", "service"],
        ["agent", "ollama"],
    ]
    assert found[0].addresses == ("10.0.0.1", "10.0.0.77")


def test_hosts_without_a_hash_are_one_machine_where_they_share_a_hardware_address() -> None:
    others = [replace(OLLAMA, addresses=(f"10.0.0.{number}",)) for number in (3, 4, 5)]
    found = machines_of(others, {"10.0.0.3": "aa", "10.0.0.4": "bb", "10.0.0.5": "aa"}, HERE)
    assert [machine.addresses for machine in found] == [("10.0.0.3", "10.0.0.5"), ("10.0.0.4",)]


def test_an_address_that_every_machine_has_makes_no_two_of_them_one() -> None:
    """docker0 has 172.17.0.1 on each, and on this machine too."""
    docker = [replace(one, addresses=(*one.addresses, "172.17.0.1")) for one in (HEAD, AGENT)]
    found = machines_of(docker, {}, HERE)
    assert [machine.addresses[0] for machine in found] == ["10.0.0.1", "10.0.0.2"], "the reachable one is the first"
    own = machines_of([*docker, replace(OLLAMA, addresses=("172.17.0.1",))], {}, HERE)
    assert len(own) == 3, "no machine is known to be the one"


def test_what_runs_on_this_machine_is_marked() -> None:
    found = machines_of([HEAD, replace(OLLAMA, addresses=("10.0.0.9",))], {}, HERE)
    assert [machine.is_here for machine in found] == [False, True]


def test_a_service_is_one_entry_though_it_was_found_by_both_ways() -> None:
    announced_once = replace(HEAD, addresses=("10.0.0.1", "10.0.0.101"))
    probed = [Sighting("service", (address,), 8322, version="0.1.0") for address in announced_once.addresses]
    (machine,) = machines_of([*probed, announced_once], {}, HERE)
    assert machine.sightings == (announced_once,)


@pytest.mark.parametrize(
    ("subnets", "count"),
    [(["10.0.0.0/24"], 254), (["10.0.0.7/32"], 1), (["10.0.0.9/30", "10.0.0.8/30"], 2), (["10.0.0.0/22"], 1022)],
)
def test_every_address_of_the_subnets_is_tried_once(subnets: list[str], count: int) -> None:
    assert len(set(addresses_of(subnets))) == len(addresses_of(subnets)) == count


@pytest.mark.parametrize(
    ("subnets", "message"),
    [
        (["10.0.0.0/21"], "found 2048 addresses, expected 1024 at most"),
        (["10.0.0.0/23", "10.0.4.0/23", "10.0.8.1/32"], "found 1025 addresses, expected 1024 at most"),
        (["fd00::/64"], "expected 1024 at most"),
        (["8.8.8.0/24"], "expected a network of private addresses"),
        (["224.0.0.0/24"], "expected a network of private addresses"),
        (["office"], "expected a network such as 10.0.0.0/24"),
        (["10.0.0.0/33"], "expected a network such as 10.0.0.0/24"),
    ],
)
def test_other_networks_are_refused(subnets: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        addresses_of(subnets)


def test_the_neighbour_table_of_the_kernel_is_read(tmp_path: Path) -> None:
    table = tmp_path / "arp"
    table.write_text(
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "10.0.0.1         0x1         0x2         02:FC:00:00:00:05     *        eth0\n"
        "10.0.0.2         0x1         0x0         02:fc:00:00:00:06     *        eth0\n"
        "10.0.0.3         0x1         0x2         00:00:00:00:00:00     *        eth0\n"
        "damaged\n"
    )
    assert neighbours(table) == {"10.0.0.1": "02:fc:00:00:00:05"}
    assert neighbours(tmp_path / "none") == {}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Sighting]:
    """Findings that the commands get in place of a network's."""
    sightings: list[Sighting] = []

    async def search(subnets: Sequence[str], seconds: float) -> Search:
        return Search(tuple(machines_of(sightings, {}, HERE)), ())

    monkeypatch.setattr(searching, "search", search)
    monkeypatch.delenv("TRL_SERVICE_URL", raising=False)
    return sightings


def test_the_machines_are_those_that_were_found(found: list[Sighting], capsys: pytest.CaptureFixture[str]) -> None:
    found += [HEAD, AGENT, OLLAMA]
    assert main(["nodes", "commands", "--discover"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [
        "# machine 0 (10.0.0.1) runs the service, which trains there too",
        "# machine 1 (10.0.0.2) has an agent: a",
        "# machine 2 (10.0.0.3)",
        "NODE_RANK=2 TRL_SERVICE_URL=http://10.0.0.1:8322 TRL_SERVICE_NODE_TOKEN_FILE=~/.trl-node-token "
        "./scripts/run-remote-fsdp-server.sh",
    ]


def test_no_text_from_the_network_becomes_part_of_a_command(
    found: list[Sighting], capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "x'; reboot #`reboot`$(reboot)"
    found += [replace(HEAD, name=evil, version=evil), replace(OLLAMA, models=(evil,), version=evil)]
    assert main(["nodes", "discover", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["commands"]
    assert "reboot" not in json.dumps(lines)
    assert len(shlex.split(lines[1]["command"])) == 4


def test_discover_shows_machines_models_and_what_to_run(
    found: list[Sighting], capsys: pytest.CaptureFixture[str]
) -> None:
    found += [HEAD, replace(AGENT, cpus=8, gpus=1), OLLAMA]
    assert main(["nodes", "discover"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "service head at http://10.0.0.1:8322",
        "agent a (8 CPUs, 1 GPU) of http://10.0.0.1:8322",
        "Ollama at http://10.0.0.3:11434: tiny:1b",
        "3 machines",
        "NODE_RANK=2",
        "not verified",
    ):
        assert part in printed


def test_addresses_are_whole_on_a_terminal(
    found: list[Sighting], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = tuple(f"10.0.{number}.101" for number in range(4))
    found += [replace(HEAD, addresses=addresses, cpus=16, gpus=1)]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["nodes", "discover"]) == 0
    printed = capsys.readouterr().out.splitlines()[1]
    assert all(address in printed for address in addresses)
    assert printed.endswith(f"service head (16 CPUs, 1 GPU) at http://{addresses[0]}:8322")


def test_the_documented_search_is_what_is_printed(found: list[Sighting], capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text().partition("## Discovery")[2]
    command, _, printed = page.partition("$ trl-remote ")[2].partition("```")[0].partition("\n")
    found += [
        replace(HEAD, addresses=("10.0.0.1", "10.0.0.101"), cpus=16, gpus=1),
        replace(AGENT, cpus=8, gpus=0),
        replace(OLLAMA, version="0.9.1", models=("llama3.2:1b",)),
    ]
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("sightings", "message"),
    [
        ([OLLAMA], "found no service: start one on machine 0"),
        ([HEAD, replace(HEAD, addresses=("10.0.0.5",), machine=OTHER)], "found 2 services: name one with --url"),
        ([replace(HEAD, addresses=("127.0.0.1",))], "other machines cannot reach the service at http://127.0.0.1:8322"),
    ],
)
def test_without_one_service_that_others_reach_no_command_is_proposed(
    found: list[Sighting], capsys: pytest.CaptureFixture[str], sightings: list[Sighting], message: str
) -> None:
    found += sightings
    assert main(["nodes", "commands", "--discover"]) == 1
    assert message in capsys.readouterr().err
    assert main(["nodes", "discover"]) == 0, "what was found is shown all the same"
    printed = capsys.readouterr().out
    assert message in printed
    assert "is not supported" not in printed, "--url was left out"
    assert "NODE_RANK" not in printed


def test_an_empty_network_is_reported_with_what_would_be_found(
    found: list[Sighting], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "discover"]) == 0
    assert capsys.readouterr().out.startswith("nothing was found: services with `announce: true`")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["commands", "--discover", "--nodes", "3"], "--nodes=3 .*leave it out: --discover finds the machines"),
        (["commands", "--subnet", "10.0.0.0/24"], "it belongs to --discover"),
        (["commands", "--seconds", "3"], "it belongs to --discover"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["nodes", *words]) == 1
    written = capsys.readouterr()
    assert (written.out, written.err.count("\n")) == ("", 1)
    assert re.search(message, written.err)


def without_zeroconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    monkeypatch.setitem(sys.modules, "zeroconf.asyncio", None)


def test_without_its_package_discovery_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_zeroconf(monkeypatch)
    assert main(["nodes", "discover"]) == 1
    written = capsys.readouterr().err
    assert "pip install 'llama_stack_provider_trl[discovery]'" in written
    assert written.count("\n") == 1
    with pytest.raises(DiscoveryError, match="announce=true needs the package zeroconf"):
        require_zeroconf("announce=true")


@pytest.mark.parametrize(("given", "announce"), [({}, False), ({"TRL_NODE_ANNOUNCE": "on"}, True)])
def test_an_agent_is_announced_only_where_it_is_switched_on(given: dict[str, str], announce: bool) -> None:
    environ = {"TRL_SERVICE_NODE_TOKEN": "t", "TRL_NODE_ADDRESS": "10.0.0.2", **given}
    assert worker_settings("http://10.0.0.1:8322", environ, name="a", device="cpu").announce is announce
    assert worker_settings("http://10.0.0.1:8322", environ, name="a", device="cpu", announce="on").announce


def test_a_service_on_loopback_is_not_announced() -> None:
    assert not ServiceSettings().announce
    with pytest.raises(SettingsError, match=r"announce=true: no other machine can reach host='127\.0\.0\.1'"):
        ServiceSettings(announce=True).check_exposure()


def test_two_agents_on_one_machine_are_reported_as_no_help(
    found: list[Sighting], capsys: pytest.CaptureFixture[str]
) -> None:
    found += [HEAD, AGENT, replace(AGENT, addresses=("10.0.0.102",), name="a2")]
    assert main(["nodes", "discover"]) == 0
    assert (
        "note: parallel will not help on a, a2: these agents are on one machine (10.0.0.2), and share the same cores"
    ) in capsys.readouterr().out
