"""Where the memory does not suffice, a chat beside a training is refused with what is needed and what is free."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import NotServed
from llama_stack_provider_trl.specs.model_source import ModelSource
from llama_stack_provider_trl.specs.serving import AnswerRefused, ServeRequest
from llama_stack_provider_trl_remote.service.serving.chats import _refused
from llama_stack_provider_trl_remote.service.serving.served import Files, Served
from llama_stack_provider_trl_remote.service.serving.serving import Serving
from llama_stack_provider_trl_remote.service.settings import ServiceSettings


def asked(tmp_path: Path, free: int, processes: Any = None, **changes: Any) -> str:
    """Why a chat is not answered, with so many bytes free."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    with open(model / "model.safetensors", "wb") as file:
        file.truncate(6 << 30)
    settings = ServiceSettings(data_dir=tmp_path / "data")
    store: Any = SimpleNamespace(holders=lambda: {"cuda:0": "tune"})
    given: Any = {"files": Files.of(model), "adapter": None, "training": "tune", **changes}
    served = Served("job:tune/newest", ModelSource(model=str(model)), **given)
    unused: Any = None
    serving = Serving(settings, unused, unused, store, ["cuda:0"], unused, memory=lambda: free)
    serving._processes.update(processes or {})

    async def ask() -> None:
        async for _ in serving.answer(served, ServeRequest(prompt="a", seed="1")):
            pass

    with pytest.raises(NotServed) as caught:
        asyncio.run(ask())
    return str(caught.value)


def test_a_chat_beside_a_training_needs_memory_that_is_free(tmp_path: Path) -> None:
    assert asked(tmp_path, 2 << 30).startswith(
        "a training comes first: job 'tune' trains, and a process that answers beside it would need 9.0 GiB of memory, "
        "of which 2.0 GiB are free. Send this again when the job has ended"
    )
    # Of a model of the cache the job has counted the parameters.
    found = asked(tmp_path, 2 << 30, files=None, parameters=1 << 30)
    assert "would need 6.3 GiB of memory" in found
    assert "would need an unknown amount of memory" in asked(tmp_path, 1 << 40, files=None)
    assert asked(tmp_path, 1 << 40, training=None).startswith("a training comes first: job 'tune' has cuda:0. Send")


class _Process:
    """Plays a process."""

    def __init__(self, memory: int, *, is_ready: bool) -> None:
        self.device, self.is_beside, self.has_ended, self.callers, self.used_at = (
            "cpu",
            True,
            False,
            Counter[str](),
            0.0,
        )
        self.memory, self.is_ready, self.reason = memory, is_ready, ""

    def end(self, reason: str) -> None:
        self.reason, self.has_ended = reason, True

    async def ended(self) -> None:
        assert self.has_ended


@pytest.mark.parametrize(("is_ready", "free"), [(False, "1.0"), (True, "8.0")])
def test_memory_that_another_process_is_loading_is_not_free(tmp_path: Path, is_ready: bool, free: str) -> None:
    other: Any = _Process(7 << 30, is_ready=is_ready)
    assert f"of which {free} GiB are free" in asked(tmp_path, 8 << 30, processes={"other": other})


@pytest.mark.parametrize(("users", "leaves"), [(0, True), (1, False)])
def test_a_process_beside_a_training_leaves_for_a_device_that_is_free(tmp_path: Path, users: int, leaves: bool) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "data")
    served = Served("job:tune/newest", ModelSource(model="m"), None, None, None)
    process: Any = _Process(0, is_ready=True)
    process.callers["someone"] += users
    process.callers += Counter()
    holders = {"cuda:0": "tune"}
    store: Any = SimpleNamespace(holders=lambda: holders)
    unused: Any = None
    serving = Serving(settings, unused, unused, store, ["cuda:0"], unused)
    serving._processes[served.key] = process
    assert asyncio.run(serving._process_for(served)) is process
    holders.clear()

    async def placed() -> None:
        raise LookupError

    serving._place = lambda _: placed()  # type: ignore[method-assign, assignment, return-value]
    if not leaves:
        assert asyncio.run(serving._process_for(served)) is process
        return
    with pytest.raises(LookupError):
        asyncio.run(serving._process_for(served))
    assert process.reason == "a device is free: it need not answer beside a training"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/d/serving/1/adapters/abc/a.json' is damaged", "'ft:a/a.json' is damaged"),
        ("/d/adapters/abc and /d/adapters/other", "ft:a and /d/adapters/other"),
    ],
)
def test_a_refusal_names_the_model_in_place_of_the_copy_of_its_adapter(text: str, shown: str) -> None:
    files = Files(Path("/d/adapter"), "abc")
    served = Served("ft:a", ModelSource(model="org/a"), None, files)
    assert str(_refused(AnswerRefused(message=text, is_request=True), served)) == shown
