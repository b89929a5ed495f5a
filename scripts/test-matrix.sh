#!/usr/bin/env bash
# Runs the suite of Llama Stack releases against a real server of each, and writes the table of docs/reference/compatibility.md.
#
#   ./scripts/test-matrix.sh                     every release; the first time this installs an environment for each
#   ./scripts/test-matrix.sh 0.3.5 0.6.1         some; the table then keeps the results of the others
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh

export HF_HUB_OFFLINE=1
if [ $# -gt 0 ]; then
    export TRL_RELEASES="$*"
else
    TRL_RELEASES="$(.venv/bin/python -c 'from tests.releases import RELEASES; print(*RELEASES)')"
    export TRL_RELEASES
fi
results=.pytest_cache/releases/results.xml
mkdir -p "$(dirname "$results")"
status=0
.venv/bin/python -m pytest --junitxml "$results" tests/contract/test_releases.py tests/contract/test_release_builds.py \
    tests/contract/test_external_api.py || status=$?
.venv/bin/python -m tests.release_table "$results"
exit "$status"
