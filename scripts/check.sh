#!/usr/bin/env bash
# Checks that do not run the code: lint, format, types, spelling, shell syntax, and the docs as a site.
#
#   ./scripts/check.sh
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh

.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check . || {
    echo "check: run .venv/bin/ruff format . and review its changes." >&2
    exit 1
}

packages=()
for package in llama_stack_provider_trl llama_stack_provider_trl_remote; do
    [ ! -f "$package/__init__.py" ] || packages+=("$package")
done
.venv/bin/python -m mypy "${packages[@]}"
(cd benchmarks && ../.venv/bin/python -m mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache gpu_checks)
git ls-files -z | xargs -0 .venv/bin/codespell

for script in scripts/*.sh .ci/run; do
    bash -n "$script"
done
if command -v shellcheck >/dev/null; then
    shellcheck scripts/*.sh .ci/run
fi
./scripts/docs.sh
echo "check: all is well."
