"""Nodes and tokens have names of two kinds: a node that is named like a token is not taken for it, anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.service.cluster.credentials import NodeCredentials, new_credential
from llama_stack_provider_trl_remote.service.http.bodies import CreateToken
from llama_stack_provider_trl_remote.service.security.access import Caller
from llama_stack_provider_trl_remote.service.settings import LOCAL, NODES, OPERATOR, ServiceSettings, Token
from llama_stack_provider_trl_remote.wire import NAME
from tests.tiny import REPOSITORY


@pytest.mark.parametrize("name", ["alice", OPERATOR, NODES, LOCAL, "configured-1", "a" * 43])
def test_a_node_named_like_a_token_is_another_caller(tmp_path: Path, name: str) -> None:
    """Limits, records, connections and budgets go by the caller's name."""
    store = Store(tmp_path / "jobs.db")
    credential, sha256 = new_credential()
    store.nodes.join(name, "machine", "boot", "{}", sha256)
    caller = NodeCredentials(store)(credential)
    assert caller is not None
    assert (caller.node, caller.role) == (name, "node")
    assert caller.name != name
    assert re.fullmatch(NAME, name)
    assert not re.fullmatch(NAME, caller.name)  # which every name of a token matches
    store.close()


def test_no_token_has_the_name_of_a_node_s_caller() -> None:
    name = Caller.of_node("alice").name
    with pytest.raises(ValidationError, match="String should match pattern"):
        CreateToken.model_validate({"name": name})
    with pytest.raises(ValidationError, match="String should match pattern"):
        Token.model_validate({"name": name, "token": "x" * 32})
    for entry in ServiceSettings.model_validate({"node_token": "n" * 32, "api_token": "a" * 32}).configured_tokens:
        assert re.fullmatch(NAME, entry.name)


def test_every_caller_of_a_node_is_made_in_one_place() -> None:
    found = [
        f"{path.name}: {line.strip()}"
        for path in (REPOSITORY / "llama_stack_provider_trl_remote").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r'Caller\(\s*"node"', line)
    ]
    assert found == [], "use Caller.of_node"
