"""The proof that a service receives its nodes' calls."""

from __future__ import annotations

import asyncio
import logging

import pytest

from llama_stack_provider_trl_remote.service.cluster.presence import GAP, Presence
from llama_stack_provider_trl_remote.service.own_calls import INTERVAL, PATIENCE, _Proofs, _why_unanswered
from llama_stack_provider_trl_remote.wire import SILENCE
from tests.fakes import FakeClock


class World:
    """A node `b` that has called once, on a stopped clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.presence = Presence(self.clock, "head")
        self.presence.note_call("b")
        self.presence.require_proofs()
        self.proofs = _Proofs(self.presence, self._call, lambda: True, self.clock)

    def pass_time(self, seconds: float, why_unanswered: str = "") -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(INTERVAL)
            self.proofs.note(why_unanswered)
            self.presence.silence("b")

    async def _call(self) -> str:
        raise AssertionError("the test makes no calls")


@pytest.fixture
def world() -> World:
    return World()


def test_silence_counts_while_the_service_answers_its_own_calls(world: World) -> None:
    world.pass_time(SILENCE + 1)
    assert world.presence.silence("b") >= SILENCE
    assert world.presence.is_absent("b")


def test_after_a_time_without_answers_every_node_has_as_long_to_call_as_ever(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.pass_time(SILENCE - 1)
    world.pass_time(700, "no answer within 5 s")
    assert world.presence.silence("b") < SILENCE
    world.pass_time(SILENCE - 2)
    assert not world.presence.is_absent("b")
    world.pass_time(4)
    assert world.presence.is_absent("b")
    assert caplog.text.count("does not answer its own calls (no answer within 5 s)") == 1
    assert caplog.text.count("answers its own calls again") == 1


def test_one_slow_answer_changes_nothing(world: World) -> None:
    world.pass_time(SILENCE - 2)
    world.pass_time(GAP - 2, "no answer within 5 s")
    world.pass_time(2)
    assert world.presence.is_absent("b")


def test_a_service_that_never_reaches_itself_counts_silence_without_that(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.pass_time(PATIENCE, "certificate verify failed")
    assert not world.presence.is_absent("b")
    world.pass_time(SILENCE + 2, "certificate verify failed")
    assert world.presence.is_absent("b")
    assert caplog.text.count("has never reached itself (certificate verify failed)") == 1


def test_a_service_that_has_once_reached_itself_is_trusted_for_good(world: World) -> None:
    world.pass_time(1)
    world.pass_time(PATIENCE + 60, "no answer within 5 s")
    assert not world.presence.is_absent("b")


def test_a_service_whose_first_node_joins_late_gives_no_proof_up_for_one_call(world: World) -> None:
    world.clock.advance(PATIENCE + 60)
    world.pass_time(SILENCE + GAP, "no answer within 5 s")
    assert not world.presence.is_absent("b")


def test_a_service_that_reaches_itself_late_requires_proofs_from_then_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.pass_time(PATIENCE + 2, "certificate verify failed")
    world.pass_time(2)
    world.pass_time(700, "no answer within 5 s")
    assert caplog.text.count("does not answer its own calls (no answer within 5 s)") == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 409 Conflict\r\n\r\n", ""),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", ""),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "status 503"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n", "status 429"),
        (b"", "the connection was closed without an answer"),
        (b"SSH-2.0-x\r\n", "the connection was closed without an answer"),
    ],
)
def test_only_an_answer_to_a_new_connection_is_a_proof(answer: bytes, why: str) -> None:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def call() -> str:
        server = await asyncio.start_server(answered, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await _why_unanswered(url, None, b"POST / HTTP/1.1\r\n\r\n")

    assert asyncio.run(call()) == why


def test_a_port_without_a_service_answers_nothing() -> None:
    async def call() -> str:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await _why_unanswered(f"http://127.0.0.1:{port}", None, b"")

    assert "127.0.0.1" in asyncio.run(call())
