"""Runs a program of Llama Stack or OGX whose log has plain tracebacks: `plain_log.py PROGRAM ARGUMENTS`.

Rich has Pygments read every file of a traceback up to the line that it shows: for a request that is refused, a server
of 0.6.1 took 1.6 s of CPU time, and one of 0.3.5 0.2 s.
"""

from __future__ import annotations

import logging
import runpy
import sys

from rich.logging import RichHandler

_emit = RichHandler.emit


def _emit_plain(self: RichHandler, record: logging.LogRecord) -> None:
    self.rich_tracebacks = False
    _emit(self, record)


if __name__ == "__main__":
    RichHandler.emit = _emit_plain  # type: ignore[method-assign] - handlers that exist already, too
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
