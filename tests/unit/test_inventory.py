"""The inventory of machines that are reached over SSH: what it accepts, and the sentence of each fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.pools.inventory import Inventory, InventoryHost, read_inventory
from tests.tiny import REPOSITORY


def written(directory: Path, content: Any) -> Path:
    path = directory / "nodes.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_machine_needs_its_address_only(tmp_path: Path) -> None:
    (found,) = read_inventory(written(tmp_path, {"nodes": [{"host": "10.0.0.11"}]})).nodes
    assert (found.name, found.port, found.data_dir, found.device) == ("10.0.0.11", 22, "~/.llama/trl-node", "auto")
    assert found.known_hosts == Path.home() / ".ssh" / "known_hosts"
    assert found.where == "10.0.0.11"


def test_defaults_count_where_a_machine_has_no_value_and_paths_begin_at_the_file(tmp_path: Path) -> None:
    content = """
        service: http://10.0.0.1:8322/v1
        certificate: cert.pem
        defaults: {user: trainer, key_file: keys/id, labels: {rack: 7}}
        nodes:
        - {host: 10.0.0.11, name: gpu-a, port: 2222}
        - {host: 10.0.0.12, user: other, known_hosts: ~/hosts}
    """
    inventory = read_inventory(written(tmp_path, content))
    a, b = inventory.nodes
    assert inventory.service == "http://10.0.0.1:8322"
    assert inventory.certificate == tmp_path / "cert.pem"
    assert (a.user, b.user) == ("trainer", "other")
    assert a.key_file == tmp_path / "keys" / "id"
    assert b.known_hosts == Path.home() / "hosts"
    assert a.labels == {"rack": "7"}
    assert a.where == "gpu-a (10.0.0.11:2222)"
    assert [host.name for host in inventory.chosen(["gpu-a"])] == ["gpu-a"]
    assert inventory.chosen([]) == [a, b]
    with pytest.raises(NodeError, match=r"no node 'gpu-c' in the inventory: it has 10.0.0.12, gpu-a"):
        inventory.chosen(["gpu-a", "gpu-c"])


ONE = {"host": "10.0.0.11", "name": "gpu-a"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "found a NoneType, expected a mapping with the key `nodes`"),
        ("- host: a", "found a list, expected a mapping"),
        ("nodes: [", "is not an inventory: while parsing"),
        ({"nodes": []}, "nodes=[]: List should have at least 1 item"),
        ({"nodes": [ONE], "hosts": []}, "unknown key 'hosts', expected nodes, service, certificate, constraints, def"),
        ({"nodes": [ONE | {"usr": "x"}]}, "node gpu-a: unknown key 'usr', expected host, name, port, user, key_file"),
        ({"nodes": [{"name": "gpu-a"}]}, "node gpu-a: the key 'host' is missing"),
        ({"nodes": [ONE | {"port": 0}]}, "node gpu-a: port=0: Input should be greater than or equal to 1"),
        ({"nodes": [ONE | {"port": "ssh"}]}, "node gpu-a: port='ssh': "),
        ({"nodes": [{"host": "-oProxyCommand=x"}]}, "node -oProxyCommand=x: host='-oProxyCommand=x': "),
        ({"nodes": [ONE | {"name": "a b"}]}, "node a b: name='a b': String should match pattern"),
        ({"nodes": [ONE | {"labels": {"rack": [7]}}]}, "node gpu-a: labels.rack=[7]: Input should be a valid string"),
        ({"nodes": [ONE | {"host_key": "no key"}]}, "node gpu-a: host_key='no key': "),
        ({"nodes": [ONE | {"data_dir": "a\nb"}]}, "node gpu-a: data_dir='a\\nb': "),
        ({"nodes": ["10.0.0.11"]}, "node number 1: "),
        ({"nodes": [ONE | {"environment": {"HF_TOKEN": "x"}}]}, "environment: HF_TOKEN looks like a secret"),
        ({"nodes": [ONE, ONE | {"host": "10.0.0.12"}]}, "2 nodes have the name 'gpu-a': set another `name`"),
        ({"nodes": [ONE, ONE | {"name": "gpu-b"}]}, "gpu-a and gpu-b have the same host 10.0.0.11 and data_dir"),
        ("nodes:\n- host: a\n  port: 22\n  port: 23\n", "the key 'port' is there twice in the mapping of line 2"),
        ({"nodes": [ONE], "service": "gpu:8322"}, "service: expected the address of the training service"),
        ({"nodes": [ONE], "defaults": {"host": "x"}}, "`defaults` is a mapping of keys that machines have in common"),
        ({"nodes": [ONE], "defaults": {"prot": 1}}, "node gpu-a: unknown key 'prot'"),
    ],
)
def test_a_fault_is_one_sentence_with_the_file_and_the_key(tmp_path: Path, content: Any, sentence: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(NodeError) as caught:
        read_inventory(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"nodes.yaml cannot be read \(No such file or directory\): name one with"):
        read_inventory(tmp_path / "nodes.yaml")


def test_the_page_has_every_key() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "nodes-over-ssh.md").read_text()
    _, of_nodes, of_file = re.split(r"<!-- /?inventory -->", page)
    assert re.findall(r"^\| `(\w+)` \|", of_nodes, re.MULTILINE) == [*InventoryHost.model_fields]
    keys = set(re.findall(r"^\| `(\w+)` \|", of_file.split("\n## ")[0], re.MULTILINE))
    assert keys == {*Inventory.model_fields, "defaults"}
