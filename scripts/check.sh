#!/usr/bin/env bash
# Reads the code without running it: lint, format, types, shell syntax. Says what to run when the format is off.
#
#   ./scripts/check.sh
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh

.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check . || {
    echo "check: run .venv/bin/ruff format . and look at what it changed." >&2
    exit 1
}

packages=()
for package in llama_stack_provider_trl llama_stack_provider_trl_remote; do
    [ ! -f "$package/__init__.py" ] || packages+=("$package")
done
.venv/bin/python -m mypy "${packages[@]}"

for script in scripts/*.sh .ci/run; do
    bash -n "$script"
done
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh .ci/run
fi
echo "check: all is well."
