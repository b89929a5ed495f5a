"""Calls the program by which the service reads datasets from their uris."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_READ_ALL = """
import json, sys
from llama_stack_provider_trl_remote.service.datasets.reader import main
for arguments in json.loads(sys.argv[1]):
    main(arguments)
"""
"""Reads one uri after the other, to import the libraries once."""


def read_uris(
    root: Path,
    environ: dict[str, str],
    *uris: str,
    secret: str,
    known: str = "",
    max_rows: int = 1000,
    max_mb: int = 64,
) -> list[Any]:
    """What the reader answers for each uri, with the rows that it has stored in `root`.

    Args:
        environ: variables beside those of this process.
        secret: of these, which the program never writes.
        known: the stamp of the rows that are there.
    """
    calls = [["convert", uri, str(root), str(max_rows), str(max_mb), "0", known, "2048"] for uri in uris]
    done = subprocess.run(
        [sys.executable, "-c", _READ_ALL, json.dumps(calls)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert secret not in done.stdout + done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for answer in answers:
        if "sha256" in answer:
            lines = (root / f"{answer['sha256']}.jsonl").read_text().splitlines()
            answer["rows"] = [json.loads(line) for line in lines]
    return answers
