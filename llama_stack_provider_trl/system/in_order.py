"""A thread that writes for others, so that a disk that hangs holds up that thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue


class InOrder:
    """Runs functions one after the other, in the order of their submission, in a thread that ends with the process.

    Safe to share between threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._functions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._last: Future[object] | None = None
        self.pending = 0
        """Functions that have not ended."""

    def start(self) -> None:
        """Start the thread. Raises RuntimeError: the system allows no more threads."""
        with self._lock:
            self._start()

    def submit[Result](self, function: Callable[[], Result]) -> Future[Result]:
        """Have the thread call a function after those before it. A caller that stops to wait does not cancel it."""
        result: Future[Result] = Future()
        result.set_running_or_notify_cancel()
        with self._lock:
            self._start()
            self.pending += 1
            self._last = result  # type: ignore[assignment]
            self._functions.put(partial(self._run, function, result))
        return result

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until all that was submitted has ended. Returns whether it has, within these seconds."""
        with self._lock:
            last = self._last
        return last is None or not wait_for([last], seconds).not_done

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        while True:
            self._functions.get()()

    def _run[Result](self, function: Callable[[], Result], result: Future[Result]) -> None:
        try:
            value = function()
        except BaseException as error:
            self._ended()
            result.set_exception(error)
        else:
            self._ended()
            result.set_result(value)

    def _ended(self) -> None:
        with self._lock:
            self.pending -= 1
