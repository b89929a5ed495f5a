#!/usr/bin/env bash
# Installs what the tests need of Debian, where that needs no question: as root on Linux with apt-get. They walk through the
# dashboard with chromium's headless shell, check /metrics with promtool of the package prometheus, and make machines
# nodes over SSH with sshd. Does nothing for what is there, and elsewhere, where these tests are skipped.
#
#   ./scripts/install-debian-packages.sh
set -euo pipefail

PATH="$PATH:/usr/sbin"
missing=()
for program in chromium-headless-shell promtool sshd; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
[ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -q -y -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)

get_lists() {
    "${apt[@]}" update
}

# A window takes a fifth of the CPU time that one of the package chromium does, which serves where a release lacks this.
get_chromium-headless-shell() {
    "${apt[@]}" --no-install-recommends install chromium-headless-shell ||
        command -v chromium >/dev/null || "${apt[@]}" --no-install-recommends install chromium
}

# The program alone: the package itself would start a server, now and at each boot.
get_promtool() {
    (cd "$work" && "${apt[@]}" download prometheus) &&
        dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb | tar -x -C "$work" ./usr/bin/promtool &&
        install -D -m 755 "$work/usr/bin/promtool" /usr/local/bin/promtool
}

# Neither started now nor at the next boot.
get_sshd() {
    local policy=/usr/sbin/policy-rc.d
    [ -e "$policy" ] && policy="$work/unused"
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    "${apt[@]}" --no-install-recommends install openssh-server
    local status=$?
    rm -f "$policy" /etc/systemd/system/multi-user.target.wants/ssh.service /etc/systemd/system/sshd.service
    return "$status"
}

version_of() {
    case "$1" in
        sshd) dpkg-query --show openssh-server ;;
        chromium-headless-shell) dpkg-query --show chromium-headless-shell 2>/dev/null || chromium --version ;;
        *) "$1" --version 2>&1 | head -n 1 ;;
    esac
}

for step in get_lists "${missing[@]/#/get_}"; do
    if ! "$step" >"$work/log" 2>&1 </dev/null; then
        tail -n 15 "$work/log" >&2
        echo "install-debian-packages: $step failed; the last lines are above." >&2
        exit 1
    fi
done
for program in "${missing[@]}"; do
    echo "install-debian-packages: $(version_of "$program")"
done
