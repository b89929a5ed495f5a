"""The process that answers chats: `python -m llama_stack_provider_trl.recipes.serve RUN_DIR/spec.json`.

Listens on a Unix socket in its run directory, from before the model is loaded: the messages are those of
`specs.serving`. It ends when the service ends its lease, when it is idle, and when its runner ends it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import JobFailure
from ..specs.events import Reason
from ..specs.serving import LEASE, MOST_REQUEST, SOCKET, Answer, AnswerRefused, ServeRequest, ServeSpec
from .failures import classify
from .imports import packages_found_once, quick_imports
from .train import QUANTIZATION_LIBRARIES, unused_libraries_hidden

if TYPE_CHECKING:
    from .serving.model import ServedModel

_BACKLOG = 512
_LEASE_SECONDS = 60.0
"""Seconds within which the service has to take its lease."""
_REFUSING_SECONDS = 5.0
"""Seconds for which a process whose model cannot be loaded reports it."""
_POLL_S = 0.2
_NICENESS = 19
_MOST_OOM_SCORE = "1000"
_REQUEST_SECONDS = 30.0
_OF_REQUESTS = {Reason.invalid_request, Reason.invalid_dataset, Reason.invalid_model}


class ChatServer:
    """Answers connections, each in a thread of its own."""

    def __init__(self, listener: socket.socket, spec: ServeSpec) -> None:
        self._listener, self._spec = listener, spec
        self._model: ServedModel | None = None
        self._refusal: AnswerRefused | None = None
        self._loaded = threading.Event()
        self._guard = threading.Lock()
        self._open = 0
        self._used = time.monotonic()
        self._has_lease = False
        self._begun = time.monotonic()

    def run(self) -> int:
        """Load the model, and answer until nobody asks any more. Returns the exit status."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        try:
            with unused_libraries_hidden(QUANTIZATION_LIBRARIES):
                with quick_imports():
                    from .serving.model import ServedModel
                with packages_found_once():
                    self._model = ServedModel(self._spec)
        except BaseException as error:
            traceback.print_exc()
            self._refusal = _refusal(error)
        self._used = time.monotonic()
        self._loaded.set()
        idle = _REFUSING_SECONDS if self._model is None else self._spec.idle_seconds
        while not self._is_over(idle):
            time.sleep(min(_POLL_S, idle))
        return 0 if self._refusal is None else 1

    def _is_over(self, idle: float) -> bool:
        now = time.monotonic()
        if not self._has_lease and now - self._begun > _LEASE_SECONDS:
            print("no service has taken the lease: the process ends")
            return True
        with self._guard:
            return not self._open and now - self._used > idle

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):
            connection.settimeout(_REQUEST_SECONDS)
            line = _read_line(connection)
            if line == LEASE:
                self._hold_lease(connection)
            with self._guard:
                self._open += 1
            try:
                self._answer(connection, line)
            finally:
                with self._guard:
                    self._open -= 1
                    self._used = time.monotonic()

    def _hold_lease(self, connection: socket.socket) -> NoReturn:
        """Wait until the service is gone, and end with it."""
        self._has_lease = True
        connection.settimeout(None)
        with suppress(OSError):
            connection.recv(1)
        os._exit(0)

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        # A reader that is slow keeps its own answer waiting, and only for as long as the service lets it.
        connection.settimeout(None)

        def send(message: Answer) -> None:
            connection.sendall(message.model_dump_json().encode() + b"\n")

        self._loaded.wait()
        if self._model is None:
            assert self._refusal is not None
            return send(self._refusal)
        try:
            request = ServeRequest.model_validate_json(line)
            self._model.answer(request, send, _checked(connection))
        except OSError:
            raise
        except Exception as error:
            if not isinstance(error, JobFailure):
                traceback.print_exc()
            send(_refusal(error))


def _refusal(error: BaseException) -> AnswerRefused:
    failed = classify(error)
    return AnswerRefused(message=failed.message, is_request=failed.reason in _OF_REQUESTS)


def _checked(connection: socket.socket) -> Callable[[], None]:
    """Raises OSError once the other end was closed: it sends nothing after its request."""

    def check() -> None:
        if select.select([connection], [], [], 0)[0]:
            raise ConnectionAbortedError("the answer is no longer wanted")

    return check


def _read_line(connection: socket.socket) -> bytes:
    """Raises OSError: the line is too long, or its end is missing."""
    found = bytearray()
    while not found.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part or len(found) + len(part) > MOST_REQUEST:
            raise ConnectionAbortedError("the request is not whole")
        found += part
    return bytes(found)


def listen(run_dir: Path) -> socket.socket:
    """Listen in the run directory, which is the working directory: its whole path may be too long for a socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.chdir(run_dir)
    listener.bind(SOCKET)
    listener.listen(_BACKLOG)
    return listener


def let_others_first() -> None:
    """Compute where others leave the processor idle, and be the first that the kernel ends when memory is short."""
    os.nice(_NICENESS)
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(_MOST_OOM_SCORE)


def main(argv: list[str]) -> int:
    """Serve what the specification describes, which is the one argument; returns the exit status."""
    path = Path(argv[1])
    spec = ServeSpec.model_validate_json(path.read_text())
    if spec.beside:
        let_others_first()
    return ChatServer(listen(path.parent), spec).run()


if __name__ == "__main__":
    status = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
