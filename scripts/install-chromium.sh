#!/usr/bin/env bash
# Installs Debian's chromium, with which the tests walk through the dashboard, where that needs no question: as root on
# Linux with apt-get. Does nothing where there is one, and elsewhere, where these tests are skipped.
#
#   ./scripts/install-chromium.sh
set -euo pipefail

! command -v chromium >/dev/null || exit 0
[ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0

log="$(mktemp)"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
if ! { "${apt[@]}" update && "${apt[@]}" --no-install-recommends install chromium; } >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    echo "install-chromium: apt-get could not install chromium; its last lines are above." >&2
    exit 1
fi
echo "install-chromium: $(chromium --version 2>/dev/null)"
