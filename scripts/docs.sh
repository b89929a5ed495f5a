#!/usr/bin/env bash
# Builds the docs as a site into build/site. A link or an anchor that leads nowhere, or a page in no menu, is an error.
#
#   ./scripts/docs.sh
#   ./scripts/docs.sh serve    shows them on http://127.0.0.1:8000 and builds again after each change
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh

# Material's announcement of its successor is no finding about these pages.
export NO_MKDOCS_2_WARNING=true
case "${1:-}" in
    '') exec .venv/bin/python -m mkdocs build --strict ;;
    serve) exec .venv/bin/python -m mkdocs serve --strict ;;
    *)
        echo "docs: unknown argument '$1'; it takes nothing, or serve." >&2
        exit 2
        ;;
esac
