"""Sessions of browsers: they end with their tokens, outlive a restart, and disclose no token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llama_stack_provider_trl.jobs.store.tokens import digest
from llama_stack_provider_trl_remote.service.security.access import Caller
from llama_stack_provider_trl_remote.service.security.sessions import (
    LIFETIME,
    Sessions,
    cookie_header,
    cookies_of,
)
from tests.fakes import FakeClock


class FakeTokens:
    """Tokens that the test adds and removes."""

    def __init__(self, **callers: Caller) -> None:
        self.callers = {digest(token): caller for token, caller in callers.items()}

    def digests(self) -> Iterable[str]:
        return tuple(self.callers)

    def by_digest(self, sha256: str) -> Caller | None:
        return self.callers.get(sha256)


ALICE = Caller("submit", "alice", presented=True)


def test_a_session_has_the_caller_of_its_token_until_it_is_closed(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions.json", [FakeTokens(bob=Caller("admin", "bob")), FakeTokens(alice=ALICE)])
    session = sessions.open(digest("alice"))
    found = sessions.caller(session)
    assert found is not None
    assert (found.name, found.role, found.session) == ("alice", "submit", session)
    assert sessions.caller(session + "x") is None
    assert sessions.caller("") is None
    sessions.close(session)
    assert sessions.caller(session) is None
    assert not found.still_valid()


def test_a_session_ends_when_its_token_does(tmp_path: Path) -> None:
    tokens = FakeTokens(alice=ALICE)
    sessions = Sessions(tmp_path / "sessions.json", [tokens])
    session = sessions.open(digest("alice"))
    found = sessions.caller(session)
    assert found is not None
    assert found.still_valid()
    tokens.callers.clear()
    assert not found.still_valid()
    assert sessions.caller(session) is None


def test_a_session_ends_after_its_lifetime(tmp_path: Path) -> None:
    clock = FakeClock()
    sessions = Sessions(tmp_path / "sessions.json", [FakeTokens(alice=ALICE)], clock)
    session = sessions.open(digest("alice"))
    clock.now += LIFETIME - 1
    assert sessions.caller(session) is not None
    clock.now += 2
    assert sessions.caller(session) is None


def test_sessions_and_forms_outlive_a_restart_but_not_the_removal_of_their_token(tmp_path: Path) -> None:
    path, tokens = tmp_path / "sessions.json", FakeTokens(alice=ALICE)
    before = Sessions(path, [tokens])
    session, closed = before.open(digest("alice")), before.open(digest("alice"))
    before.close(closed)
    after = Sessions(path, [tokens])
    found = after.caller(session)
    assert found is not None
    assert found.name == "alice"
    assert after.caller(closed) is None
    assert after.form_token(session) == before.form_token(session)
    assert Sessions(path, [FakeTokens(other=ALICE)]).caller(session) is None


def test_the_file_discloses_neither_token_nor_session_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    session = Sessions(path, [FakeTokens(alice=ALICE)]).open(digest("alice"))
    text = path.read_text()
    assert digest("alice") not in text
    assert session not in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_each_session_has_a_form_token_of_its_own(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions.json", [FakeTokens(alice=ALICE)])
    tokens = [sessions.form_token(session) for session in ("", sessions.open(digest("alice")), "another")]
    assert len(set(tokens)) == 3


def test_a_damaged_file_ends_all_sessions_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "sessions.json"
    for text in ("", "{}", "[]", '{"key": "zz", "sessions": {}}', '{"key": "00", "sessions": {"a": 1}}'):
        path.write_text(text)
        sessions = Sessions(path, [FakeTokens(alice=ALICE)])
        assert sessions.caller("a") is None
        assert sessions.caller(sessions.open(digest("alice"))) is not None


def test_one_session_too_many_ends_the_oldest(tmp_path: Path) -> None:
    clock = FakeClock()
    sessions = Sessions(tmp_path / "sessions.json", [FakeTokens(alice=ALICE)], clock)
    sessions._sessions = {}
    first = sessions.open(digest("alice"))
    for number in range(999):
        clock.now += 1
        sessions._sessions[f"other {number}"] = sessions._sessions[next(iter(sessions._sessions))].__class__(
            "proof", clock.now + LIFETIME
        )
    assert sessions.caller(first) is not None
    assert sessions.caller(sessions.open(digest("alice"))) is not None
    assert sessions.caller(first) is None


def test_a_token_ends_no_session_of_others_with_its_own(tmp_path: Path) -> None:
    """1000 logins of one token took 9 s, and logged out every other user."""
    tokens = FakeTokens(alice=ALICE, bob=Caller("admin", "bob", presented=True))
    sessions = Sessions(tmp_path / "sessions.json", [tokens], FakeClock())
    other, first = sessions.open(digest("bob")), sessions.open(digest("alice"))
    for _ in range(100):
        last = sessions.open(digest("alice"))
    assert [sessions.caller(one) is not None for one in (other, first, last)] == [True, False, True]
    assert len(sessions._sessions) == 101


def test_the_cookie_is_kept_from_scripts_and_from_other_sites() -> None:
    plain, secure = (cookie_header("name", "value", secure=secure) for secure in (False, True))
    assert plain == "name=value; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict"
    assert secure == f"{plain}; Secure"
    assert "Max-Age=0" in cookie_header("name", "", secure=False)


def test_of_a_cookie_that_is_sent_twice_the_first_counts() -> None:
    assert cookies_of("a=1; b = 2 ;a=3;c") == {"a": "1", "b": "2", "c": ""}
