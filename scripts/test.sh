#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. Without any all of them run, two files at a time.
#
#   ./scripts/test.sh
#   ./scripts/test.sh tests/unit -k resolve
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh

# Tests never fetch models, and ranks get the thread count that a user's ranks would get.
export HF_HUB_OFFLINE=1
unset OMP_NUM_THREADS
# Most of a test's time one process imports torch, or trains on one core.
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder
exec .venv/bin/python -m pytest "$@"
