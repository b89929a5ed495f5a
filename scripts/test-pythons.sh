#!/usr/bin/env bash
# Runs the unit tests on every supported Python that is installed, besides that of .venv, which test.sh uses: of a test
# with several cases the first one, which shows that this Python runs it; the other values are tried on that of .venv.
# What reads this repository's texts finds the same with every Python, and is left out.
#
#   ./scripts/test-pythons.sh
#   TRL_TESTS=full ./scripts/test-pythons.sh    # all cases
#
# Each gets an environment without torch and Llama Stack, which takes half a minute to make: few unit tests need them.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./scripts/prepare-env.sh
# shellcheck source=scripts/pythons.sh
. ./scripts/pythons.sh

CONSTRAINTS=constraints/llama-stack-0.3.5.txt
# The project brings what a service needs by its own metadata: a list beside it would miss what that gains.
PROJECT='.[service,ssh,discovery]'
PACKAGES='jinja2 kubernetes-validate numpy pytest pytest-timeout pytest-xdist requests schemathesis'
unset PYTHONHOME PYTHONPATH
export HF_HUB_OFFLINE=1

main() {
    local minor found candidate tested=''
    minor="$(.venv/bin/python -E -S -c 'import sys; print(sys.version_info.minor)')"
    while IFS= read -r candidate; do
        found="$(probe "$candidate")"
        [ -n "$found" ] || continue
        case " $minor $tested " in *" ${found%% *} "*) continue ;; esac
        grep -q "Python :: 3.${found%% *}\"" pyproject.toml || continue
        tested="$tested ${found%% *}"
        test_python "${found%% *}" "${found#* }" </dev/null
    done < <(candidates)
    [ -n "$tested" ] || echo "test-pythons: no supported Python besides 3.$minor, the one of .venv, was found."
}

test_python() {
    local directory=".pytest_cache/pythons/3.$1"
    prepare "$2" "$directory"
    echo "test-pythons: unit tests with Python $(version_of "$2")"
    TRL_TESTS="${TRL_TESTS:-first}" "$directory/bin/python" -m pytest -q -n 2 --dist loadfile tests/unit
}

prepare() {
    local stamp
    stamp="$(version_of "$1") $PACKAGES $(cat pyproject.toml "$CONSTRAINTS" | cksum)"
    [ "$(cat "$2/stamp" 2>/dev/null)" != "$stamp" ] || return 0
    mkdir -p "$2"
    "$1" -m venv --clear "$2"
    # shellcheck disable=SC2086  # a list
    if ! "$2/bin/python" -m pip --disable-pip-version-check --no-input install -c "$CONSTRAINTS" \
        --editable "$PROJECT" $PACKAGES \
        >"$2/install.log" 2>&1; then
        grep -iE '^ *error' "$2/install.log" >&2 || tail -n 15 "$2/install.log" >&2
        echo "test-pythons: installing failed; the whole of it is in $PWD/$2/install.log." >&2
        exit 1
    fi
    echo "$stamp" >"$2/stamp"
}

main
