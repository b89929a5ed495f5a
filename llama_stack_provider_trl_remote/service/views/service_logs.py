"""The ends of the logs of the service and of the nodes' agents, and the entries that agents send."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import is_regular, tail
from llama_stack_provider_trl.system.logs import PrivateFileHandler

from ...wire import LogEntries
from ..http.errors import NotFound

_AGENT_BYTES = 1 << 20
"""Of the log of an agent; there is one file before it."""
_BEGIN = "agent-"


class ServiceLogs:
    """The logs below a data directory. Safe to share between threads."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = DataDir(data_dir).logs
        self._lock = threading.Lock()
        self._received: dict[str, tuple[str, int]] = {}
        """Node -> run of its agent, and the number of the last entry that is here."""

    @property
    def path(self) -> Path:
        """The log of the service."""
        return self._directory / "service.log"

    def read(self, node: str | None, lines: int, size: int) -> str:
        """The last lines of a log, at most `size` bytes of them, whatever the size of the file and of its lines. Raises
        NotFound: there is no such log; the message names the logs that exist.

        Args:
            node: whose agent's log; None: that of the service.
        """
        path = self.path if node is None else self._of_agent(node)
        if not is_regular(path):
            found = sorted(path.stem.removeprefix(_BEGIN) for path in self._directory.glob(f"{_BEGIN}*.log"))
            known = f"of the agents of {', '.join(found)}" if found else "of no agent"
            raise NotFound(
                f"there is no log of {'the service' if node is None else f'node {node!r}'}; there are logs {known}"
            )
        text = tail(path, lines, size)
        if text.count("\n") + 1 < lines and len(text) < size:  # the file has begun a moment ago
            before = tail(path.with_name(f"{path.name}.1"), lines, size - len(text))
            text = "\n".join([*before.splitlines(), *text.splitlines()][-lines:])
        return f"{text}\n" if text else ""

    def add(self, node: str, entries: LogEntries) -> None:
        """Append what an agent has logged; what is here already is skipped. A full disk loses it."""
        with self._lock:
            run, last = self._received.get(node, ("", 0))
            last = last if run == entries.run else 0
            new = entries.lines[max(0, last + 1 - entries.number) :]
            self._received[node] = (entries.run, max(last, entries.number + len(entries.lines) - 1))
            if not new:
                return
            handler = PrivateFileHandler(self._of_agent(node), _AGENT_BYTES, 1)
            try:
                for line in new:
                    handler.handle(_record(line))
            finally:
                handler.close()

    def forget(self, node: str) -> None:
        """Remove the log of a node that was removed."""
        with self._lock:
            self._received.pop(node, None)
            for path in (self._of_agent(node), self._of_agent(node).with_name(f"{_BEGIN}{node}.log.1")):
                path.unlink(missing_ok=True)

    def _of_agent(self, node: str) -> Path:
        return self._directory / f"{_BEGIN}{node}.log"


def _record(line: str) -> logging.LogRecord:
    """An entry that is a line of its own: an entry of several lines is indented."""
    found: Mapping[str, object] = {"msg": line.replace("\r", " ").replace("\n", "\n    ")}
    return logging.makeLogRecord(dict(found))
