"""Keeps the exporter's process while there is something to export. Used by the process that supervises."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..jobs.store.monitoring.exports import Exports
from ..requests.trackers import TrackerSettings
from ..system.data_dir import DataDir
from ..system.files import private_directory
from ..system.process import child_environment

log = logging.getLogger(__name__)

MODULE = "llama_stack_provider_trl.export"
INTERVAL = 1.0
"""Seconds between two checks whether an exporter is needed."""
LIVED, LONGEST_WAIT = 3.0, 30.0
"""An exporter that ended within so many seconds is started again after a wait, which doubles up to the second."""
_END_TIME = 5.0
_LOG_BYTES = 4 << 20
_FOR_TRACKERS = {"mlflow": re.compile(r"MLFLOW_.*"), "wandb": re.compile(r"WANDB_API_KEY")}
"""Tracker -> environment variables with its credentials and its own settings. Others, and W&B offline, write files
only."""
_NO_REPORTS = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Libraries of trackers send nothing to their makers."""
_NOT_FOR_TRACKERS = re.compile(r"(HF|HUGGING_?FACE)_.*TOKEN.*")


class ExporterConfig(BaseModel):
    """What an exporter gets on its standard input."""

    data_dir: Path
    trackers: TrackerSettings


class ExporterProcess:
    """Starts the exporter of a data directory when there is something to export, and again when it was killed.

    Args:
        environ: with the credentials of trackers; None: this process's own, read at each start.
    """

    def __init__(
        self,
        exports: Exports,
        data_dir: Path,
        trackers: TrackerSettings,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self._exports, self._data_dir, self._trackers = exports, data_dir, trackers
        self._environ, self._clock, self._spawn = environ, clock, spawn
        self._process: Any = None
        self._next_check = -math.inf
        self._started_at = -math.inf
        self._wait = 0.0

    def tend(self) -> None:
        """Start an exporter where one is needed and none runs. Takes no time where nothing is to be done. Raises
        StoreError."""
        if not self._trackers.configured or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + INTERVAL
        if self._process is not None:
            if (status := self._process.poll()) is None:
                return
            self._ended(status)
        elif self._exports.due(self._trackers.configured, limit=1):
            try:
                self._start()
            except OSError as error:
                self._wait_longer()
                log.warning("the exporter cannot be started: %s; it is tried again", error)

    def stop(self) -> None:
        """End the exporter. The next one continues where it was."""
        if self._process is not None:
            self._process.stdin.close()
            try:
                self._process.wait(_END_TIME)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _ended(self, status: int) -> None:
        self._process.stdin.close()
        self._process = None
        if status == 0:
            self._wait = 0.0
            return
        if self._clock() - self._started_at > LIVED:
            self._wait = 0.0
        else:
            self._wait_longer()
        log.warning(
            "the exporter ended with %d, see %s; another continues", status, DataDir(self._data_dir).exporter_log
        )

    def _wait_longer(self) -> None:
        self._wait = min(max(INTERVAL, 2 * self._wait), LONGEST_WAIT)
        self._next_check = self._clock() + self._wait

    def _start(self) -> None:
        config = ExporterConfig(data_dir=self._data_dir.absolute(), trackers=self._trackers)
        path, home = DataDir(self._data_dir).exporter_log, DataDir(self._data_dir).trackers
        private_directory(home)
        if path.exists() and path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
        with open(path, "ab", opener=_private) as output:
            self._process = self._spawn(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=home,
                env=exporter_environment(os.environ if self._environ is None else self._environ, self._trackers),
                start_new_session=True,
                bufsize=0,
            )
        self._started_at = self._clock()
        try:
            self._process.stdin.write(config.model_dump_json().encode() + b"\n")
        except BrokenPipeError:
            log.debug("the exporter ended at once")  # noticed at the next check


def exporter_environment(environ: Mapping[str, str], trackers: TrackerSettings) -> dict[str, str]:
    """The environment of an exporter: that of a training without its tokens, and the variables of its trackers."""
    common = dict(child_environment(environ, {}).items())
    calling = {
        name for name in trackers.configured if name != "wandb" or (trackers.wandb and trackers.wandb.mode == "online")
    }
    own = [pattern for name, pattern in _FOR_TRACKERS.items() if name in calling]
    added = {name: value for name, value in environ.items() if any(pattern.fullmatch(name) for pattern in own)}
    return (
        {name: value for name, value in common.items() if not _NOT_FOR_TRACKERS.fullmatch(name)} | added | _NO_REPORTS
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
