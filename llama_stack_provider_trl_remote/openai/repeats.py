"""Decides whether a request that a client repeats is the job that an earlier one has made. Pure, but for its record."""

from __future__ import annotations

BACK_OFF = 10.0
"""Seconds within which OpenAI's SDK tries again: it waits 8 s at most, and connects."""
_DOWN = 60.0
"""Seconds for which a service may be down between a lost answer and the try that reaches the next one."""
_MOST = 4096


class Repeats:
    """The answers that may have been lost. The record is lost with the process: the times of a job decide then.

    Args:
        started: of the service, as all times in seconds since the epoch.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._until: dict[str, float] = {}

    def answer(self, name: str, begun: float, now: float) -> None:
        """A job is the answer to a request that has begun then. A client that has stopped waiting tries again within
        what the request took."""
        self._note(name, max(self._until.get(name, 0.0), now + (now - begun) + BACK_OFF))

    def see(self, name: str) -> None:
        """Its caller names a job: the answer was not lost."""
        self._note(name, 0.0)

    def may_be(self, name: str, stored: float, ended: float | None, now: float) -> bool:
        """Whether the answer with this job may be the one that was lost.

        Args:
            ended: when the job ended; None: it has not.
        """
        if ended is not None and ended < now - BACK_OFF:
            return False
        if (until := self._until.get(name)) is not None:
            return now <= until
        is_of_before = self._started - _DOWN <= stored < self._started
        return now <= max(stored, self._started if is_of_before else 0.0) + BACK_OFF

    def _note(self, name: str, until: float) -> None:
        self._until.pop(name, None)
        self._until[name] = until
        if len(self._until) > _MOST:
            del self._until[next(iter(self._until))]
