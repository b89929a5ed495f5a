"""Nodes over SSH: the wheel that is sent, the commands that machines see, the sentences, and what each command does."""

from __future__ import annotations

import asyncio
import base64
import csv
import errno
import hashlib
import io
import json
import os
import re
import socket
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_stack_provider_trl.errors import MissingExtra, ServiceRefusal
from llama_stack_provider_trl_remote.cli import nodes_ssh
from llama_stack_provider_trl_remote.cli.commands import COMMANDS
from llama_stack_provider_trl_remote.cli.main import parser
from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.pools import host_agent, on_host, ssh, wheel
from llama_stack_provider_trl_remote.nodes.pools.inventory import InventoryHost
from llama_stack_provider_trl_remote.nodes.pools.on_host import Place

HOST = InventoryHost(host="10.0.0.11", name="gpu-a", user="trainer", key_file=Path("/keys/id"))


# --- the wheel


def test_the_wheel_has_the_modules_of_this_process_and_a_record_of_each_file() -> None:
    made = wheel.wheel_of_this_installation()
    assert made == wheel.wheel_of_this_installation()  # to the byte: the digest is the version
    assert re.fullmatch(r"llama_stack_provider_trl-[\w.]+-py3-none-any\.whl", made.name)
    with zipfile.ZipFile(io.BytesIO(made.content)) as archive:
        names = archive.namelist()
        information = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
        record = {row[0]: row[1] for row in csv.reader(archive.read(f"{information}/RECORD").decode().splitlines())}
        assert set(record) == set(names)
        for name in names:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            assert record[name] == ("" if name.endswith("/RECORD") else f"sha256={digest}")
        assert archive.read("llama_stack_provider_trl_remote/nodes/pools/wheel.py") == Path(wheel.__file__).read_bytes()
        assert b"Provides-Extra: train" in archive.read(f"{information}/METADATA")
        assert b"trl-remote" in archive.read(f"{information}/entry_points.txt")
    typed = {"llama_stack_provider_trl/py.typed", "llama_stack_provider_trl_remote/py.typed"}
    assert {*typed, "llama_stack_provider_trl/jobs/store/sql/schema.sql"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_a_wheel_that_is_none_is_refused(tmp_path: Path) -> None:
    made = wheel.wheel_of_this_installation()
    (tmp_path / made.name).write_bytes(made.content)
    assert wheel.read_wheel(tmp_path / made.name) == made
    (tmp_path / "text.whl").write_text("text")
    with zipfile.ZipFile(tmp_path / "other-1.whl", "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "")
    for name, found in (
        ("nothing.whl", "cannot be read (No such file or directory)"),
        ("text.whl", "is not a wheel (File is not a zip file)"),
        ("other-1.whl", "is not a wheel of llama_stack_provider_trl"),
    ):
        with pytest.raises(NodeError, match=re.escape(f"{tmp_path / name} {found}")):
            wheel.read_wheel(tmp_path / name)


# --- what is sent


def test_the_command_that_others_see_has_neither_token_nor_program() -> None:
    command = ssh._command("/opt/my python/bin/python3")
    assert command.startswith("'/opt/my python/bin/python3' -I -c ")
    assert len(command) < 250
    assert "secret" not in repr(ssh.NodePlan(url="u", token="secret", wheel=wheel.Wheel("w", b"")))


def test_the_program_that_is_sent_needs_the_standard_library_only() -> None:
    source = ssh.program().decode()
    compile(source, "on_host", "exec")
    found = set(re.findall(r"^(?:    )?(?:import|from) (\w+)", source, re.MULTILINE))
    assert found <= {*sys.stdlib_module_names}


def test_the_first_python_that_is_new_enough_is_taken() -> None:
    assert ssh.chosen_python("hello\ntrl-python 3.9.2 /usr/bin/python3\ntrl-python 3.13.1 /a b/python3.13\n") == (
        "/a b/python3.13",
        ["/usr/bin/python3 3.9.2", "/a b/python3.13 3.13.1"],
    )
    assert ssh.chosen_python("trl-python 3.9.2 /usr/bin/python3\n") == (None, ["/usr/bin/python3 3.9.2"])
    assert ssh.chosen_python("") == (None, [])


def test_a_path_of_the_inventory_is_one_word_of_the_shell() -> None:
    assert "for name in python3.12 python3.13 python3.14 python3; do" in ssh.python_probe(None)
    assert "for name in '/x; rm -rf $HOME'; do" in ssh.python_probe("/x; rm -rf $HOME")
    assert "for name in \"$HOME\"/'my env/bin/python'; do" in ssh.python_probe("~/my env/bin/python")


# --- sentences of connections


def test_each_way_not_to_connect_has_its_sentence() -> None:
    library = pytest.importorskip("asyncssh")
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    cases: tuple[tuple[Exception, list[str], str], ...] = (
        (library.HostKeyNotVerifiable("no"), ["ssh-ed25519 SHA256:abc"], "its host key ssh-ed25519 SHA256:abc is not "),
        (library.KeyExchangeFailed("none match"), [], "it has no host key of the kind in "),
        (library.PermissionDenied("no"), [], "it refuses the key /keys/id for user trainer: add the public key to"),
        (library.KeyImportError("Passphrase must be specified"), [], "the key /keys/id has a passphrase: add it to an"),
        (library.KeyImportError("Invalid key"), [], "key /keys/id cannot be used (Invalid key): correct it"),
        (FileNotFoundError(2, "No such file", "/keys/id"), [], "its `key_file` /keys/id cannot be read (No such file)"),
        (FileNotFoundError(2, "No such file", "/k/hosts"), [], "its `known_hosts` /k/hosts cannot be read"),
        (TimeoutError(), [], "port 22 of 10.0.0.11 cannot be reached (no answer within 10 s): check host and port"),
        (refused, [], "port 22 of 10.0.0.11 cannot be reached (Connection refused): check host and port"),
        (socket.gaierror(-2, "Name or service not known"), [], "cannot be reached (Name or service not known)"),
        (library.ConnectionLost("Connection lost"), [], "(no SSH server there, or one that ends the connection: Conne"),
    )
    for error, seen, sentence in cases:
        assert sentence in ssh.connection_problem(library, HOST, error, seen), error
    pinned = HOST.model_copy(update={"host_key": "ssh-ed25519 AAAA"})
    wrong = library.HostKeyNotVerifiable("no")
    assert "not the one in `host_key` of the inventory" in ssh.connection_problem(library, pinned, wrong, ["k"])
    assert str(ssh.HostError(HOST, "it is full")) == "gpu-a (10.0.0.11): it is full"


def test_the_verification_of_host_keys_cannot_be_switched_off(tmp_path: Path) -> None:
    """By ~/.ssh/config it could: asyncssh takes UserKnownHostsFile=none for "verify nothing"."""
    library = pytest.importorskip("asyncssh")
    (tmp_path / "hosts").write_text("")
    options = ssh._options(library, InventoryHost(host="a", known_hosts=tmp_path / "hosts"))
    assert options["config"] is None
    assert options["known_hosts"] == str(tmp_path / "hosts")  # an empty text would stand for ~/.ssh/known_hosts
    with pytest.raises(FileNotFoundError):
        ssh._options(library, InventoryHost(host="a", known_hosts=tmp_path / "nothing"))
    with pytest.raises(library.KeyImportError):
        ssh._options(library, InventoryHost(host="a", host_key="ssh-ed25519 AAAAB"))
    key = library.generate_private_key("ssh-ed25519")
    found = ssh._options(library, InventoryHost(host="a", host_key=key.export_public_key().decode().strip()))
    assert found["known_hosts"] == ([key.convert_to_public()], [], [])
    assert ssh.fingerprint(key.public_data) == key.get_fingerprint()


# --- on the machine


def test_files_that_cannot_be_written_have_their_sentence(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "data"))
    full = on_host.explained(OSError(errno.ENOSPC, "No space left on device"), place)
    assert re.fullmatch(
        rf"the disk of {place.data_dir} is full \(\d+\.\d of \d+\.\d MiB are free\): free space there, or set "
        "`data_dir` to a larger disk",
        full,
    )
    denied = PermissionError(errno.EACCES, "Permission denied", "/data")
    assert on_host.explained(denied, place).startswith("/data cannot be written by user ")
    with pytest.raises(OSError, match="No space left"):
        on_host.refuse_when_full("ERROR: Could not install: [Errno 28] No space left on device\n", place)
    on_host.refuse_when_full("ERROR: other", place)
    assert on_host.last_line("a\ntrl-remote: the sentence\n\n") == "the sentence"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:  # noqa: PT011 (its sentence is below)
        Place(str(tmp_path / "file" / "data")).make()
    assert "file is no directory: choose a directory below your home" in on_host.explained(caught.value, place)


def test_what_is_written_is_private_and_whole(tmp_path: Path) -> None:
    on_host.write(tmp_path / "token", b"one")
    on_host.write(tmp_path / "token", b"two")
    assert (tmp_path / "token").read_bytes() == b"two"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["token"]
    content = b"wheel"
    assert on_host.received(io.BytesIO(content), 5, hashlib.sha256(content).hexdigest()) == content
    for arrived in (b"whee", b"whelk"):
        with pytest.raises(on_host.HostProblem, match="did not arrive whole"):
            on_host.received(io.BytesIO(arrived), 5, hashlib.sha256(content).hexdigest())


def test_the_agent_gets_no_token_and_nothing_of_the_ssh_session(tmp_path: Path) -> None:
    request = {"certificate": "PEM", "environment": {"HF_HOME": "/models"}}
    session = {"PATH": "/bin", "SSH_CONNECTION": "a", "TRL_SERVICE_TOKEN": "s", "PYTHONPATH": "/x", "HF_HOME": "/other"}
    found = on_host.agent_environment(session, request, Place(str(tmp_path)))
    assert found == {"PATH": "/bin", "HF_HOME": "/models", "SSL_CERT_FILE": f"{tmp_path}/ssh/certificate.pem"}


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_process_of_another_start_time_is_not_signalled(tmp_path: Path) -> None:
    me = on_host.process_of(os.getpid())
    assert me is not None
    assert on_host.is_alive(me)
    reused = on_host.Process(me.pid, me.started - 1, me.parent, me.argv)
    assert not on_host.is_alive(reused)
    on_host.send(reused, 9)  # else this test would end here
    on_host.end([reused])
    assert on_host.agent_of(Place(str(tmp_path))) is None
    assert on_host.owned(Place(str(tmp_path))) == []


def test_a_repeated_up_compares_everything_that_an_agent_is_started_with(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "data"))
    request = dict.fromkeys(("url", "name", "device", "labels", "digest", "environment", "site_packages"), "x")
    before = on_host.settings_of({**request, "certificate": None}, place)
    assert before == json.loads(json.dumps(before))  # as it is read back
    for changed in ({"digest": "y"}, {"url": "y"}, {"labels": {"a": "b"}}, {"certificate": "PEM"}):
        assert on_host.settings_of({**request, "certificate": None, **changed}, place) != before
    assert on_host.stored_settings(place) == {}
    assert not place.data_dir.exists()


def test_the_output_of_an_agent_is_bounded_and_a_full_disk_stops_nothing() -> None:
    stream = io.StringIO()
    output = host_agent.BoundedOutput(stream, most=5)
    print("abc", file=output)
    print("defg", file=output, flush=True)
    assert stream.getvalue() == "abc\nd"

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    print("abc", file=host_agent.BoundedOutput(Full()), flush=True)


# --- the commands


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    nodes = [{"host": "10.0.0.11", "name": "a"}, {"host": "10.0.0.12", "name": "b"}]
    path.write_text(yaml.safe_dump({"service": "http://10.0.0.1:8322", "nodes": nodes}))
    return path


class Client:
    """The service, as far as these commands call it."""

    def __init__(self, *nodes: str) -> None:
        self.url = "http://127.0.0.1:8322"
        self.nodes: dict[str, dict[str, Any]] = {name: {"agent": True, "state": "open", "jobs": {}} for name in nodes}
        versions = {"torch": "2.13.0", "trl": "1.16.0"}
        self.nodes["head"] = {"head": True, "agent": True, "state": "open", "jobs": {}, "versions": versions}
        self.calls: list[str] = []
        self.refusals: list[int] = []

    async def get_all(self, path: str) -> Any:
        return {"data": [{"node": name, **row} for name, row in self.nodes.items()]}

    async def post(self, path: str) -> None:
        self.calls.append(f"POST {path}")

    async def delete(self, path: str) -> None:
        self.calls.append(f"DELETE {path}")
        if self.refusals:
            raise ServiceRefusal(self.url, self.refusals.pop(0), "the sentence")
        if self.nodes.pop(path.rpartition("/")[2], None) is None:
            raise ServiceRefusal(self.url, 404, "the sentence")


class Hosts:
    """The machines: what they were given, and which of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: dict[str, ssh.NodePlan] = {}
        self.stopped: list[str] = []
        self.failing: set[str] = set()
        monkeypatch.setattr(ssh, "require_asyncssh", lambda: None)
        for name in ("start_node", "stop_node", "observe_node"):
            monkeypatch.setattr(ssh, name, getattr(self, name))

    async def start_node(self, host: InventoryHost, plan: ssh.NodePlan, progress: Callable[[str], None]) -> Any:
        progress("connecting")
        if host.name in self.failing:
            raise ssh.HostError(host, "its disk is full")
        self.plans[host.name] = plan
        return {"state": "started", "pid": 7, "python": "3.12.1"}

    async def stop_node(self, host: InventoryHost, progress: Callable[[str], None]) -> Any:
        self.stopped.append(host.name)
        return {"state": "ended", "ended": 3}

    async def observe_node(self, host: InventoryHost) -> Any:
        return {"state": "running", "pid": 7, "processes": 3}


@pytest.fixture
def hosts(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.chdir(inventory.parent)
    monkeypatch.setenv("TRL_SERVICE_NODE_TOKEN", "join")
    for name in ("_POLL", "LISTED", "REMOVED"):
        monkeypatch.setattr(nodes_ssh, name, 0.0)
    return Hosts(monkeypatch)


def call(client: Client, *words: str) -> int:
    options = parser().parse_args(["nodes", *words])
    return asyncio.run(COMMANDS["nodes", options.command](client, options))  # type: ignore[arg-type]


def test_up_reports_each_machine_and_one_that_fails_leaves_the_others_alone(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.failing = {"a"}
    assert call(Client("a", "b"), "up") == 1
    printed = capsys.readouterr()
    assert re.search(r"^a +10.0.0.11 +failed +its disk is full$", printed.out, re.MULTILINE)
    assert re.search(r"^b +10.0.0.12 +started +joined, pid 7, Python 3.12.1$", printed.out, re.MULTILINE)
    assert "a  connecting" in printed.err
    plan = hosts.plans["b"]
    assert (plan.url, plan.token) == ("http://10.0.0.1:8322", "join")
    assert plan.constraints == "torch==2.13.0\ntrl==1.16.0\n"  # a node with others would be refused
    hosts.failing = set()
    assert call(Client("a"), "up", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["result"] == "started"


def test_the_texts_that_the_inventory_names_are_utf_8(hosts: Hosts, inventory: Path) -> None:
    named = yaml.safe_load(inventory.read_text()) | {"constraints": "versions.txt"}
    inventory.write_text(yaml.safe_dump(named))
    inventory.with_name("versions.txt").write_bytes(b"\xef\xbb\xbf# f\xc3\xbcr uns\ntorch==2.13.0\n")
    assert call(Client("a", "b"), "up") == 0
    assert hosts.plans["a"].constraints == "# für uns\ntorch==2.13.0\n"
    inventory.with_name("versions.txt").write_bytes(b"\x30\x82\xff")
    with pytest.raises(NodeError, match=r"`constraints` of the inventory, .*versions.txt, is not text in UTF-8$"):
        call(Client("a", "b"), "up")


def test_up_reports_a_node_that_the_service_does_not_list_or_gives_no_jobs(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client("a", "b")
    del client.nodes["a"]
    client.nodes["b"]["state"] = "draining"
    assert call(client, "up") == 1
    printed = capsys.readouterr().out
    assert "its agent runs, but the service at http://127.0.0.1:8322 does not list it" in printed
    assert "it takes no jobs: draining (trl-remote nodes uncordon b)" in printed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"service": None}, "other machines cannot reach the service at http://127.0.0.1:8322: set `service`"),
        ({"service": "http://localhost:8322"}, "other machines cannot reach the service at http://localhost:8322"),
        ({"certificate": "none.pem"}, "`certificate` of the inventory, "),
        ({"token": ""}, "found none: set TRL_SERVICE_NODE_TOKEN"),
        ({"token": "a\nb"}, "TRL_SERVICE_NODE_TOKEN: the token has a character that cannot be printed"),
    ],
)
def test_what_no_machine_could_do_is_refused_before_any_is_called(
    hosts: Hosts, inventory: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("TRL_SERVICE_NODE_TOKEN", change.pop("token", "join"))
    found = yaml.safe_load(inventory.read_text()) | change
    inventory.write_text(yaml.safe_dump(found))
    with pytest.raises(NodeError, match=re.escape(sentence)):
        call(Client(), "up")
    assert not hosts.plans


def test_down_ends_the_processes_and_then_removes_the_node(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    client = Client("a", "b")
    assert call(client, "down", "a") == 0
    assert hosts.stopped == ["a"]
    assert client.calls == ["DELETE /v1/nodes/a"]
    assert "3 processes ended; removed at the service" in capsys.readouterr().out
    assert call(client, "down", "a") == 0  # again
    assert "the service has no such node" in capsys.readouterr().out


def test_down_waits_until_the_service_takes_the_node_for_gone(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_ssh, "REMOVED", 60.0)
    client = Client("a")
    client.refusals = [409, 409]  # its jobs count as there until then
    assert call(client, "down", "a") == 0
    assert client.calls == ["DELETE /v1/nodes/a"] * 3


def test_down_with_drain_leaves_a_node_alone_that_keeps_its_jobs(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client("a")
    client.nodes["a"]["jobs"] = {"cpu": "job-1"}
    assert call(client, "down", "a", "--drain", "--drain-timeout", "0") == 1
    assert client.calls == ["POST /v1/nodes/a/drain"]
    assert not hosts.stopped
    assert "it still has job-1 after 0 s and was left alone" in capsys.readouterr().out
    client.nodes["a"]["jobs"] = {}
    assert call(client, "down", "a", "--drain") == 0
    assert hosts.stopped == ["a"]


def test_status_compares_the_machine_with_the_service(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(Client("a"), "status") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^a +\S+ +running +agent 7, 3 processes; at the service: open$", printed, re.MULTILINE)
    assert re.search(r"^b .*at the service: unknown$", printed, re.MULTILINE)


def test_without_the_extra_one_sentence_names_it(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inventory.parent)
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    with pytest.raises(MissingExtra, match=r"pip install 'llama_stack_provider_trl\[ssh\]'"):
        call(Client(), "up")
