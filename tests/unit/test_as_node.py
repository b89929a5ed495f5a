"""The service's machine as a node; its agent is played."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import ServiceRefusal
from llama_stack_provider_trl_remote.nodes.identity import NodeError
from llama_stack_provider_trl_remote.nodes.start import NodeSettings
from llama_stack_provider_trl_remote.service import as_node

pytestmark = pytest.mark.timeout(30)


def test_a_machine_that_cannot_take_part_says_so_once_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, refused = OSError(28, "No space left on device"), ServiceRefusal("http://head", 409, "taken")
    troubles: list[Exception] = [full, full, refused, NodeError("no such address")]
    made: list[NodeSettings] = []

    async def run() -> None:
        takes_part = asyncio.Event()

        class PlayedAgent:
            async def run(self) -> None:
                if troubles:
                    raise troubles.pop(0)
                takes_part.set()
                await asyncio.Event().wait()

        def make_agent(settings: NodeSettings) -> PlayedAgent:
            made.append(settings)
            return PlayedAgent()

        monkeypatch.setattr(as_node, "make_agent", make_agent)
        monkeypatch.setattr(as_node, "RETRY", 0.0)
        node = asyncio.create_task(as_node.be_a_node(service, 8322))
        await takes_part.wait()
        node.cancel()
        with pytest.raises(asyncio.CancelledError):
            await node

    settings = SimpleNamespace(
        torch_run_config=SimpleNamespace(master_addr="10.0.0.1"),
        host="0.0.0.0",
        data_dir=tmp_path,
        train_python=None,
        tls_cert=None,
    )
    service: Any = SimpleNamespace(settings=settings, node_token="t", node_name="head", devices=["cpu"])
    asyncio.run(run())
    assert [settings.address for settings in made] == ["10.0.0.1"] * 5
    assert [caplog.text.count(said) for said in ("No space left", "taken", "no such address")] == [1, 1, 1]
