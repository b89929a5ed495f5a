"""Detects that the clock of the machine was set back: times that were stored before it lie in the future then."""

from __future__ import annotations

import time
from collections.abc import Callable

_JITTER = 1.0
"""Seconds by which the clocks may disagree between two calls: the wall clock may be slewed."""


class WallClock:
    """Compares the wall clock with one that only runs forward."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._ahead: float | None = None
        """Wall clock less monotonic clock at the last call; None: there was none."""

    def set_back(self) -> float | None:
        """Seconds by which the wall clock was set back since the last call; None: it was not.

        0 at the first call: it may have been set back while no process looked.
        """
        before, self._ahead = self._ahead, self._clock() - self._monotonic()
        if before is None:
            return 0.0
        back = before - self._ahead
        return back if back > _JITTER else None
