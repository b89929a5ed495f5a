"""Checks that Triton can compile its launcher here: it needs a C compiler and Python's headers.

Run by name it prints what is missing: `trl-remote doctor` checks the interpreter that trains with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_SOURCE = "#include <stdlib.h>\n#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n"
_TIMEOUT = 60.0
"""Seconds. It takes 0.1 s; the rest is for a cold disk."""
ADVICE = "install gcc, libc6-dev and python3-dev (of the Python that trains), or set CC to a C compiler"


@cache
def missing_compiler() -> str:
    """As `missing_for_triton`, of this process's environment, once per process."""
    return missing_for_triton(os.environ)


def missing_for_triton(environ: Mapping[str, str]) -> str:
    """What Triton lacks to compile its launcher; empty: nothing. It chooses compiler and headers as Triton does."""
    given, path = environ.get("CC"), environ.get("PATH")
    names = [given] if given else ["gcc", "clang"]
    compiler = next((found for name in names if (found := shutil.which(name, path=path))), None)
    if compiler is None:
        return f"CC={given!r} is no program" if given else "no C compiler was found: neither CC nor gcc nor clang"
    headers = _headers()
    if not (headers / "Python.h").is_file():
        return f"{headers} has no Python.h"
    return _failure(compiler, headers, environ)


def _headers() -> Path:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme leads to /usr/local, where its headers are not.
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))


def _failure(compiler: str, headers: Path, environ: Mapping[str, str]) -> str:
    """Compile a shared library that includes both headers; returns the first error."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.c")
        source.write_text(_SOURCE)
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", str(Path(directory, "probe.so"))]
        try:
            done = subprocess.run(
                command, env=dict(environ), capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"{compiler} cannot run: {error}"
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return f"{compiler} cannot compile: {' '.join(errors[:1])[:300]}" if done.returncode else ""


if __name__ == "__main__":
    sys.stdout.write(missing_compiler())
