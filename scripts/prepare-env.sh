#!/usr/bin/env bash
# Makes .venv in the repository root and installs the project with all its extras. Does nothing when nothing changed.
#
#   ./scripts/prepare-env.sh
#
#   TRL_PYTHON       the interpreter to use (default: the first working Python 3.12, else 3.13, else newer)
#   TRL_CONSTRAINTS  the versions to install (default: constraints/llama-stack-0.3.5.txt)
#   TRL_INSTALLER    pip: install with pip alone (default: with uv, where it can be installed)
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

EXTRAS='train,stack,service,dashboard,quantization,images,plot,tensorboard,mlflow,completion,ssh,discovery,search,s3,graders,schemas,demo,dev'
CONSTRAINTS="${TRL_CONSTRAINTS:-constraints/llama-stack-0.3.5.txt}"
VENV_PYTHON=.venv/bin/python
STAMP=.venv/prepare-env.stamp
LOG=.venv/prepare-env.log
# Held by flock while this script works, and not empty while .venv may be half-made. It outlives .venv.
LOCK=.venv.lock

# shellcheck source=scripts/pythons.sh
. ./scripts/pythons.sh

# What these hold would leak into every call of .venv.
unset PYTHONHOME PYTHONPATH

main() {
    # Another checkout may use what it points to.
    [ ! -L .venv ] || die ".venv is a link to '$(readlink .venv)', and this would replace what is there:" \
        "remove the link ('rm .venv') and run this again."
    [ -f "$CONSTRAINTS" ] || die "no constraints file at '$CONSTRAINTS' (from TRL_CONSTRAINTS, relative to $PWD)."
    if up_to_date; then
        note ".venv is ready."
        return
    fi
    local python
    python="$(find_python)"
    take_lock "$python"
    if up_to_date; then
        note ".venv was made ready by another call."
        return
    fi
    reusable "$python" || make_venv "$python"
    install
    note ".venv is ready."
}

note() { echo "prepare-env: $*"; }

die() {
    note "$*" >&2
    exit 1
}

# What .venv is made of: its place, its Python, the extras, and the two files that choose the versions.
fingerprint() {
    "$VENV_PYTHON" -E -S -c '
import hashlib, pathlib, sys
digest = hashlib.sha256(sys.argv[1].encode())
for name in sys.argv[2:]:
    digest.update(hashlib.sha256(pathlib.Path(name).read_bytes()).digest())
print(pathlib.Path.cwd(), ".".join(map(str, sys.version_info[:3])), digest.hexdigest(), sep="\n")
' "$EXTRAS" pyproject.toml "$CONSTRAINTS"
}

up_to_date() {
    [ -x "$VENV_PYTHON" ] && [ -f "$STAMP" ] && [ ! -s "$LOCK" ] || return 1
    [ "$(fingerprint 2>/dev/null)" = "$(cat "$STAMP")" ] || return 1
    [ -z "${TRL_PYTHON:-}" ] || [ "$(version_of "$TRL_PYTHON")" = "$(version_of "$VENV_PYTHON")" ]
}

find_python() {
    local candidate found best='' best_rank=99 rank
    if [ -n "${TRL_PYTHON:-}" ]; then
        found="$(probe "$TRL_PYTHON")"
        [ -n "$found" ] || die "TRL_PYTHON='$TRL_PYTHON' is not a Python >= 3.12 with its venv module."
        echo "${found#* }"
        return
    fi
    while IFS= read -r candidate; do
        found="$(probe "$candidate")"
        [ -n "$found" ] || continue
        rank="${found%% *}"
        if [ "$rank" -lt "$best_rank" ]; then
            best_rank="$rank"
            best="${found#* }"
        fi
        [ "$best_rank" -gt 12 ] || break
    done < <(candidates && echo "$VENV_PYTHON")
    [ -n "$best" ] || die "no Python >= 3.12 with its venv module found. Install one ('pyenv install 3.12'," \
        "'apt install python3.12-venv' or 'brew install python@3.12'), or set TRL_PYTHON to one, and run this again."
    echo "$best"
}

# The lock stays with file descriptor 9, so also with a pip that outlives us. macOS has no flock command, Python has it.
take_lock() {
    exec 9>>"$LOCK"
    "$1" -E -S -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return
    note "waiting for another prepare-env.sh in this checkout ..."
    "$1" -E -S -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

# True when .venv can be installed into as it stands: whole, at its place, with a fitting Python and a pip.
reusable() {
    [ -d .venv ] || return 1
    if [ -s "$LOCK" ]; then
        note "the last run was interrupted; starting over."
        return 1
    fi
    if [ -f "$STAMP" ] && [ "$(sed -n 1p "$STAMP")" != "$PWD" ]; then
        note "this checkout was moved; starting over."
        return 1
    fi
    if [ -n "${TRL_PYTHON:-}" ] && [ "$(version_of "$1")" != "$(version_of "$VENV_PYTHON")" ]; then
        note "TRL_PYTHON is Python $(version_of "$1"), .venv is another; starting over."
        return 1
    fi
    if [ -z "$(probe "$VENV_PYTHON")" ] || ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        note ".venv has no working Python >= 3.12 with pip; starting over."
        return 1
    fi
}

make_venv() {
    note "making .venv with Python $(version_of "$1"); the first time this takes about 2 minutes and 5 GB."
    echo 'making .venv' >"$LOCK"
    "$1" -m venv --clear .venv
}

install() {
    note "installing what $CONSTRAINTS names (watch it: tail -f '$PWD/$LOG') ..."
    rm -f "$STAMP"
    echo 'installing' >"$LOCK"
    : >"$LOG"
    # Without build isolation the project is built by the setuptools that the constraints name, and needs no network.
    local again=()
    if pip_install 'pip>=25' 'setuptools>=77' &&
        { uv_install || pip_install ${again[@]+"${again[@]}"} --no-build-isolation -e ".[$EXTRAS]"; }; then
        compile_modules
        fingerprint >"$STAMP"
        : >"$LOCK"
        return
    fi
    # Until the first of these lines .venv is as it was: pip has resolved and fetched, uv was not started.
    grep -qE '^(Installing collected packages|uv could not install)' "$LOG" || : >"$LOCK"
    grep -iE '^ *error' "$LOG" >&2 || tail -n 15 "$LOG" >&2
    die "installing failed; the whole of it is in $LOG."
}

pip_install() {
    "$VENV_PYTHON" -m pip --disable-pip-version-check --no-input install --no-compile --progress-bar off -c "$CONSTRAINTS" "$@" \
        >>"$LOG" 2>&1 </dev/null
}

# uv unpacks with all cores, and links what it has unpacked before. It is not needed: what it cannot install, pip does.
uv_install() {
    [ "${TRL_INSTALLER:-uv}" != pip ] || return 1
    # Not on the line of setuptools: an index may lack uv.
    pip_install uv || return 1
    local status=0
    "$VENV_PYTHON" scripts/uv_install.py -c "$CONSTRAINTS" --no-build-isolation -e ".[$EXTRAS]" >>"$LOG" 2>&1 </dev/null || status=$?
    [ "$status" != 0 ] || return 0
    echo 'uv could not install this; pip continues.' >>"$LOG"
    # 3: uv was not started. Else it may have ended within a package, which pip would take for installed.
    [ "$status" = 3 ] || again=(--force-reinstall)
    return 1
}

# pip compiles with one process; this takes all cores. Left out are a third of all: tests, and the models of transformers,
# of which few are ever imported; Python compiles such a module when it imports it. A module that cannot be compiled is
# one that nothing imports.
compile_modules() {
    "$VENV_PYTHON" -W ignore -m compileall -q -j 0 -x 'site-packages/(.*/tests?|torch/testing/_internal|transformers/models)/' \
        "$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >>"$LOG" 2>&1 </dev/null || true
}

main
