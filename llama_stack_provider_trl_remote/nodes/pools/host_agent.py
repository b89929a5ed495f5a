"""The agent of a node that was made over SSH: `python -m llama_stack_provider_trl_remote.nodes.pools.host_agent FILE`.

FILE is written by `on_host`: settings of the agent as JSON. The token is in the file that it names, so it is neither an
argument nor a variable of this process, which other programs of the user could read.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.system.console import complain

from ..start import serve, worker_settings

_MOST_OUTPUT = 1 << 20


class BoundedOutput(io.TextIOBase):
    """Standard output and standard error of an agent: their first MiB, from which its start is judged. The agent's log,
    which rotates, has everything. A full disk loses text, and stops nothing."""

    def __init__(self, stream: TextIO, most: int = _MOST_OUTPUT) -> None:
        self._stream, self._left = stream, most

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text[: self._left])
            self._stream.flush()
        self._left = max(0, self._left - len(text))
        return len(text)


def main(path: Path) -> int:
    """Run the agent until SIGTERM or SIGINT. 1: it failed, with a sentence on standard error."""
    output: Any = BoundedOutput(sys.stdout)
    sys.stdout = sys.stderr = output
    try:
        found = json.loads(path.read_text())
        environ = {**os.environ, "TRL_SERVICE_NODE_TOKEN": Path(found["token_file"]).read_text().strip()}
        return serve(
            worker_settings(
                found["url"],
                environ,
                name=found["name"],
                data_dir=found["data_dir"],
                device=found["device"],
                labels=found["labels"],
            )
        )
    except (TrlError, OSError) as error:
        complain(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
