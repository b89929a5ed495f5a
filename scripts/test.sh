#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. Without any all of them run, three files at a time, and as root on Debian what they
# need of it is installed first.
#
#   ./scripts/test.sh
#   ./scripts/test.sh tests/unit -k resolve
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh

# Tests never fetch models, and ranks get the thread count that a user's ranks would get.
export HF_HUB_OFFLINE=1
unset OMP_NUM_THREADS
# An installation has bytecode. Without it each of hundreds of processes compiles our modules again: 0.2 to 0.6 s each.
unset PYTHONDONTWRITEBYTECODE
# A third of a test's time it waits: for a timeout, a poll, a disk. On 2 cores, 2 files at a time leave them idle.
if [ $# -eq 0 ]; then
    ./scripts/install-debian-packages.sh
    set -- -n 3 --dist loadfile --no-loadscope-reorder
fi
exec .venv/bin/python -m pytest "$@"
