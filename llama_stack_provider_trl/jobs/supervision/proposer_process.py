"""Has a proposer answer a question in a process of its own, without waiting for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from os import environ
from tempfile import TemporaryFile

from ...system.files import tail_of
from ...system.process import child_environment

PROGRAM = (sys.executable, "-P", "-m", "llama_stack_provider_trl.proposer")
SECONDS = 90.0
"""An answer that takes longer counts as failed. It takes a second, most of it imports."""
_ANSWER_BYTES = 1 << 20
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class ProposerProcess:
    """A proposer at work. Its files have no names, and it ends by itself: a kill of this process leaves nothing of it.
    Raises OSError: it cannot be started."""

    def __init__(self, question: bytes, program: Sequence[str] = PROGRAM, seconds: float = SECONDS) -> None:
        self._answer, self._errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        with TemporaryFile() as given:
            given.write(question)
            given.seek(0)
            self._process = subprocess.Popen(
                program,
                stdin=given,
                stdout=self._answer,
                stderr=self._errors,
                env={k: v for k, v in child_environment(environ, _ONE_THREAD).items() if "TOKEN" not in k},
            )

    def answer(self) -> bytes | None:
        """The answer; None: there is none yet. Raises ValueError: there will be none."""
        status = self._process.poll()
        if status is None and time.monotonic() < self._deadline:
            return None
        try:
            return self._read(status)
        finally:
            self.end()

    def end(self) -> None:
        """End the process, if it lives."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._answer.close()
        self._errors.close()

    def _read(self, status: int | None) -> bytes:
        if status is None:
            raise ValueError(f"it has not answered within {self._seconds:.0f} s")
        if status != 0:
            raise ValueError(f"it ended with {status}: {tail_of(self._errors, 1, 400) or 'without a message'}")
        self._answer.seek(0)
        return self._answer.read(_ANSWER_BYTES)
