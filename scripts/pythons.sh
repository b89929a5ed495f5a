# Finds the Pythons of this machine. Sourced by prepare-env.sh and test-pythons.sh.
# shellcheck shell=bash

version_of() { "$1" -E -S -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# Prints "MINOR PATH" of a CPython >= 3.12 that can make a venv, with the path behind any shim or venv; else nothing.
# It must be run to know: pyenv's shims exist for versions that are not active, and Debian splits venv off.
probe() {
    "$1" -E -c '
import sys
if sys.version_info < (3, 12) or sys.implementation.name != "cpython":
    sys.exit(1)
import ensurepip, sysconfig, venv
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print(sys.version_info.minor, getattr(sys, "_base_executable", sys.executable))
' 2>/dev/null || true
}

# Prints the commands that may be a supported Python, one per line.
candidates() {
    printf '%s\n' python3.12 python3.13 python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python
}
