"""Compiles the tests with their assertions rewritten, as pytest does when it imports them.

In a fresh checkout all workers of a run would do that at the same time for the same files, 7 s of CPU time each.

    python -m tests.compiled PART OF    # every OF-th file, from PART on

The functions are pytest's own affair: where they are others, the workers compile, as they did.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llama_stack_provider_trl.system.process import usable_cpus

REPOSITORY = Path(__file__).resolve().parents[1]


def compile_tests() -> None:
    """By as many processes as there are cores, before workers start."""
    count = usable_cpus()
    commands = [[sys.executable, "-m", "tests.compiled", str(part), str(count)] for part in range(count)]
    for process in [subprocess.Popen(command, cwd=REPOSITORY) for command in commands]:
        process.wait()


def _compile(files: list[Path]) -> None:
    from _pytest.assertion import rewrite

    state: Any = SimpleNamespace(trace=lambda _: None)
    config: Any = None
    for path in files:
        compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, compiled) is None and rewrite.try_makedirs(compiled.parent):
            key, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, key, compiled)


if __name__ == "__main__" and not sys.dont_write_bytecode:
    part, count = map(int, sys.argv[1:])
    with suppress(Exception):
        _compile(sorted(REPOSITORY.glob("tests/**/test_*.py"))[part::count])
